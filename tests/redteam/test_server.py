"""Breaking the box itself: a rollout whose box is lost is tried again, so an agent could swap a bad one for a new one.

The command server runs as the agent's own user, and the trusted side reads and writes what the agent prepared. Each
attack asserts that the same box still answers, and exactly.
"""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from swe_lightning.records import Task
from swe_lightning.sandbox import Backend, FileState, Limits, Sandbox
from swe_lightning.sandbox.boxside.kernel import landlock_version
from swe_lightning.sandbox.trees import agent_tree

from .conftest import LIMITS, Say

DEEP = (
    "import os\nos.unlink('/testbed/m.py'); os.mkdir('/testbed/m.py'); os.chdir('/testbed/m.py')\n"
    "for i in range(1900): os.mkdir('d'); os.chdir('d')\n"
)


@pytest.mark.parametrize("limit", ["NOFILE", "CPU", "DATA", "FSIZE", "NPROC", "AS", "STACK"])
def test_the_servers_limits_are_its_own(py: Say, sh: Say, limit: str) -> None:
    """RLIMIT_CPU of one second is a SIGKILL that even process 1 does not survive."""
    said = py(
        "import os, resource, signal, time\n"
        f"try: resource.prlimit(1, resource.RLIMIT_{limit}, (1, 1)); print('SET')\n"
        "except OSError: pass\n"
        "else:\n"
        "    until = time.time() + 3\n"
        "    while time.time() < until: os.kill(1, signal.SIGCHLD)\n"
    )
    assert said == ""
    assert sh("echo alive") == "alive\n"
    assert "4096" in py("import resource; resource.prlimit(0, resource.RLIMIT_NOFILE, (4096, 4096)); print(4096)")


PRIORITY = {
    "the lowest class": "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    "nice": "os.setpriority(os.PRIO_PROCESS, 1, 19)",
    "nice to all of the user": "os.setpriority(os.PRIO_USER, 0, 19)",
    "nice to its group": "os.setpriority(os.PRIO_PGRP, 1, 19)",
    "one processor": "os.sched_setaffinity(1, {0})",
    "upper half of a register": "libc.syscall(141 if x86 else 140, *map(ctypes.c_ulong, (0, 1 | 1 << 32, 19)))",
    "idle input and output": "libc.syscall(251 if x86 else 30, *map(ctypes.c_ulong, (1, 1, 3 << 13)))",
}


@pytest.mark.parametrize("how", PRIORITY)
def test_the_servers_priority_is_its_own(py: Say, how: str) -> None:
    said = py(
        "import ctypes, os\nx86 = os.uname().machine == 'x86_64'\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"before = os.getpriority(os.PRIO_PROCESS, 1)\ntry: result = {PRIORITY[how]}\n"
        "except OSError: result = -1\n"
        "print(result, before == os.getpriority(os.PRIO_PROCESS, 1))\n"
        "os.setpriority(os.PRIO_PROCESS, 0, 19); print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    assert said == "-1 True\n19\n"


def test_signals_by_the_kernels_hand_do_not_end_the_server(py: Say, sh: Say) -> None:
    """A descriptor's owner gets its signal from the kernel, whose signals process 1 must take."""
    said = py(
        "import fcntl, os, signal, socket\n"
        "for number in (9, 19, 0, 6):\n"
        "    a, b = socket.socketpair()\n"
        "    fcntl.fcntl(a, fcntl.F_SETOWN, 1); fcntl.fcntl(a, 10, number)\n"
        "    fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)\n"
        "    b.send(b'x'); b.close()\n"
        "print('sent')"
    )
    assert said == "sent\n"
    assert sh("echo alive") == "alive\n"


def test_commands_stay_first_in_line_when_memory_runs_out(py: Say, sh: Say) -> None:
    """Socket buffers count for the box but for no process: without their mark the server would be the largest."""
    if landlock_version() < 2:
        pytest.skip("this kernel has no Landlock (version 2): docs/security.md says what that leaves open")
    said = py(
        "import os\n"
        "for p in ('self', 'thread-self', str(os.getpid()), '1'):\n"
        "    for f, value in (('oom_score_adj', '0'), ('oom_adj', '-17')):\n"
        "        try: open(f'/proc/{p}/{f}', 'w').write(value); print('LOWERED', p)\n"
        "        except OSError: pass\n"
        "print(open('/proc/self/oom_score_adj').read())"
    )
    assert said == "1000\n\n"
    assert (
        sh("echo to >/dev/stdout; echo both >/dev/stderr; mkdir a b; echo x >a/f; mv a/f b/g; cat b/g")
        == "to\nboth\nx\n"
    )


def test_memory_without_an_owner_is_refused(py: Say) -> None:
    """Message queues and semaphores of System V stay when their makers are killed."""
    said = py(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600), libc.shmget(0, 4096, 0o1600))"
    )
    assert said == "-1 -1 -1\n"


def test_directories_without_end_do_not_break_what_is_written_there(box: Sandbox, py: Say, sh: Say) -> None:
    py(DEEP)
    assert box.diff() == {"m.py": None}
    assert any("too deep" in note for note in box.left_out)
    box.write({"m.py": FileState(b"restored\n")})
    assert sh("cat m.py; ls -A") == "restored\nm.py\n"
    assert box.diff() == {"m.py": FileState(b"restored\n")}


def test_locked_directories_do_not_keep_a_file_from_being_written(box: Sandbox, sh: Say) -> None:
    sh("rm m.py; mkdir -p m.py/a/b/c m.py/.1.1/x; touch m.py/a/b/f; chmod 0 m.py/a/b/c")
    sh("chmod 0500 m.py/a/b m.py/a m.py")
    box.write({"m.py": FileState(b"restored\n")})
    assert sh("cat m.py; ls -A") == "restored\nm.py\n"


