"""Child processes of a run, one owner: started, watched, restarted when they die, and gone when the run is gone.

Each service is a `swel serve ...` process in its own session (Ctrl-C reaches only the owner), killed by the kernel if
the owner dies, with its own log file. A service that dies is started again with back-off; one that cannot come up is an
error that quotes the end of its log. This module knows nothing about what the services do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swe_lightning.errors import SwelError

_PR_SET_PDEATHSIG = 1
PROBE_EVERY_S = 5.0
SILENCE_S = 60.0
"""A service that has answered before and now does not for this long is killed and started again."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def swel_command(*arguments: str) -> list[str]:
    """argv of this very swel, independent of PATH."""
    return [sys.executable, "-m", "cli", *arguments]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass
class Service:
    """One supervised process. `command` is asked again at every start, so a restart may use newer arguments."""

    name: str
    command: Callable[[], Sequence[str]]
    healthy: Callable[[], bool]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    started: float = 0.0
    last_answer: float = 0.0
    next_probe: float = 0.0
    ready: threading.Event = field(default_factory=threading.Event)

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def log_tail(self, lines: int = 12) -> str:
        if not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Supervisor:
    """Starts services in order and keeps them running from one watching thread until `close()`.

    PR_SET_PDEATHSIG fires when the *thread* that forked ends, so every start happens in the watching thread, which
    lives as long as the supervisor.
    """

    def __init__(self, *, start_timeout_s: float = 120, max_restarts: int = 20) -> None:
        self._start_timeout_s = start_timeout_s
        self._max_restarts = max_restarts
        self._services: list[Service] = []
        self._pending: list[Service] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self.failure: SwelError | None = None
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._thread.start()

    def start(self, service: Service) -> Service:
        """Start and wait until healthy; raises SwelError with the end of its log if it does not come up."""
        with self._lock:
            self._pending.append(service)
        self._wake.set()
        deadline = time.monotonic() + self._start_timeout_s
        while not service.ready.wait(0.05):
            self.check()
            if time.monotonic() > deadline:
                raise SwelError(
                    f"{service.name} was not ready after {self._start_timeout_s:.0f} s:\n{service.log_tail()}"
                )
        return service

    def check(self) -> None:
        """Raise the failure of a service that could not be kept running, if any."""
        if self.failure:
            raise self.failure

    def stop(self, service: Service, *, grace_s: float = 10) -> None:
        """Stop one service and forget it."""
        with self._lock:
            if service in self._services:
                self._services.remove(service)
        _terminate(service.process, grace_s)

    def close(self) -> None:
        """Stop all services, last started first. Idempotent."""
        self._stop.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=30)
        while self._services:
            _terminate(self._services.pop().process, 10)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                pending, self._pending = self._pending, []
                services = list(self._services)
            for service in pending:
                self._spawn(service)
                with self._lock:
                    self._services.append(service)
            for service in services:
                self._keep(service)
            self._wake.wait(0.02 if any(not s.ready.is_set() for s in self._services) else 0.2)
            self._wake.clear()

    def _keep(self, service: Service) -> None:
        process = service.process
        if process is None or process.poll() is None:
            if not service.ready.is_set():
                if service.healthy():
                    service.ready.set()
            elif not self._still_answers(service):
                _terminate(process, 2)
            return
        first_start = not service.ready.is_set() and service.restarts == 0
        if first_start or service.restarts >= self._max_restarts:
            self.failure = self.failure or SwelError(
                f"{service.name} ended with exit code {process.returncode}:\n{service.log_tail()}"
            )
            return
        service.restarts += 1
        service.ready.clear()
        time.sleep(min(0.1 * 2 ** min(service.restarts, 5), 3))
        with self._lock:
            if service in self._services:  # it may have been stopped while we slept
                self._spawn(service)

    def _still_answers(self, service: Service) -> bool:
        """Asked every few seconds; a service that has been silent for long is as good as dead."""
        now = time.monotonic()
        if now < service.next_probe:
            return True
        service.next_probe = now + PROBE_EVERY_S
        if service.healthy():
            service.last_answer = now
            return True
        return now - max(service.last_answer, service.started) < SILENCE_S

    def _spawn(self, service: Service) -> None:
        service.log.parent.mkdir(parents=True, exist_ok=True)
        service.started = time.monotonic()
        with service.log.open("ab") as log:
            service.process = subprocess.Popen(
                list(service.command()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
                env={**os.environ, **service.environment},
            )


def _terminate(process: subprocess.Popen[bytes] | None, grace_s: float) -> None:
    """SIGTERM to the process group, then SIGKILL after `grace_s`."""
    if process is None:
        return
    for sig, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            return
        try:
            os.killpg(process.pid, sig)
            process.wait(wait_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
