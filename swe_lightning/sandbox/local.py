"""Local boxes: bubblewrap namespaces around a copy-on-write tree, as root or as an ordinary user.

Three processes take part: the owner (this module), one launcher per owner (mounts, starts), and per box a command
server that is process 1 inside (runs). The owner holds a socket to the server, a pidfd of it, and a descriptor of the
tmpfs with the box's changes; when the owner dies, the socket closes and the box ends by itself.

No sockets, ports or mounts appear on the host. Nothing secret is ever put on a command line.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import re
import secrets
import select
import signal
import socket
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from swe_lightning import paths
from swe_lightning.errors import MissingPart, SandboxLost, SandboxStartError
from swe_lightning.sandbox import cgroups, registry, rootfs, seccomp, treediff
from swe_lightning.sandbox._server import pack, unpack
from swe_lightning.sandbox.base import TREE_ROOT, ExecResult, Limits, TreeDiff
from swe_lightning.sandbox.pyenv import test_environment

START_TIMEOUT_S = 60.0
REPLY_GRACE_S = 30.0
READ_LIMIT = 64 << 20
ROOT_BOX_UID = 1_879_048_192  # first id no distribution hands out
INODES = 200_000


class LocalSandbox:
    """One box. Commands are serial: a second thread waits for the first."""

    def __init__(
        self,
        sock: socket.socket,
        root: int,
        pidfd: int,
        base: treediff.BaseTree,
        layout: str,
        name: str,
        groups: list[Path],
    ) -> None:
        self.name = name
        self.layout = layout
        self.left_out: list[str] = []
        self._sock, self._root, self._pidfd = sock, root, pidfd
        self._base, self._groups = base, groups
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._open = True
        self._why_lost = ""
        self._unchanged: dict[str, tuple[int, int]] = {}

    def run(self, command: str, *, timeout_s: float, env: Mapping[str, str] | None = None) -> ExecResult:
        text = to_bytes(command)
        if b"\0" in text:
            return ExecResult(b"bash: the command holds a NUL byte\n", 126)
        request = pack(b"run", str(float(timeout_s)).encode(), text, pack_mapping(env or {}))
        code, flags, output = self._ask(request, timeout_s + REPLY_GRACE_S)
        return ExecResult(output, int(code), timed_out=b"t" in flags, truncated=b"c" in flags)

    def read_file(self, path: str) -> bytes:
        where = os.fsencode(os.path.join(TREE_ROOT, path))
        return self._ask(pack(b"read", where, str(READ_LIMIT).encode()), REPLY_GRACE_S)[0]

    def write(self, changes: TreeDiff) -> None:
        deleted, written = [], []
        for path, state in changes.items():
            name = os.fsencode(check_relative(path))
            if state is None:
                deleted += [name, b"x", b""]
            else:
                mode = b"l" if state.symlink else (b"755" if state.mode & 0o100 else b"644")
                written += [name, mode, state.data]
        self._ask(pack(b"write", *deleted, *written), REPLY_GRACE_S)

    def diff(self) -> TreeDiff:
        if not self._open:
            raise SandboxLost(f"sandbox {self.name} was destroyed; its changes are gone")
        reader = treediff.Reader(self._base, self._root)
        found = reader.overlay() if self.layout == "overlay" else reader.copy(self._unchanged)
        self.left_out = reader.left_out
        return found

    def destroy(self) -> None:
        with self._closing:
            if not self._open:
                return
            self._open = False
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            dead = bool(poll.poll(10_000))
            for fd in (self._root, self._pidfd):
                os.close(fd)
            self._sock.close()
            if dead and cgroups.remove(self._groups):
                registry.forget(self.name)

    def __enter__(self) -> LocalSandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    def _ask(self, request: bytes, timeout_s: float) -> list[bytes]:
        """One request, one reply. OSError if the server refused; SandboxLost if there is no server any more."""
        with self._lock:
            if not self._open or self._why_lost:
                raise SandboxLost(f"sandbox {self.name} {self._why_lost or 'was destroyed'}")
            try:
                self._sock.settimeout(timeout_s)
                self._sock.sendall(request)
                status, *fields = receive(self._sock)
            except OSError as error:
                # Whatever was half said is lost with the box: the next frame could be of the last command.
                timed_out = isinstance(error, TimeoutError)
                self._why_lost = "stopped answering" if timed_out else "died (its process 1 is gone)"
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                raise SandboxLost(f"sandbox {self.name} {self._why_lost}") from error
        if status != b"+":
            number, message = int(fields[0]), fields[1].decode(errors="replace")
            raise OSError(number, message)
        return fields


class LocalBackend:
    """Makes boxes. Thread-safe; after a fork the child gets a launcher of its own."""

    def __init__(self, *, env_dir: Path | None = None, force_copy: bool = False) -> None:
        self._env_dir = env_dir
        self._force_copy = force_copy
        self._lock = threading.Lock()
        self._launcher: tuple[int, subprocess.Popen[bytes], socket.socket] | None = None
        self._filter = -1
        self.overlay = False

    def create(
        self,
        tree: Path,
        *,
        env: Mapping[str, str] = {},
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        label: str = "",
        files: Mapping[str, bytes] = {},
    ) -> LocalSandbox:
        for path in files:
            check_relative(path)
        if not tree.is_dir():
            raise SandboxStartError(f"cannot start a sandbox: no directory {tree}")
        name = f"{os.getpid()}-{secrets.token_hex(6)}"
        groups = cgroups.create(name, limits)
        ours, theirs = socket.socketpair()
        errors = os.memfd_create("errors")
        root = pidfd = -1
        try:
            with theirs:
                self._send_request(tree, name, limits, groups, files, theirs.fileno(), errors)
            ours.settimeout(START_TIMEOUT_S)
            ours.sendall(pack(b"init", *settings(limits, watch=not groups), pack_mapping({**rootfs.BOX_ENV, **env})))
            fields, root = receive_with_fd(ours)
            if fields[0] != b"+":
                raise SandboxStartError("cannot start a sandbox: " + fields[1].decode(errors="replace"))
            _, pidfd = receive_with_fd(ours)
            receive(ours)
            box = LocalSandbox(ours, root, pidfd, treediff.BaseTree(tree, files), fields[1].decode(), name, groups)
            if box.layout == "copy":
                box._unchanged = treediff.stamps(root)
            registry.remember(name, label, pidfd, groups)
            return box
        except BaseException as error:
            if pidfd >= 0:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            ours.close()
            for fd in (root, pidfd):
                if fd >= 0:
                    os.close(fd)
            cgroups.remove(groups)
            if isinstance(error, OSError):
                raise start_error(os.pread(errors, 2000, 0).decode(errors="replace").strip() or str(error)) from error
            raise
        finally:
            os.close(errors)

    def gc(self, label: str | None = None) -> int:
        return registry.collect(label)

    def close(self) -> None:
        """End the launcher and with it every box of this backend."""
        with self._lock:
            if self._launcher and self._launcher[0] == os.getpid():
                _, process, sock = self._launcher
                sock.close()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self._launcher = None

    def _send_request(
        self,
        tree: Path,
        name: str,
        limits: Limits,
        groups: list[Path],
        files: Mapping[str, bytes],
        box_socket: int,
        errors: int,
    ) -> None:
        request = {
            "tree": str(tree.absolute()),
            "disk_mb": limits.disk_mb,
            "inodes": INODES,
            "cgroup_joins": [str(cgroups.join_file(g)) for g in groups],
        }
        sock = self._ready_launcher()
        filter_fd = os.memfd_create("seccomp")  # bubblewrap reads it to its end: a descriptor per box
        fds = [box_socket, errors, filter_fd]
        try:
            os.write(filter_fd, seccomp.filter_bytes())
            os.lseek(filter_fd, 0, os.SEEK_SET)
            if files:
                fds.append(pack_files(files))
            socket.send_fds(sock, [json.dumps(request).encode()], fds)
        finally:
            for fd in fds[2:]:
                os.close(fd)

    def _ready_launcher(self) -> socket.socket:
        with self._lock:
            if self._launcher:
                owner, process, sock = self._launcher
                if owner == os.getpid() and process.poll() is None:
                    return sock
                sock.close()
            process, sock = self._start_launcher()
            self._launcher = (os.getpid(), process, sock)
            return sock

    def _start_launcher(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        box_uid = unprivileged_uid()
        plan = rootfs.plan(str(stage_directory(box_uid)), self._env_dir or test_environment(), box_uid)
        plan["without"] = ["copy"] if self._force_copy else []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        text = os.memfd_create("plan")
        try:
            os.write(text, json.dumps(plan).encode())
            os.lseek(text, 0, os.SEEK_SET)
            script = Path(__file__).with_name("_launcher.py")
            argv = [str(rootfs.base_python()[1]), "-I", "-S", "-B", str(script), str(theirs.fileno()), str(text)]
            process = subprocess.Popen(
                argv, env={}, pass_fds=(theirs.fileno(), text), start_new_session=True, stdin=subprocess.DEVNULL
            )
        finally:
            os.close(text)
            theirs.close()
        ours.settimeout(START_TIMEOUT_S)
        answer = ours.recv(1 << 16)
        ours.settimeout(None)
        if not answer:
            raise SandboxStartError("the sandbox launcher ended at once; its message is above")
        reply: dict[str, Any] = json.loads(answer)
        if "error" in reply:
            process.wait(10)
            if reply["errno"] in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EINVAL, errno.ENOSYS):
                raise MissingPart(why_no_namespaces(reply["error"]))
            raise SandboxStartError(f"the sandbox launcher failed: {reply['error']}")
        self.overlay = bool(reply["overlay"])
        return process, ours


def start_error(said: str) -> SandboxStartError | MissingPart:
    """bubblewrap's own words, unless they mean that this machine can start no box at all."""
    if "namespace" in said or "setting up uid map" in said:
        return MissingPart(why_no_namespaces(said))
    return SandboxStartError(f"cannot start a sandbox: {said}")


