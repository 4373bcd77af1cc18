"""Attacks on a local box by whoever writes its commands. Each tries for real and asserts that nothing was gained.

Where an attack would succeed on an open machine, the test also makes sure that the target is there: a listener that
the host can reach, a file the host can read, a process the host can see. Otherwise "not found" would prove nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from swe_lightning.records import Task
from swe_lightning.sandbox import FileState, Limits
from swe_lightning.sandbox.local import LocalBackend, LocalSandbox
from swe_lightning.sandbox.trees import agent_tree, pristine_tree

LIMITS = Limits(cpu=2, memory_mb=256, pids=64, disk_mb=32, output_bytes=50_000)
FIX = "return the_only_correct_answer"
HIDDEN_TEST = "assert_the_hidden_expectation"

Say = Callable[..., str]


# -- history, fix, hidden tests


@pytest.mark.parametrize(
    "route",
    [
        "git --version",
        "env git --version",
        "/usr/bin/git --version",
        "/usr/lib/git-core/git --version",
        "/usr/libexec/git-core/git --version",
        "git-upload-pack --help",
        'python -c \'import subprocess; subprocess.run(["git", "--version"], check=True)\'',
        "cp /usr/bin/git /tmp/g && chmod +x /tmp/g && /tmp/g --version",
        "/lib64/ld-linux-x86-64.so.2 /usr/bin/git --version",
    ],
)
def test_git_does_not_run_by_any_route(sh: Say, route: str) -> None:
    assert "git version" not in sh(route)


def test_no_program_of_git_is_anywhere(sh: Say) -> None:
    """By content, whatever its name."""
    found = sh(
        "exec 2>/dev/null; find /usr /opt /bin /lib* -xdev -type f -perm /111 -size +1M -print0 |"
        "xargs -0 grep -l GIT_INDEX_FILE"
    )
    assert found.strip() == ""


def test_no_git_objects_or_references_are_visible(sh: Say, task: Task) -> None:
    assert task.repo_path is not None
    assert Path(task.repo_path, ".git/objects").is_dir()
    assert sh("find / \\( -name .git -o -name '*.pack' -o -name packed-refs -o -name ORIG_HEAD \\) 2>/dev/null") == ""
    assert "No such file" in sh(f"ls {task.repo_path}")


def test_neither_fix_nor_hidden_tests_are_visible(sh: Say, task: Task) -> None:
    assert FIX not in (pristine_tree(task) / "m.py").read_text()
    assert HIDDEN_TEST in (pristine_tree(task) / "test_m.py").read_text()
    words = f"-e {FIX.replace(' ', '.')} -e {HIDDEN_TEST}"
    places = "/testbed /tmp /opt /run /var /root /home /dev/shm /etc /proc/self/mountinfo"
    assert sh(f"grep -rIl {words} {places} 2>/dev/null") == ""
    assert sh("ls -a /testbed") == ".\n..\nm.py\n"


def test_released_packages_of_the_host_are_hidden(sh: Say) -> None:
    """Wherever they are installed: beside the interpreter, in the system's Python, in a cache."""
    shown = sh("find / -path /proc -prune -o -path /opt/env -prune -o -name '*-packages' -print 2>/dev/null").split()
    assert shown
    assert [line for directory in shown for line in sh(f"ls -A {directory}").split()] == []
    named = "-iname 'pydantic*' -o -name 'pip-*' -o -path '*/.cache/*'"
    assert sh(f"find / -path /proc -prune -o \\( {named} \\) -print 2>/dev/null") == ""


# -- the host's files


