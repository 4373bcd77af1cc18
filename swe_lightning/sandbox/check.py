"""Can this machine run local boxes, and do they hold? One sentence when it cannot; a table of attempts when it can.

`escape_report` is what `swel sandbox check` prints: each attempt runs inside a fresh box, tries something that must
not work, and says ESCAPED if it did. The red team's tests try more, and harder.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from swe_lightning.errors import MissingPart, SwelError
from swe_lightning.sandbox import cgroups
from swe_lightning.sandbox.base import Backend, Limits

LIMITS = Limits(cpu=1, memory_mb=256, pids=64, disk_mb=32)


def check_host() -> MissingPart | None:
    """None if a box starts here, else the one thing that is missing."""
    from swe_lightning.sandbox.host import why_no_namespaces
    from swe_lightning.sandbox.local import LocalBackend

    if platform.system() != "Linux":
        return MissingPart(f"local sandboxes need Linux, this is {platform.system()}")
    backend = LocalBackend()
    try:
        with tempfile.TemporaryDirectory() as tree, backend.create(Path(tree), limits=LIMITS) as box:
            result = box.run("python -c 'print(6 * 7)'", timeout_s=30)
        if result.output != b"42\n":
            said = result.output.decode(errors="replace").strip()
            return MissingPart(f"a local sandbox starts, but Python does not run in it: {said}")
        return None
    except MissingPart as error:
        return error
    except SwelError as error:
        return MissingPart(why_no_namespaces(str(error)))
    finally:
        backend.close()


ATTEMPTS: dict[str, str] = {
    "run git": r"""
        for g in git /usr/bin/git 'env git' /usr/lib/git-core/git; do
            $g --version 2>/dev/null && echo ESCAPED $g
        done
        find / -path /proc -prune -o \( -name git -o -name 'git-*' \) -type f -perm /111 -size +0 -print 2>/dev/null |
            sed 's/^/ESCAPED /'
    """,
    "find history": "find / -name .git 2>/dev/null | sed 's/^/ESCAPED /'",
    "be root": """
        [ $(id -u) = 0 ] && echo ESCAPED uid 0
        grep -E '^Cap(Prm|Eff|Bnd|Amb):.*[1-9a-f]' /proc/self/status && echo ESCAPED capabilities
    """,
    "gain privileges": """
        grep -q '^NoNewPrivs:.*1' /proc/self/status || echo ESCAPED
        su -c true </dev/null 2>&1 && echo ESCAPED su
    """,
    "make namespaces": """
        unshare -Ur true 2>/dev/null && echo ESCAPED user
        unshare -n true 2>/dev/null && echo ESCAPED net
    """,
    "mount": """
        mount -t tmpfs x /tmp 2>/dev/null && echo ESCAPED mount
        umount /testbed 2>/dev/null && echo ESCAPED umount
    """,
    "print into every command's output": """
        echo 'echo noise' | tee ~/.bashrc ~/.profile ~/.bash_profile ~/.bash_login >/dev/null 2>&1
        said=$(bash -c true 2>&1)
        [ -n "$said" ] && echo ESCAPED bash -c true prints $said
    """,
    "read the command server": """
        cat /proc/1/environ /proc/1/mem >/dev/null 2>&1 && echo ESCAPED memory
        ls /proc/1/fd 2>/dev/null && echo ESCAPED descriptors
    """,
    "kill the command server": "kill -9 1; kill -STOP 1; kill -INT 1; true",
    "see the host's processes": "[ $(ls -d /proc/[0-9]* | wc -l) -gt 6 ] && echo ESCAPED $(ls -d /proc/[0-9]*)",
    "see the host's files": """
        cat {secret} 2>/dev/null | sed 's/^/ESCAPED /'
        find / -path /proc -prune -o -type s -print 2>/dev/null | sed 's/^/ESCAPED socket /'
        ls -d /etc/ssh /var/lib/docker /run/docker.sock 2>/dev/null | sed 's/^/ESCAPED /'
    """,
    "find a network interface": "ls -d /sys/class/net/[!l]* 2>/dev/null | sed 's/^/ESCAPED /'",
    "write to the system": """
        for f in /x /usr/x /etc/passwd /opt/env/x /run/x /dev/x /proc/sys/kernel/core_pattern; do
            (echo x >>$f) 2>/dev/null && echo ESCAPED $f
        done
    """,
    "reach the host's network": r"""
        python - <<'END'
