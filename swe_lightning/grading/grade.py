"""Patch -> verdict, in a sandbox the agent never saw.

A fresh box from the pristine tree (buggy code, all tests present), the filtered model patch written into it, then the
task's FAIL_TO_PASS and PASS_TO_PASS ids in one session. A test that did not run counts as failed. The verdict speaks
about the patch only: whatever a machine did wrong raises GradingError with a typed reason and is never a reward.

What a session that hangs, never starts or kills its box (twice) means is settled by a control: the same tests on the
tree without the patch. If the control ends, the patch is to blame and the verdict is "unresolved"; if it does not, the
machine or the task is broken and there is no verdict. A control that ended is not repeated for that task.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from swe_lightning import recipe
from swe_lightning.errors import DataError, GradingError, InfraError, SandboxLost
from swe_lightning.grading.apply_patch import PatchError, from_patch
from swe_lightning.grading.git_patch import changes_only, git_mode
from swe_lightning.grading.memo import KeyedLock, VerdictMemo
from swe_lightning.grading.patch import filter_diff
from swe_lightning.grading.run_tests import TestRun, run_tests
from swe_lightning.records import InfraReason, Task
from swe_lightning.sandbox import Backend, Limits, TreeDiff
from swe_lightning.sandbox.trees import pristine_tree

GRADER_VERSION = "1"
"""Part of every remembered verdict's key: raise it when a rule below or the filter changes."""

PASSING = {"PASSED", "XFAIL", "XPASS"}
"""The one table. XFAIL passes as in SWE-bench, but only where the tests themselves expect the failure (a mark, or
pytest.xfail() called by a test file; called elsewhere it is FAILED). XPASS is a body that ran through (strict ones are
FAILED). SKIPPED, ERROR (set-up, tear-down, collection) and a missing test fail."""

UNREPEATABLE = ("tests timed out", "the sandbox died")
"""Beginnings of reasons that may depend on how busy the machine was: such a verdict is not remembered."""

DEFAULT_TEST_CMD = "python -m pytest -q"


@dataclass
class Verdict:
    """What the tests said. `f2p`: id -> passed; `apply`: how the patch reached the tree (files, git-apply, patch-fuzz,
    empty, failed)."""

    resolved: bool
    reward: float
    f2p: dict[str, bool] = field(default_factory=dict)
    p2p_failed: list[str] = field(default_factory=list)
    dropped_paths: list[str] = field(default_factory=list)
    apply: str = ""
    why: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Grader:
    """Thread-safe; one per process. `memo` is the directory of remembered verdicts (used if the section asks)."""

    def __init__(
        self, backend: Backend, section: recipe.Grading, *, memo: Path | None = None, limits: Limits | None = None
    ) -> None:
        self._backend, self._section = backend, section
        self._limits = limits or Limits()
        self._memo = VerdictMemo(memo) if memo is not None and section.remember_verdicts else None
        self._trees: dict[tuple[str | None, str], Path] = {}
        self._controls: set[str] = set()
        self._control_once = KeyedLock()

    def grade(self, task: Task, patch: bytes | TreeDiff, *, drop: tuple[str, ...] = ()) -> Verdict:
        """`patch`: changes of the tree, or a git-format text. `drop`: further paths to leave out (harness files).

        Raises GradingError where no verdict could be taken, DataError for a task without tests.
        """
        began = time.monotonic()
        if not task.FAIL_TO_PASS:
            raise DataError(f"task {task.instance_id} names no FAIL_TO_PASS tests, so there is nothing to grade")
        base = self._tree(task)
        try:
            if isinstance(patch, dict):
                diff, method = patch, "files" if patch else "empty"
            else:
                diff, method = from_patch(base, patch)
        except PatchError as error:
            return Verdict(False, 0.0, apply="failed", why=str(error), seconds=time.monotonic() - began)
        kept, dropped = filter_diff(diff, task, base, drop)
        kept = changes_only(base, kept)
        try:
            verdict = self._remembered(task, base, kept) if self._memo else self._take(task, base, kept)
        except PatchError as error:
            verdict, method = Verdict(False, 0.0, why=str(error)), "failed"
        verdict.dropped_paths, verdict.apply = dropped, method
        verdict.seconds = time.monotonic() - began
        return verdict

    def _tree(self, task: Task) -> Path:
        key = (task.repo_path, task.instance_id)
        try:
            if key not in self._trees or not self._trees[key].is_dir():
                self._trees[key] = pristine_tree(task)
            return self._trees[key]
        except InfraError as error:
            raise GradingError(f"{task.instance_id}: {error}", error.reason) from error

    def _remembered(self, task: Task, base: Path, kept: TreeDiff) -> Verdict:
        assert self._memo is not None
        key = verdict_key(task, base, kept)
        with self._memo.once(key):
            known = self._memo.get(key)
            if known is not None:
                return Verdict(**known)
            verdict = self._take(task, base, kept)
            if not verdict.why.startswith(UNREPEATABLE):
                self._memo.put(key, verdict.as_dict())
            return verdict

    def _take(self, task: Task, base: Path, kept: TreeDiff) -> Verdict:
        run, lost = self._run(task, base, kept)
        if lost:  # a machine can lose a box once; a patch that kills its box does so again
            run, lost = self._run(task, base, kept)
        if not run.finished:
            if not run.timed_out and run.unparsed:
                raise GradingError(
                    f"{task.instance_id}: the log says tests passed but no result was recorded; "
                    f"does test_cmd ({task.test_cmd}) run pytest?",
                    InfraReason.PARSE_ERROR,
                )
            if lost or run.timed_out or not run.started:
                self._require_control(task, base)
        return judge(task, run)

    def _require_control(self, task: Task, base: Path) -> None:
        """GradingError if the tests do not end without the patch either. A control that ended is remembered."""
        key = verdict_key(task, base, {})
        with self._control_once(key):
            if key in self._controls:
                return
            control, lost = self._run(task, base, {})
            if control.finished:
                self._controls.add(key)
                return
        timed_out = InfraReason.GRADING_TIMEOUT if control.timed_out else InfraReason.GRADING_ERROR
        reason = lost.reason if lost else timed_out
        raise GradingError(f"{task.instance_id}: {control.why}, also without the patch", reason)

    def _run(self, task: Task, base: Path, kept: TreeDiff) -> tuple[TestRun, InfraError | None]:
        """One session in a fresh box, and SandboxLost if the box died in it. PatchError if `kept` cannot be written."""
        try:
            with self._backend.create(base, limits=self._limits, label="grading") as box:
                try:
                    box.write(kept)
                except OSError as error:
                    raise PatchError(f"the files cannot be written: {error}") from error
                ids = [*task.FAIL_TO_PASS, *task.PASS_TO_PASS]
                command, timeout_s = task.test_cmd or DEFAULT_TEST_CMD, self._section.timeout_s
                return run_tests(box, command, ids, env=task.test_env, timeout_s=timeout_s), None
        except SandboxLost as error:
            why = f"the sandbox died while the tests ran: {error}"
            return TestRun({}, False, -1, False, b"", 0.0, why=why), error
        except InfraError as error:
            raise GradingError(f"{task.instance_id}: {error}", error.reason) from error


