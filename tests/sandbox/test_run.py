"""What `run` promises: bash, from the tree, bytes exact and bounded, time bounded, nothing left after a timeout."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from swe_lightning.errors import SandboxLost, SandboxStartError
from swe_lightning.sandbox import Backend, Limits, Sandbox
from swe_lightning.sandbox.kubernetes import KubernetesSandbox
from swe_lightning.sandbox.local import LocalSandbox


def run(box: Sandbox, command: str, timeout_s: float = 20) -> str:
    return box.run(command, timeout_s=timeout_s).output.decode()


def test_commands_run_with_bash_from_the_tree(box: Sandbox) -> None:
    assert run(
        box, 'echo "$0"; pwd; [ $(id -u) = 0 ] || echo user; cat link; ./run.sh; [[ x == x ]] && echo double'
    ) == ("bash\n/testbed\nuser\nx = 1\nran\ndouble\n")


def test_the_environment_is_ours_and_not_the_hosts(backend: Backend, tree: Path) -> None:
    os.environ["HOST_SECRET"] = "s3cret"
    try:
        with backend.create(tree, env={"F": "pkg/a.py", "L": "1"}) as box:
            seen = dict(line.split("=", 1) for line in run(box, "env").splitlines())
            once = box.run("echo $L$ONCE", timeout_s=20, env={"ONCE": "now", "L": "2"})
            after = run(box, "echo $L$ONCE")
    finally:
        del os.environ["HOST_SECRET"]
    assert "HOST_SECRET" not in seen
    assert (seen["F"], seen["HOME"], seen["PAGER"], seen["LANG"]) == ("pkg/a.py", "/tmp", "cat", "C.UTF-8")
    assert (seen["GIT_PAGER"], seen["SETUPTOOLS_SCM_PRETEND_VERSION"]) == ("cat", "99.0.0")
    assert (seen["PYTHONDONTWRITEBYTECODE"], seen["PYTHONHASHSEED"]) == ("1", "0")
    assert (once.output, after) == (b"2now\n", "1\n")


def test_a_path_goes_in_front_of_the_boxs_own(backend: Backend, tree: Path) -> None:
    """S15: whoever gives a PATH does not know where Python lies in the box; in its place, nothing would be found."""
    with backend.create(tree) as box:
        own = run(box, "printf %s $PATH")
    with backend.create(tree, env={"PATH": "/testbed/tools:/usr/bin"}) as box:
        every = run(box, "printf %s $PATH; command -v python >/dev/null || echo no python")
        one = box.run("printf %s $PATH; python -c ''", timeout_s=20, env={"PATH": "/once"}).output.decode()
    rest = ":".join(p for p in own.split(":") if p != "/usr/bin")
    assert every == f"/testbed/tools:/usr/bin:{rest}"
    assert one == f"/once:{every}"


def test_start_up_files_are_not_read_and_cannot_print(backend: Backend, tree: Path) -> None:
    """S15, H1: each command has the environment it was given, whatever an earlier one wrote for the shell to read."""
    with backend.create(tree) as box:
        run(box, "for f in .bashrc .profile .bash_profile; do echo 'echo noise; export MARK=1' >~/$f; done")
        assert run(box, "bash -c true; echo ${MARK-unset}") == "unset\n"


def test_output_is_bytes_exact_and_interleaved(box: Sandbox) -> None:
    result = box.run("printf 'ok\\xff\\x00'; echo err >&2; printf 'end'", timeout_s=20)
    assert result.output == b"ok\xff\x00err\nend"
    assert not result.truncated


def test_exit_codes_are_the_shells(box: Sandbox) -> None:
    codes = [box.run(c, timeout_s=20).exit_code for c in ("true", "exit 7", "kill -9 $$", "nonesuch")]
    assert codes == [0, 7, 137, 127]


def test_stdin_is_closed_and_pagers_do_not_wait(box: Sandbox) -> None:
    started = time.monotonic()
    assert run(box, "cat; read x || echo eof; $PAGER </dev/null; tty") == "eof\nnot a tty\n"
    assert time.monotonic() - started < 10


def test_a_timeout_kills_all_that_runs(box: Sandbox) -> None:
    started = time.monotonic()
    result = box.run("echo begun; sleep 31.7 & (setsid sleep 31.7 &) ; sleep 31.7", timeout_s=0.4)
    assert time.monotonic() - started < 10
    assert (result.output, result.exit_code, result.timed_out) == (b"begun\n", 124, True)
    assert run(box, "grep -l sleep /proc/[0-9]*/comm") == ""
    assert run(box, "echo next") == "next\n"


def test_a_background_process_neither_blocks_nor_dies_with_its_command(box: Sandbox) -> None:
    started = time.monotonic()
    pid = run(box, "sleep 30 & echo $!").strip()
    assert time.monotonic() - started < 10
    assert run(box, f"kill -0 {pid} && echo alive") == "alive\n"


def test_long_output_keeps_beginning_and_end(box: Sandbox) -> None:
    result = box.run("seq 1 100000", timeout_s=20)
    full = b"".join(b"%d\n" % n for n in range(1, 100001))
    head, mark, tail = result.output.partition(b"\n[... ")
    left_out, _, tail = tail.partition(b" bytes left out ...]\n")
    assert result.truncated
    assert mark
    assert full.startswith(head)
    assert full.endswith(tail)
    assert len(head) + len(tail) == 20_000
    assert int(left_out) == len(full) - 20_000


def test_output_of_exactly_the_bound_is_whole(box: Sandbox) -> None:
    result = box.run("head -c 20000 /dev/zero", timeout_s=20)
    assert (len(result.output), result.truncated) == (20_000, False)


def test_endless_output_ends_with_the_timeout(box: Sandbox) -> None:
    result = box.run("yes", timeout_s=0.5)
    assert result.timed_out
    assert result.truncated
    assert len(result.output) < 20_100


@pytest.mark.parametrize("size", [90_000, 150_000, 3_000_000])
def test_scripts_of_any_length_run(box: Sandbox, size: int) -> None:
    assert run(box, f"cat <<'END' | wc -c\n{'x' * size}\nEND\n") == f"{size + 1}\n"


def test_odd_commands_are_the_agents_mistake_not_a_lost_box(box: Sandbox) -> None:
    assert box.run("echo \0", timeout_s=20).exit_code == 126
    assert box.run("echo \ud83d", timeout_s=20).output == b"?\n"
    assert box.run("echo '\udcff'", timeout_s=20).output == b"\xff\n"
    assert box.run("if", timeout_s=20).exit_code == 2
    assert run(box, "echo fine") == "fine\n"


def test_orphans_are_reaped(box: Sandbox) -> None:
    for _ in range(5):
        run(box, "for i in 1 2 3 4 5 6; do (setsid true &); done; sleep 0.1")
    assert run(box, "cat /proc/[0-9]*/stat | grep -c ' Z '") == "0\n"


def test_the_test_environment_is_the_boxs_python(local_box: LocalSandbox) -> None:
    (python, tests, packages) = run(
        local_box,
        "command -v python; printf 'def test(): assert 1\\n' >test_x.py; pytest -q -p no:cacheprovider test_x.py"
        " | tail -1 | cut -d' ' -f1,2; python -m pytest --version; ls /opt/env/lib/python3*/site-packages",
    ).split("\n", 2)
    assert python == "/opt/env/bin/python"
    assert tests == "1 passed"
    assert packages.startswith("pytest ")
    assert not {"torch", "pydantic", "swe_lightning", "minisweagent", "pip"} & set(packages.split())


def test_no_host_package_is_visible(local_box: LocalSandbox) -> None:
    found = run(local_box, "find / -name '*-packages' -not -path '/opt/env/*' -not -path '/proc/*' 2>/dev/null").split()
    for directory in found:
        assert run(local_box, f"ls {directory}") == "", directory


FORKS = """
import os, time
for count in range(200):
    try:
        pid = os.fork()
    except OSError:
        print(count, flush=True)
        os.killpg(0, 9)
    if pid == 0:
        time.sleep(30)
        os._exit(0)
