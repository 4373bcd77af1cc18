"""One rollout, start to verdict: box, episode, patch, fresh box, grading. One call gives one Outcome, always.

Invariants: the agent's box is destroyed before grading begins; an exception of any kind becomes a typed outcome of this
rollout alone; a reward is set only where the policy's own behaviour decided it (a verdict, or an episode that ended
without submission, which is worth 0). Knows nothing of processes, threads or the gateway's rollout API.
"""

from __future__ import annotations

import re
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from swe_lightning.controller.protocol import Job
from swe_lightning.errors import GradingError, InfraError, MissingPart, UserError
from swe_lightning.grading import Grader, Verdict
from swe_lightning.grading.patch import filter_diff, to_patch
from swe_lightning.grading.shaping import shape
from swe_lightning.harness import templates
from swe_lightning.harness.mini_swe_agent import EpisodeResult, run_episode
from swe_lightning.recipe import Grading, Harness, Reward, SandboxSection
from swe_lightning.records import InfraReason, Outcome, Task
from swe_lightning.sandbox import Backend, Limits, Sandbox, TreeDiff, make_backend
from swe_lightning.sandbox.image_names import task_image
from swe_lightning.sandbox.trees import agent_tree


@dataclass
class Rooms:
    """Where boxes and verdicts come from, made once per worker and configuration."""

    backend: Callable[[SandboxSection, bool], Backend]
    """(section, may remembered commands be used) -> backend"""
    grader: Callable[[SandboxSection, Grading], Grader]
    tree: Callable[[Task, bool], Path]
    """(task, show tests) -> the exported tree the agent works on"""


def real_rooms(run_dir: Path) -> Rooms:
    def memo_of(section: SandboxSection) -> Path:
        return section.memo_dir or run_dir / "memo"

    @lru_cache(maxsize=64)
    def backend(section: str, remember: bool) -> Backend:
        parsed = SandboxSection.model_validate_json(section)
        return make_backend(parsed, memo_dir=memo_of(parsed) / "commands" if remember else None)

    @lru_cache(maxsize=64)
    def grader(section: str, grading: str) -> Grader:
        sandbox, parsed = SandboxSection.model_validate_json(section), Grading.model_validate_json(grading)
        memo = memo_of(sandbox) / "verdicts"
        return Grader(backend(section, False), parsed, memo=memo, limits=Limits.of(sandbox))

    @lru_cache(maxsize=10_000)
    def tree(
        repository: str | None, image: str, instance_id: str, commit: str | None, published: bool, show_tests: bool
    ) -> Path:
        # A branch of a task repository never moves; asking git costs a process per rollout.
        task = Task(
            instance_id=instance_id, repo="", repo_path=repository, image_name=image or None, base_commit=commit
        )
        return agent_tree(task.model_copy(update={"test_patch": "" if published else None}), show_tests=show_tests)

    return Rooms(
        tree=lambda task, show_tests: tree(
            task.repo_path,
            task_image(task),
            task.instance_id,
            task.base_commit,
            task.test_patch is not None,
            show_tests,
        ),
        backend=lambda section, remember: backend(section.model_dump_json(), remember),
        grader=lambda section, grading: grader(section.model_dump_json(), grading.model_dump_json()),
    )


