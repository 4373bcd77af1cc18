"""Services live exactly as long as their owner: restarted when killed, gone when the owner is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from swe_lightning.controller.supervisor import Service, Supervisor
from swe_lightning.errors import SwelError


def service(tmp_path: Path, code: str, **options: object) -> Service:
    return Service("thing", lambda: [sys.executable, "-c", code], log=tmp_path / "thing.log", **options)  # type: ignore[arg-type]


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not reached in time"
        time.sleep(0.02)


def test_a_killed_service_comes_back(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        thing = supervisor.start(service(tmp_path, "import time; time.sleep(60)", healthy=lambda: True))
        first = thing.pid
        assert first
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: thing.pid != first and thing.ready.is_set())
        second = thing.pid
        assert second
        assert psutil.pid_exists(second)
        supervisor.check()
    assert not psutil.pid_exists(second)


def test_a_service_that_cannot_start_is_an_error_with_its_own_words(tmp_path: Path) -> None:
    code = "import sys; print('port in use'); sys.exit(1)"
    with Supervisor(start_timeout_s=20) as supervisor:
        with pytest.raises(SwelError, match="port in use"):
            supervisor.start(service(tmp_path, code, healthy=lambda: False))


def test_a_service_that_never_answers_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    code = "import time; print('still thinking', flush=True); time.sleep(60)"
    with Supervisor(start_timeout_s=1) as supervisor:
        with pytest.raises(SwelError, match="still thinking"):
            supervisor.start(service(tmp_path, code, healthy=lambda: False))


def test_services_die_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    owner = f"""
import sys, time, pathlib
from swe_lightning.controller.supervisor import Service, Supervisor
s = Supervisor().start(Service("x", lambda: [sys.executable, "-c", "import time; time.sleep(60)"],
                               healthy=lambda: True, log=pathlib.Path({str(tmp_path)!r}) / "x.log"))
print(s.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert psutil.pid_exists(child)
        process.kill()
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
