"""Starting boxes on a busy machine: few at once, tried again, one failure stays one failure."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swe_lightning import paths
from swe_lightning.errors import SandboxStartError
from swe_lightning.records import InfraReason
from swe_lightning.sandbox import cgroups
from swe_lightning.sandbox.local import LocalBackend
from swe_lightning.sandbox.starts import Starts


def test_no_more_than_the_limit_start_at_once() -> None:
    now, most, lock = 0, 0, threading.Lock()

    def start() -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1
        return 1

    starts = Starts(at_once=8)
    with ThreadPoolExecutor(64) as pool:
        assert sum(pool.map(lambda _: starts.run(start), range(64))) == 64
    assert most == 8


@pytest.mark.parametrize(("failures", "works"), [(0, True), (2, True), (3, False)])
def test_a_refusal_is_tried_again_and_the_first_error_is_kept(failures: int, works: bool) -> None:
    tried: list[int] = []

    def start() -> str:
        tried.append(1)
        if len(tried) <= failures:
            raise SandboxStartError(f"refused {len(tried)}", InfraReason.IMAGE_UNAVAILABLE)
        return "up"

    starts = Starts(wait_s=0.001)
    if works:
        assert starts.run(start) == "up"
        assert len(tried) == failures + 1
    else:
        with pytest.raises(SandboxStartError, match=r"refused 1 \(3 tries\)") as caught:
            starts.run(start)
        assert caught.value.reason == InfraReason.IMAGE_UNAVAILABLE


def test_what_cannot_get_better_is_not_tried_again(tmp_path: Path) -> None:
    tried: list[int] = []

    def start() -> None:
        tried.append(1)
        raise SandboxStartError("no such thing", permanent=True)

    with pytest.raises(SandboxStartError, match=r"no such thing$"):
        Starts().run(start)
    assert tried == [1]


def test_waits_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)

    def start() -> None:
        raise SandboxStartError("busy")

    for _ in range(20):
        with pytest.raises(SandboxStartError):
            Starts(tries=2, wait_s=1).run(start)
    assert len(waits) == 20
    assert len(set(waits)) > 15
    assert min(waits) >= 1
    assert max(waits) <= 3


def test_a_start_that_never_answers_ends_in_time_and_hurts_nobody_else(able: None, tree: Path) -> None:
    stuck, fine = LocalBackend(start_timeout_s=1.0), LocalBackend()
    try:
        stuck.create(tree).destroy()
        assert stuck._launcher is not None
        os.kill(stuck._launcher[1].pid, signal.SIGSTOP)
        before = len(os.listdir("/proc/self/fd"))
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            failed = pool.submit(stuck.create, tree)
            with fine.create(tree) as box:
                assert box.run("echo fine", timeout_s=20).output == b"fine\n"
            with pytest.raises(SandboxStartError, match="no answer within 1 s"):
                failed.result(30)
        assert time.monotonic() - began < 10
        assert len(os.listdir("/proc/self/fd")) <= before + 3  # those of the other backend's launcher
        assert list((paths.home() / "boxes").glob("*.json")) == []
        for parent in cgroups._parents(os.geteuid()):
            assert not list(parent.glob(f"{os.getpid()}-*"))
        os.kill(stuck._launcher[1].pid, signal.SIGCONT)
        with stuck.create(tree) as box:
            assert box.run("echo again", timeout_s=20).output == b"again\n"
    finally:
        stuck.close()
        fine.close()


def test_one_start_that_fails_leaves_the_others_alone(able: None, tree: Path, tmp_path: Path) -> None:
    backend = LocalBackend()

    def work(number: int) -> bytes:
        with backend.create(tmp_path / "nowhere" if number == 2 else tree) as box:
            return box.run(f"echo {number}", timeout_s=20).output

    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(work, n) for n in range(4)]
    said = [f.exception() or f.result() for f in done]
    backend.close()
    assert [s for s in said if isinstance(s, bytes)] == [b"0\n", b"1\n", b"3\n"]
    assert isinstance(said[2], SandboxStartError)
    assert said[2].reason == InfraReason.SANDBOX_START