def test_links_do_not_lead_the_writer_out_of_the_tree(box: Sandbox, sh: Say) -> None:
    sh("mkdir /tmp/there; ln -s /tmp/there tests; ln -s /tmp/there/f m2.py")
    box.write({"tests/test_m.py": FileState(b"t\n"), "m2.py": FileState(b"m\n")})
    assert sh("ls -A /tmp/there; cat tests/test_m.py m2.py") == "t\nm\n"
    assert set(box.diff()) == {"tests/test_m.py", "m2.py"}


def test_endless_names_cost_the_trusted_side_bounded_memory(box: Sandbox, py: Say) -> None:
    """A path of 25 KiB, 20,000 times: half a gigabyte of names in a tree that takes a few megabytes."""
    said = py(
        "import os\nos.chdir('/testbed')\nopen('real.py', 'w').write('real')\n"
        "for i in range(98): os.mkdir('n' * 255); os.chdir('n' * 255)\n"
        "for i in range(20000): os.symlink('y', f'{i:06}' + 'z' * 249)\nprint('made')",
        timeout_s=60,
    )
    assert said == "made\n"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = box.diff()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 << 10
    assert found["real.py"] == FileState(b"real")
    assert len(found) < 1000
    assert any("too many names" in note for note in box.left_out)


def test_what_is_written_through_a_mapping_shows(py: Say, box: Sandbox) -> None:
    """A tmpfs does not stamp a page that was read before it is written."""
    py(
        "import mmap, time\nf = open('/testbed/m.py', 'r+b'); m = mmap.mmap(f.fileno(), 4); m[0]\n"
        "time.sleep(0.05); m[0:4] = b'EVIL'; m.close()"
    )
    assert box.diff()["m.py"].data.startswith(b"EVIL")


def test_a_crash_feeds_no_handler_of_the_host(py: Say, sh: Say) -> None:
    """A limit of 0 would not do: the kernel pipes core dumps to the host's program all the same, but never with 1."""
    said = py(
        "import resource\nprint(resource.getrlimit(resource.RLIMIT_CORE))\n"
        "for call in (lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),\n"
        "             lambda: resource.prlimit(0, resource.RLIMIT_CORE, (0, 0))):\n"
        "    call(); print(resource.getrlimit(resource.RLIMIT_CORE))"
    )
    assert said == "(1, 1)\n" * 3
    assert sh("cd /tmp; { bash -c 'ulimit -c 0; kill -SEGV $$'; } 2>/dev/null; ls -A | grep -c core").endswith("0\n")


def test_nothing_in_shared_memory_reaches_another_box(backend: Backend, task: Task, box: Sandbox, sh: Say) -> None:
    assert sh("echo kept | tee /dev/shm/kept /tmp/kept; ls /dev/shm /tmp | grep -c kept") == "kept\n2\n"
    with backend.create(agent_tree(task, show_tests=False), limits=LIMITS) as other:
        assert other.run("ls -A /dev/shm /tmp /dev/mqueue 2>/dev/null | grep kept", timeout_s=20).output == b""


def test_odd_attributes_do_not_change_what_the_patch_says(box: Sandbox, sh: Say, py: Say) -> None:
    """Set-user-id bits, access lists, extended attributes, a file as long as a name can be, a sparse one."""
    sh("chmod 7777 m.py; setfacl -m u:0:rwx m.py 2>/dev/null; mkfifo pipe 2>/dev/null; true")
    py("import os\ntry: os.setxattr('/testbed/m.py', 'user.overlay.opaque', b'y')\nexcept OSError: pass")
    py(f"import os\nopen('/testbed/' + 'n' * 255, 'w').write('x'); open('/testbed/s', 'wb').truncate({20 << 20})")
    found = box.diff()
    assert found["m.py"] is not None
    assert (found["m.py"].mode, found["n" * 255], found["s"]) == (0o755, FileState(b"x"), FileState(bytes(20 << 20)))


def test_small_limits_are_limits_too(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every name costs a kilobyte of memory that no process owns."""
    tree = tmp_path_factory.mktemp("small")
    tree.chmod(0o755)
    with backend.create(tree, limits=Limits(memory_mb=128, disk_mb=16, pids=32)) as box:
        source = (
            "import os\nfor d in ('/dev/shm', '/tmp', '/testbed'):\n    try:\n"
            "        for i in range(1 << 20): os.symlink('x' * 100, f'{d}/{i}')\n    except OSError: pass\n"
        )
        box.run(f"python - <<'END'\n{source}\nEND", timeout_s=60)
        assert box.run("echo alive", timeout_s=20).output == b"alive\n"


def test_a_kept_tree_runs_nothing_of_the_agents(box: Sandbox, sh: Say, tmp_path: Path) -> None:
    """`core.fsmonitor` of a repository is a program that git runs when a shell prompt asks for the status."""
    from swe_lightning.sandbox.keep import save

    sh("mkdir -p .git sub/.GIT; printf '[core]\\nfsmonitor = touch /tmp/pwned\\n' | tee .git/config >sub/.GIT/config")
    sh("echo kept >new.py")
    (tmp_path / "base").mkdir()
    save(tmp_path / "base", {}, box.diff(), [], tmp_path / "kept")
    assert [p.name for p in (tmp_path / "kept/tree").iterdir()] == ["new.py"]
    assert ".git/config: part of a .git" in (tmp_path / "kept/changes.txt").read_text()
