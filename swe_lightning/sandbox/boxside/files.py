"""Read and write files of the box for the trusted side. Links are replaced or refused, never followed on a write."""

import os


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
    parent = os.path.dirname(path)
    if parent and not os.path.isdir(parent):
        _make_parents(parent)
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
            os.chmod(path, 0o700)
            for name in os.listdir(path):
                _remove(path + b"/" + name)
            os.rmdir(path)
        else:
            os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        pass


def _make_parents(path: bytes) -> None:
    """Directories down to `path`; a file or a dangling link in the way is replaced."""
    done = b""
    for part in path.split(b"/"):
        done = done + b"/" + part if done else part
        if not os.path.isdir(done):
            _remove(done)
            os.mkdir(done, 0o755)
