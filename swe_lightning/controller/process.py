"""The controller's end of one worker process: start it, write leases, hear from it, end it.

Reading and writing happen in threads of their own, so that a worker that hangs can never hang the controller. What the
worker says arrives as events in the controller's queue.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swe_lightning.controller.protocol import Job, line, parse
from swe_lightning.gateway.database import SECRETS
from swe_lightning.gateway.tokens import KEY_VARIABLE


@dataclass
class Running:
    """A lease in a worker's hands. `overdue_at` is on time.monotonic()."""

    job: Job
    overdue_at: float
    given_at: float = field(default_factory=time.monotonic)


def worker_environment() -> dict[str, str]:
    """Ours without the signing key (who holds it can mint any token, and a worker has those of its leases only) and
    without the password of the gateway's store."""
    inherited = {name: value for name, value in os.environ.items() if name not in (KEY_VARIABLE, *SECRETS)}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class WorkerProcess:
    """Puts ("said", worker, message) and finally ("ended", worker, None) into `events`."""

    def __init__(
        self, number: int, *, gateway_url: str, run_dir: Path, slots: int, label: str, events: queue.Queue[Any]
    ) -> None:
        self.number = number
        self.slots = slots
        self.ready = False
        self.retiring = False
        self.running: dict[tuple[str, int], Running] = {}
        self.log_file = run_dir / "logs" / f"worker{number}.log"
        self._events = events
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        command = [sys.executable, "-m", "swe_lightning.controller.worker", "--gateway", gateway_url]
        command += ["--run-dir", str(run_dir), "--slots", str(slots), "--label", label, "--parent", str(os.getpid())]
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Its own session: Ctrl-C at a terminal is the owner's to handle, not every worker's.
                start_new_session=True,
                env=worker_environment(),
            )
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"worker{number}{work.__name__}", daemon=True).start()

    @property
    def free(self) -> int:
        return self.slots - len(self.running) if self.ready and not self.retiring else 0

    def give(self, job: Job, *, overdue_after_s: float) -> None:
        data = job.encode()
        self.running[job.key] = Running(job, time.monotonic() + overdue_after_s)
        self._outbox.put(data)

    def cancel(self, key: tuple[str, int]) -> None:
        self._outbox.put(line("cancel", rollout_id=key[0], attempt=key[1]))

    def end(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`. Idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._outbox.put(None)

    def log_tail(self, lines: int = 12) -> str:
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for data in self.process.stdout:
            try:
                self._events.put(("said", self, parse(data)))
            except ValueError:
                continue
        self.process.wait()
        self._outbox.put(None)
        self._events.put(("ended", self, None))

    def _write(self) -> None:
        assert self.process.stdin is not None
        while (data := self._outbox.get()) is not None:
            try:
                self.process.stdin.write(data)
                self.process.stdin.flush()
            except OSError:
                return
