"""The launcher: a small stdlib-only process that mounts trees and starts boxes, one per backend and owner process.

It lives in its own mount namespace (as root: the host's user namespace; as anybody else: a user namespace of its own),
so nothing it mounts is ever seen by the host and all of it vanishes with its processes. Per box it forks a child,
which mounts a size-limited tmpfs, lays an overlay of the read-only tree over it, sends a descriptor of that tmpfs to
the owner, gives up root, and becomes bubblewrap.

Single-threaded on purpose: forking stays cheap, and a box dies with the thread that started it.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import importlib.util
import json
import marshal
import os
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
MOUNT_ATTR_IDMAP, AT_EMPTY_PATH, AT_RECURSIVE, OPEN_TREE_CLONE = 0x100000, 0x1000, 0x8000, 1
BOX_SOCKET_FD = 3

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """A step the kernel refused; the text goes to the owner."""


def call(name: str, *args: Any) -> int:
    result = getattr(libc, name)(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    arguments = [os.fsencode(a) if a else None for a in (source, target, kind)]
    call("mount", *arguments, ctypes.c_ulong(flags), os.fsencode(data) if data else None)


# -- once per launcher


def enter_namespaces(own_user_namespace: bool) -> None:
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWNS | (CLONE_NEWUSER if own_user_namespace else 0)
    call("unshare", flags)
    if own_user_namespace:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as f:
                f.write(text)
    mount("", "/", flags=MS_REC | MS_PRIVATE)


def build_stage(stage: str, plan: dict[str, Any]) -> None:
    """Collect under one world-searchable directory all that boxes see of the host."""
    os.umask(0o022)
    mount("stage", stage, "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,mode=755")
    for name in ("box", "empty", "lib"):
        os.mkdir(f"{stage}/{name}")
    open(f"{stage}/nothing", "w").close()
    for name, text in plan["texts"].items():
        path = f"{stage}/{name}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(text.encode("latin-1"))
    for name, target in plan["links"].items():
        os.makedirs(os.path.dirname(f"{stage}/{name}"), exist_ok=True)
        os.symlink(target, f"{stage}/{name}")
    for name, source in plan["copies"].items():
        with open(source, "rb") as f:
            data = f.read()
        path = f"{stage}/{name}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(data)
        os.chmod(path, 0o755)
    with open(plan["server"], "rb") as f:
        code = compile(f.read(), "/run/box/server.py", "exec")
    with open(f"{stage}/lib/server.pyc", "wb") as f:  # compiled once here instead of in every box
        f.write(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
    for name, source in plan["binds"].items():
        os.makedirs(f"{stage}/{name}", exist_ok=True)
        mount(source, f"{stage}/{name}", flags=MS_BIND | MS_REC)


def overlay_works(stage: str, userxattr: bool) -> bool:
    """Whether this kernel mounts the overlay we need, whiteouts and opaque directories included."""
    pid = os.fork()
    if pid == 0:
        try:
            call("unshare", CLONE_NEWNS)
            mount("probe", f"{stage}/box", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m")
            os.chdir(f"{stage}/box")
            os.makedirs("lower/d")
            open("lower/d/f", "w").close()
            mount_overlay(["lower"], userxattr)
            os.unlink("merged/d/f")
            os.rmdir("merged/d")
            os.mkdir("merged/d")
            os._exit(0 if os.listdir("merged/d") == [] else 1)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def mount_overlay(lower: list[str], userxattr: bool, uid: int | None = None) -> None:
    """Overlay in the working directory: relative names keep host paths out of the box's mount table."""
    for name in ("upper", "work", "merged"):
        os.mkdir(name)
    if uid is not None:
        os.chown("upper", uid, uid)
    options = f"lowerdir={':'.join(lower)},upperdir=upper,workdir=work,index=off,"
    options += "userxattr" if userxattr else "redirect_dir=off,metacopy=off"  # userxattr implies the other two
    mount("overlay", "merged", "overlay", MS_NOSUID | MS_NODEV, options)


# -- ownership: as root, the tree must look as if the box's user owned it

_user_namespaces: dict[tuple[int, int], int] = {}


def mapping_namespace(uid: int, gid: int, box: int) -> int:
    """Descriptor of a user namespace that shows files of uid:gid as the box user's."""
    if (uid, gid) not in _user_namespaces:
        ready_in, ready_out = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                call("unshare", CLONE_NEWUSER)
                os.write(ready_out, b"1")
                signal.pause()
            finally:
                os._exit(1)
        os.close(ready_out)
        try:
            if os.read(ready_in, 1) != b"1":
                raise OSError(1, "unshare of a user namespace for id mapping failed")
            for name, value in (("uid_map", uid), ("gid_map", gid)):
                with open(f"/proc/{pid}/{name}", "w") as f:
                    f.write(f"{value} {box} 1")
            _user_namespaces[uid, gid] = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
        finally:
            os.close(ready_in)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return _user_namespaces[uid, gid]


