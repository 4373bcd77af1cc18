"""Read and write files of the box for the trusted side. Links are replaced or refused, never followed on a write.

What lies in the way may be a command's work, of any depth: nothing here recurses or spells a path to its end.
"""

import os

MAX_PASSES = 200_000


def read(path: bytes, limit: int) -> bytes:
    """A regular file of at most `limit` bytes."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_mode & 0o170000 != 0o100000:
            raise OSError(22, "not a regular file")
        data = bytearray()
        while part := os.read(fd, 1 << 20):
            data += part
            if len(data) > limit:
                raise OSError(27, "file too large")
    finally:
        os.close(fd)
    return bytes(data)


def write(path: bytes, mode: bytes, data: bytes) -> None:
    """Put `data` at `path`, replacing what lies there. Mode: octal digits, l = symlink to `data`, x = only remove."""
    _remove(path)
    if mode == b"x":
        return
    _make_parents(os.path.dirname(path))
    if mode == b"l":
        os.symlink(data, path)
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fchmod(fd, int(mode, 8))
    finally:
        os.close(fd)


def _remove(path: bytes) -> None:
    """Whatever lies at `path`, without following links."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            _empty(path)
            os.rmdir(path)
        else:
            os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        pass


def _empty(path: bytes) -> None:
    """Everything below a directory. What its directories hold is moved up into it first: each name once, no depth."""
    from .tree import DIRECTORY, open_anyway

    top, number = open_anyway(path, DIRECTORY, None), 0
    try:
        os.fchmod(top, 0o700)
        for _ in range(MAX_PASSES):
            names = os.listdir(top)
            if not names:
                return
            for name in names:
                try:
                    os.unlink(name, dir_fd=top)
                    continue
                except IsADirectoryError:
                    pass
                below = open_anyway(os.fsencode(name), DIRECTORY, top)
                try:
                    os.fchmod(below, 0o700)
                    for deeper in os.listdir(below):
                        number += 1
                        _move_up(os.fsencode(deeper), below, b".%d.%d" % (os.getpid(), number), top)
                finally:
                    os.close(below)
                try:
                    os.rmdir(name, dir_fd=top)
                except OSError as error:
                    if error.errno != 39:
                        raise
        raise OSError(39, "it fills up as fast as it is emptied")
    finally:
        os.close(top)


def _move_up(name: bytes, below: int, new: bytes, top: int) -> None:
    from .tree import DIRECTORY, open_anyway

    try:
        os.rename(name, new, src_dir_fd=below, dst_dir_fd=top)
    except PermissionError:  # a directory that may not be written to cannot change its parent
        handle = open_anyway(name, DIRECTORY, below)
        os.fchmod(handle, 0o700)
        os.close(handle)
        os.rename(name, new, src_dir_fd=below, dst_dir_fd=top)
    except OSError as error:
        if error.errno not in (17, 20, 21, 39):  # a name like this one is there: the next pass tries another
            raise


def _make_parents(path: bytes) -> None:
    """Directories down to `path`; a file or a link in the way is replaced."""
    done = b""
    for part in path.split(b"/") if path else ():
        done = done + b"/" + part if done else part
        if not os.path.isdir(done) or os.path.islink(done):
            _remove(done)
            os.mkdir(done, 0o755)
