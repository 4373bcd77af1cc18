"""Other processes, the kernel, privileges: nothing to see, nothing to gain.

Each attack tries for real and asserts that nothing was gained. Where it would succeed on an open machine, the test also
makes sure that the target is there: otherwise "not found" would prove nothing.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from swe_lightning.sandbox import Sandbox

from .conftest import Say, running, wait_for


def test_processes_of_the_host_are_invisible(sh: Say) -> None:
    with subprocess.Popen(["sleep", "77.125"]) as target:
        try:
            while "77.125" not in Path(f"/proc/{target.pid}/cmdline").read_text():
                time.sleep(0.01)
            assert sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 77[.]125'").strip() == "0"
            sh("kill -9 -1")
            assert target.poll() is None
        finally:
            target.kill()


def test_environment_and_memory_of_the_command_server_are_closed(py: Say) -> None:
    said = py(
        "for name in ('environ', 'mem', 'maps', 'auxv', 'fd/3', 'root/etc', 'cwd/x'):\n"
        "    try: open(f'/proc/1/{name}', 'rb'); print('OPENED', name)\n"
        "    except OSError: pass\n"
        "import os\n"
        "try: print('LISTED', os.listdir('/proc/1/fd'))\n"
        "except OSError: pass\n"
    )
    assert said == ""


def test_no_descriptor_of_the_server_is_inherited(sh: Say) -> None:
    assert sh('bash -c \'ls /proc/self/fd | tr "\\n" " "; readlink /proc/self/fd/0\'') == "0 1 2 3 /dev/null\n"


SYSCALLS = {
    "ptrace": "libc.ptrace(16, os.getppid(), 0, 0)",
    "process_vm_readv": "libc.syscall({'x86_64': 310}.get(os.uname().machine, 270), os.getpid(), 0, 0, 0, 0, 0)",
    "unshare user": "libc.unshare(0x10000000)",
    "unshare net": "libc.unshare(0x40000000)",
    "unshare mount": "libc.unshare(0x20000)",
    "setns": "libc.setns(os.open('/proc/self/ns/net', os.O_RDONLY), 0)",
    "mount": "libc.mount(b'x', b'/tmp', b'tmpfs', 0, None)",
    "remount": "libc.mount(None, b'/usr', None, 32 | 4096, None)",
    "umount": "libc.umount2(b'/testbed', 2)",
    "chroot": "libc.chroot(b'/tmp')",
    "setuid": "libc.setuid(0)",
    "setgroups": "libc.setgroups(0, None)",
    "keyctl": "libc.syscall({'x86_64': 250}.get(os.uname().machine, 219), 0, -3, 1, 0, 0)",
    "bpf": "libc.syscall({'x86_64': 321}.get(os.uname().machine, 280), 0, 0, 0)",
    "perf": "libc.syscall({'x86_64': 298}.get(os.uname().machine, 241), 0, 0, 0, 0, 0)",
    "io_uring": "libc.syscall(425, 4, ctypes.create_string_buffer(256))",
    "userfaultfd": "libc.syscall({'x86_64': 323}.get(os.uname().machine, 282), 1)",
    "shmget": "libc.shmget(0, 1 << 20, 0o1600)",
    "open_tree": "libc.syscall(428, -100, b'/usr', 1)",
}


@pytest.mark.parametrize("name", SYSCALLS)
def test_forbidden_system_calls_fail(py: Say, name: str) -> None:
    said = py(
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"result = {SYSCALLS[name]}\nprint(result, ctypes.get_errno())"
    )
    assert said in ("-1 1\n", "-1 22\n" if name == "setuid" else "")  # EPERM; EINVAL: no such user in the box


def test_clone_into_namespaces_fails_and_threads_work(py: Say) -> None:
    said = py(
        "import ctypes, os, threading\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "n = {'x86_64': 56}.get(os.uname().machine, 220)\n"
        "for flag in (0x10000000, 0x40000000, 0x20000000, 0x20000):\n"
        "    r = libc.syscall(n, flag | 17, 0, 0, 0, 0)\n"
        "    if r == 0: os._exit(0)\n"
        "    print(r, ctypes.get_errno())\n"
        "print(libc.syscall(435, 0, 0), ctypes.get_errno())\n"
        "t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()"
    )
    assert said == "-1 1\n" * 4 + "-1 38\nthread\n"


def test_setuid_programs_gain_nothing(sh: Say, box: Sandbox) -> None:
    assert any(
        Path(p).exists() and Path(p).stat().st_mode & 0o4000 for p in ("/usr/bin/su", "/usr/bin/passwd", "/bin/su")
    )
    assert sh("cp /usr/bin/id /tmp/i; chmod 4755 /tmp/i; /tmp/i -u") == "1000\n"
    assert "uid=0" not in sh("su -c id </dev/null; newgrp root -c id </dev/null")
    status = dict(line.split(":\t", 1) for line in sh("cat /proc/self/status").splitlines() if ":\t" in line)
    assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0000000000000000"}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert status["Uid"].split() == ["1000"] * 4


def test_as_root_the_boxs_user_is_nobody_on_the_host(box: Sandbox) -> None:
    if os.geteuid() != 0:
        pytest.skip("the box runs as this very user")
    box.run("sleep 60.25 & echo mine >f", timeout_s=20)
    assert wait_for("sleep\x0060.25\0", present=True)
    assert all(Path(f"/proc/{pid}").stat().st_uid >= 65534 for pid in running("sleep\x0060.25\0"))
