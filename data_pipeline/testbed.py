"""Where bugs are tried: sandboxes on one clean tree, reused from bug to bug.

A trial writes the changed files, runs the tests inside the box and puts the files back; a box whose tree is not clean
afterwards (tests that leave files behind) is thrown away, so no bug sees another one's traces. Results are remembered
by content in one SQLite file under `home()`: an interrupted synthesis continues where it was. Nothing of the package
ever runs outside a box.
"""

from __future__ import annotations

import hashlib
import json
import queue
import sqlite3
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_pipeline.sdist import normalise
from data_pipeline.trees import Tree, tree_digest, write_tree
from swe_lightning.paths import home

TRIAL_VERSION = 1
"""Raise when the meaning of a stored trial changes."""


@dataclass(frozen=True)
class TestPlan:
    """How a package's tests run: `command` by bash from the tree's root (test ids are appended), with `env`."""

    __test__ = False  # not a test class, whatever pytest thinks of the name

    command: str
    env: Mapping[str, str]


@dataclass(frozen=True)
class Trial:
    """One run of tests. `passed`, `failed` (errors included) are pytest ids; skipped tests are in neither."""

    passed: frozenset[str]
    failed: frozenset[str]
    finished: bool
    timed_out: bool
    seconds: float


def installed_in_test_environment() -> dict[str, str]:
    """Packages (normalised name -> version) that the boxes' Python has: the test runner and what it needs."""
    from swe_lightning.sandbox.pyenv import test_environment

    found = {}
    for info in test_environment().glob("lib/python*/site-packages/*.dist-info"):
        name, _, version = info.name.removesuffix(".dist-info").partition("-")
        found[normalise(name)] = version
    return found


class Memory:
    """Trials by content digest; safe for several threads and processes."""

    def __init__(self, file: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(file or home() / "trials.db", timeout=60, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("CREATE TABLE IF NOT EXISTS trials (key TEXT PRIMARY KEY, value BLOB NOT NULL)")

    def get(self, key: str) -> Trial | None:
        with self._lock:
            row = self._db.execute("SELECT value FROM trials WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        value = json.loads(zlib.decompress(row[0]))
        return Trial(
            frozenset(value["passed"]),
            frozenset(value["failed"]),
            value["finished"],
            value["timed_out"],
            value["seconds"],
        )

    def put(self, key: str, trial: Trial) -> None:
        value = {
            "passed": sorted(trial.passed),
            "failed": sorted(trial.failed),
            "finished": trial.finished,
            "timed_out": trial.timed_out,
            "seconds": trial.seconds,
        }
        with self._lock, self._db:
            self._db.execute(
                "INSERT OR REPLACE INTO trials VALUES (?, ?)", (key, zlib.compress(json.dumps(value).encode()))
            )

    def close(self) -> None:
        self._db.close()


class Testbed:
    """Boxes on one package's clean tree. `trial` may be called from several threads; each takes a box of its own."""

    __test__ = False

    def __init__(self, backend: Any, tree: Tree, plan: TestPlan, memory: Memory) -> None:
        self.backend, self.tree, self.plan, self.memory = backend, tree, plan, memory
        self.digest = tree_digest(tree)
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while not self._idle.empty():
            self._idle.get_nowait().destroy()

    def trial(
        self, changes: Mapping[str, bytes], targets: Sequence[str], *, timeout_s: float, repeat: int = 0
    ) -> Trial:
        """Run `targets` (test files or ids; empty = everything) with `changes` laid over the clean tree.

        `repeat` tells runs of the same content apart where a second opinion is wanted.
        """
        key = self._key(changes, targets, repeat)
        known = self.memory.get(key)
        if known is not None and not _had_less_time(known, timeout_s):
            return known
        trial = self._run(changes, targets, timeout_s)
        self.memory.put(key, trial)
        return trial

    def _key(self, changes: Mapping[str, bytes], targets: Sequence[str], repeat: int) -> str:
        described = {
            "version": TRIAL_VERSION,
            "tree": self.digest,
            "changes": {path: hashlib.sha256(data).hexdigest() for path, data in sorted(changes.items())},
            "targets": list(targets),
            "command": self.plan.command,
            "env": dict(sorted(self.plan.env.items())),
            "environment": _environment_name(),
            "repeat": repeat,
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def _run(self, changes: Mapping[str, bytes], targets: Sequence[str], timeout_s: float) -> Trial:
        run, seconds = self._session(changes, targets, timeout_s)
        return Trial(
            passed=frozenset(t for t, status in run.statuses.items() if status == "PASSED"),
            failed=frozenset(t for t, status in run.statuses.items() if status in ("FAILED", "ERROR")),
            finished=run.finished,
            timed_out=run.timed_out,
            seconds=round(seconds, 3),
        )

    def output(self, changes: Mapping[str, bytes], targets: Sequence[str], *, timeout_s: float) -> str:
        """What the tests print."""
        run, _ = self._session(changes, targets, timeout_s)
        return run.log.decode(errors="replace")

    def _session(self, changes: Mapping[str, bytes], targets: Sequence[str], timeout_s: float) -> tuple[Any, float]:
        """(the run, seconds) in a box of its own, which is given back clean or thrown away."""
        from swe_lightning.grading.run_tests import run_tests
        from swe_lightning.sandbox import FileState

        box = self._take()
        healthy = False
        try:
            started = time.monotonic()
            if changes:
                box.write({path: FileState(data, self._mode(path)) for path, data in changes.items()})
            run = run_tests(box, self.plan.command, list(targets), env=self.plan.env, timeout_s=timeout_s)
            seconds = time.monotonic() - started
            if changes:
                box.write({path: FileState(self.tree[path].data, self._mode(path)) for path in changes})
            healthy = not run.timed_out and not box.diff()
        finally:
            if healthy:
                self._idle.put(box)
            else:
                box.destroy()
        return run, seconds

    def _mode(self, path: str) -> int:
        return 0o755 if self.tree[path].mode == "100755" else 0o644

    def _take(self) -> Any:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return self.fresh_box()

    def fresh_box(self, files: Mapping[str, bytes] | None = None) -> Any:
        """A new box on the clean tree; the caller destroys it. `files` lie beside the tree's own."""
        directory = write_tree(self.tree, home() / "sources" / self.digest[:32])
        return self.backend.create(directory, env=dict(self.plan.env), label="synth", files=files or {})


def _had_less_time(trial: Trial, timeout_s: float) -> bool:
    """A run that was cut off says nothing about one that may take longer: a raised time limit runs it again."""
    return trial.timed_out and trial.seconds + 0.01 < timeout_s


@lru_cache(maxsize=1)
def _environment_name() -> str:
    from swe_lightning.sandbox.pyenv import test_environment

    return test_environment().name
