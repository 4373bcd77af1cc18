"""What `swel grade` does: one patch, a predictions file, or the gold and the null patch of every task.

Returns data; a task without a verdict is a row with an infrastructure reason, never a zero and never an exception that
stops the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from swe_lightning.errors import DataError, GradingError
from swe_lightning.grading.apply_patch import PatchError, from_patch
from swe_lightning.grading.grade import Grader, Verdict
from swe_lightning.records import Task
from swe_lightning.sandbox import TreeDiff
from swe_lightning.sandbox.trees import pristine_tree

Patch = bytes | TreeDiff


@dataclass
class GradeRow:
    """One graded task: a verdict, or the reason why there is none."""

    instance_id: str
    verdict: Verdict | None = None
    infra_reason: str | None = None
    message: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def gold_changes(task: Task) -> TreeDiff:
    """The fix. SWE-smith rows hold the patch that introduces the bug, so it is applied in reverse; rows with a
    `test_patch` (SWE-bench) hold the fix itself."""
    try:
        diff, _ = from_patch(pristine_tree(task), _encode(task.patch), reverse=task.test_patch is None)
    except PatchError as error:
        raise DataError(f"task {task.instance_id}: its own patch does not fit its tree ({error})") from error
    return diff


def grade_patch(grader: Grader, task: Task, patch: Patch) -> GradeRow:
    try:
        return GradeRow(task.instance_id, grader.grade(task, patch))
    except GradingError as error:
        return GradeRow(task.instance_id, infra_reason=error.reason.value, message=str(error))


def grade_gold(
    grader: Grader, tasks: Sequence[Task], *, parallel: int = 2, progress: Callable[[int], Any] | None = None
) -> list[GradeRow]:
    """Every gold patch must resolve its task."""
    return _each(tasks, lambda task: grade_patch(grader, task, gold_changes(task)), parallel, progress)


def grade_null(
    grader: Grader, tasks: Sequence[Task], *, parallel: int = 2, progress: Callable[[int], Any] | None = None
) -> list[GradeRow]:
    """No task may be resolved by changing nothing."""
    return _each(tasks, lambda task: grade_patch(grader, task, {}), parallel, progress)


def grade_predictions(
    grader: Grader,
    tasks: Sequence[Task],
    predictions: Mapping[str, bytes],
    *,
    parallel: int = 2,
    progress: Callable[[int], Any] | None = None,
) -> list[GradeRow]:
    """Tasks without a prediction are left out; predictions for unknown tasks are refused."""
    unknown = sorted(set(predictions) - {t.instance_id for t in tasks})
    if unknown:
        raise DataError(f"{len(unknown)} predictions name tasks that are not in the task file, first {unknown[0]}")
    chosen = [t for t in tasks if t.instance_id in predictions]
    return _each(chosen, lambda t: grade_patch(grader, t, predictions[t.instance_id]), parallel, progress)


def read_predictions(path: Path) -> dict[str, bytes]:
    """SWE-bench predictions: JSON lines, a JSON list, or a JSON object by instance id; of several, the last counts."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read predictions {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a predictions file: it is not UTF-8 text (byte {error.start})") from error
    try:
        data = json.loads(text)
        items = [data] if isinstance(data, dict) and "instance_id" in data else data
        rows = list(items.values()) if isinstance(items, dict) else items
    except json.JSONDecodeError:
        rows = [_json_line(path, n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    try:
        return {row["instance_id"]: _encode(row.get("model_patch") or "") for row in rows}
    except (TypeError, KeyError) as error:
        raise DataError(f"{path} is not a predictions file: every row needs instance_id and model_patch") from error


def summary_table(rows: Sequence[GradeRow], title: str) -> Table:
    table = Table(title=title)
    for column in ("task", "resolved", "F2P", "P2P failed", "dropped", "seconds", "why"):
        table.add_column(column)
    for row in rows:
        v = row.verdict
        if v is None:
            table.add_row(row.instance_id, f"no verdict: {row.infra_reason}", "", "", "", "", row.message)
            continue
        passed = f"{sum(v.f2p.values())}/{len(v.f2p)}"
        cells = (passed, str(len(v.p2p_failed)), str(len(v.dropped_paths)), f"{v.seconds:.2f}", v.why)
        table.add_row(row.instance_id, "yes" if v.resolved else "no", *cells)
    return table


def _each(
    tasks: Sequence[Task], grade: Callable[[Task], GradeRow], parallel: int, progress: Callable[[int], Any] | None
) -> list[GradeRow]:
    def one(task: Task) -> GradeRow:
        row = grade(task)
        if progress:
            progress(1)
        return row

    with ThreadPoolExecutor(max(parallel, 1)) as pool:
        return list(pool.map(one, tasks))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _json_line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path} line {number} is not JSON: {error.msg}") from error
