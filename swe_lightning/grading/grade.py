"""Patch -> verdict, in a sandbox the agent never saw.

A fresh box from the pristine tree, then the filtered model patch, then the tests as the gold side has them, then the
task's test command: in that order, which the verdict records. A test that did not run counts as failed. The verdict
speaks about the patch only: whatever a machine did wrong raises GradingError with a typed reason and is never a reward.

What a session that hangs, never starts, cannot be read or kills its box (twice) means is settled by a control: the same
tests without the patch. If the control ends, the patch is to blame and the verdict is "unresolved"; if it does not, the
machine or the task is broken and there is no verdict. A control that ended is not repeated for that task.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from swe_lightning import recipe
from swe_lightning.errors import DataError, GradingError, InfraError, SandboxLost
from swe_lightning.grading import saved_log
from swe_lightning.grading.apply_patch import PatchError, from_patch
from swe_lightning.grading.eval_command import EvalCommand, eval_command, watched_files
from swe_lightning.grading.git_patch import changes_only, git_mode, read_state
from swe_lightning.grading.memo import KeyedLock, VerdictMemo
from swe_lightning.grading.patch import sort_out, tampering
from swe_lightning.grading.rules import OFFICIAL, Verdict, judge_statuses, origin_of
from swe_lightning.grading.run_tests import TestRun, run_tests
from swe_lightning.records import InfraReason, Task
from swe_lightning.sandbox import Backend, Limits, TreeDiff
from swe_lightning.sandbox.image_names import task_image
from swe_lightning.sandbox.trees import pristine_tree

__all__ = ["GRADER_VERSION", "Grader", "Verdict", "verdict_key"]

GRADER_VERSION = "3"
"""Part of every remembered verdict's key: raise it when a rule below or the filter changes."""

UNREPEATABLE = ("tests timed out", "the sandbox died")
"""Beginnings of reasons that may depend on how busy the machine was: such a verdict is not remembered."""

LOG_BYTES = 32 << 20
"""Output kept of a session whose statuses are read from its log."""


@dataclass
class Plan:
    """What grading one task takes, found once per call."""

    task: Task
    base: Path
    spec: EvalCommand
    tests: TreeDiff
    """The tests as the gold side has them, written over the model's patch."""
    scope: str

    @property
    def ids(self) -> list[str]:
        return [*self.task.FAIL_TO_PASS, *self.task.PASS_TO_PASS]


