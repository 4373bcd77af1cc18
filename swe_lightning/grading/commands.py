"""What `swel grade` does: one patch, a predictions file, a saved log, or the gold and the null patch of every task.

Returns data; a task without a verdict is a row with a reason, never a zero and never an exception that stops others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swe_lightning.errors import DataError, GradingError, InfraError, UserError
from swe_lightning.grading import saved_log
from swe_lightning.grading.apply_patch import PatchError, from_patch
from swe_lightning.grading.grade import GRADER_VERSION, Grader
from swe_lightning.grading.predictions import encode
from swe_lightning.grading.sheet import BAD_TASK, GradeRow, Sheet
from swe_lightning.records import Task
from swe_lightning.sandbox import Limits, TreeDiff
from swe_lightning.sandbox.trees import pristine_tree

Patch = bytes | TreeDiff


@dataclass
class Job:
    """One grading to take. `patch` is found when it runs, so that a task that has none is a row of its own."""

    task: Task
    patch: Callable[[], Patch]
    key: str
    run: int = 0


def jobs_of(tasks: Sequence[Task], kind: str, *, repeat: int = 1, scope: str = "listed") -> list[Job]:
    """`gold`: the fix itself must resolve; `null`: nothing must not."""
    patch: Callable[[Task], Patch] = gold_changes if kind == "gold" else lambda _: {}
    return [_job(t, lambda t=t: patch(t), kind.encode(), run, scope) for t in tasks for run in range(repeat)]  # type: ignore[misc]


def jobs_of_patches(
    tasks: Sequence[Task], patches: Mapping[str, bytes], *, repeat: int = 1, scope: str = "listed"
) -> list[Job]:
    """Tasks without a patch are left out; patches for unknown tasks are refused."""
    unknown = sorted(set(patches) - {t.instance_id for t in tasks})
    if unknown:
        raise DataError(f"{len(unknown)} predictions name tasks that are not in the task file, first {unknown[0]}")
    return [
        _job(t, lambda t=t: patches[t.instance_id], patches[t.instance_id], run, scope)  # type: ignore[misc]
        for t in tasks
        if t.instance_id in patches
        for run in range(repeat)
    ]


def _job(task: Task, patch: Callable[[], Patch], described: bytes, run: int, scope: str) -> Job:
    row = json.dumps([GRADER_VERSION, scope, task.model_dump(mode="json")], sort_keys=True)
    return Job(task, patch, hashlib.blake2b(row.encode() + b"\0" + described, digest_size=16).hexdigest(), run)


def grade_jobs(
    grader: Grader,
    jobs: Sequence[Job],
    *,
    workers: int = 2,
    sheet: Sheet | None = None,
    progress: Callable[[], Any] = lambda: None,
) -> list[GradeRow]:
    """Rows in the order of the jobs. What `sheet` has a verdict for is taken from there."""
    sheet = sheet or Sheet()

    def one(job: Job) -> GradeRow:
        row = sheet.known(job.task.instance_id, job.run, job.key)
        if row is None:
            row = _grade(grader, job)
            sheet.add(row)
        progress()
        return row

    pool = ThreadPoolExecutor(max(workers, 1))
    try:
        return list(pool.map(one, jobs))
    finally:
        pool.shutdown(cancel_futures=True)


def _grade(grader: Grader, job: Job) -> GradeRow:
    row = GradeRow(job.task.instance_id, run=job.run, key=job.key)
    try:
        row.verdict = grader.grade(job.task, job.patch())
    except InfraError as error:
        row.infra_reason, row.message = error.reason.value, str(error)
    except UserError as error:
        row.infra_reason, row.message = BAD_TASK, str(error)
    return row


def gold_changes(task: Task) -> TreeDiff:
    """The fix. SWE-smith rows hold the patch that introduces the bug, so it is applied in reverse; rows with a
    `test_patch` (SWE-bench) hold the fix itself."""
    try:
        diff, _ = from_patch(pristine_tree(task), encode(task.patch), reverse=task.test_patch is None)
    except PatchError as error:
        raise DataError(f"task {task.instance_id}: its own patch does not fit its tree ({error})") from error
    return diff


def grade_log(task: Task, log: bytes) -> GradeRow:
    """The verdict of a saved test log. UserError for a row that cannot be graded at all."""
    try:
        return GradeRow(task.instance_id, saved_log.judge(task, log.decode("utf-8", "replace")))
    except GradingError as error:
        return GradeRow(task.instance_id, infra_reason=error.reason.value, message=str(error))


def failed(rows: Sequence[GradeRow], kind: str) -> str:
    """Why `swel grade` ends with exit code 1, or an empty string. Known flaky tasks do not fail a gold run."""
    without = [r for r in rows if r.verdict is None]
    if without:
        return f"{len(without)} of {len(rows)} have no verdict, first {without[0].instance_id}: {without[0].message}"
    wrong = [r for r in rows if r.resolved != (kind == "gold") and not (kind == "gold" and r.flaky)]
    if kind in ("gold", "null") and wrong:
        what = "gold patches do not resolve" if kind == "gold" else "null patches resolve"
        return f"{len(wrong)} of {len(rows)} {what}, first {wrong[0].instance_id}"
    return ""


def bounded_workers(asked: int | None, limits: Limits) -> int:
    """Gradings at once: as many boxes as this machine's cores and free memory hold, or fewer if asked."""
    import psutil

    cores = (psutil.cpu_count() or 1) / limits.cpu
    memory = psutil.virtual_memory().available / (limits.memory_mb << 20)
    held = max(int(min(cores, memory)), 1)
    return held if asked is None else min(asked, held)


def with_versions(tasks: Sequence[Task], path: Path) -> list[Task]:
    """Rows without a `version` column get theirs from a JSON object instance_id -> version."""
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read versions from {path}: {error}") from error
    if not isinstance(known, dict):
        raise DataError(f"{path} must hold a JSON object instance_id -> version")
    return [
        t if getattr(t, "version", None) or t.instance_id not in known
        else t.model_copy(update={"version": str(known[t.instance_id])})
        for t in tasks
    ]  # fmt: skip