print(count)
"""


def test_limits_hold_per_box(backend: Backend, tree: Path) -> None:
    with backend.create(tree, limits=Limits(pids=32, disk_mb=16, memory_mb=128)) as box:
        assert "No space" in run(box, "head -c 12M /dev/zero >a; head -c 12M /dev/zero >b; rm a b; true")
        assert 16 <= int(run(box, f"python -c '{FORKS}'")) <= 33
        assert run(box, "echo alive") == "alive\n"
        assert "MemoryError" in run(box, "python -c 'x = bytearray(400 << 20)'")


def test_a_lost_box_is_an_infrastructure_error_for_ever(backend: Backend, tree: Path) -> None:
    with backend.create(tree) as box:
        kill_server(box)
        for _ in range(2):
            with pytest.raises(SandboxLost):
                box.run("echo hello", timeout_s=20)


def test_a_destroyed_box_refuses_work(backend: Backend, tree: Path) -> None:
    box = backend.create(tree)
    box.destroy()
    box.destroy()
    for call in (lambda: box.run("true", timeout_s=1), box.diff, lambda: box.read_file("pkg/a.py")):
        with pytest.raises(SandboxLost):
            call()


def test_a_missing_tree_is_a_start_error(backend: Backend, tmp_path: Path) -> None:
    with pytest.raises(SandboxStartError, match="nowhere") as failed:
        backend.create(tmp_path / "nowhere")
    assert failed.value.permanent


def kill_server(box: Sandbox) -> None:
    """From outside, as the kernel or a person could."""
    if isinstance(box, LocalSandbox):
        os.kill(host_pid(box), 9)
    elif isinstance(box, KubernetesSandbox):
        box._owner._connected().cluster.delete("pods", box.pod)
        with contextlib.suppress(SandboxLost):
            box.run("sleep 30", timeout_s=40)  # until its node has noticed
    else:
        from swe_lightning.sandbox.docker_engine import connect

        connect().kill(box.name)  # type: ignore[attr-defined]


def host_pid(box: LocalSandbox) -> int:
    for line in Path(f"/proc/self/fdinfo/{box._pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    raise AssertionError("no pid")


def test_the_original_tree_is_there_to_compare_with_and_cannot_be_changed(box: Sandbox) -> None:
    assert box.run("echo new > pkg/a.py; cat /testbed.orig/pkg/a.py", timeout_s=5).output == b"x = 1\n"
    assert box.run("echo bad > /testbed.orig/pkg/a.py", timeout_s=5).exit_code != 0
    assert box.run("rm -rf /testbed.orig/pkg", timeout_s=5).exit_code != 0
    assert box.run("cp /testbed.orig/pkg/a.py pkg/a.py", timeout_s=5).exit_code == 0
    assert box.diff() == {}
