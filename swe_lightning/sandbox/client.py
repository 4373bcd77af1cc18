"""The trusted end of the wire: asks a command server to run, read and write, over any connected socket.

Serial: a second thread waits for the first. Whatever goes wrong on the wire is the end of the box, because the next
frame could be of the last command: it is killed, and from then on every request raises SandboxLost. It never turns into
text that looks like a command's output.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from swe_lightning.errors import SandboxLost
from swe_lightning.sandbox.base import TREE_ROOT, ExecResult, Limits, TreeDiff
from swe_lightning.sandbox.boxside.wire import OK, fields_of, mapping, over, pack, unpack

REPLY_GRACE_S = 30.0
READ_LIMIT = 64 << 20
MAX_FDS = 64
MAX_REPLY = 256 << 20


class Stream(Protocol):
    """What is needed of a socket."""

    def settimeout(self, timeout_s: float | None, /) -> None: ...
    def gettimeout(self) -> float | None: ...
    def sendall(self, data: bytes, /) -> None: ...
    def recv(self, n: int, /) -> bytes: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class CommandClient:
    def __init__(self, sock: Stream, name: str, kill: Callable[[], None]) -> None:
        self.name = name
        self._sock, self._kill = sock, kill
        self._lock = threading.Lock()
        self._gone = ""

    def run(self, command: str, *, timeout_s: float, env: Mapping[str, str] | None = None) -> ExecResult:
        text = to_bytes(command)
        if b"\0" in text:
            return ExecResult(b"bash: the command holds a NUL byte\n", 126)
        request = pack(b"run", str(float(timeout_s)).encode(), text, pack_mapping(env or {}))
        code, flags, output = self.ask(request, timeout_s + REPLY_GRACE_S)
        return ExecResult(output, int(code), timed_out=b"t" in flags, truncated=b"c" in flags)

    def read_file(self, path: str) -> bytes:
        where = os.fsencode(os.path.join(TREE_ROOT, path))
        return self.ask(pack(b"read", where, str(READ_LIMIT).encode()), REPLY_GRACE_S)[0]

    def write(self, changes: TreeDiff) -> None:
        deleted, written = [], []
        for path, state in changes.items():
            name = os.fsencode(check_relative(path))
            if state is None:
                deleted += [name, b"x", b""]
            else:
                mode = b"l" if state.symlink else (b"755" if state.mode & 0o100 else b"644")
                written += [name, mode, state.data]
        self.ask(pack(b"write", *deleted, *written), REPLY_GRACE_S)

    def close(self) -> None:
        """A request that is under way on another thread ends with SandboxLost. Idempotent."""
        self._gone = self._gone or "was destroyed"
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def ask(self, request: bytes, timeout_s: float) -> list[bytes]:
        """One request, one reply. OSError if the server refused; SandboxLost if there is no server any more."""
        with self._lock:
            if self._gone:
                raise SandboxLost(f"sandbox {self.name} {self._gone}")
            try:
                self._sock.settimeout(timeout_s)
                self._sock.sendall(request)
                status, *fields = receive(self._sock)
            except OSError as error:
                timed_out = isinstance(error, TimeoutError)
                self._gone = self._gone or ("stopped answering" if timed_out else "died (its process 1 is gone)")
                self._kill()
                raise SandboxLost(f"sandbox {self.name} {self._gone}") from error
        if status != OK:
            number, message = int(fields[0]), fields[1].decode(errors="replace")
            raise OSError(number, message)
        return fields


def settings(limits: Limits, *, watch: bool, count_processes: bool) -> list[bytes]:
    """What the command server limits by itself. `watch`: memory, where no cgroup does. `count_processes`: only where
    the kernel counts those of this box alone (older ones than 5.14 count all that the user has, anywhere).
    """
    values = {
        "output_bytes": limits.output_bytes,
        "watch_bytes": limits.memory_mb << 20 if watch else 0,
        "DATA": limits.memory_mb << 20,
        "FSIZE": limits.disk_mb << 20,
        "NOFILE": 4096,
        "CORE": 1,  # not 0: seccomp.py says why
        "MSGQUEUE": 0,
        "MEMLOCK": 1 << 16,
    }
    if count_processes:
        values["NPROC"] = limits.pids
    return [f"{k}={v}".encode() for k, v in values.items()]


def to_bytes(text: str) -> bytes:
    """UTF-8, with escaped bytes restored; lone surrogates of a model's output become question marks."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def pack_mapping(values: Mapping[str, str]) -> bytes:
    return fields_of(*(to_bytes(part) for item in values.items() for part in item))


def environment(base: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Of every command: what is given over the box's own, by the same rule as what a single command is given."""
    both = over(mapping(pack_mapping(base)), mapping(pack_mapping(given)))
    return {k.decode("utf-8", "surrogateescape"): v.decode("utf-8", "surrogateescape") for k, v in both.items()}


def check_relative(path: str) -> str:
    """A path that stays inside the tree, in its only spelling."""
    parts = path.split("/")
    if not path or "\0" in path or any(p in ("", ".", "..") for p in parts):
        raise ValueError(f"{path!r} is not a plain path relative to the tree")
    return path


def receive(sock: Stream) -> list[bytes]:
    (length,) = struct.unpack("!I", _exactly(sock, 4))
    if length > MAX_REPLY:
        raise ConnectionAbortedError(f"a reply of {length} bytes")
    return unpack(_exactly(sock, length))


def receive_with_fds(sock: socket.socket) -> tuple[list[bytes], list[int]]:
    """One frame and the descriptors that travel with it."""
    room = socket.CMSG_SPACE(4 * MAX_FDS)
    head, ancillary, _, _ = sock.recvmsg(4, room, socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if len(head) < 4:
        raise ConnectionResetError("the sandbox ended while it was being started")
    (length,) = struct.unpack("!I", head)
    return unpack(_exactly(sock, length)), list(fds)


def _exactly(sock: Stream, n: int) -> bytes:
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
