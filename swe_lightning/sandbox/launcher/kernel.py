"""System calls the standard library lacks: mounts, namespaces, bind mounts whose files belong to another user."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from typing import Any

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
MOUNT_ATTR_IDMAP, AT_EMPTY_PATH, AT_RECURSIVE, OPEN_TREE_CLONE = 0x100000, 0x1000, 0x8000, 1

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: Any) -> int:
    result = getattr(libc, name)(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    arguments = [os.fsencode(a) if a else None for a in (source, target, kind)]
    call("mount", *arguments, ctypes.c_ulong(flags), os.fsencode(data) if data else None)


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
