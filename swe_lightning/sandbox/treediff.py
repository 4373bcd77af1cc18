"""Read what changed in a box's tree from outside, without trusting anything in it.

Two layouts: the upper directory of an overlay (only changes are there; deletions are whiteouts, replaced directories
are opaque), or a whole copy. Every step is relative to an open directory and follows no link, so a symlink in the
tree is read as a link, never through it. Devices, pipes and sockets cannot be part of a patch: they are left out, with
a note. So is what would not fit in memory.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from swe_lightning.sandbox.base import FileState, TreeDiff

MAX_FILE_BYTES = 32 << 20
MAX_TOTAL_BYTES = 128 << 20
MAX_DEPTH = 100
MAX_NOTES = 1000
MAX_NAME_BYTES = 16 << 20
"""Of all new paths together: one may be of 25 KiB, and a box has room for 200,000."""
OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def state_at(directory: int | None, name: str, info: os.stat_result, limit: int = MAX_FILE_BYTES) -> FileState:
    """The file `name` in an open directory. ValueError with the reason if it cannot be part of a patch."""
    if stat.S_ISLNK(info.st_mode):
        return FileState(os.fsencode(os.readlink(name, dir_fd=directory)), 0o777, symlink=True)
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("not a file, directory or symlink")
    if info.st_size > limit:
        raise ValueError(f"{info.st_size} bytes are too large for a patch")
    fd = _open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, directory)
    with os.fdopen(fd, "rb") as f:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("changed while it was read")
        data = f.read(info.st_size + 1)
    if len(data) > info.st_size:
        raise ValueError("grew while it was read")
    return FileState(data, 0o755 if info.st_mode & 0o100 else 0o644)


def _open(name: str, flags: int, directory: int | None) -> int:
    """Open even what its owner (this user, in the box) made unreadable."""
    try:
        return os.open(name, flags, dir_fd=directory)
    except PermissionError:
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            mode = os.fstat(handle).st_mode
            if stat.S_ISLNK(mode):
                raise
            link = f"/proc/self/fd/{handle}"
            os.chmod(link, stat.S_IMODE(mode) | 0o700)
            try:
                return os.open(link, flags & ~os.O_NOFOLLOW)
            finally:
                os.chmod(link, stat.S_IMODE(mode))
        finally:
            os.close(handle)


class BaseTree:
    """The tree a box was made from: the given directory with the extra files laid over it."""

    def __init__(self, tree: Path, files: Mapping[str, bytes]) -> None:
        self.tree = str(tree)
        self.files = {name: FileState(data, 0o644) for name, data in files.items()}
        self.file_parents = {name.rsplit("/", n)[0] for name in files for n in range(1, name.count("/") + 1)}

    def get(self, path: str) -> FileState | None:
        if path in self.files:
            return self.files[path]
        try:
            info = os.lstat(f"{self.tree}/{path}")
            return state_at(None, f"{self.tree}/{path}", info, limit=1 << 62)
        except (OSError, ValueError):
            return None

    def is_dir(self, path: str) -> bool:
        if path in self.files:
            return False
        return path in self.file_parents or stat.S_ISDIR(self._mode(path))

    def exists(self, path: str) -> bool:
        return path in self.files or stat.S_IFMT(self._mode(path)) in (stat.S_IFREG, stat.S_IFLNK)

    def same(self, path: str, directory: int, name: str, info: os.stat_result) -> bool:
        """Whether the regular file `name` is the one at `path`, read in parts: neither has to fit in memory."""
        if path in self.files:
            return False  # small: compared as a whole
        with contextlib.ExitStack() as stack:
            try:
                ours = os.lstat(f"{self.tree}/{path}")
                if not stat.S_ISREG(ours.st_mode) or (ours.st_mode ^ info.st_mode) & 0o100:
                    return False
                base = stack.enter_context(open(f"{self.tree}/{path}", "rb", buffering=0))
                fd = _open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, directory)
                stack.callback(os.close, fd)
                while (part := os.read(fd, 1 << 20)) == base.read(1 << 20):
                    if not part:
                        return True
            except OSError:
                pass
        return False

    def _mode(self, path: str) -> int:
        try:
            return os.lstat(f"{self.tree}/{path}").st_mode
        except OSError:
            return 0

    def below(self, path: str) -> Iterator[str]:
        """Paths of all files under the directory `path` ("" = all)."""
        prefix = path + "/" if path else ""
        extra = {name for name in self.files if name.startswith(prefix)}
        yield from sorted(extra)
        stack = [path]
        while stack:
            here = stack.pop()
            with contextlib.suppress(OSError), os.scandir(f"{self.tree}/{here}" if here else self.tree) as entries:
                for entry in entries:
                    name = f"{here}/{entry.name}" if here else entry.name
                    if name in self.files:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(name)
                    elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                        yield name


class Reader:
    """One reading of a box's tree."""

    def __init__(self, base: BaseTree, root: int) -> None:
        self.base = base
        self.root = root
        self.found: TreeDiff = {}
        self.left_out: list[str] = []
        self.room = MAX_TOTAL_BYTES
        self.name_room = MAX_NAME_BYTES

    def overlay(self) -> TreeDiff:
        fd = os.open("upper", DIR_FLAGS, dir_fd=self.root)
        try:
            self._upper(fd, "", opaque=False)
        finally:
            os.close(fd)
        return dict(sorted(self.found.items()))

    def _upper(self, directory: int, path: str, opaque: bool) -> None:
        """Merge one directory of the upper layer; `opaque`: nothing of the base shows through it."""
        present = set()
        based = self.base.is_dir(path)
        for name, info in _list(directory):
            here = f"{path}/{name}" if path else name
            present.add(name)
            if not self._named(here, based):
                continue
            if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
                self._gone(here)
            elif stat.S_ISDIR(info.st_mode):
                if not self.base.is_dir(here):
                    self._gone(here)
                with self._entered(directory, name, here) as fd:
                    if fd >= 0:
                        self._upper(fd, here, opaque or not self.base.is_dir(here) or _is_opaque(fd))
            else:
                if self.base.is_dir(here):
                    self._gone(here)
                self._file(directory, name, here, info)
        if opaque and self.base.is_dir(path):
            for below in self.base.below(path):
                if below not in self.found and not self._still_there(below, path, present):
                    self.found[below] = None

    def _still_there(self, below: str, path: str, present: set[str]) -> bool:
        """Entries that exist in an opaque directory were compared on their own."""
        return (below[len(path) + 1 :] if path else below).split("/", 1)[0] in present

    def _named(self, path: str, based: bool) -> bool:
        """Whether there is room to name this path, if it is a new one. `based`: its directory is in the base."""
        if based and (self.base.exists(path) or self.base.is_dir(path)):
            return True
        before = self.name_room
        self.name_room -= len(path)
        if self.name_room < 0 <= before:
            self._note(path, "and others: too many names for a patch")
        return self.name_room >= 0

    @contextlib.contextmanager
    def _entered(self, parent: int, name: str, path: str) -> Iterator[int]:
        """The directory `name`, open and searchable; -1 with a note if it is too deep or was swapped meanwhile."""
        if path.count("/") >= MAX_DEPTH:
            self._note(path, "too deep for a patch")
            yield -1
            return
        try:
            fd = _open(name, DIR_FLAGS, parent)
        except OSError as error:
            self._note(path, str(error))
            yield -1
            return
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        locked = os.geteuid() != 0 and mode & 0o700 != 0o700
        try:
            if locked:
                os.fchmod(fd, mode | 0o700)
            yield fd
        finally:
            if locked:
                os.fchmod(fd, mode)
            os.close(fd)

    def _gone(self, path: str) -> None:
        """Whatever the base had at `path` is deleted."""
        if self.base.is_dir(path):
            for below in self.base.below(path):
                self.found[below] = None
        elif self.base.exists(path):
            self.found[path] = None

    def _file(self, directory: int, name: str, path: str, info: os.stat_result) -> None:
        try:
            state = state_at(directory, name, info, min(MAX_FILE_BYTES, self.room))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._note(path, str(error))
            if self.base.exists(path) and not stat.S_ISREG(info.st_mode):
                self.found[path] = None
            return
        if state != self.base.get(path):
            self.room -= len(state.data)
            self.found[path] = state

    def _note(self, path: str, why: str) -> None:
        if len(self.left_out) < MAX_NOTES:
            self.left_out.append(f"{path}: {why}")

    # -- copies

    def copy(self) -> TreeDiff:
        """Compare a whole copy, by content: a tmpfs does not stamp what is written through a mapping."""
        seen: set[str] = set()
        fd = os.open("upper", DIR_FLAGS, dir_fd=self.root)
        try:
            self._copied(fd, "", seen)
        finally:
            os.close(fd)
        for path in self.base.below(""):
            if path not in seen:
                self.found[path] = None
        return dict(sorted(self.found.items()))

    def _copied(self, directory: int, path: str, seen: set[str]) -> None:
        based = self.base.is_dir(path)
        for name, info in _list(directory):
            here = f"{path}/{name}" if path else name
            if not self._named(here, based):
                continue
            if stat.S_ISDIR(info.st_mode):
                with self._entered(directory, name, here) as fd:
                    if fd >= 0:
                        self._copied(fd, here, seen)
                continue
            if stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
                seen.add(here)
            if not (stat.S_ISREG(info.st_mode) and self.base.same(here, directory, name, info)):
                self._file(directory, name, here, info)


def _list(directory: int) -> list[tuple[str, os.stat_result]]:
    """(name, lstat), directories last: a huge one must not take the room of a file beside it."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found.append((entry.name, entry.stat(follow_symlinks=False)))
    return sorted(found, key=lambda item: stat.S_ISDIR(item[1].st_mode))


def _is_opaque(fd: int) -> bool:
    for name in OPAQUE:
        with contextlib.suppress(OSError):
            if os.getxattr(fd, name) in (b"y", b"x"):
                return os.getxattr(fd, name) == b"y"
    return False
