"""The stages, the ledger and the whole filter: what stays, what leaves and that it adds up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline import commands, stages
from data_pipeline.ledger import Ledger, LedgerError
from data_pipeline.pipeline import FilterSettings, Tools, filter_rows
from data_pipeline.probe_results import load_results
from data_pipeline.repos import Branch, build_repository
from data_pipeline.split import split_rows
from data_pipeline.stages.branches import BranchIndex, missing_branch
from data_pipeline.stages.rules import empty_issue, too_many_tests
from data_pipeline.trees import Entry
from swe_lightning.errors import DataError, UserError

Make = Callable[..., dict[str, Any]]
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "tasks"


def test_empty_issues(make_row: Make) -> None:
    rows = [make_row(n, problem_statement=text) for n, text in enumerate(["", " \n", None, "x"])]
    assert [empty_issue(row) is not None for row in rows] == [True, True, True, False]


@pytest.mark.parametrize(("fail", "keep", "leaves"), [(1, 199, False), (1, 200, True), (201, 0, True), (0, 0, False)])
def test_cap_counts_both_lists(make_row: Make, fail: int, keep: int, leaves: bool) -> None:
    row = make_row(FAIL_TO_PASS=[f"f{n}" for n in range(fail)], PASS_TO_PASS=[f"p{n}" for n in range(keep)])
    assert bool(too_many_tests(row)) is leaves


def test_branches_are_asked_by_instance_name(make_row: Make, tmp_path: Path) -> None:
    tree = {"a.py": Entry(b"x = 1\n")}
    present = make_row(0, repo_path=str(tmp_path / "r.git"), base_commit="f" * 40)
    absent = make_row(1, repo_path=str(tmp_path / "r.git"))
    listed = make_row(2, image_name="image")
    unlisted = make_row(3, image_name="image")
    unknown = make_row(4)
    build_repository(tree, [Branch(present["instance_id"], {"a.py": b"x = 2\n"})], tmp_path / "r.git")
    index = BranchIndex({"image": [listed["instance_id"]]})
    rejected = missing_branch([present, absent, listed, unlisted, unknown], index)
    assert {i: reason for i, (reason, _) in rejected.items()} == {1: "missing_branch", 3: "missing_branch"}
    assert index.unchecked == 1


def test_ledger_refuses_sums_that_do_not_add_up(make_row: Make) -> None:
    rows = [make_row(n) for n in range(3)]
    ledger = Ledger(3)
    kept = ledger.apply("a", rows, {1: ("reason", "evidence")})
    ledger.close(kept)
    with pytest.raises(LedgerError, match="do not add up"):
        ledger.close(kept[:1])
    with pytest.raises(LedgerError, match="counted twice"):
        ledger.close([*kept, rows[1]])
    with pytest.raises(LedgerError, match="not given"):
        ledger.apply("b", kept, {5: ("reason", "evidence")})
    ledger.apply("b", kept[:1], {})
    with pytest.raises(LedgerError, match="saw 1 rows, but 2"):
        ledger.close(kept)


ROW = st.fixed_dictionaries(
    {
        "problem_statement": st.sampled_from(["", " ", None, "text"]),
        "repo": st.sampled_from(["a/x", "a/y", "b/z"]),
        "tests": st.sampled_from([1, 5, 201]),
        "outcomes": st.lists(st.sampled_from([True, False, None]), max_size=6),
    }
)


@given(st.lists(ROW, min_size=3, max_size=40), st.integers(0, 5), st.integers(0, 3))
def test_every_row_is_kept_or_explained_once(drawn: list[dict[str, Any]], seed: int, keep_none: int) -> None:
    rows = [
        {
            "instance_id": f"i{n}",
            "repo": d["repo"],
            "problem_statement": d["problem_statement"],
            "FAIL_TO_PASS": ["t"] * d["tests"],
            "PASS_TO_PASS": [],
        }
        for n, d in enumerate(drawn)
    ]
    outcomes = {row["instance_id"]: d["outcomes"] for row, d in zip(rows, drawn, strict=True)}
    settings = FilterSettings(seed=seed, keep_none_solved=keep_none)
    try:
        result = filter_rows(rows, settings, Tools(outcomes=outcomes))
    except DataError:
        return  # nothing, or not enough for two sides, was left
    names = [row["instance_id"] for row in (*result.train, *result.val)] + [d.instance_id for d in result.ledger.drops]
    assert Counter(names) == Counter(row["instance_id"] for row in rows)
    assert result.report["rows_in"] == result.report["train"] + result.report["val"] + sum(
        result.report["dropped"].values()
    )


def test_split_modes(make_row: Make) -> None:
    rows = [make_row(n) for n in range(90)]
    train, val, mode = split_rows(rows, val_size=9, seed=1)
    assert mode == "stratified"
    assert Counter(row["repo"] for row in val) == {repo: 3 for repo in {row["repo"] for row in rows}}
    assert {r["instance_id"] for r in train}.isdisjoint(r["instance_id"] for r in val)
    assert split_rows(rows, val_size=9, seed=1)[1] == val
    assert split_rows(rows, val_size=9, seed=2)[1] != val
    train, val, _ = split_rows(rows, mode="repository", val_size=9)
    assert {r["repo"] for r in train}.isdisjoint(r["repo"] for r in val)


def test_each_repository_and_difficulty_keeps_its_share(make_row: Make) -> None:
    """240 rows in six strata of 20 to 60: a fortieth is 0.5 to 1.5 rows, a tenth exactly 2, 4 and 6."""
    plan = {("a/x", "mixed"): 60, ("a/x", "none_solved"): 20, ("b/y", "mixed"): 40, ("b/y", "none_solved"): 40}
    plan |= {("c/z", "mixed"): 20, ("c/z", "none_solved"): 60}
    strata = [stratum for stratum, count in plan.items() for _ in range(count)]
    rows = [make_row(n, repo=repo) for n, (repo, _) in enumerate(strata)]
    classes = {row["instance_id"]: kind for row, (_, kind) in zip(rows, strata, strict=True)}

    def drawn(size: int) -> Counter[tuple[str, str]]:
        _, val, _ = split_rows(rows, mode="stratified", val_size=size, seed=3, difficulty=classes)
        return Counter((row["repo"], classes[row["instance_id"]]) for row in val)

    assert drawn(24) == {stratum: count // 10 for stratum, count in plan.items()}
    few = drawn(6)
    assert sum(few.values()) == 6
    assert all(abs(few[stratum] - count / 40) < 1 for stratum, count in plan.items()), "rounded by less than a row"


STAGE_NAMES = st.sets(st.sampled_from(sorted(stages.BY_NAME)))


@given(st.lists(ROW, min_size=3, max_size=25), STAGE_NAMES, STAGE_NAMES, st.sampled_from(stages.PRESETS))
def test_counts_add_up_whichever_stages_run(
    drawn: list[dict[str, Any]], add: set[str], skip: set[str], preset: stages.Preset
) -> None:
    rows = [
        {
            "instance_id": f"i{n}",
            "repo": d["repo"],
            "problem_statement": d["problem_statement"] and f"{d['problem_statement']} {n % 7}",
            "FAIL_TO_PASS": [f"t{m}" for m in range(d["tests"])],
            "PASS_TO_PASS": [f"k{m}" for m in range(n % 3)],
            "patch": f"--- a/{'tests/' * (n % 4 == 0)}m.py\n",
            "image_name": "im/age" if n % 5 else None,
        }
        for n, d in enumerate(drawn)
    ]
    outcomes = {row["instance_id"]: d["outcomes"] for row, d in zip(rows, drawn, strict=True)}
    settings = FilterSettings(preset=preset, add=tuple(add), skip=tuple(skip), keep_none_solved=1)
    branches = {"im/age": [f"i{n}" for n in range(0, len(rows), 2)]}
    try:
        result = filter_rows(rows, settings, Tools(branches=branches, outcomes=outcomes))
    except DataError:
        return  # nothing, or not enough for two sides, was left
    names = [row["instance_id"] for row in (*result.train, *result.val)] + [d.instance_id for d in result.ledger.drops]
    assert sorted(names) == sorted(row["instance_id"] for row in rows)
    left = len(rows)
    for step in result.report["funnel"]:
        assert step["in"] == left
        assert step["in"] - step["out"] == sum(drop.stage == step["stage"] for drop in result.ledger.drops)
        left = step["out"]
    assert {drop.stage for drop in result.ledger.drops}.isdisjoint(skip)


def test_held_out_rows_are_never_trained_on(make_row: Make) -> None:
    rows = [make_row(n, role="held_out" if n % 3 == 0 else "train", package=f"p{n % 3}") for n in range(9)]
    train, val, mode = split_rows(rows, val_size=2)
    assert mode == "held_out"
    assert len(val) == 2
    assert all(row["role"] == "train" for row in train)
    assert len(train) == 6
    plain = [{**row, "role": None} for row in rows]
    train, val, _ = split_rows(plain, held_out_repos=["p1"])
    assert {row["package"] for row in val} == {"p1"}
    assert {row["package"] for row in train} == {"p0", "p2"}
    with pytest.raises(DataError, match="elsewhere is not among"):
        split_rows(plain, held_out_repos=["elsewhere"])


def test_the_papers_funnel_at_a_tenth(make_row: Make) -> None:
    """5,914 rows: 1,803 empty, 127 without a branch, 40 over the cap, the rest by difficulty."""
    rows: list[dict[str, Any]] = []
    outcomes: dict[str, list[bool | None]] = {}
    plan = [
        ("empty_issue", 1803, {"problem_statement": "\n"}, None),
        ("missing_branch", 127, {"image_name": "gone"}, None),
        ("test_cap", 40, {"PASS_TO_PASS": [f"t{n}" for n in range(200)]}, None),
        ("all_solved", 2000, {}, [True] * 4),
        ("none_solved", 1444, {}, [False] * 4),
        ("mixed", 500, {}, [True, False]),
    ]
    for _, count, change, outcome in plan:
        for _ in range(count):
            rows.append(make_row(len(rows), **change))
            if outcome:
                outcomes[rows[-1]["instance_id"]] = list(outcome)
    settings = FilterSettings(keep_none_solved=100, val_size=40)
    result = filter_rows(rows, settings, Tools(branches={"gone": []}, outcomes=outcomes))
    assert result.report["dropped"] == {
        "all_solved": 2000,
        "empty_issue": 1803,
        "none_solved": 1344,
        "missing_branch": 127,
        "test_cap": 40,
    }
    assert (result.report["train"], result.report["val"]) == (560, 40)


def test_command_writes_whole_results_that_can_be_moved(
    make_row: Make, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    build_repository(
        {"a.py": Entry(b"x = 1\n")}, [Branch(make_row(n)["instance_id"], {}) for n in range(8)], tmp_path / "r.git"
    )
    rows = [make_row(n, repo_path="r.git", own=n) for n in range(8)] + [make_row(8, problem_statement="")]
    file = write_rows(rows)
    out = tmp_path / "deep" / "out"
    report = commands.filter(inputs=[file], out=out, val_size=2)
    assert (report["train"], report["val"], report["dropped"]) == (6, 2, {"empty_issue": 1})
    assert sorted(p.name for p in out.iterdir()) == [
        "card.md",
        "dropped.jsonl",
        "funnel.png",
        "histograms.png",
        "report.json",
        "report.md",
        "train.jsonl",
        "val.jsonl",
    ]
    first = json.loads((out / "train.jsonl").read_text().splitlines()[0])
    assert (out / first["repo_path"]).resolve() == tmp_path / "r.git"
    dropped = json.loads((out / "dropped.jsonl").read_text())
    assert (dropped["stage"], dropped["reason"]) == ("empty_issue", "empty_issue")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    commands.filter(inputs=[file], out=out, val_size=2)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    with pytest.raises(DataError, match="other inputs or settings"):
        commands.filter(inputs=[file], out=out, val_size=3)
    commands.filter(inputs=[file], out=out, val_size=3, overwrite=True)
    assert len((out / "val.jsonl").read_text().splitlines()) == 3


def test_an_empty_result_says_why_and_writes_nothing(
    make_row: Make, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    file = write_rows(
        [make_row(0, problem_statement=""), make_row(1, FAIL_TO_PASS=["t"] * 1 + [f"u{n}" for n in range(300)])]
    )
    with pytest.raises(DataError, match="no row is left of 2: 1 empty_issue, 1 test_cap"):
        commands.filter(inputs=[file], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_probe_through_the_command(
    make_row: Make, write_rows: Callable[..., str], written_rollouts: Any, tmp_path: Path
) -> None:
    rows = [make_row(n) for n in range(10)]
    file = write_rows(rows)
    run = written_rollouts({row["instance_id"]: [True, n == 0] * 2 for n, row in enumerate(rows)})
    report = commands.filter(inputs=[file], out=tmp_path / "out", rollouts=run, val_size=1)
    assert report["difficulty"] == {"all_solved": 1, "mixed": 9, "none_solved": 0, "undecided": 0}
    assert report["solve_rates"]["bug"] == {"func_basic": [10, 10]}
    assert len(run.ended) == 9 * 2 + 4
    report = commands.filter(
        inputs=[file], out=tmp_path / "again", probe_results=tmp_path / "out" / "probe.jsonl", val_size=1
    )
    assert report["dropped"] == {"all_solved": 1}
    (tmp_path / "other.json").write_text('{"elsewhere-1": [true]}')
    with pytest.raises(DataError, match="name none of the tasks"):
        commands.filter(inputs=[file], out=tmp_path / "third", probe_results=tmp_path / "other.json")


def test_imported_outcomes_of_other_tasks_and_other_k(
    make_row: Make, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    rows, results = [make_row(n) for n in range(6)], tmp_path / "r.json"
    names = [row["instance_id"] for row in rows]
    settings: dict[str, Any] = {"inputs": [write_rows(rows)], "out": tmp_path / "out", "probe_results": results}
    written = [[True, False], [True, True], [False, None], [False, True], [False, False]]
    results.write_text(json.dumps({**dict(zip(names, written, strict=False)), "gone-1": [True, True]}))
    with pytest.raises(DataError, match="at most 2 rollouts of a task, fewer than --k 4; give --k 2"):
        commands.filter(**settings, val_size=1)
    assert not (tmp_path / "out").exists()
    report = commands.filter(**settings, k=2, val_size=1)
    assert report["difficulty"] == {"all_solved": 1, "mixed": 2, "none_solved": 1, "undecided": 2}
    assert report["probe_results"] == {"tasks": 6, "unknown": 1}
    assert "1 of the 6 tasks of the probe results are in no input" in (tmp_path / "out" / "report.md").read_text()
    results.write_text(json.dumps({name: [True] * 4 + [False] for name in names}))
    report = commands.filter(**settings, k=4, val_size=1, overwrite=True)
    assert report["difficulty"]["mixed"] == 6, "verdicts beyond --k count"


def test_outcomes_of_another_model_are_never_counted(
    make_row: Make, write_rows: Callable[..., str], written_rollouts: Any, tmp_path: Path
) -> None:
    rows = [make_row(n) for n in range(4)]
    names = [row["instance_id"] for row in rows]
    settings: dict[str, Any] = {"inputs": [write_rows(rows)], "out": tmp_path, "val_size": 1}
    weak = written_rollouts({name: [True, False] for name in names}, window=4, stop_after=5)
    with pytest.raises(KeyboardInterrupt):  # interrupted: no report says yet which model it was
        commands.filter(**settings, rollouts=weak, probe_identity="weak")
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "gateway.db").write_bytes(b"rollouts of the weak model")
    for other in ("strong", None):
        with pytest.raises(DataError, match="probe of another model or recipe"):
            commands.filter(**settings, rollouts=weak, probe_identity=other)
    again = written_rollouts({name: [True, False] for name in names}, window=4)
    report = commands.filter(**settings, rollouts=again, probe_identity="weak")
    assert len(weak.ended) + len(again.ended) == 8, "the same model goes on where it stopped"
    assert report["difficulty"]["mixed"] == 4
    strong = written_rollouts({name: [True] * 4 if name == names[0] else [False] * 4 for name in names})
    with pytest.raises(DataError, match="other inputs or settings"):
        commands.filter(**settings, rollouts=strong, probe_identity="strong")
    assert not strong.asked
    report = commands.filter(**settings, rollouts=strong, probe_identity="strong", overwrite=True)
    assert report["difficulty"] == {"all_solved": 1, "mixed": 0, "none_solved": 3, "undecided": 0}
    assert report["source"]["probe"] == "strong"
    assert not (tmp_path / "probe").exists(), "a store of the weak model would answer for the strong one"
    assert len(load_results(tmp_path / "probe.jsonl")[names[0]]) == 4


@pytest.mark.parametrize(("option", "value"), [("split", "randomly"), ("k", 0), ("test_cap", 0), ("val_size", 0)])
def test_bad_options(write_rows: Callable[..., str], make_row: Make, tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(UserError, match=option.replace("_", "-")):
        commands.filter(inputs=[write_rows([make_row()])], out=tmp_path / "out", **{option: value})


def test_stats_and_show(make_row: Make, write_rows: Callable[..., str]) -> None:
    file = write_rows([make_row(0), make_row(1, problem_statement=""), make_row(2, strategy="boundary")])
    stats = commands.stats(inputs=[file])
    assert (stats["rows"], stats["empty_issue"]) == (3, 1)
    assert stats["kinds"] == {"func_basic": 2, "boundary": 1}
    assert stats["tests_per_task"]["median"] == 2
    name = make_row(1)["instance_id"]
    assert commands.show(inputs=[file], instance_id=name)["instance_id"] == name
    with pytest.raises(DataError, match=r"no task .*for example owner__name"):
        commands.show(inputs=[file], instance_id="owner__name.0123abcd.func_basic__0000001")


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/tasks is not here")
def test_published_smith_rows(tmp_path: Path) -> None:
    inputs = [str(SHARED / "swesmith_real_9_on_sdists.jsonl"), str(SHARED / "swesmith_official_pandas_pr_53652.json")]
    report = commands.filter(inputs=inputs, out=tmp_path / "out", val_size=1)
    assert report["rows_in"] == 10
    assert report["dropped"]["empty_issue"] == 4
    assert report["train"] + report["val"] + sum(report["dropped"].values()) == 10
    assert report["branches_unchecked"] == 6


def test_the_held_out_side_is_never_probed(make_row: Make, written_rollouts: Any, tmp_path: Path) -> None:
    rows = [make_row(n, package=f"p{n % 3}", repo=f"pypi/p{n % 3}") for n in range(6)]
    rows[0]["role"] = "held_out"
    run = written_rollouts({row["instance_id"]: [True, False] for row in rows})
    settings = FilterSettings(split="held_out", held_out_repos=("p1",))
    result = filter_rows(rows, settings, Tools(rollouts=run), tmp_path)
    assert {name for name, _ in run.asked} == {rows[n]["instance_id"] for n in (2, 3, 5)}
    assert {row["instance_id"] for row in result.val} == {rows[n]["instance_id"] for n in (0, 1, 4)}