class Grader:
    """Thread-safe; one per process. `memo` is the directory of remembered verdicts (used if the section asks)."""

    def __init__(
        self, backend: Backend, section: recipe.Grading, *, memo: Path | None = None, limits: Limits | None = None
    ) -> None:
        self._backend, self._section = backend, section
        self._limits = limits or Limits()
        self._memo = VerdictMemo(memo) if memo is not None and section.remember_verdicts else None
        self._trees: dict[tuple[str | None, str | None], Path] = {}
        self._controls: set[str] = set()
        self._control_once = KeyedLock()

    def grade(self, task: Task, patch: bytes | TreeDiff, *, drop: tuple[str, ...] = ()) -> Verdict:
        """`patch`: changes of the tree, or a git-format text. `drop`: further paths to leave out (harness files).

        Raises GradingError where no verdict could be taken, DataError for a task that cannot be graded.
        """
        began = time.monotonic()
        plan = self._plan(task)
        try:
            if isinstance(patch, dict):
                diff, method = patch, "files" if patch else "empty"
            else:
                diff, method = from_patch(plan.base, patch)
        except PatchError as error:
            return Verdict(False, 0.0, apply="failed", why=str(error), seconds=time.monotonic() - began)
        kept, dropped = sort_out(diff, task, plan.base, drop)
        kept = changes_only(plan.base, kept)
        try:
            verdict = self._remembered(plan, kept) if self._memo else self._take(plan, kept)
        except PatchError as error:
            verdict, method = Verdict(False, 0.0, why=str(error)), "failed"
        verdict.dropped_paths, verdict.tampering = list(dropped), tampering(dropped)
        verdict.apply, verdict.seconds = method, time.monotonic() - began
        return verdict

    def _plan(self, task: Task) -> Plan:
        if not task.FAIL_TO_PASS:
            raise DataError(f"task {task.instance_id} names no FAIL_TO_PASS tests, so there is nothing to grade")
        task = in_scope(task, self._section.tests)
        spec = eval_command(task)
        if origin_of(task) == "swebench":
            saved_log.swebench()  # a missing package is found before a box is made
        base = self._tree(task)
        return Plan(task, base, spec, gold_tests(task, base), self._section.tests)

    def _tree(self, task: Task) -> Path:
        key = (task.repo_path, task.base_commit if task.test_patch is not None else task.instance_id)
        try:
            if key not in self._trees or not self._trees[key].is_dir():
                self._trees[key] = pristine_tree(task)
            return self._trees[key]
        except InfraError as error:
            raise GradingError(f"{task.instance_id}: {error}", error.reason) from error

    def _remembered(self, plan: Plan, kept: TreeDiff) -> Verdict:
        assert self._memo is not None
        key = verdict_key(plan, kept)
        with self._memo.once(key):
            known = self._memo.get(key)
            if known is not None:
                return Verdict(**known)
            verdict = self._take(plan, kept)
            if not verdict.why.startswith(UNREPEATABLE):
                self._memo.put(key, verdict.as_dict())
            return verdict

    def _take(self, plan: Plan, kept: TreeDiff) -> Verdict:
        run, lost = self._run(plan, kept)
        if lost:  # a machine can lose a box once; a patch that kills its box does so again
            run, lost = self._run(plan, kept)
        unread = _unread(plan, run)
        if unread or (not run.finished and (lost or run.timed_out or not run.started)):
            self._require_control(plan, unread=unread)
        verdict = _judge(plan, run)
        what = f"model patch ({len(kept)} files)" if kept else "no model patch"
        verdict.order = ["pristine tree", what, f"tests restored ({len(plan.tests)} files)", "test command"]
        return verdict

    def _require_control(self, plan: Plan, *, unread: bool) -> None:
        """GradingError if the tests do not end, or (`unread`) name no passed test, without the patch either.

        A control that did is remembered.
        """
        key = f"{verdict_key(plan, {})} {unread}"
        with self._control_once(key):
            if key in self._controls:
                return
            control, lost = self._run(plan, {})
            if control.finished and not _unread(plan, control) and (not unread or _names_a_pass(plan, control)):
                self._controls.add(key)
                return
        if _unread(plan, control) or (unread and control.finished):
            raise GradingError(
                f"{plan.task.instance_id}: the log says tests passed but no result was recorded; "
                f"does the test command ({plan.spec.command}) run pytest, or print a line per test?",
                InfraReason.PARSE_ERROR,
            )
        timed_out = InfraReason.GRADING_TIMEOUT if control.timed_out else InfraReason.GRADING_ERROR
        reason = lost.reason if lost else timed_out
        raise GradingError(f"{plan.task.instance_id}: {control.why}, also without the patch", reason)

    def _run(self, plan: Plan, kept: TreeDiff) -> tuple[TestRun, InfraError | None]:
        """One session in a fresh box, and SandboxLost if the box died in it. PatchError if `kept` cannot be written."""
        task, spec = plan.task, plan.spec
        limits = self._limits if spec.takes_ids else dataclasses.replace(self._limits, output_bytes=LOG_BYTES)
        ids = plan.ids if spec.takes_ids and plan.scope != "all" else []
        try:
            with self._backend.create(plan.base, limits=limits, label="grading", image=task_image(task)) as box:
                try:
                    box.write(kept)
                    box.write(plan.tests)
                except OSError as error:
                    raise PatchError(f"the files cannot be written: {error}") from error
                timeout_s, watch = self._section.timeout_s, watched_files(task)
                return run_tests(box, spec, ids, env=task.test_env, timeout_s=timeout_s, watch=watch), None
        except SandboxLost as error:
            why = f"the sandbox died while the tests ran: {error}"
            return TestRun({}, False, -1, False, b"", 0.0, why=why, recorded=spec.pytest), error
        except InfraError as error:
            raise GradingError(f"{task.instance_id}: {error}", error.reason) from error


