"""Local boxes: bubblewrap namespaces around a copy-on-write tree, as root or as an ordinary user.

Three processes take part: the owner (this module), one launcher per owner (mounts, starts), and per box a command
server that is process 1 inside (runs). The owner holds a socket to the server, a pidfd of it, and a descriptor of the
tmpfs with the box's changes; when the owner dies, the socket closes and the box ends by itself.

No sockets, ports or mounts appear on the host. Nothing secret is ever put on a command line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from swe_lightning.errors import MissingPart, SandboxLost, SandboxStartError
from swe_lightning.sandbox import cgroups, host, launcher, registry, rootfs, seccomp, treediff
from swe_lightning.sandbox.base import Limits, TreeDiff
from swe_lightning.sandbox.boxside.wire import OK, pack
from swe_lightning.sandbox.client import (
    CommandClient,
    environment,
    pack_mapping,
    receive,
    receive_with_fds,
    settings,
)
from swe_lightning.sandbox.network import Network, endpoints
from swe_lightning.sandbox.pyenv import test_environment
from swe_lightning.sandbox.relay import Relay, RelayedBox
from swe_lightning.sandbox.starts import Starts, refuse_unusable
from swe_lightning.services import Service

START_TIMEOUT_S = 60.0
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
        self._server = CommandClient(sock, name, self._kill)
        self.run, self.read_file, self.write = self._server.run, self._server.read_file, self._server.write
        self._root, self._pidfd = root, pidfd
        self._base, self._groups = base, groups
        self.relayed: RelayedBox | None = None
        self.owner: LocalBackend | None = None  # its end would be this box's
        self._closing = threading.Lock()
        self._open = True

    def diff(self) -> TreeDiff:
        if not self._open:
            raise SandboxLost(f"sandbox {self.name} was destroyed; its changes are gone")
        reader = treediff.Reader(self._base, self._root)
        found = reader.overlay() if self.layout == "overlay" else reader.copy()
        self.left_out = reader.left_out
        return found

    def destroy(self) -> None:
        with self._closing:
            if not self._open:
                return
            self._open = False
            self._send_kill()
            self._server.close()
            if self.relayed is not None:
                self.relayed.close()
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            dead = bool(poll.poll(10_000))
            for fd in (self._root, self._pidfd):
                os.close(fd)
            if dead and cgroups.remove(self._groups):
                registry.forget(self.name)

    def _kill(self) -> None:
        with self._closing:  # a descriptor that destroy() closed may be another box's by now
            if self._open:
                self._send_kill()

    def _send_kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def __enter__(self) -> LocalSandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()


class LocalBackend:
    """Makes boxes. Thread-safe; after a fork the child gets a launcher of its own."""

    def __init__(
        self,
        *,
        env_dir: Path | None = None,
        force_copy: bool = False,
        whitelist: tuple[Service, ...] = (),
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._env_dir = env_dir
        self._force_copy = force_copy
        self._whitelist = whitelist
        self._start_timeout_s = start_timeout_s
        self._starts = Starts()
        self._lock = threading.Lock()
        self._launcher: tuple[int, subprocess.Popen[bytes], socket.socket] | None = None
        self._relay: tuple[int, Relay] | None = None
        self.overlay = False

    def create(
        self,
        tree: Path,
        *,
        env: Mapping[str, str] = {},
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        label: str = "",
        files: Mapping[str, bytes] = {},
        gateway: Service | None = None,
        image: str = "",
    ) -> LocalSandbox:
        refuse_unusable(tree, files)
        return self._starts.run(lambda: self._create(tree, env, limits, label, files, gateway))

    def _create(
        self,
        tree: Path,
        env: Mapping[str, str],
        limits: Limits,
        label: str,
        files: Mapping[str, bytes],
        gateway: Service | None,
    ) -> LocalSandbox:
        name = f"{os.getpid()}-{secrets.token_hex(6)}"
        groups = cgroups.create(name, limits)
        sockets, hosts = endpoints(Network(gateway, self._whitelist))
        request = {
            "tree": str(tree.absolute()),
            "disk_mb": limits.disk_mb,
            "inodes": INODES,
            "cgroup_joins": [str(cgroups.join_file(g)) for g in groups],
            "routes": [(e.address, e.port) for e in sockets],
            "hosts": rootfs.ETC_TEXTS["hosts"] + hosts,
        }
        ours, theirs = socket.socketpair()
        errors = os.memfd_create("errors")
        fds: list[int] = []
        pidfd = -1
        try:
            with theirs:
                self._send_request(request, files, theirs.fileno(), errors)
            ours.settimeout(self._start_timeout_s)
            ours.sendall(
                pack(
                    b"init",
                    *settings(limits, watch=not groups, count_processes=host.kernel() >= (5, 14)),
                    pack_mapping(environment(rootfs.BOX_ENV, env)),
                )
            )
            fields, fds = receive_with_fds(ours)
            if fields[0] != OK:
                raise SandboxStartError("cannot start a sandbox: " + fields[1].decode(errors="replace"))
            _, [pidfd, *_] = receive_with_fds(ours)
            receive(ours)
            base, layout = treediff.BaseTree(tree, files), fields[1].decode()
            box = LocalSandbox(ours, fds[0], pidfd, base, layout, name, groups)
            if sockets:
                box.relayed = self._ready_relay().open(fds[1:], [e.target for e in sockets])
            box.owner = self
            registry.remember(name, label, pidfd, groups)
            return box
        except BaseException as error:
            if pidfd >= 0:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            ours.close()
            for fd in (*fds, pidfd):
                if fd >= 0:
                    os.close(fd)
            cgroups.remove(groups)
            if isinstance(error, OSError):
                said = os.pread(errors, 2000, 0).decode(errors="replace").strip()
                timed_out = isinstance(error, TimeoutError)
                why = f"no answer within {self._start_timeout_s:g} s" if timed_out else str(error)
                raise host.start_error(said or why, permanent=timed_out) from error
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
            if self._relay and self._relay[0] == os.getpid():
                self._relay[1].close()
            self._relay = None

    def _send_request(self, request: dict[str, Any], files: Mapping[str, bytes], box_socket: int, errors: int) -> None:
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

    def _ready_relay(self) -> Relay:
        with self._lock:
            if self._relay is None or self._relay[0] != os.getpid():
                self._relay = (os.getpid(), Relay())
            return self._relay[1]

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
        box_uid = host.unprivileged_uid()
        plan = rootfs.plan(str(host.stage_directory(box_uid)), self._env_dir or test_environment(), box_uid)
        plan["without"] = ["copy"] if self._force_copy else []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        text = os.memfd_create("plan")
        try:
            os.write(text, json.dumps(plan).encode())
            os.lseek(text, 0, os.SEEK_SET)
            arguments = [str(Path(__file__).parent), str(theirs.fileno()), str(text)]
            argv = [str(rootfs.base_python()[1]), "-I", "-S", "-B", "-c", launcher.BOOT, *arguments]
            process = subprocess.Popen(
                argv, env={}, pass_fds=(theirs.fileno(), text), start_new_session=True, stdin=subprocess.DEVNULL
            )
        finally:
            os.close(text)
            theirs.close()
        ours.settimeout(self._start_timeout_s)
        answer = ours.recv(1 << 16)
        ours.settimeout(None)
        if not answer:
            raise SandboxStartError("the sandbox launcher ended at once; its message is above")
        reply: dict[str, Any] = json.loads(answer)
        if "error" in reply:
            process.wait(10)
            if reply["errno"] in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EINVAL, errno.ENOSYS):
                raise MissingPart(host.why_no_namespaces(reply["error"]))
            raise SandboxStartError(f"the sandbox launcher failed: {reply['error']}")
        self.overlay = bool(reply["overlay"])
        return process, ours


def pack_files(files: Mapping[str, bytes]) -> int:
    fd = os.memfd_create("files")
    with os.fdopen(os.dup(fd), "wb") as f:
        for path, data in files.items():
            name = os.fsencode(path)
            f.write(struct.pack("!I", len(name)) + name + struct.pack("!Q", len(data)) + data)
    return fd