def bind_tree(tree: str, target: str, namespace: int | None) -> None:
    """Bind `tree` at `target`, with ids mapped through `namespace` if given."""
    if namespace is None:
        mount(tree, target, flags=MS_BIND)
        return
    fd = call("syscall", SYS_OPEN_TREE, -100, os.fsencode(tree), OPEN_TREE_CLONE | os.O_CLOEXEC)
    attributes = struct.pack("QQQQ", MOUNT_ATTR_IDMAP, 0, 0, namespace)
    call("syscall", SYS_MOUNT_SETATTR, fd, b"", AT_EMPTY_PATH, attributes, ctypes.c_size_t(len(attributes)))
    call("syscall", SYS_MOVE_MOUNT, fd, b"", -100, os.fsencode(target), 4)  # MOVE_MOUNT_F_EMPTY_PATH
    os.close(fd)


def copy_tree(source: str, target: str, box: int | None) -> None:
    """Files, directories and symlinks; anything else has no place in a task's tree."""
    with os.scandir(source) as entries:
        for entry in entries:
            path = f"{target}/{entry.name}"
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), path)
            elif entry.is_dir():
                if not os.path.isdir(path):
                    os.mkdir(path)
                copy_tree(entry.path, path, box)
            elif entry.is_file():
                with open(entry.path, "rb") as read, open(path, "wb") as write:
                    while os.sendfile(write.fileno(), read.fileno(), None, 1 << 30):
                        pass
                    os.fchmod(write.fileno(), 0o755 if entry.stat().st_mode & 0o100 else 0o644)
            else:
                continue
            if box is not None:
                os.chown(path, box, box, follow_symlinks=False)


# -- once per box


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
                    socket.socket(fileno=os.dup(box_socket)).sendall(frame(b"-", text.encode(errors="replace")))
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
        handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        send_with_fd(box_socket, frame(b"+", layout.encode()), handle)
        os.close(handle)
        self._exec_bwrap(box_socket, stderr, seccomp)

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

    def _exec_bwrap(self, box_socket: int, stderr: int, seccomp: int) -> NoReturn:
        os.dup2(stderr, 2)
        os.dup2(stderr, 1)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        high = [copy_above(fd) for fd in (box_socket, seccomp)]
        for number, fd in enumerate(high, BOX_SOCKET_FD):
            os.dup2(fd, number)
        if self.box_uid is not None:
            os.setgroups([])
            os.setresgid(self.box_uid, self.box_uid, self.box_uid)
            os.setresuid(self.box_uid, self.box_uid, self.box_uid)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.chdir("/")
        os.execve(self.bwrap[0], self.bwrap, {})


def copy_above(fd: int) -> int:
    """A copy well above the numbers bubblewrap is told to use; closed on exec."""
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)


def write_files(files: list[int], target: str, uid: int | None) -> None:
    """Unpack the owner's extra files: (name length, name, data length, data) repeated in one descriptor."""
    if not files:
        return
    with os.fdopen(os.dup(files[0]), "rb") as f:
        f.seek(0)
        while head := f.read(4):
            name = f.read(struct.unpack("!I", head)[0])
            data = f.read(struct.unpack("!Q", f.read(8))[0])
            path = os.fsencode(target)
            *parents, last = name.split(b"/")
            for part in parents:
                path += b"/" + part
                if not os.path.isdir(path) or os.path.islink(path):
                    os.mkdir(path)
                    if uid is not None:
                        os.chown(path, uid, uid)
            path += b"/" + last
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            with os.fdopen(fd, "wb") as out:
                out.write(data)
                if uid is not None:
                    os.fchown(out.fileno(), uid, uid)


def frame(*fields: bytes) -> bytes:
    body = b"".join(struct.pack("!I", len(f)) + f for f in fields)
    return struct.pack("!I", len(body)) + body


def send_with_fd(fd: int, data: bytes, passed: int) -> None:
    sock = socket.socket(fileno=os.dup(fd))
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [passed]))])
    sock.close()


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(sock.fileno(), False)
    plan = json.loads(os.read(int(sys.argv[2]), 1 << 24))
    try:
        launcher = Launcher(sock, plan)
    except OSError as error:
        sock.sendall(json.dumps({"error": str(error), "errno": error.errno}).encode())
        sys.exit(1)
    sock.sendall(json.dumps({"overlay": launcher.overlay}).encode())
    launcher.serve()


if __name__ == "__main__":
    main()