class RolloutRunner:
    """Thread-safe: one instance serves all threads of a worker."""

    def __init__(self, run_dir: Path, rooms: Rooms, *, label: str) -> None:
        self._run_dir = run_dir
        self._rooms = rooms
        self._label = label
        self._boxes: dict[tuple[str, int], Sandbox] = {}
        self._lock = threading.Lock()

    def run(self, job: Job) -> Outcome:
        """Never raises (SystemExit and the like apart)."""
        try:
            outcome = self._run(job)
        except Exception as error:
            reason, message = attribute(error)
            self._save(job, "error.txt", traceback.format_exc().encode("utf-8", "replace"))
            outcome = Outcome(infra_reason=reason, message=message, exit_status=reason.value)
        # The agent chooses file names, and an outcome that cannot be sent would count as a broken machine: an agent
        # could turn its failure into "no reward".
        outcome.message, outcome.verdict = sendable(outcome.message), sendable(outcome.verdict)
        return outcome

    def cancel(self, key: tuple[str, int]) -> None:
        """Take the box away from a rollout that nobody wants any more; it ends at its next command."""
        with self._lock:
            box = self._boxes.get(key)
        if box is not None:
            box.destroy()

    def destroy_all(self) -> None:
        with self._lock:
            keys = list(self._boxes)
        for key in keys:
            self.cancel(key)

    def _run(self, job: Job) -> Outcome:
        config = job.rollout.config
        task = Task.model_validate(job.rollout.task)
        harness = Harness.model_validate(config.get("harness", {}))
        sandbox = SandboxSection.model_validate(config.get("sandbox", {}))
        grading = Grading.model_validate(config.get("grading", {}))
        clock = Clock()
        tree = self._rooms.tree(task, sandbox.show_tests)
        episode, diff = self._play(job, task, harness, sandbox, tree, clock)
        if episode.infra_reason is not None:
            return Outcome(
                infra_reason=episode.infra_reason, message=episode.message, exit_status=episode.exit_status,
                verdict={"n_calls": episode.n_calls, "seconds": clock.seconds},
            )  # fmt: skip
        if not episode.submitted:
            return Outcome(
                reward=0.0, message=f"not submitted: {episode.message}"[:500], exit_status=episode.exit_status,
                verdict={"n_calls": episode.n_calls, "seconds": clock.seconds},
            )  # fmt: skip
        own_files = tuple(harness.agent_files)
        graded, _ = filter_diff(diff, task, tree, own_files)
        if graded:
            self._save(job, "patch", to_patch(tree, graded))
        verdict = self._grade(task, diff, own_files, self._rooms.grader(sandbox, grading))
        clock.lap("grading")
        details: dict[str, Any] = {**asdict(verdict), "n_calls": episode.n_calls}
        details |= {"grading_seconds": verdict.seconds, "seconds": clock.seconds}
        reward = Reward.model_validate(config.get("reward", {}))
        shaped = shape(
            verdict.reward, reward, mode=job.rollout.mode, turns=episode.n_calls, turn_limit=harness.step_limit,
            longest_prompt_tokens=episode.longest_prompt_tokens,
        )  # fmt: skip
        if shaped is not None:
            details["shaping"] = {**asdict(shaped), "longest_prompt_tokens": episode.longest_prompt_tokens}
        return Outcome(
            reward=verdict.reward, shaped_reward=shaped.value if shaped else None,
            message=verdict.why, exit_status=episode.exit_status, verdict=details,
        )  # fmt: skip

    def _play(
        self, job: Job, task: Task, harness: Harness, sandbox: SandboxSection, tree: Path, clock: Clock
    ) -> tuple[EpisodeResult, TreeDiff]:
        """The episode and, where it was submitted, what it changed. The box is gone afterwards."""
        files = templates.agent_files(harness, task, tree)
        backend = self._rooms.backend(sandbox, job.rollout.mode == "train")
        box = backend.create(
            tree,
            env=templates.agent_env(harness, task),
            limits=Limits.of(sandbox),
            label=self._label,
            files=files,
            image=task_image(task),
        )
        with self._lock:
            self._boxes[job.key] = box
        try:
            clock.lap("start")
            episode = run_episode(
                task,
                harness,
                box,
                job.base_url,
                job.agent_token,
                deadline=time.monotonic() + job.rollout.timeout_s,
                log_file=self._file(job, "jsonl"),
            )
            clock.lap("episode")
            diff = box.diff() if episode.submitted else {}
            return episode, diff
        finally:
            with self._lock:
                self._boxes.pop(job.key, None)
            box.destroy()
            clock.lap("close")

    @staticmethod
    def _grade(task: Task, diff: TreeDiff, drop: tuple[str, ...], grader: Grader) -> Verdict:
        try:
            return grader.grade(task, diff, drop=drop)
        except UserError as error:
            raise GradingError(str(error)) from error

    def _file(self, job: Job, suffix: str) -> Path:
        return attempt_file(self._run_dir, job.rollout.rollout_id, job.attempt, suffix)

    def _save(self, job: Job, suffix: str, data: bytes) -> None:
        file = self._file(job, suffix)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        except OSError:
            # A full disk must not turn a verdict into a failure; the gateway's record does not depend on this file.
            pass


def sendable(value: Any) -> Any:
    """The same value with every text in it valid UTF-8: bytes of file names that are not (surrogates) as `\\xff`."""
    if isinstance(value, str):
        try:
            data = value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # a surrogate that stands for no byte
            data = value.encode("utf-8", "backslashreplace")
        return data.decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        return {sendable(key): sendable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [sendable(entry) for entry in value]
    return value


def attribute(error: Exception) -> tuple[InfraReason, str]:
    """Which machine is to blame. Nothing that is raised here was decided by the policy."""
    if isinstance(error, InfraError):
        return error.reason, str(error)
    if isinstance(error, MissingPart):
        return InfraReason.SANDBOX_START, str(error)
    if isinstance(error, UserError):
        return InfraReason.HARNESS_CRASH, str(error)
    return InfraReason.HARNESS_CRASH, f"{type(error).__name__}: {error}"


class Clock:
    """Seconds per stage of one rollout."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage] = round(now - self._last, 4)
        self._last = now


def attempt_file(run_dir: Path, rollout_id: str, attempt: int, suffix: str) -> Path:
    """logs/rollouts/<rollout id>/attempt<N>.<jsonl|patch|error.txt>"""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", rollout_id).strip(".") or "_"
    return run_dir / "logs" / "rollouts" / name / f"attempt{attempt}.{suffix}"
