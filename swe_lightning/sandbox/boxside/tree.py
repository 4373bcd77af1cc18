"""The tree of a box that its owner cannot open from outside: laid from a read-only original and compared with it.

A stamp is (inode, change time), the pair a command cannot set back. A file with another stamp may have changed; one
with the same stamp is compared with the original, because a tmpfs does not stamp what is written through a mapping.
Walking never follows a link, and every step is relative to an open directory, so that what a command swaps meanwhile
leads nowhere. Contents go out on request only: the owner decides what is worth its memory. Names are bounded here.
"""

import os
import stat
from time import clock_gettime_ns, sleep

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
MAX_DEPTH = 100
MAX_NOTES = 1000
MAX_NAME_BYTES = 16 << 20
"""Of all paths together that the base does not have: a name may be of 25 KiB, and there is room for 200,000."""
COARSE_CLOCK = 5  # the clock that change times are taken from


class Tree:
    def __init__(self, root: bytes) -> None:
        self.root = root
        self.origin = b""
        self.stamps: dict[bytes, tuple[int, int]] = {}
        self.directories: set[bytes] = set()
        self.name_room = 0

    def lay(self, origin: bytes) -> None:
        """Copy `origin` here: directories, files with mode and times, links as they are."""
        self.origin = origin
        _copy(origin, self.root)

    def record(self) -> None:
        """What is here now is the base. Returns when a change of this very moment would show."""
        self.stamps = {}
        self.directories = set()
        self.name_room = 1 << 62
        newest = 0
        for path, info in self._walk(lambda *_: None):
            self.stamps[path] = (info.st_ino, info.st_ctime_ns)
            newest = max(newest, info.st_ctime_ns)
            while (path := path.rpartition(b"/")[0]) and path not in self.directories:
                self.directories.add(path)
        while clock_gettime_ns(COARSE_CLOCK) <= newest:
            sleep(0.001)

    def changes(self) -> list[bytes]:
        """(path, kind, detail) of everything that may differ: kind l (link, its target), 755 or 644 (file, its size),
        x (gone), ! (cannot be carried, the reason)."""
        found: list[bytes] = []
        notes = 0

        def note(path: bytes, why: str) -> None:
            nonlocal notes
            notes += 1
            if notes <= MAX_NOTES:
                found.extend((path, b"!", why.encode(errors="surrogateescape")))

        seen = set()
        self.name_room = MAX_NAME_BYTES
        for path, info in self._walk(note):
            if not (stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)):
                note(path, "not a file, directory or symlink")
                continue
            if path in self.stamps:
                seen.add(path)
                if self.stamps[path] == (info.st_ino, info.st_ctime_ns) and self._same(path, info):
                    continue
            if stat.S_ISLNK(info.st_mode):
                try:
                    with Directory(self.root, path) as (parent, name):
                        found += [path, b"l", os.readlink(name, dir_fd=parent)]
                except OSError as error:  # a command swapped it meanwhile
                    note(path, str(error))
            else:
                found += [path, b"755" if info.st_mode & 0o100 else b"644", b"%d" % info.st_size]
        for path in self.stamps.keys() - seen:
            found += [path, b"x", b""]
        return found

    def _same(self, path: bytes, info: os.stat_result) -> bool:
        """Whether a file still holds what the original holds (False too where there is no original)."""
        if not stat.S_ISREG(info.st_mode):
            return True
        handles: list[int] = []
        try:
            for top in (self.root, self.origin):
                handles.append(os.open(top + b"/" + path, FILE))
            while (here := os.read(handles[0], 1 << 20)) == os.read(handles[1], 1 << 20):
                if not here:
                    return True
        except OSError:
            pass
        finally:
            for handle in handles:
                os.close(handle)
        return False

    def fetch(self, path: bytes, offset: int, length: int) -> bytes:
        with Directory(self.root, path) as (parent, name):
            fd = open_anyway(name, FILE, parent)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(22, "not a regular file any more")
                return os.pread(fd, length, offset)
            finally:
                os.close(fd)

    def _walk(self, note):
        """(path, lstat) of everything but directories."""
        stack = [(b"", 0)]
        while stack:
            path, depth = stack.pop()
            try:
                with Directory(self.root, path + b"/.") as (fd, _), os.scandir(fd) as entries:
                    listed = list(_stats(entries))
            except OSError as error:
                note(path, str(error))
                continue
            for name, info in listed:
                here = path + b"/" + name if path else name
                if here not in self.stamps and here not in self.directories:
                    self.name_room -= len(here)
                    if self.name_room < 0:
                        if self.name_room + len(here) >= 0:
                            note(path, "and others: too many names for a patch")
                        continue
                if not stat.S_ISDIR(info.st_mode):
                    yield here, info
                elif depth >= MAX_DEPTH - 1:
                    note(here, "too deep for a patch")
                else:
                    stack.append((here, depth + 1))


def _stats(entries):
    """(name, lstat) of what is still there: a file that vanishes meanwhile must not hide its neighbours."""
    for entry in entries:
        try:
            yield os.fsencode(entry.name), entry.stat(follow_symlinks=False)
        except OSError:
            continue


class Directory:
    """Opens the directory that holds `path`, step by step, never through a link: (descriptor, last name)."""

    def __init__(self, root: bytes, path: bytes) -> None:
        *self.parents, self.name = path.lstrip(b"/").split(b"/")
        self.fd = os.open(root, DIRECTORY)

    def __enter__(self) -> tuple[int, bytes]:
        try:
            for part in self.parents:
                deeper = open_anyway(part, DIRECTORY, self.fd)
                os.close(self.fd)
                self.fd = deeper
        except BaseException:
            os.close(self.fd)
            raise
        return self.fd, self.name

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def open_anyway(name: bytes, flags: int, parent) -> int:
    """Open even what a command (this very user) made unreadable or unsearchable."""
    handle = -1
    try:
        fd = os.open(name, flags, dir_fd=parent)
        if not flags & os.O_DIRECTORY or os.fstat(fd).st_mode & 0o500 == 0o500:
            return fd
        handle = fd
    except PermissionError:
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISLNK(mode):
            raise OSError(40, "a link")
        link = f"/proc/self/fd/{handle}"
        os.chmod(link, stat.S_IMODE(mode) | 0o700)
        return os.open(link, flags & ~os.O_NOFOLLOW)
    finally:
        os.close(handle)


def _copy(origin: bytes, target: bytes) -> None:
    with os.scandir(origin) as entries:
        for entry in entries:
            here, there = origin + b"/" + entry.name, target + b"/" + entry.name
            if entry.is_symlink():
                os.symlink(os.readlink(here), there)
            elif entry.is_dir():
                os.mkdir(there, 0o755)
                _copy(here, there)
            elif entry.is_file():
                _copy_file(here, there)


def _copy_file(here: bytes, there: bytes) -> None:
    source = os.open(here, os.O_RDONLY | os.O_CLOEXEC)
    try:
        info = os.fstat(source)
        target = os.open(there, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            at = 0
            while at < info.st_size and (sent := os.sendfile(target, source, at, info.st_size - at)):
                at += sent
            if info.st_mode & 0o100:
                os.fchmod(target, 0o755)
            os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
        finally:
            os.close(target)
    finally:
        os.close(source)