def judge(task: Task, run: TestRun) -> Verdict:
    """The verdict of one session, by PASSING. An unfinished session passed nothing."""
    believed = run.statuses if run.finished else {}
    f2p = {i: believed.get(i) in PASSING for i in task.FAIL_TO_PASS}
    p2p_failed = [i for i in task.PASS_TO_PASS if believed.get(i) not in PASSING]
    resolved = all(f2p.values()) and not p2p_failed
    why = "" if resolved else run.why or _first_failures(task, believed, f2p, p2p_failed)
    return Verdict(resolved, 1.0 if resolved else 0.0, f2p, p2p_failed, why=why)


def _first_failures(task: Task, statuses: dict[str, str], f2p: dict[str, bool], p2p_failed: list[str]) -> str:
    broken = [i for i, passed in f2p.items() if not passed]
    parts = []
    for count, total, what, ids in (
        (len(broken), len(f2p), "FAIL_TO_PASS", broken),
        (len(p2p_failed), len(task.PASS_TO_PASS), "PASS_TO_PASS", p2p_failed),
    ):
        if count:
            parts.append(f"{count} of {total} {what} fail, first {ids[0]} ({statuses.get(ids[0], 'did not run')})")
    return "; ".join(parts)


def verdict_key(task: Task, base: Path, kept: TreeDiff) -> str:
    """Digest of everything the verdict depends on. `base.name` is the digest of the exported tree."""
    digest = hashlib.blake2b(digest_size=20)
    head = [
        GRADER_VERSION,
        base.name,
        task.instance_id,
        task.test_cmd,
        task.test_env,
        task.FAIL_TO_PASS,
        task.PASS_TO_PASS,
    ]
    digest.update(json.dumps(head, sort_keys=True).encode())
    for path in sorted(kept):
        state = kept[path]
        content = b"-"
        if state is not None:
            content = git_mode(state).encode() + hashlib.blake2b(state.data, digest_size=20).digest()
        digest.update(b"\0" + os.fsencode(path) + b"\0" + content)
    return digest.hexdigest()
