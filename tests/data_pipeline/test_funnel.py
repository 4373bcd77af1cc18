"""The paper's funnel at full size: 59,136 rows in the published proportions, every count known beforehand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from data_pipeline import commands
from data_pipeline.fakes import PLAN, SmithLike


def test_the_papers_funnel(tmp_path: Path) -> None:
    made = SmithLike(seed=7)
    source, branches, results = (tmp_path / name for name in ("smith.jsonl", "branches.json", "results.json"))
    with source.open("wb") as stream:
        stream.writelines(made.lines())
    branches.write_text(json.dumps(made.branches()))
    results.write_text(json.dumps(made.outcomes()))
    report = commands.filter(inputs=[str(source)], out=tmp_path / "out", branches=branches, probe_results=results)
    assert report["rows_in"] == 59_136
    assert [(step["stage"], step["in"], step["out"]) for step in report["funnel"]] == [
        ("empty_issue", 59_136, 41_103),
        ("missing_branch", 41_103, 39_838),
        ("test_cap", 39_838, 28_000),
        ("difficulty", 28_000, 6_400),
        ("split", 6_400, 6_400),
    ]
    assert report["dropped"] == {
        "empty_issue": 18_033,
        "all_solved": 13_000,
        "test_cap": 11_838,
        "none_solved": 8_600,
        "missing_branch": 1_265,
    }
    assert (report["train"], report["val"]) == (6_000, 400)
    assert report["difficulty"] == {"all_solved": 13_000, "mixed": 5_400, "none_solved": 9_600, "undecided": 0}
    kind = {made.name(number): kind for number, kind in enumerate(made.kinds)}
    dropped = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").open()]
    assert all(drop["reason"] == kind[drop["instance_id"]] for drop in dropped), "each row left for its own reason"
    sides = {
        side: [json.loads(line) for line in (tmp_path / "out" / f"{side}.jsonl").open()] for side in ("train", "val")
    }
    kept = Counter(kind[row["instance_id"]] for rows in sides.values() for row in rows)
    assert kept == {"mixed": PLAN["mixed"], "none_solved": 1_000}
    names = [row["instance_id"] for rows in sides.values() for row in rows] + [d["instance_id"] for d in dropped]
    assert len(names) == len(set(names)) == 59_136
    # Stratified: difficulty keeps its share in the validation set, to within the rounding of each repository.
    share = sum(kind[row["instance_id"]] == "mixed" for row in sides["val"]) / 400
    assert abs(share - PLAN["mixed"] / 6_400) < 0.06
    assert len({row["repo"] for row in sides["val"]}) == 128