def why_no_namespaces(detail: str) -> str:
    """One sentence for a machine that forbids user namespaces, with the setting to change where it is known."""
    switches = {
        "/proc/sys/user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    }
    for path, (bad, cure) in switches.items():
        with contextlib.suppress(OSError):
            if Path(path).read_text().strip() == bad:
                return f"local sandboxes need user namespaces, which this machine forbids: allow them with `{cure}`"
    return (
        f"local sandboxes need user and mount namespaces, which this machine forbids ({detail}); "
        "in a container, start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    )


def settings(limits: Limits, *, watch: bool) -> list[bytes]:
    """What the command server limits by itself: per process, and by watching memory where no cgroup does."""
    values = {
        "output_bytes": limits.output_bytes,
        "watch_bytes": limits.memory_mb << 20 if watch else 0,
        "DATA": limits.memory_mb << 20,
        "FSIZE": limits.disk_mb << 20,
        "NOFILE": 4096,
        "CORE": 0,
        "MSGQUEUE": 0,
        "MEMLOCK": 1 << 16,
    }
    if kernel() >= (5, 14):  # older ones count all of the user's processes, in every box and outside
        values["NPROC"] = limits.pids
    return [f"{k}={v}".encode() for k, v in values.items()]


def kernel() -> tuple[int, int]:
    major, minor = re.findall(r"\d+", os.uname().release)[:2]
    return int(major), int(minor)


def unprivileged_uid() -> int | None:
    """As root: the host uid boxes run under. None: we are not root (of the host), the box runs as ourselves."""
    if os.geteuid() != 0:
        return None
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, _, count = map(int, line.split())
        if inside <= ROOT_BOX_UID < inside + count:
            return ROOT_BOX_UID
        if inside <= 65534 < inside + count:
            return 65534
    return None


def stage_directory(box_uid: int | None) -> Path:
    """An empty directory the launcher covers in its own namespace; the box's user must be able to reach it."""
    if box_uid is None:
        place = paths.home() / "stage"
        place.mkdir(exist_ok=True)
        return place
    for parent in ("/run", "/var/lib", "/var/tmp", "/tmp"):
        place = Path(parent) / "swe-lightning-stage"
        with contextlib.suppress(OSError):
            place.mkdir(mode=0o755, exist_ok=True)
            info = place.lstat()
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid():
                return place
    raise SandboxStartError("no directory for the sandbox stage: tried /run, /var/lib, /var/tmp and /tmp")


def to_bytes(text: str) -> bytes:
    """UTF-8, with escaped bytes restored; lone surrogates of a model's output become question marks."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def pack_mapping(mapping: Mapping[str, str]) -> bytes:
    return pack(*(to_bytes(part) for item in mapping.items() for part in item))[4:]


def pack_files(files: Mapping[str, bytes]) -> int:
    fd = os.memfd_create("files")
    with os.fdopen(os.dup(fd), "wb") as f:
        for path, data in files.items():
            name = os.fsencode(path)
            f.write(struct.pack("!I", len(name)) + name + struct.pack("!Q", len(data)) + data)
    return fd


def check_relative(path: str) -> str:
    """A path that stays inside the tree, in its only spelling."""
    parts = path.split("/")
    if not path or "\0" in path or any(p in ("", ".", "..") for p in parts):
        raise ValueError(f"{path!r} is not a plain path relative to the tree")
    return path


def receive(sock: socket.socket) -> list[bytes]:
    (length,) = struct.unpack("!I", _exactly(sock, 4))
    return unpack(_exactly(sock, length))


def receive_with_fd(sock: socket.socket) -> tuple[list[bytes], int]:
    """One frame and the descriptor that travels with it (-1 = none)."""
    head, ancillary, _, _ = sock.recvmsg(4, socket.CMSG_SPACE(4), socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC)
    fd = -1
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fd = array.array("i", data[:4])[0]
    if len(head) < 4:
        raise ConnectionResetError("the sandbox ended while it was being started")
    (length,) = struct.unpack("!I", head)
    return unpack(_exactly(sock, length)), fd


def _exactly(sock: socket.socket, n: int) -> bytes:
    data = bytearray()
    until = None if (timeout := sock.gettimeout()) is None else time.monotonic() + timeout
    while len(data) < n:
        if until is not None and time.monotonic() > until:
            raise TimeoutError("no complete reply")
        part = sock.recv(min(n - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError("closed")
        data += part
    return bytes(data)
