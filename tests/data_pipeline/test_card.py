"""What a filtered set says of itself: pictures that draw what the report counts, and a card whose command holds."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline import commands
from data_pipeline.fakes import SmithLike
from data_pipeline.histograms import by_powers, histograms, share
from data_pipeline.plots import draw
from swe_lightning.controller.supervisor import swel_command

Make = Callable[..., dict[str, Any]]


def filtered(folder: Path, out: str, **settings: Any) -> dict[str, Any]:
    """A funnel with every loss in it, from files with names that a shell would take apart."""
    made = SmithLike(seed=3, scale=200)
    source, branches, results = folder / "smith rows.jsonl", folder / "it's.json", folder / "results.json"
    source.write_bytes(b"".join(made.lines()))
    branches.write_text(json.dumps(made.branches()))
    results.write_text(json.dumps(made.outcomes()))
    return commands.filter(
        inputs=[str(source)],
        out=folder / out,
        branches=branches,
        probe_results=results,
        keep_none_solved=5,
        val_size=4,
        seed=9,
        test_cap=190,
        stages=["duplicate_issue", "patch_leak"],
        skip=["eval_overlap"],
        **settings,
    )


def command_of(out: Path) -> list[str]:
    text = (out / "card.md").read_text()
    found = re.search(r"^    swel (.+)$", text, re.M)
    assert found is not None, text
    return shlex.split(found[1])


def test_the_cards_command_makes_the_same_bytes(tmp_path: Path) -> None:
    report = filtered(tmp_path, "out")
    words = command_of(tmp_path / "out")
    assert words[words.index("--out") + 1] == str(tmp_path / "out-again")
    done = subprocess.run(swel_command(*words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    card = (tmp_path / "out" / "card.md").read_text()
    for side in ("train", "val"):
        data = (tmp_path / "out" / f"{side}.jsonl").read_bytes()
        assert (tmp_path / "out-again" / f"{side}.jsonl").read_bytes() == data
        assert f"| `{side}.jsonl` | {report[side]} | `{hashlib.sha256(data).hexdigest()}` |" in card
    for name in report["source"]["sha256"]:
        assert hashlib.sha256(Path(name).read_bytes()).hexdigest() in card
    again = (tmp_path / "out-again" / "funnel.png").read_bytes()
    assert again == (tmp_path / "out" / "funnel.png").read_bytes(), "pictures follow from the report"


def test_a_probed_set_is_made_again_from_the_outcomes_of_its_probe(
    make_row: Make, write_rows: Callable[..., str], written_rollouts: Any, tmp_path: Path
) -> None:
    rows = [make_row(n) for n in range(9)]
    run = written_rollouts({row["instance_id"]: [True, n == 0] * 2 for n, row in enumerate(rows)})
    commands.filter(
        inputs=[write_rows(rows)], out=tmp_path / "out", rollouts=run, probe_identity="a model", val_size=2, k=4
    )
    card = (tmp_path / "out" / "card.md").read_text()
    assert "a model" in card.split("## What the command cannot promise")[1]
    words = command_of(tmp_path / "out")
    assert words[words.index("--probe-results") + 1] == str(tmp_path / "out" / "probe.jsonl")
    done = subprocess.run(swel_command(*words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("train.jsonl", "val.jsonl", "dropped.jsonl"):
        assert (tmp_path / "out-again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_hub_data_is_named_with_the_revision_that_was_read(tmp_path: Path) -> None:
    from data_pipeline.card import rerun
    from data_pipeline.settings import FilterSettings

    source = {
        "inputs": ["smith", "own.jsonl"],
        "data_sets": ["SWE-bench/SWE-smith", "own.jsonl"],
        "hub": [{"data_set": "SWE-bench/SWE-smith", "split": "train", "revision": "0123abcd"}],
    }
    words = rerun({"source": source, "settings": vars(FilterSettings())}, tmp_path / "out")
    assert words[:6] == ["data", "filter", "--input", "SWE-bench/SWE-smith@0123abcd", "--input", "own.jsonl"]


def test_bins() -> None:
    assert by_powers([0, 0, 4, 5, 9], [5]) == [("0", 2, 0), ("4-7", 2, 1), ("8-15", 1, 0)]
    assert by_powers([1, 2, 3], [1, 3]) == [("1", 1, 1), ("2-3", 2, 1)]
    assert [share(*rate) for rate in ((0, 4), (1, 4), (1, 2), (3, 4), (9, 10), (4, 4))] == [
        "0", "1-25", "26-50", "51-75", "76-99", "100",
    ]  # fmt: skip
    rows = [{"instance_id": str(n), "tests": 1, "issue_chars": n} for n in range(3)]
    found = histograms(rows, rows[:1], {"0": (1, 2), "1": (0, 4), "2": (0, 0)})
    assert [bin for bin in found["solve_rate"] if bin[1]] == [("0", 1, 0), ("26-50", 1, 1)]
    assert "solve_rate" not in histograms(rows, rows)


def test_histograms_count_every_row(tmp_path: Path) -> None:
    report = filtered(tmp_path, "out")
    for name in ("tests", "issue_chars"):
        assert sum(came for _, came, _ in report["histograms"][name]) == report["rows_in"]
        assert sum(stayed for _, _, stayed in report["histograms"][name]) == report["train"] + report["val"]
    assert sum(stayed for *_, stayed in report["histograms"]["solve_rate"]) == report["train"] + report["val"]
    assert dict((label, came) for label, came, _ in report["histograms"]["solve_rate"])["100"] == 65


@pytest.mark.parametrize("scale", [1, 300])
def test_pictures_hold_what_the_report_counts(scale: int) -> None:
    """The same bytes twice, another picture for another report; and a picture that is not blank."""
    from io import BytesIO

    from matplotlib.image import imread

    counts = [("empty_issue", 60_000 // scale, 41_000 // scale), ("split", 41_000 // scale, 41_000 // scale)]
    report: dict[str, Any] = {
        "rows_in": 60_000 // scale,
        "train": 40_000 // scale,
        "val": 1_000 // scale,
        "funnel": [{"stage": name, "in": before, "out": after} for name, before, after in counts],
        "repositories": {f"owner/{'long' * 20}{n}": {"train": 7 * n + 3, "val": n} for n in range(40 // scale + 1)},
        "histograms": {"tests": [("0", 60_000 // scale, 41_000 // scale), ("1", 1, 0)], "issue_chars": [("1", 2, 1)]},
    }
    first = draw(report)
    assert draw(report) == first
    for name, png in first.items():
        pixels = imread(BytesIO(png), format="png")
        assert pixels.shape[1] > 800, name
        assert (pixels[..., :3].min(axis=2) < 0.7).mean() > 0.01, name
        border = [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
        assert all((line[..., :3] > 0.95).all() for line in border), f"{name}: something is cut off at the edge"
    assert draw({**report, "rows_in": report["rows_in"] + 9})["funnel.png"] != first["funnel.png"]
