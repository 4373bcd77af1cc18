"""One at a time per key, over threads and processes: what two workers both want is computed once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def once(directory: Path, key: str) -> Iterator[None]:
    """Hold the lock of `key` (hex). Keys share 4096 lock files, so unrelated ones may rarely wait for each other;
    never take two at once. The kernel drops the lock of a process that dies.
    """
    place = directory / "locks"
    place.mkdir(exist_ok=True)
    fd = os.open(place / key[:3], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