import socket
inet, inet6 = socket.AF_INET, socket.AF_INET6
for family, address in [(inet, ("127.0.0.1", {port})), (inet, ("192.0.2.1", 80)), (inet6, ("::1", {port}))]:
    s = socket.socket(family)
    s.settimeout(1)
    try:
        s.connect(address)
        print("ESCAPED", address)
    except OSError:
        pass
try:
    socket.socket(socket.AF_UNIX).connect("\0{abstract}")
    print("ESCAPED abstract socket")
except OSError:
    pass
END
    """,
    "resolve names": """
        python -c 'import socket; print("ESCAPED", socket.gethostbyname("example.org"))' 2>/dev/null
    """,
    "open raw and netlink sockets": """
        for kind in AF_INET AF_PACKET AF_NETLINK; do
            python -c "import socket; socket.socket(socket.$kind, socket.SOCK_RAW)" 2>/dev/null && echo ESCAPED $kind
        done
    """,
    "fill the disk": """
        for d in /tmp /testbed /dev/shm; do
            head -c 100M /dev/zero >$d/a 2>/dev/null && echo ESCAPED $d
            rm -f $d/a
        done
    """,
    "take all processes": """
        python - 2>/dev/null <<'END'
import os, time
for i in range(500):
    if os.fork() == 0:
        time.sleep(9)
        os._exit(0)
print("ESCAPED")
END
    """,
    "take all memory": """
        python -c 'x = [bytearray(1 << 24) for _ in range(64)]; print("ESCAPED")' 2>/dev/null
    """,
}


def escape_report(
    backend: Backend, *, cgroup: bool | None = None, interface: bool = False
) -> list[tuple[str, bool, str]]:
    """(attempt, held, what was seen) for each way out that is tried on this machine. `cgroup`: are whole boxes limited;
    default: as local boxes are here. `interface`: boxes have one, and policies keep it from leading anywhere."""
    rows: list[tuple[str, bool, str]] = []
    with _listeners() as (port, abstract), tempfile.TemporaryDirectory() as tree, _secret() as secret:
        for name, script in ATTEMPTS.items():
            if interface and "interface" in name:
                rows.append((name, True, "there is one; before each box the cluster has shown that it leads nowhere"))
                continue
            text = script.replace("{port}", str(port)).replace("{abstract}", abstract)
            text = text.replace("{secret}", secret)
            try:
                with backend.create(Path(tree), limits=LIMITS, label="check") as box:
                    result = box.run(text, timeout_s=20)
                    alive = box.run("echo alive", timeout_s=20).output == b"alive\n"
            except SwelError as error:
                rows.append((name, False, str(error)))
                continue
            seen = [line for line in result.output.decode(errors="replace").splitlines() if "ESCAPED" in line]
            held = not seen and alive and not result.timed_out
            rows.append((name, held, "; ".join(seen) or ("" if held else "the sandbox did not survive the attempt")))
    total = "memory, processes and CPU of a whole sandbox (cgroups)"
    limited = cgroups.available() if cgroup is None else cgroup
    rows.append((f"limit {total}", True, "" if limited else "not on this machine for this user: per process only"))
    return rows


@contextlib.contextmanager
def _secret() -> Iterator[str]:
    """A file that anybody on the host can read."""
    with tempfile.NamedTemporaryFile(prefix="swel-check-") as file:
        file.write(b"the host's own")
        file.flush()
        os.chmod(file.name, 0o644)
        yield file.name


@contextlib.contextmanager
def _listeners() -> Iterator[tuple[int, str]]:
    """Real services of the host that a box must not reach: a TCP port and an abstract Unix socket."""
    abstract = f"swel-check-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind("\0" + abstract)
        unix.listen()
        yield tcp.getsockname()[1], abstract
