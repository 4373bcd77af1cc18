"""Who outlives whom: boxes end with destroy, with their owner and with their launcher; leftovers are found by label."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swe_lightning import paths
from swe_lightning.errors import SandboxLost
from swe_lightning.sandbox import Limits, cgroups
from swe_lightning.sandbox.local import LocalBackend, LocalSandbox


@pytest.fixture
def backend(local_backend: LocalBackend) -> LocalBackend:
    """Only local boxes: how they are kept, not what they promise."""
    return local_backend


MARK = "sleep 987.6"


def processes_with(text: str) -> list[int]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            line = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(int(directory.name))
    return found


def wait_for(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)


def wait_until_gone(text: str, timeout_s: float = 10) -> list[int]:
    until = time.monotonic() + timeout_s
    while (alive := processes_with(text)) and time.monotonic() < until:
        time.sleep(0.02)
    return alive


def test_nothing_survives_destroy(backend: LocalBackend, tree: Path) -> None:
    backend.create(tree).destroy()  # the launcher is up
    records = set((paths.home() / "boxes").glob("*.json"))  # other tests kill owners of boxes
    mounts, descriptors = Path("/proc/self/mounts").read_text(), len(os.listdir("/proc/self/fd"))
    mark = f"{MARK}1{os.getpid()}"
    box = backend.create(tree)
    box.run(f"(setsid nohup {mark} >/dev/null 2>&1 &) ; {mark} & disown -a; true", timeout_s=20)
    wait_for(lambda: len(processes_with(mark)) >= 2)
    box.destroy()
    assert processes_with(mark) == []
    assert Path("/proc/self/mounts").read_text() == mounts
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert set((paths.home() / "boxes").glob("*.json")) <= records
    for parent in cgroups._parents(os.geteuid()):
        assert not (parent / box.name).exists()


def test_destroy_while_a_command_runs(backend: LocalBackend, tree: Path) -> None:
    box = backend.create(tree)
    outcome: list[BaseException] = []

    def work() -> None:
        try:
            box.run("sleep 60", timeout_s=120)
        except SandboxLost as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.3)
    box.destroy()
    thread.join(10)
    assert not thread.is_alive()
    assert len(outcome) == 1


def test_boxes_outlive_the_thread_that_made_them(backend: LocalBackend, tree: Path) -> None:
    made: list[LocalSandbox] = []
    thread = threading.Thread(target=lambda: made.append(backend.create(tree)))
    thread.start()
    thread.join()
    time.sleep(0.1)
    with made[0] as box:
        assert box.run("echo here", timeout_s=20).output == b"here\n"


def test_many_boxes_at_once_keep_apart(backend: LocalBackend, tree: Path) -> None:
    def work(number: int) -> bytes:
        with backend.create(tree, limits=Limits(memory_mb=128, disk_mb=16), files={"who": b"%d\n" % number}) as box:
            box.run(f"echo {number} >mine; echo {number} >>/tmp/t", timeout_s=60)
            return box.run("cat who mine /tmp/t", timeout_s=60).output

    with ThreadPoolExecutor(64) as pool:
        seen = list(pool.map(work, range(64)))
    assert [s.split() for s in seen] == [[b"%d" % n] * 3 for n in range(64)]


def test_a_dead_launcher_loses_its_boxes_and_is_replaced(able: None, tree: Path) -> None:
    backend = LocalBackend()
    box = backend.create(tree)
    assert backend._launcher is not None
    backend._launcher[1].kill()
    backend._launcher[1].wait()
    with pytest.raises(SandboxLost):
        box.run("sleep 1; echo still", timeout_s=20)
    box.destroy()
    with backend.create(tree) as again:
        assert again.run("echo new", timeout_s=20).output == b"new\n"
    backend.close()


def test_a_forked_child_gets_its_own_launcher(able: None, tree: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from swe_lightning.sandbox.local import LocalBackend
backend, tree = LocalBackend(), Path(sys.argv[1])
with backend.create(tree) as box:
    pid = os.fork()
    with backend.create(tree) as other:
        said = other.run(f"echo {pid == 0}", timeout_s=20).output
    if pid == 0:
        os._exit(0 if said == b"True\\n" else 1)
    status = os.waitpid(pid, 0)[1]
    print(status, said, box.run("echo parent", timeout_s=20).output)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tree)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 b'False\\n' b'parent\\n'\n", done.stderr


OWNER = """
import os, sys, time
from pathlib import Path
from swe_lightning.sandbox.local import LocalBackend
backend = LocalBackend()
box = backend.create(Path(sys.argv[1]), label=sys.argv[2])
box.run(f"(setsid {sys.argv[3]} >/dev/null 2>&1 &)", timeout_s=20)
print(box.name, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_boxes_end_with_their_owner_however_it_ends(able: None, tree: Path, number: signal.Signals) -> None:
    mark = f"{MARK}2{os.getpid()}"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tree), f"crash{number}", mark], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    wait_for(lambda: any(p != owner.pid for p in processes_with(mark)))
    owner.send_signal(number)
    owner.wait()
    owner.stdout.close()
    assert wait_until_gone(mark) == []
    backend = LocalBackend()
    assert backend.gc("another label") == 0
    assert backend.gc(f"crash{number}") == 1
    assert backend.gc(f"crash{number}") == 0
    assert not (paths.home() / "boxes" / f"{name}.json").exists()
    for parent in cgroups._parents(os.geteuid()):
        assert not (parent / name).exists()


def test_gc_leaves_live_boxes_alone_and_kills_stuck_ones(backend: LocalBackend, tree: Path) -> None:
    backend.gc()  # what tests that kill owners of boxes left
    with backend.create(tree, label="live") as box, backend.create(tree, label="stuck") as stuck:
        assert backend.gc() == 0
        record_file = paths.home() / "boxes" / f"{stuck.name}.json"
        record = json.loads(record_file.read_text())
        record["owner"] = [2**22 - 1, "1"]  # as if the owner had died and the box had not noticed
        record_file.write_text(json.dumps(record))
        assert backend.gc("live") == 0
        assert backend.gc("stuck") == 1
        with pytest.raises(SandboxLost):
            stuck.run("true", timeout_s=20)
        assert box.run("echo here", timeout_s=20).output == b"here\n"


def test_gc_sweeps_groups_without_a_record(backend: LocalBackend) -> None:
    parents = cgroups._parents(os.geteuid())
    if not parents:
        pytest.skip("this user can make no cgroups here")
    old, young, mine = f"{2**22 - 1}-old", f"{2**22 - 1}-young", f"{os.getpid()}-mine"
    for name in (old, young, mine):
        (parents[0] / name).mkdir()
    for name in (old, mine):
        os.utime(parents[0] / name, (1, 1))
    backend.gc()
    left = [name for name in (old, young, mine) if (parents[0] / name).exists()]
    cgroups.remove([parents[0] / name for name in left])
    assert left == [young, mine]


def test_nothing_given_to_a_box_shows_on_a_command_line(backend: LocalBackend, tree: Path) -> None:
    secret = f"secret-{os.getpid()}-value"
    with backend.create(tree, env={"TOKEN": secret}, files={"f": secret.encode()}) as box:
        assert box.run("echo $TOKEN", timeout_s=20, env={"MORE": secret}).output.decode().strip() == secret
        assert processes_with(secret) == []
