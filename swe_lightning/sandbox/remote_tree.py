"""Trees that only their command server can reach (docker, Kubernetes): laid by it; changes listed, weighed, fetched.

The server is process 1 of the box and out of the commands' reach, so what it lists is true. What it lists is still
data of the agent: sizes are bounded here, before anything is fetched, by the same bounds as for local boxes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from swe_lightning.sandbox.base import ORIGINAL_ROOT, FileState, Limits, TreeDiff
from swe_lightning.sandbox.boxside.wire import fields_of, pack
from swe_lightning.sandbox.client import REPLY_GRACE_S, CommandClient, environment, pack_mapping, settings
from swe_lightning.sandbox.rootfs import BOX_ENV
from swe_lightning.sandbox.treediff import MAX_FILE_BYTES, MAX_NOTES, MAX_TOTAL_BYTES, BaseTree

BATCH_BYTES = 1 << 20
BATCH_FILES = 500
DIFF_TIMEOUT_S = 120.0
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
T = TypeVar("T")


def remote_diff(server: CommandClient, base: BaseTree) -> tuple[TreeDiff, list[str]]:
    """(changes, what was left out and why)."""
    listed = server.ask(pack(b"changes"), DIFF_TIMEOUT_S)
    found: TreeDiff = {}
    notes: list[str] = []
    wanted: list[tuple[bytes, int, int]] = []
    room = MAX_TOTAL_BYTES
    for at in range(0, len(listed), 3):
        path, kind, detail = listed[at : at + 3]
        name = os.fsdecode(path)
        if kind == b"!":
            notes.append(f"{name}: {detail.decode(errors='replace')}")
        elif kind == b"x":
            found[name] = None
        elif kind == b"l":
            found[name] = FileState(detail, 0o777, symlink=True)
        elif int(detail) > min(MAX_FILE_BYTES, room):
            notes.append(f"{name}: {int(detail)} bytes are too large for a patch")
        else:
            room -= int(detail)
            wanted.append((path, int(detail), int(kind, 8)))
    for batch in _batches(wanted):
        _fetch(server, batch, found, notes)
    changed = {name: state for name, state in found.items() if state != base.get(name)}
    return dict(sorted(changed.items())), notes[:MAX_NOTES]


def container_env(image_env: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Of every command: ours, over it what the image's own shell would set, over it what the caller gives."""
    ours = {k: v for k, v in BOX_ENV.items() if k not in ("PATH", "VIRTUAL_ENV")}
    return environment({**ours, "PATH": DEFAULT_PATH, **image_env}, env)


def prepare(
    server: CommandClient, env: Mapping[str, str], limits: Limits, files: TreeDiff, patience_s: float,
    filter_bytes: bytes, services: Callable[[], T], *, watch: bool = False, count_processes: bool = False,
) -> T:  # fmt: skip
    """A new container's server, which has said that it is there: tree, extra files, base, services, limits, filter.

    `services` is called before any limit holds; its result is returned.
    """
    server.ask(pack(b"lay", os.fsencode(ORIGINAL_ROOT)), patience_s)
    server.write(files)
    server.ask(pack(b"record"), patience_s)
    result = services()
    options = settings(limits, watch=watch, count_processes=count_processes)
    server.ask(pack(b"init", *options, pack_mapping(env)), patience_s)
    server.ask(pack(b"filter", filter_bytes), patience_s)
    return result


def _batches(wanted: list[tuple[bytes, int, int]]) -> list[list[tuple[bytes, int, int]]]:
    batches: list[list[tuple[bytes, int, int]]] = []
    size = 0
    for path, length, mode in wanted:
        if not batches or size + length > BATCH_BYTES or len(batches[-1]) >= BATCH_FILES:
            batches.append([])
            size = 0
        batches[-1].append((path, length, mode))
        size += length
    return batches


def _fetch(server: CommandClient, batch: list[tuple[bytes, int, int]], found: TreeDiff, notes: list[str]) -> None:
    """Files of one batch; a large one is a batch of its own and comes in parts."""
    contents = {path: bytearray() for path, _, _ in batch}
    offset, longest = 0, max(length for _, length, _ in batch)
    failed: dict[bytes, str] = {}
    while offset <= longest:
        reply = server.ask(
            pack(b"fetch", *(fields_of(p, b"%d" % offset, b"%d" % (BATCH_BYTES + 1)) for p, _, _ in batch)),
            REPLY_GRACE_S,
        )
        for (path, _, _), status, data in zip(batch, reply[::2], reply[1::2], strict=True):
            if status == b"+":
                contents[path] += data
            else:
                failed[path] = data.decode(errors="replace")
        offset += BATCH_BYTES + 1
    for path, length, mode in batch:
        name = os.fsdecode(path)
        if path in failed:
            notes.append(f"{name}: {failed[path]}")
        elif len(contents[path]) != length:
            notes.append(f"{name}: changed while it was read")
        else:
            found[name] = FileState(bytes(contents[path]), mode)


def survey(tree: Path) -> tuple[bool, int]:
    """(can anybody read it, MiB it takes in a tmpfs)."""
    blocks, readable = 0, True
    for folder, names, files in os.walk(tree):
        info = os.lstat(folder)
        readable &= info.st_mode & 0o5 == 0o5
        for name in files:
            info = os.lstat(os.path.join(folder, name))
            blocks += -(-info.st_size // 4096)
            readable &= stat.S_ISLNK(info.st_mode) or info.st_mode & 0o4 == 0o4
        blocks += len(names)
    return readable, (blocks * 4096 >> 20) + 1
