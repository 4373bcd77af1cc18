"""Do the tests say what the row claims? The null patch must fail every FAIL_TO_PASS, the gold one pass everything.

A row stays only if both hold in every repetition. It leaves as

    null_passes     a FAIL_TO_PASS test passes without the fix: a model would be rewarded for nothing
    gold_fails      the fix fails every time (a test that did not run failed)
    flaky           the fix passes some repetitions and fails others
    timeout         the tests hang, with the fix or without
    gold_unusable   the fix does not fit the tree, or the row names no test
    no_verdict      a machine failed, again and again; says nothing about the row, and is tried anew by the next run

Every grading is appended to a JSONL file under a digest of what it depends on, so an interrupted validation repeats
none, and a row that changed is graded anew. The gradings themselves come from the grading room.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data_pipeline.journal import Journal
from data_pipeline.progress import progress

Row = Mapping[str, Any]
Patch = Literal["null", "gold"]
LOST_AT_MOST = 3
"""Gradings of one row that machines may lose before it counts as no_verdict."""
KEY_COLUMNS = (
    "instance_id",
    "patch",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
    "test_cmd",
    "test_env",
    "base_commit",
)


@dataclass(frozen=True)
class Grading:
    """What one grading said. `lost`: no verdict was taken, and why."""

    patch: Patch
    resolved: bool = False
    f2p_passed: int = 0
    why: str = ""
    timed_out: bool = False
    unusable: bool = False
    lost: str = ""


GradeOnce = Callable[[Row, Patch], Grading]


def judge(gradings: Sequence[Grading], repeats: int) -> tuple[str, str] | None:
    """(reason, evidence) as soon as the row has to leave, None while it may stay. Pure."""
    null = [g for g in gradings if g.patch == "null" and not g.lost]
    gold = [g for g in gradings if g.patch == "gold" and not g.lost]
    for grading in (*null, *gold):
        if grading.unusable:
            return "gold_unusable", grading.why
        if grading.timed_out:
            return "timeout", f"{grading.patch} patch: {grading.why}"
    passing = next((g for g in null if g.resolved or g.f2p_passed), None)
    if passing is not None:
        return "null_passes", f"{passing.f2p_passed} FAIL_TO_PASS tests pass without the fix"
    failed = [g for g in gold if not g.resolved]
    if failed and len(failed) < len(gold):
        return "flaky", f"the fix passed {len(gold) - len(failed)} of {len(gold)} times; {failed[0].why}"
    if failed and len(gold) >= repeats:
        return "gold_fails", f"the fix failed {len(gold)} of {len(gold)} times; {failed[0].why}"
    lost = [g.lost for g in gradings if g.lost]
    if len(lost) >= LOST_AT_MOST:
        return "no_verdict", f"{len(lost)} gradings were lost, the last to {lost[-1]}"
    return None


def next_patch(gradings: Sequence[Grading], repeats: int) -> Patch | None:
    """What to grade next: null first, because it is the cheapest way out. None when the row is decided."""
    if judge(gradings, repeats) is not None:
        return None
    if not any(g.patch == "null" and not g.lost for g in gradings):
        return "null"
    return "gold" if sum(g.patch == "gold" and not g.lost for g in gradings) < repeats else None


def validate(
    rows: Sequence[Row],
    load: Callable[[Row], Row],
    grade: GradeOnce,
    *,
    repeats: int = 3,
    workers: int = 2,
    file: Path,
    settings: str = "",
) -> dict[int, tuple[str, str]]:
    """Rows to take out: {index: (reason, evidence)}. `load` gives the whole row, one at a time per worker.

    `settings`: what a verdict depends on beside the row (time limit, backend), as text.
    """
    known = load_gradings(file)
    keys = [row_key(load(row), settings) for row in rows]
    rejected: dict[int, tuple[str, str]] = {}
    with Journal(file) as journal, progress("validate", len(rows)) as meter:

        def one(index: int) -> tuple[int, tuple[str, str] | None]:
            gradings = list(known.get(keys[index], ()))
            row: Row | None = None
            while (patch := next_patch(gradings, repeats)) is not None:
                row = row if row is not None else load(rows[index])
                gradings.append(grade(row, patch))
                if not gradings[-1].lost:
                    journal.append({"key": keys[index], "instance_id": row["instance_id"], **gradings[-1].__dict__})
            return index, judge(gradings, repeats)

        for index, found in bounded(one, range(len(rows)), workers):
            meter.advance(rows[index]["instance_id"])
            if found is not None:
                rejected[index] = found
    return rejected


def row_key(row: Row, settings: str) -> str:
    text = json.dumps([settings, *(row.get(column) for column in KEY_COLUMNS)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def load_gradings(file: Path) -> dict[str, list[Grading]]:
    found: dict[str, list[Grading]] = defaultdict(list)
    for _, record in Journal.read(file):
        found[record["key"]].append(Grading(**{k: v for k, v in record.items() if k not in ("key", "instance_id")}))
    return found


def bounded(work: Callable[[int], Any], items: Iterable[int], workers: int) -> Iterator[Any]:
    """Results as they come; never more than twice as many started as work at once, so Ctrl-C ends soon."""
    waiting: set[Future[Any]] = set()
    left = iter(items)
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        try:
            while True:
                while len(waiting) < 2 * workers and (item := next(left, None)) is not None:
                    waiting.add(pool.submit(work, item))
                if not waiting:
                    return
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def grade_with(grader: Any) -> GradeOnce:
    """Gradings of the grading room. The grader must not remember verdicts: a flaky test would never show."""
    from swe_lightning.errors import DataError, GradingError
    from swe_lightning.grading.commands import gold_changes
    from swe_lightning.records import InfraReason, Task

    def grade(row: Row, patch: Patch) -> Grading:
        task = Task.model_validate(row)
        if not task.FAIL_TO_PASS:
            return Grading(patch, unusable=True, why="no FAIL_TO_PASS test")
        try:
            changes = gold_changes(task) if patch == "gold" else {}
        except DataError as error:
            return Grading(patch, unusable=True, why=str(error))
        try:
            verdict = grader.grade(task, changes)
        except GradingError as error:
            if error.reason is InfraReason.GRADING_TIMEOUT:
                return Grading(patch, timed_out=True, why=str(error))
            return Grading(patch, lost=f"{error.reason.value}: {error}")
        return Grading(
            patch,
            resolved=verdict.resolved,
            f2p_passed=sum(verdict.f2p.values()),
            why=verdict.why,
            timed_out=verdict.why.startswith("tests timed out"),
        )

    return grade
