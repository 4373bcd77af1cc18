"""Comparisons: paired, clustered, printed and saved from the same numbers."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from swe_lightning.errors import DataError
from swe_lightning.evaluation.compare import compare, comparison_table, markdown, results_table
from swe_lightning.evaluation.result import EvalRecord, EvalResult


def result(label: str, rewards: dict[str, list[float | None]]) -> EvalResult:
    records = [
        EvalRecord(f"{label}-{task}-{k}", task, task[0], k, value, infra_reason=None if value is not None else "lost")
        for task, values in rewards.items()
        for k, value in enumerate(values)
    ]
    return EvalResult(label, 2, 0.7, records)


BEFORE = result("step0", {"a1": [0, 0], "a2": [1, 0], "b1": [0, 0], "c1": [0, None], "d1": [None, None]})
AFTER = result("step20", {"a1": [1, 1], "a2": [1, 1], "b1": [1, 0], "c1": [0, 0], "d1": [1, 1]})


def test_numbers() -> None:
    found = compare(BEFORE, AFTER)
    assert found.difference.mean == pytest.approx((1 + 0.5 + 0.5 + 0) / 4)
    assert (found.difference.tasks, found.difference.clusters, found.left_out) == (4, 3, 1)
    assert (found.pairs.only_second, found.pairs.only_first, found.pairs.both, found.pairs.neither) == (4, 0, 1, 2)
    assert (found.before_rate, found.after_rate) == (pytest.approx(1 / 7), 0.7)
    assert compare(AFTER, BEFORE).difference.mean == -found.difference.mean


def test_printed_and_saved_alike() -> None:
    found = compare(BEFORE, AFTER)
    text = markdown([BEFORE, AFTER], [found])
    assert "| step20 | 7/10 | 0.700 | 0.397 to 0.892 |" in text
    assert "| step20 - step0 | +0.500 |" in text
    assert "4 / 3" in text
    assert "3 lost" in text
    console = Console(file=io.StringIO(), width=200)
    console.print(results_table([BEFORE, AFTER]), comparison_table([found]))
    assert "+0.500" in console.file.getvalue()  # type: ignore[attr-defined]
    assert json.loads(json.dumps(found.as_dict()))["difference"]["mean"] == 0.5


def test_one_package_has_no_interval_but_valid_json() -> None:
    one = compare(result("x", {"a1": [0]}), result("y", {"a1": [1]}))
    assert one.as_dict()["difference"]["low"] is None
    assert "undefined" in markdown([], [one])


def test_a_file_that_is_no_evaluation(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DataError, match="not an evaluation"):
        EvalResult.load(tmp_path / "x.json")
    with pytest.raises(DataError, match="cannot read"):
        EvalResult.load(tmp_path / "none.json")