def in_scope(task: Task, scope: str) -> Task:
    """The task as it is judged: under fail_to_pass_files, without PASS_TO_PASS tests of other files."""
    if scope != "fail_to_pass_files":
        return task
    files = {i.split("::", 1)[0] for i in task.FAIL_TO_PASS}
    kept = [i for i in task.PASS_TO_PASS if i.split("::", 1)[0] in files]
    return task.model_copy(update={"PASS_TO_PASS": kept})


def gold_tests(task: Task, base: Path) -> TreeDiff:
    """The files that decide the verdict as the gold side has them: the tree's own, changed by the test patch."""
    found: TreeDiff = {}
    for path in watched_files(task):
        state = read_state(base, path)
        if state is not None:
            found[path] = state
    if task.test_patch:
        try:
            patched, _ = from_patch(base, task.test_patch.encode("utf-8", "surrogateescape"))
        except PatchError as error:
            raise DataError(f"task {task.instance_id}: its test patch does not fit its tree ({error})") from error
        found |= patched
    return found


def _reading(plan: Plan, run: TestRun) -> saved_log.Reading | None:
    """What the log of a finished session says; None if only the machine can be to blame for what it does not say."""
    try:
        return saved_log.read_session(plan.task, run.log.decode("utf-8", "replace"), run.exit_code)
    except GradingError:
        return None


def _unread(plan: Plan, run: TestRun) -> bool:
    """The log says that tests passed, but neither the recorder nor the official parser saw any."""
    if origin_of(plan.task) != "swebench":
        return run.unparsed
    return (run.recorded and run.unparsed) or (run.finished and _reading(plan, run) is None)


def _names_a_pass(plan: Plan, run: TestRun) -> bool:
    if origin_of(plan.task) != "swebench":
        return bool(run.statuses)
    reading = _reading(plan, run)
    return reading is not None and saved_log.names_a_pass(plan.task, reading.statuses)


def _judge(plan: Plan, run: TestRun) -> Verdict:
    """The verdict of one session. An unfinished session passed nothing."""
    task = plan.task
    if not run.finished:
        return dataclasses.replace(judge_statuses(task, {}, why=run.why), proof="none")
    if origin_of(task) != "swebench":
        return dataclasses.replace(judge_statuses(task, run.statuses), proof="recorder")
    reading = _reading(plan, run) or saved_log.Reading(believed=False, why="the log holds no test result")
    if run.recorded:
        reading.statuses = _confirmed(reading.statuses, run.statuses)
    verdict = saved_log.judge_reading(task, reading)
    verdict.proof = "recorder" if run.recorded else "log"
    if run.truncated and not verdict.resolved:
        verdict.why = f"the tests wrote more than {LOG_BYTES >> 20} MiB, part of the log is missing; {verdict.why}"
    return verdict


def _confirmed(printed: dict[str, str], recorded: dict[str, str]) -> dict[str, str]:
    """What the official parser read, without passes that the recorder did not see.

    Parsers cut an id at its first space or rewrite its parameters; an id that is found in neither form is looked for by
    its test function.
    """
    passed: dict[str, bool] = {}
    for test_id, status in recorded.items():
        for form in {test_id, test_id.split(" ", 1)[0], test_id.split("[", 1)[0]}:
            passed[form] = passed.get(form, False) or status in OFFICIAL.p2p
    return {
        i: status
        for i, status in printed.items()
        if status not in OFFICIAL.p2p or passed.get(i, passed.get(i.split("[", 1)[0], False))
    }


def verdict_key(plan: Plan, kept: TreeDiff) -> str:
    """Digest of everything the verdict depends on. `base.name` is the digest of the exported tree."""
    task, digest = plan.task, hashlib.blake2b(digest_size=20)
    head = [
        GRADER_VERSION,
        plan.base.name,
        task.instance_id,
        plan.scope,
        dataclasses.asdict(plan.spec),
        task.test_env,
        task.FAIL_TO_PASS,
        task.PASS_TO_PASS,
    ]
    digest.update(json.dumps(head, sort_keys=True).encode())
    for changes in (kept, plan.tests):
        digest.update(b"\1")
        for path in sorted(changes):
            state = changes[path]
            content = b"-"
            if state is not None:
                content = git_mode(state).encode() + hashlib.blake2b(state.data, digest_size=20).digest()
            digest.update(b"\0" + os.fsencode(path) + b"\0" + content)
    return digest.hexdigest()