def test_files_of_the_host_are_not_there(sh: Say, tmp_path: Path, swel_home: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    (Path("/tmp") / f"swel-red-{os.getpid()}").write_text("host secret")
    try:
        for path in (secret, Path(f"/tmp/swel-red-{os.getpid()}"), swel_home, Path(__file__)):
            assert "No such file" in sh(f"cat {path}"), path
    finally:
        Path(f"/tmp/swel-red-{os.getpid()}").unlink()
    assert sh("ls -d /etc/shadow /etc/ssh /etc/hostname /home /mnt /srv /sys /boot /var/lib /var/log 2>/dev/null") == ""
    assert sh("find /run /var /root -type s 2>/dev/null") == ""


def test_links_lead_nowhere_and_diff_does_not_follow_them(sh: Say, box: LocalSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    tmp_path.chmod(0o755)
    sh(f"ln -s {secret} a; ln -s {tmp_path} d; ln -s /etc e; rm m.py; ln -s {secret} m.py")
    sh("mkdir x; ln -s ../../../.. x/up")
    assert "host secret" not in sh("cat a d/secret m.py")
    found = box.diff()
    assert {name for name in found} == {"a", "d", "e", "m.py", "x/up"}
    assert all(state is not None and state.symlink for state in found.values())
    assert found["m.py"] == FileState(os.fsencode(secret), 0o777, symlink=True)


def test_a_directory_swapped_for_a_link_during_diff_leaks_nothing(sh: Say, box: LocalSandbox, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("host secret")
    tmp_path.chmod(0o755)
    sh(f"mkdir d; echo mine >d/f; (while :; do mv d k; ln -s {tmp_path} d; rm d; mv k d; done >/dev/null 2>&1 &)")
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        for state in box.diff().values():
            assert state is None or b"host secret" not in state.data


def test_pipes_devices_and_sockets_do_not_hang_or_leak(sh: Say, py: Say, box: LocalSandbox) -> None:
    sh("mkfifo pipe; mknod null c 1 3; mknod disk b 8 0; rm m.py; mkfifo m.py")
    py("import socket; s = socket.socket(socket.AF_UNIX); s.bind('sock')")
    started = time.monotonic()
    assert box.diff() == {"m.py": None}
    assert time.monotonic() - started < 5
    assert {note.split(":")[0] for note in box.left_out} == {"pipe", "sock", "m.py"}


def test_odd_names_stay_names(sh: Say, box: LocalSandbox) -> None:
    sh("printf 1 >$'a\\nb'; printf 2 >$'\\xff\\xfe'; printf 3 >'$(touch pwned)'; printf 4 >'..x'")
    sh("mkdir $'\\n'; printf 5 >$'\\n/\\n'")
    found = {os.fsencode(name): state.data for name, state in box.diff().items() if state}
    assert found == {b"a\nb": b"1", b"\xff\xfe": b"2", b"$(touch pwned)": b"3", b"..x": b"4", b"\n/\n": b"5"}


def test_whiteouts_and_overlay_marks_cannot_be_forged(sh: Say, py: Say, box: LocalSandbox) -> None:
    said = py(
        "import os\nos.mkdir('d')\n"
        "for kind in ('trusted', 'user'):\n"
        "    for name, value in (('opaque', b'y'), ('redirect', b'/')):\n"
        "        try: os.setxattr('d', f'{kind}.overlay.{name}', value); print(kind)\n"
        "        except OSError: pass\n"
        "try: os.mknod('w', 0o20000, 0); print('whiteout')\n"
        "except OSError: pass"
    )
    assert "trusted" not in said
    assert "whiteout" not in said
    assert box.diff() == {}
    assert sh("ls d m.py") == "m.py\n\nd:\n"


# -- network


@pytest.fixture
def tcp() -> int:
    """A real service on the host's loopback, IPv4, that the host itself can reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        yield port


def test_the_hosts_loopback_is_out_of_reach(py: Say, sh: Say, tcp: int) -> None:
    said = py(f"import socket; socket.create_connection(('127.0.0.1', {tcp}), 3); print('CONNECTED')")
    assert "CONNECTED" not in said
    assert "ConnectionRefusedError" in said
    assert "CONNECTED" not in sh(f"(exec 3<>/dev/tcp/127.0.0.1/{tcp}) 2>/dev/null && echo CONNECTED")


def test_the_hosts_ipv6_loopback_is_out_of_reach(py: Say) -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    with server:
        said = py(f"import socket; socket.create_connection(('::1', {server.getsockname()[1]}), 3); print('CONNECTED')")
    assert "CONNECTED" not in said


def test_only_a_loopback_exists(py: Say, sh: Say) -> None:
    assert len(os.listdir("/sys/class/net")) > 1
    interfaces = [line.split(":")[0].strip() for line in sh("cat /proc/net/dev").splitlines()[2:]]
    assert interfaces == ["lo"]
    assert sh("tail -n +2 /proc/net/route") == ""
    said = py(
        "import socket\n"
        "for a in ('192.0.2.1', '10.0.0.1', '169.254.169.254', '224.0.0.1', '255.255.255.255'):\n"
        "    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "    s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)\n"
        "    try: s.sendto(b'x', (a, 53)); print('SENT', a)\n"
        "    except OSError: pass\n"
    )
    assert said == ""


def test_names_are_not_resolved(py: Say) -> None:
    said = py("import socket; print('RESOLVED', socket.getaddrinfo('pypi.org', 443))", timeout_s=30)
    assert "RESOLVED" not in said
    assert "gaierror" in said


@pytest.mark.parametrize(
    "family", ["AF_INET", "AF_INET6", "AF_PACKET", "AF_NETLINK", "AF_VSOCK", "AF_ALG", "AF_BLUETOOTH"]
)
def test_raw_and_exotic_sockets_do_not_open(py: Say, family: str) -> None:
    said = py(f"import socket; socket.socket(socket.{family}, socket.SOCK_RAW); print('OPENED')")
    assert "OPENED" not in said


def test_abstract_sockets_of_the_host_are_out_of_reach(py: Say) -> None:
    name = f"swel-red-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind("\0" + name)
        server.listen()
        client.connect("\0" + name)
        said = py(f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}'); print('CONNECTED')")
    assert "CONNECTED" not in said
    assert "ConnectionRefusedError" in said


# -- other processes


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


def test_setuid_programs_gain_nothing(sh: Say, box: LocalSandbox) -> None:
    assert any(
        Path(p).exists() and Path(p).stat().st_mode & 0o4000 for p in ("/usr/bin/su", "/usr/bin/passwd", "/bin/su")
    )
    assert sh("cp /usr/bin/id /tmp/i; chmod 4755 /tmp/i; /tmp/i -u") == "1000\n"
    assert "uid=0" not in sh("su -c id </dev/null; newgrp root -c id </dev/null")
    status = dict(line.split(":\t", 1) for line in sh("cat /proc/self/status").splitlines() if ":\t" in line)
    assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0000000000000000"}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert status["Uid"].split() == ["1000"] * 4


def test_as_root_the_boxs_user_is_nobody_on_the_host(box: LocalSandbox) -> None:
    if os.geteuid() != 0:
        pytest.skip("the box runs as this very user")
    box.run("sleep 60.25 & echo mine >f", timeout_s=20)
    assert _wait_for("sleep\x0060.25\0", present=True)
    assert all(Path(f"/proc/{pid}").stat().st_uid >= 65534 for pid in _running("sleep\x0060.25\0"))


def _running(command_line: str) -> list[str]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if (directory / "cmdline").read_bytes() == command_line.encode():
                found.append(directory.name)
        except OSError:
            continue
    return found


def _wait_for(command_line: str, *, present: bool) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if bool(_running(command_line)) == present:
            return True
        time.sleep(0.02)
    return False


# -- writing where nothing may be written


@pytest.mark.parametrize(
    "path",
    [
        "/x",
        "/usr/bin/x",
        "/usr/bin/env",
        "/etc/passwd",
        "/etc/ld.so.preload",
        "/opt/env/bin/python",
        "/opt/env/lib/x",
        "/opt/x",
        "/run/x",
        "/run/box/server.pyc",
        "/var/x",
        "/dev/x",
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/vm/drop_caches",
        "/proc/sysrq-trigger",
        "/proc/1/oom_score_adj",
    ],
)
def test_the_system_is_read_only(sh: Say, path: str) -> None:
    assert "WROTE" not in sh(f"(echo x >>{path}) 2>/dev/null && echo WROTE")
    if sh(f"[ -e {path} ] && echo there"):
        assert "WROTE" not in sh(f"rm -f {path} 2>/dev/null; [ -e {path} ] || echo WROTE")
    assert "WROTE" not in sh(f"chmod 777 {path} 2>/dev/null && echo WROTE; mv {path} /tmp/ 2>/dev/null && echo WROTE")


def test_one_box_does_not_see_another(backend: LocalBackend, sh: Say, task: Task) -> None:
    sh("echo theirs >/tmp/t; echo theirs >/dev/shm/s; echo theirs >theirs; (sleep 88.5 &)")
    with backend.create(agent_tree(task, show_tests=False), limits=LIMITS) as other:
        said = other.run("cat /tmp/t /dev/shm/s theirs; cat /proc/[0-9]*/cmdline", timeout_s=20).output
        assert b"theirs\n" not in said.replace(b"theirs: No", b"")
        assert b"sleep\x0088.5" not in said


# -- exhausting the host


def test_a_fork_bomb_stays_in_its_box(box: LocalSandbox, sh: Say) -> None:
    before = len(list(Path("/proc").glob("[0-9]*")))
    result = box.run(":() { :|:& }; :; sleep 3", timeout_s=1.5)
    assert result.timed_out
    assert len(list(Path("/proc").glob("[0-9]*"))) < before + 200
    assert sh("echo alive; ls -d /proc/[0-9]* | wc -l").startswith("alive\n")


def test_a_memory_bomb_takes_itself_only(box: LocalSandbox, sh: Say) -> None:
    one = box.run("python -c 'x = bytearray(1 << 30); print(\"GOT IT\")'", timeout_s=60)
    assert b"GOT IT" not in one.output
    source = (
        "import os, time\n"
        "for _ in range(12):\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(os.urandom(1 << 20)) * 100\n"
        "        time.sleep(2)\n"
        "        os._exit(0)\n"
        "done = [os.wait()[1] for _ in range(12)]\n"
        "print('ALL FINE' if not any(done) else 'killed')"
    )
    many = box.run(f"python - <<'END'\n{source}\nEND", timeout_s=60)
    assert b"ALL FINE" not in many.output
    assert sh("echo alive") == "alive\n"


@pytest.mark.parametrize("place", ["/tmp", "/testbed", "/dev/shm", "/var/tmp"])
def test_filling_the_disk_ends_at_the_limit(sh: Say, place: str) -> None:
    said = sh(
        f"for i in 1 2 3 4 5 6 7 8; do head -c 8M /dev/zero >{place}/f$i; done 2>/dev/null; cat {place}/f* | wc -c"
    )
    assert 0 < int(said) <= LIMITS.disk_mb << 20
    assert "No space" in sh("echo more >/tmp/more; head -c 1M /dev/zero >/tmp/more")
    assert sh(f"rm {place}/f*; echo ok >m.py; cat m.py") == "ok\n"


def test_a_single_huge_sparse_file_is_refused(py: Say, box: LocalSandbox) -> None:
    assert "File too large" in py("open('sparse', 'w').truncate(1 << 40)")
    assert box.diff().get("sparse") in (None, FileState(b""))


def test_more_names_than_the_limit_are_refused(py: Say) -> None:
    said = py("import os\nfor i in range(300000): os.symlink('x', f'/tmp/{i}')", timeout_s=120)
    assert "No space left" in said


def test_endless_output_costs_bounded_memory(box: LocalSandbox) -> None:
    result = box.run("cat /dev/zero", timeout_s=1)
    assert result.timed_out
    assert result.truncated
    assert len(result.output) < LIMITS.output_bytes + 100


# -- outliving


def test_a_daemon_does_not_survive_a_timeout(box: LocalSandbox, sh: Say, py: Say) -> None:
    daemon = (
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        for n in set(range(1, 32)) - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
        "        while True:\n"
        "            open('/tmp/beat', 'w').write(str(time.time())); time.sleep(0.05)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "while not os.path.exists('/tmp/beat'): time.sleep(0.01)\n"
        "time.sleep(60)"
    )
    assert box.run(f"python - <<'END'\n{daemon}\nEND", timeout_s=3).timed_out
    first = sh("cat /tmp/beat; sleep 0.4")
    assert first != ""
    assert sh("cat /tmp/beat") == first


def test_a_daemon_does_not_survive_destroy(backend: LocalBackend, task: Task) -> None:
    mark = f"66.{os.getpid()}"
    box = backend.create(agent_tree(task, show_tests=False), limits=LIMITS)
    box.run(f"trap '' HUP TERM; (setsid nohup sleep {mark} >/dev/null 2>&1 &)", timeout_s=20)
    assert _wait_for(f"sleep\0{mark}\0", present=True)
    box.destroy()
    assert not _running(f"sleep\0{mark}\0")


def test_the_command_server_cannot_be_killed_or_stopped(sh: Say, py: Say) -> None:
    """A box that its agent can break would let it swap a bad rollout for a retry."""
    sh("for s in $(seq 1 64); do kill -$s 1 2>/dev/null; done; kill -9 -1")
    py("import os, signal\nfor s in range(1, 65):\n    try: os.kill(1, s)\n    except OSError: pass\nos.kill(-1, 9)")
    assert sh("echo alive") == "alive\n"


def test_out_of_memory_takes_commands_and_never_the_server(box: LocalSandbox, sh: Say) -> None:
    for _ in range(3):
        box.run(
            "head -c 100M /dev/zero >/dev/shm/f 2>/dev/null; "
            "for i in 1 2 3 4 5 6; do python -c 'x = b\"x\" * (180 << 20); import time; time.sleep(1)' & done; wait",
            timeout_s=30,
        )
        assert sh("rm -f /dev/shm/f; echo alive") == "alive\n"


def test_removing_everything_leaves_a_box_that_answers(box: LocalSandbox, sh: Say) -> None:
    sh("rm -rf --no-preserve-root / 2>/dev/null")
    assert box.diff() == {"m.py": None}
    assert sh("echo back >m.py; cat m.py") == "back\n"


def test_a_failed_owner_takes_its_box_along(able: None, task: Task) -> None:
    mark = f"55.{os.getpid()}"
    source = (
        "import sys, os; from pathlib import Path; from swe_lightning.sandbox.local import LocalBackend\n"
        "b = LocalBackend(); box = b.create(Path(sys.argv[1]))\n"
        f"box.run('(setsid sleep {mark} >/dev/null 2>&1 &)', timeout_s=20); print('ready', flush=True)\n"
        "import time; time.sleep(100)"
    )
    tree = agent_tree(task, show_tests=False)
    with subprocess.Popen([sys.executable, "-c", source, str(tree)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        assert _wait_for(f"sleep\0{mark}\0", present=True)
        owner.send_signal(signal.SIGKILL)
    assert _wait_for(f"sleep\0{mark}\0", present=False)
