"""A tree on its way into a pod: the messages that a pod's keeper lays it from (boxside/pod.py, `on_lay`).

A parent comes before what is in it, a link as a link. Each message holds a few megabytes, a large file comes in parts,
and what is neither directory, link nor regular file does not come at all.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

LAY_BYTES = 2 << 20


def batches(tree: Path) -> Iterator[list[bytes]]:
    """Fields (path, kind, time in ns, data) repeated, one list per message."""
    batch: list[bytes] = []
    size = 0
    root = os.fsencode(tree)
    for folder, names, files in os.walk(root):
        for name in [*names, *files]:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            relative = os.path.relpath(path, root)
            when = b"%d" % info.st_mtime_ns
            parts: Iterable[tuple[bytes, bytes]]
            if stat.S_ISDIR(info.st_mode):
                parts = [(b"d", b"")]
            elif stat.S_ISLNK(info.st_mode):
                parts = [(b"l", os.readlink(path))]
            elif stat.S_ISREG(info.st_mode):
                parts = _parts(path, b"755" if info.st_mode & 0o100 else b"644")
            else:
                continue
            for kind, data in parts:
                batch += [relative, kind, when, data]
                size += len(data) + 100
                if size > LAY_BYTES:
                    yield batch
                    batch, size = [], 0
    if batch:
        yield batch


def _parts(path: bytes, mode: bytes) -> Iterator[tuple[bytes, bytes]]:
    with open(path, "rb") as file:
        yield mode, file.read(LAY_BYTES)
        while data := file.read(LAY_BYTES):
            yield b"+", data
