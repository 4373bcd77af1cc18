"""The tree of one box: an overlay over the read-only original where the kernel can, a copy where it cannot."""

from __future__ import annotations

import contextlib
import os
import struct

from .kernel import CLONE_NEWNS, MS_NODEV, MS_NOSUID, call, mount


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
