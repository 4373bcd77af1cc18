"""What is particular to containers: how they are started, limited, lost, and found again after a crash."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from swe_lightning.errors import DataError, InfraError, MissingPart, SandboxLost, SandboxStartError, UserError
from swe_lightning.records import InfraReason
from swe_lightning.sandbox import FileState, Limits
from swe_lightning.sandbox.check import escape_report
from swe_lightning.sandbox.docker import DockerBackend
from swe_lightning.sandbox.docker_engine import connect
from swe_lightning.sandbox.owners import owner_is_gone, owner_stamp
from swe_lightning.sandbox.starts import start_slot
from swe_lightning.services import Service

LIMITS = Limits(cpu=2, memory_mb=256, pids=64, disk_mb=32)


@pytest.fixture(scope="module")
def client(docker_daemon: None) -> Iterator[Any]:
    client = connect()
    yield client
    client.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 15) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.05)


def ours(client: Any, label: str) -> list[str]:
    return [c["Id"] for c in client.containers(all=True, filters={"label": f"swel.label={label}"})]


def test_the_container_has_no_power(docker_backend: DockerBackend, client: Any, tree: Path) -> None:
    """S14, S18, S19: limits, no host sockets, nothing of the environment in what the daemon shows."""
    with docker_backend.create(tree, env={"TOKEN": "s3cret-value"}, limits=LIMITS, label="power") as box:
        info = client.inspect_container(box.name)
        assert box.run("echo $TOKEN", timeout_s=20).output == b"s3cret-value\n"
    host = info["HostConfig"]
    assert (host["CapDrop"], host["Privileged"], host["ReadonlyRootfs"]) == (["ALL"], False, True)
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert (host["NetworkMode"], host["PidsLimit"], host["NanoCpus"]) == ("none", 67, 2_000_000_000)
    assert host["Memory"] == host["MemorySwap"] > 256 << 20
    assert host["RestartPolicy"]["Name"] in ("", "no")
    assert [m["Destination"] for m in info["Mounts"]] == ["/testbed.orig"]
    assert not [m for m in info["Mounts"] if m["Source"].endswith(".sock") or m["RW"]]
    assert info["Config"]["User"] == "60600:60600"
    assert "s3cret-value" not in str(info)
    assert client.containers(all=True, filters={"label": "swel.label=power"}) == []


@pytest.mark.parametrize("how", ["killed", "removed"])
def test_a_container_that_is_gone_is_a_lost_sandbox(
    docker_backend: DockerBackend, client: Any, tree: Path, how: str
) -> None:
    """S3: the first command says so, and so does every later one; never text that looks like output."""
    with docker_backend.create(tree, limits=LIMITS) as box:
        if how == "killed":
            client.kill(box.name)
        else:
            client.remove_container(box.name, force=True)
        for _ in range(2):
            with pytest.raises(SandboxLost, match="not running" if how == "killed" else "no such container") as lost:
                box.run("echo hello", timeout_s=20)
            assert lost.value.reason is InfraReason.SANDBOX_LOST


def test_a_server_killed_for_memory_is_a_lost_sandbox_that_says_so(
    docker_backend: DockerBackend, client: Any, tree: Path
) -> None:
    """S9: the limit is taken away under the server itself, which no command can do to it."""
    with docker_backend.create(tree, limits=LIMITS) as box:
        box.run("head -c 30M /dev/zero >/testbed/a", timeout_s=20)
        used = client.stats(box.name, stream=False)["memory_stats"]["usage"]
        client.update_container(box.name, mem_limit=used + (2 << 20), memswap_limit=used + (2 << 20))
        with pytest.raises(SandboxLost, match=r"out of memory \(oom\)"):
            box.write({"big": FileState(bytes(16 << 20))})


def test_a_command_killed_for_memory_is_the_commands_fault(docker_backend: DockerBackend, tree: Path) -> None:
    with docker_backend.create(tree, limits=Limits(memory_mb=64, disk_mb=16)) as box:
        source = (
            "import os\nfor _ in range(8):\n    if os.fork() == 0:\n        b'x' * (40 << 20); os._exit(0)\nos.wait()"
        )
        box.run(f"python - <<'END'\n{source}\nEND", timeout_s=60)
        assert box.run("echo alive", timeout_s=20).output == b"alive\n"


OWNER = """
import sys, time
from pathlib import Path
from swe_lightning.sandbox.check import escape_report
from swe_lightning.sandbox.docker import DockerBackend
box = DockerBackend(image=sys.argv[2]).create(Path(sys.argv[1]), label=sys.argv[3])
box.run("(setsid sleep 600 >/dev/null 2>&1 &)", timeout_s=20)
print(box.name, flush=True)
time.sleep(600)
"""


def test_a_box_ends_with_its_owner_and_gc_removes_it(
    docker_backend: DockerBackend, docker_image: str, client: Any, tree: Path
) -> None:
    """S4: kill -9 of the owner leaves a stopped container; gc finds it by label and touches nothing that lives."""
    crashed = f"crashed-{os.getpid()}"
    argv = [sys.executable, "-c", OWNER, str(tree), docker_image, crashed]
    with docker_backend.create(tree, label="living") as living, contextlib.ExitStack() as stack:
        owner = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        stack.callback(owner.kill)
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        assert client.inspect_container(name)["State"]["Running"]
        docker_backend.gc()  # what killed sessions before this one left
        assert docker_backend.gc() == 0
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        wait_for(lambda: not client.inspect_container(name)["State"]["Running"])
        assert docker_backend.gc("other") == 0
        assert docker_backend.gc(crashed) == 1
        assert ours(client, crashed) == []
        assert living.run("echo here", timeout_s=20).output == b"here\n"


def test_owners_are_told_apart(docker_daemon: None) -> None:
    pid, started, boot, namespace = owner_stamp().split(" ")
    assert not owner_is_gone(owner_stamp())
    assert owner_is_gone(f"{pid} {int(started) - 1} {boot} {namespace}")
    assert owner_is_gone(f"{pid} {started} another-boot {namespace}")
    assert not owner_is_gone(f"{pid} 1 {boot} pid:[1]"), "whoever lives in another namespace cannot be judged from here"
    assert not owner_is_gone("")


def test_an_absent_image_is_image_unavailable_and_stays_with_its_rollout(
    docker_backend: DockerBackend, tree: Path
) -> None:
    """S11, S17: one of four starts fails with its own typed reason; three work."""

    def work(image: str) -> bytes | InfraError:
        try:
            with docker_backend.create(tree, limits=LIMITS, image=image) as box:
                return box.run("echo fine", timeout_s=20).output
        except InfraError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(work, ["", "no/such-image:1", "", ""]))
    assert [d for d in done if isinstance(d, bytes)] == [b"fine\n"] * 3
    (failed,) = (d for d in done if not isinstance(d, bytes))
    assert failed.reason is InfraReason.IMAGE_UNAVAILABLE
    assert "swel images pull no/such-image:1" in str(failed)


def test_a_task_without_image_needs_a_default(docker_daemon: None, tree: Path) -> None:
    with pytest.raises(DataError, match=r"sandbox\.image"):
        DockerBackend().create(tree)


def test_no_daemon_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tree: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(MissingPart, match="no Docker daemon answers at unix://"):
        DockerBackend(image="x").create(tree)
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    with pytest.raises(MissingPart, match="need its own daemon"):
        DockerBackend(image="x").create(tree)


def test_starts_are_bounded_over_threads(swel_home: Path) -> None:
    """S10: 64 requests, 8 at a time."""
    now, most = [0], [0]

    def work(_: int) -> None:
        with start_slot(8):
            now[0] += 1
            most[0] = max(most[0], now[0])
            time.sleep(0.02)
            now[0] -= 1

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(work, range(64)))
    assert most[0] == 8


def test_a_dead_process_frees_its_place(swel_home: Path) -> None:
    source = "import sys, time; from swe_lightning.sandbox.starts import start_slot\n"
    source += "with start_slot(1):\n    print('in', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(SandboxStartError, match="no free place"), start_slot(1, patience_s=0.2):
            pass
        os.kill(holder.pid, signal.SIGKILL)
    with start_slot(1, patience_s=5):
        pass


def test_named_services_are_reached_and_nothing_else(docker_image: str, docker_daemon: None, tree: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        port = server.getsockname()[1]

        def answer() -> None:
            for _ in range(2):
                with server.accept()[0] as connection:
                    connection.sendall(b"hello from outside\n")

        thread = threading.Thread(target=answer)
        thread.start()
        backend = DockerBackend(image=docker_image, whitelist=(Service("localhost", port),))
        ask = "import socket; print(socket.create_connection(('127.0.0.1', {}), 5).makefile().read(), end='')"
        with backend.create(tree, limits=LIMITS, gateway=Service("127.0.0.1", port)) as box:
            said = [box.run(f'python -c "{ask.format(p)}"', timeout_s=20).output for p in (8080, port)]
            other = box.run(f'python -c "{ask.format(port + 1)}" 2>&1 | tail -1', timeout_s=20).output
            assert box.run("ls /run/swel-routes", timeout_s=20).output == b""
        thread.join(10)
        backend.close()
    assert said == [b"hello from outside\n"] * 2
    assert b"refused" in other
    with pytest.raises(UserError, match="needs a name"):
        DockerBackend(whitelist=(Service("192.0.2.7", 80),))


def test_this_machines_report_is_clean_in_containers(docker_backend: DockerBackend) -> None:
    rows = escape_report(docker_backend, cgroup=True)
    assert [row for row in rows if not row[1]] == []


def test_a_containers_user_is_nobody_and_gains_nothing(docker_backend: DockerBackend, tree: Path) -> None:
    with docker_backend.create(tree, limits=LIMITS) as box:
        said = box.run("cp /usr/bin/id /tmp/i; chmod 6755 /tmp/i; /tmp/i -u; /tmp/i -g", timeout_s=20).output
        status = box.run("cat /proc/self/status", timeout_s=20).output.decode()
    assert said == b"60600\n60600\n"
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    with pytest.raises(KeyError):
        pwd.getpwuid(60_600)


def test_filling_each_place_of_a_container_ends_at_its_limit(docker_backend: DockerBackend, tree: Path) -> None:
    with docker_backend.create(tree, limits=LIMITS) as box:
        for place in ("/testbed", "/tmp", "/var/tmp", "/dev/shm"):
            fill = (
                f"for i in 1 2 3 4 5 6; do head -c 8M /dev/zero >{place}/f$i; done 2>/dev/null; cat {place}/f* | wc -c"
            )
            assert 0 < int(box.run(fill, timeout_s=30).output) <= 34 << 20
            assert box.run(f"rm {place}/f*; echo ok >m; cat m", timeout_s=20).output == b"ok\n"
        box.run('truncate -s 1T sparse || python -c \'open("sparse", "w").truncate(1 << 40)\'', timeout_s=20)
        assert (box.diff().get("sparse") or FileState(b"")).data == b""


def test_files_that_vanish_while_they_are_listed_hide_nothing(docker_backend: DockerBackend, tree: Path) -> None:
    """A diff that fails would turn a wrong answer into a machine's fault; a hidden neighbour, into a deletion."""
    with docker_backend.create(tree, limits=LIMITS) as box:
        loop = "while :; do for i in 1 2 3 4 5 6 7 8; do ln -s x $i; done; rm -f 1 2 3 4 5 6 7 8; done"
        box.run(f"echo kept >kept; ({loop} >/dev/null 2>&1 &)", timeout_s=20)
        until = time.monotonic() + 2
        while time.monotonic() < until:
            found = box.diff()
            assert found["kept"] == FileState(b"kept\n")
            assert None not in found.values()
