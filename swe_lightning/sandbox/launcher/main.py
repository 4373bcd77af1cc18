"""The launcher: a small stdlib-only process that mounts trees and starts boxes, one per backend and owner process.

It lives in its own mount namespace (as root: the host's user namespace; as anybody else: a user namespace of its own),
so nothing it mounts is ever seen by the host and all of it vanishes with its processes. Per box it forks a child,
which mounts a size-limited tmpfs, lays an overlay of the read-only tree over it, sends a descriptor of that tmpfs to
the owner, gives up root, and becomes bubblewrap.

Single-threaded on purpose: forking stays cheap, and a box dies with the thread that started it. Runs without
site-packages and outside swe_lightning's package, so every import is relative or of the standard library.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import sys
from typing import Any, NoReturn

from ..boxside.wire import FAILED, OK, pack
from .kernel import CLONE_NEWNS, MS_BIND, MS_NODEV, MS_NOSUID, bind_tree, call, mapping_namespace, mount
from .layers import copy_tree, mount_overlay, overlay_works, write_files
from .network import enter_with_listeners
from .stage import build_stage, enter_namespaces

BOX_SOCKET_FD = 3


class Launcher:
    def __init__(self, sock: socket.socket, plan: dict[str, Any]) -> None:
        self.sock = sock
        self.stage: str = plan["stage"]
        self.box_uid: int | None = plan["box_uid"]
        self.bwrap: list[str] = plan["bwrap"]
        enter_namespaces(own_user_namespace=self.box_uid is None)
        build_stage(self.stage, plan)
        self.overlay = "copy" not in plan["without"] and overlay_works(self.stage, userxattr=self.box_uid is None)

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        wake_in, wake_out = socket.socketpair()
        wake_out.setblocking(False)
        wake_in.setblocking(False)
        signal.set_wakeup_fd(wake_out.fileno(), warn_on_full_buffer=False)
        import select

        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.register(wake_in, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if wake_in.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    while wake_in.recv(512):
                        pass
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
            if self.sock.fileno() in ready:
                message, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 4, socket.MSG_CMSG_CLOEXEC)
                if not message:
                    os._exit(0)
                try:
                    self._start(json.loads(message), fds)
                finally:
                    for fd in fds:
                        os.close(fd)

    def _start(self, request: dict[str, Any], fds: list[int]) -> None:
        box_socket = fds[0]
        namespace, why_copy = None, ""
        try:
            info = os.stat(request["tree"])
            if self.box_uid is not None and info.st_uid != self.box_uid:
                namespace = mapping_namespace(info.st_uid, info.st_gid, self.box_uid)
            elif self.box_uid is None and info.st_uid != os.getuid():
                why_copy = "another user's files could not be changed through an overlay"
        except OSError as error:
            why_copy = str(error)
        pid = os.fork()
        if pid == 0:
            try:
                self._become_box(request, fds, namespace, bool(why_copy))
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
                with contextlib.suppress(OSError):
                    socket.socket(fileno=os.dup(box_socket)).sendall(pack(FAILED, text.encode(errors="replace")))
            finally:
                os._exit(1)

    def _become_box(self, request: dict[str, Any], fds: list[int], namespace: int | None, copy: bool) -> NoReturn:
        box_socket, stderr, seccomp, *files = fds
        for path in request["cgroup_joins"]:
            with open(path, "w") as f:
                f.write("0")
        call("unshare", CLONE_NEWNS)
        box = f"{self.stage}/box"
        size = f"size={request['disk_mb']}m,nr_inodes={request['inodes']},mode=711"
        mount("box", box, "tmpfs", MS_NOSUID | MS_NODEV, size)
        os.chdir(box)
        os.umask(0o022)
        layout = self._lay_tree(request["tree"], files, namespace, copy)
        for name in ("tmp", "shm"):
            os.mkdir(name)
            os.chmod(name, 0o1777)
        arguments = self.bwrap
        handles = [os.open(".", os.O_RDONLY | os.O_DIRECTORY)]
        if request["routes"]:
            handles += [s.detach() for s in enter_with_listeners([(a, p) for a, p in request["routes"]])]
            with open("hosts", "w") as f:
                f.write(request["hosts"])
            arguments = in_this_network(arguments, f"{box}/hosts")
        send_with_fds(box_socket, pack(OK, layout.encode()), handles)
        for fd in handles:
            os.close(fd)
        self._exec_bwrap(arguments, box_socket, stderr, seccomp)

    def _lay_tree(self, tree: str, files: list[int], namespace: int | None, copy: bool) -> str:
        """Make `merged` in the working directory. Returns overlay or copy: how the owner reads changes."""
        uid = self.box_uid
        if self.overlay and not copy:
            with contextlib.suppress(OSError):  # an odd file system or an old kernel: the copy below serves
                os.mkdir("tree")
                os.mkdir("files")
                bind_tree(tree, "tree", namespace)  # also seen by the box as the original tree
                write_files(files, "files", uid)
                mount_overlay(["files", "tree"], userxattr=uid is None, uid=uid)
                return "overlay"
        for name in ("upper", "merged", "tree"):
            if not os.path.isdir(name):
                os.mkdir(name)
        if not os.path.ismount("tree"):
            mount(tree, "tree", flags=MS_BIND)
        copy_tree(tree, "upper", uid)
        write_files(files, "upper", uid)
        if uid is not None:
            os.chown("upper", uid, uid)
        mount("upper", "merged", flags=MS_BIND)
        return "copy"

    def _exec_bwrap(self, arguments: list[str], box_socket: int, stderr: int, seccomp: int) -> NoReturn:
        os.dup2(stderr, 2)
        os.dup2(stderr, 1)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        high = [copy_above(fd) for fd in (box_socket, seccomp)]
        for number, fd in enumerate(high, BOX_SOCKET_FD):
            os.dup2(fd, number)
        no_core_dumps()
        if self.box_uid is not None:
            os.setgroups([])
            os.setresgid(self.box_uid, self.box_uid, self.box_uid)
            os.setresuid(self.box_uid, self.box_uid, self.box_uid)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.chdir("/")
        os.execve(arguments[0], arguments, {})


def no_core_dumps() -> None:
    """One byte: nothing is written, and nothing is piped to the program the host may have for core dumps."""
    import resource

    for limit in (1, 0):  # 0 where more is not allowed
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
            return


def copy_above(fd: int) -> int:
    """A copy well above the numbers bubblewrap is told to use; closed on exec."""
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)


def in_this_network(bwrap: list[str], hosts: str) -> list[str]:
    """bubblewrap's arguments for a process that is in the box's own network namespace already."""
    at = bwrap.index("--proc")
    changed = [*bwrap[:at], "--ro-bind", hosts, "/etc/hosts", *bwrap[at:]]
    changed.remove("--unshare-net")
    return changed


def send_with_fds(fd: int, data: bytes, passed: list[int]) -> None:
    sock = socket.socket(fileno=os.dup(fd))
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))])
    sock.close()


def main(socket_fd: int, plan_fd: int) -> None:
    sock = socket.socket(fileno=socket_fd)
    os.set_inheritable(sock.fileno(), False)
    plan = json.loads(os.read(plan_fd, 1 << 24))
    try:
        launcher = Launcher(sock, plan)
    except OSError as error:
        sock.sendall(json.dumps({"error": str(error), "errno": error.errno}).encode())
        sys.exit(1)
    sock.sendall(json.dumps({"overlay": launcher.overlay}).encode())
    launcher.serve()
