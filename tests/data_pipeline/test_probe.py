"""The difficulty probe: what outcomes mean, who gets the next rollout, and that nothing is asked for twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.probe import classify, probe, reject_by_difficulty, solve_table
from data_pipeline.probe_results import load_results
from data_pipeline.report import bug_kind
from swe_lightning.errors import DataError

Make = Callable[..., dict[str, Any]]

CLASSES = [
    ([True] * 4, "all_solved"),
    ([False] * 4, "none_solved"),
    ([True, False], "mixed"),
    ([True, None, None, None], "undecided"),
    ([False, False, False, None], "undecided"),
    ([None, False, None, False, False, False], "none_solved"),
    ([], "undecided"),
]


@pytest.mark.parametrize(("outcomes", "expected"), CLASSES)
def test_classes(outcomes: list[bool | None], expected: str) -> None:
    assert classify(outcomes, 4) == expected


def test_decided_tasks_get_no_more_and_lost_rollouts_are_repeated(
    make_row: Make, written_rollouts: Any, tmp_path: Path
) -> None:
    rows = [make_row(n) for n in range(4)]
    names = [row["instance_id"] for row in rows]
    run = written_rollouts(
        {
            names[0]: [True, False],
            names[1]: [True] * 9,
            names[2]: [None, False, None, False, False, False, False],
            names[3]: [],
        },
        window=4,
    )
    results = probe(rows, run, k=4, retries=1, file=tmp_path / "probe.jsonl")
    assert [run.count(name) for name in names] == [2, 4, 6, 8]
    assert [classify(results[name], 4) for name in names] == ["mixed", "all_solved", "none_solved", "undecided"]
    assert run.most_open == 4, "never more than the window"
    assert run.asked[:4] == [(name, 0) for name in names], "every task gets its first before any gets its second"


def test_nobody_waits_for_rollouts_of_a_decided_task(make_row: Make, written_rollouts: Any, tmp_path: Path) -> None:
    row = make_row()
    run = written_rollouts({row["instance_id"]: [True, False, True, True]}, window=4)
    probe([row], run, k=4, file=tmp_path / "probe.jsonl")
    assert len(run.asked) == 4, "one task alone fills the window"
    assert len(run.ended) == 2, "the second decided it"


@pytest.mark.parametrize("stop", [1, 5, 11])
def test_a_resumed_probe_asks_for_exactly_what_is_missing(
    make_row: Make, written_rollouts: Any, tmp_path: Path, stop: int
) -> None:
    rows = [make_row(n) for n in range(3)]
    file = tmp_path / "probe.jsonl"
    outcomes = {row["instance_id"]: [True] * 4 for row in rows}
    first = written_rollouts(outcomes, stop_after=stop)
    with pytest.raises(KeyboardInterrupt):
        probe(rows, first, k=4, file=file)
    with file.open("a") as f:
        f.write('{"instance_id": "torn')
    second = written_rollouts(outcomes)
    results = probe(rows, second, k=4, file=file)
    every = sorted((row["instance_id"], n) for row in rows for n in range(4))
    assert sorted([*first.ended, *second.ended]) == every
    assert load_results(file) == results


def test_a_mended_machine_gets_new_tries(make_row: Make, written_rollouts: Any, tmp_path: Path) -> None:
    row, file = make_row(), tmp_path / "probe.jsonl"
    name = row["instance_id"]
    broken = written_rollouts({name: []})
    assert classify(probe([row], broken, k=2, retries=1, file=file)[name], 2) == "undecided"
    assert broken.count(name) == 4
    mended = written_rollouts({name: [None] * 4 + [False, False]})
    assert classify(probe([row], mended, k=2, retries=1, file=file)[name], 2) == "none_solved"
    assert mended.asked == [(name, 4), (name, 5)], "a number that has an outcome is not used again"


def test_an_answer_to_no_question_is_refused(make_row: Make, written_rollouts: Any, tmp_path: Path) -> None:
    run = written_rollouts({})
    run.finished = lambda: [("stranger", 0, True)]
    with pytest.raises(DataError, match=r"stranger .rollout 0., which was not asked for"):
        probe([make_row()], run, file=tmp_path / "probe.jsonl")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("r.jsonl", '{"instance_id": "a", "solved": 1}\n', "r.jsonl:1: a probe outcome is true, false or null"),
        ("r.jsonl", '{"solved": true}\n{"instance_id": "a", "solved": true}\n', "r.jsonl:1: wants an object"),
        ("r.jsonl", '{"instance_id": "a", "solved": true}\n{"insta\n{}', "r.jsonl:2: not valid JSON"),
        ("r.jsonl", '{"instance_id": "a", "solved": true, "rollout": "x"}\n', "rollout must be a number"),
        (
            "r.jsonl",
            '{"instance_id": "a", "solved": true, "rollout": -1}\n',
            "r.jsonl:1: rollout must be a number from 0",
        ),
        ("r.jsonl", '{"instance_id": "a", "solved": true, "rollout": 1.5}\n', "from 0 upwards, not 1.5"),
        ("r.jsonl", '{"instance_id": 7, "solved": true}\n', "r.jsonl:1: instance_id must be text, not 7"),
        (
            "r.jsonl",
            '{"instance_id": "a", "solved": true, "rollout": 0}\n{"instance_id": "a", "solved": false, "rollout": 0}\n',
            "r.jsonl:2: rollout 0 of a was already given",
        ),
        ("r.json", '{"a": [true], "b": [null], "a": [false]}', "a is given twice; take one of its lists out"),
        ("r.json", '{"a": ""}', "instance_id -> list of true, false or null"),
        ("r.json", '{"a": 3}', "instance_id -> list of true, false or null"),
        ("r.json", '{"a": {"solved": 1}}', "instance_id -> list of true, false or null"),
        ("r.json", '{"a": [NaN]}', "true, false or null, not nan"),
        ("r.json", "{", "r.json: not valid JSON"),
        ("r.json", "[]", "JSON object"),
        ("r.json", '{"a": ["yes"]}', "true, false or null"),
        ("absent.json", None, "no such file"),
    ],
)
def test_bad_probe_results(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_results(tmp_path / name)


def test_results_measured_elsewhere_need_no_numbers(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"instance_id": "a", "solved": true}\n{"instance_id": "a", "solved": null}')
    assert load_results(tmp_path / "r.jsonl") == {"a": [True, None]}
    (tmp_path / "r.json").write_text('{"a": [true, null]}')
    assert load_results(tmp_path / "r.json") == {"a": [True, None]}


def test_a_seeded_sample_of_unsolved_tasks_stays(make_row: Make) -> None:
    rows = [make_row(n) for n in range(20)]
    results = {row["instance_id"]: [False] * 4 for row in rows}
    draws = [frozenset(reject_by_difficulty(rows, results, keep_none=5, seed=s)[0]) for s in (1, 1, 2)]
    assert [len(draw) for draw in draws] == [15, 15, 15]
    assert draws[0] == draws[1] != draws[2]
    stays = {row["instance_id"] for n, row in enumerate(rows) if n not in draws[0]}
    turned = rows[::-1]
    left = reject_by_difficulty(turned, results, keep_none=5, seed=1)[0]
    assert {row["instance_id"] for n, row in enumerate(turned) if n not in left} == stays, "whatever the order"


def test_one_rollout_decides_where_k_is_one(make_row: Make, written_rollouts: Any, tmp_path: Path) -> None:
    rows = [make_row(n) for n in range(3)]
    run = written_rollouts({rows[0]["instance_id"]: [True], rows[1]["instance_id"]: [None, False]})
    results = probe(rows, run, k=1, retries=1, file=tmp_path / "probe.jsonl")
    assert [classify(results[row["instance_id"]], 1) for row in rows] == ["all_solved", "none_solved", "undecided"]
    assert [run.count(row["instance_id"]) for row in rows] == [1, 2, 2]


@given(st.lists(st.booleans(), min_size=4, max_size=4))
def test_stopping_early_gives_the_class_of_all_four(outcomes: list[bool]) -> None:
    """The funnel is the one of k rollouts each: what is not run could not change the class."""
    seen: list[bool | None] = []
    for outcome in outcomes:
        if classify(seen, 4) == "undecided":
            seen.append(outcome)
    solved = sum(outcomes)
    assert classify(seen, 4) == ("mixed" if 0 < solved < 4 else "all_solved" if solved else "none_solved")


def test_solve_rates_count_first_verdicts_only(make_row: Make) -> None:
    """A mixed task stops after two rollouts, a solved one after four: all of them together would say 5 of 6."""
    rows = [make_row(0), make_row(3), make_row(6, strategy="boundary")]
    results = {rows[0]["instance_id"]: [None, False, True], rows[1]["instance_id"]: [True] * 4}
    assert solve_table(rows, results, lambda row: row["repo"]) == {rows[0]["repo"]: [1, 2]}
    assert solve_table(rows, {**results, rows[2]["instance_id"]: [False]}, bug_kind) == {
        "boundary": [0, 1],
        "func_basic": [1, 2],
    }
