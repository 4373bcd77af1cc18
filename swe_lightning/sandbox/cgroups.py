"""Limits for a whole box: memory, processes, CPU. Works with cgroup v1 and v2, where this user may create groups.

The memory limit counts the box's files too (they live in a tmpfs), so it is memory_mb + disk_mb: filling the disk
cannot get the command server killed. Where no group can be made, per-process limits and the command server's own
watch remain; `available()` says which.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from pathlib import Path

from swe_lightning.sandbox.base import Limits

PARENT = "swe-lightning"
CPU_PERIOD_US = 100_000
CONTROLLERS = ("memory", "pids", "cpu")


def mounts(mountinfo: str) -> tuple[Path | None, dict[str, Path]]:
    """(v2 mount that has the controllers, v1 controller -> mount), from the text of /proc/self/mountinfo.

    A hybrid machine mounts both; its v2 hierarchy has no memory controller and is of no use here.
    """
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        where = Path(left.split(" ")[4])
        if kind == "cgroup2" and "memory" in _read(where / "cgroup.controllers").split():
            v2 = where
        elif kind == "cgroup":
            for controller in set(options.split(",")) & set(CONTROLLERS):
                v1[controller] = where
    return v2, v1


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@functools.cache
def _parents(uid: int) -> tuple[Path, ...]:
    """Directories in which groups for boxes can be made; empty if there are none."""
    v2, v1 = mounts(_read(Path("/proc/self/mountinfo")))
    try:
        return (delegate(v2),) if v2 is not None else v1_parents(v1)
    except OSError:  # not ours to change, or its processes are in the way: per-process limits remain
        return ()


def delegate(v2: Path) -> Path:
    """Our directory in a v2 hierarchy, with those controllers handed down that the machine has."""
    wanted = [c for c in CONTROLLERS if c in _read(v2 / "cgroup.controllers").split()]
    missing = [c for c in wanted if c not in _read(v2 / "cgroup.subtree_control").split()]
    enable = " ".join("+" + c for c in missing)
    if enable:
        (v2 / "cgroup.subtree_control").write_text(enable)
    parent = v2 / PARENT
    parent.mkdir(exist_ok=True)
    (parent / "cgroup.subtree_control").write_text(" ".join("+" + c for c in wanted))
    _set(parent, "cpu.weight", 10_000)
    return parent


def v1_parents(v1: dict[str, Path]) -> tuple[Path, ...]:
    """Our directory in each v1 hierarchy; () where memory cannot be limited."""
    found: list[Path] = []
    for controller in CONTROLLERS:
        if controller in v1 and v1[controller] / PARENT not in found:
            (v1[controller] / PARENT).mkdir(exist_ok=True)
            found.append(v1[controller] / PARENT)
            _set(found[-1], "cpu.shares", 102_400)  # else all boxes together weigh as much as one process
    return tuple(found) if "memory" in v1 and os.access(v1["memory"] / PARENT, os.W_OK) else ()


def available() -> bool:
    return bool(_parents(os.geteuid()))


def create(name: str, limits: Limits) -> list[Path]:
    """Groups for one box (one under v2, one per controller under v1); [] where none can be made."""
    made = []
    for parent in _parents(os.geteuid()):
        group = parent / name
        try:
            group.mkdir()
            made.append(group)
        except OSError:
            continue
        for file, value in settings(limits).items():
            _set(group, file, value)
    return made


def settings(limits: Limits) -> dict[str, int | str]:
    """File -> value, of both versions: each group has the files of its own."""
    memory = (limits.memory_mb + limits.disk_mb) << 20
    return {
        "memory.max": memory,
        "memory.swap.max": 0,
        "memory.oom.group": 0,
        "memory.limit_in_bytes": memory,
        "memory.memsw.limit_in_bytes": memory,
        "pids.max": limits.pids + 4,
        "cpu.max": f"{int(limits.cpu * CPU_PERIOD_US)} {CPU_PERIOD_US}",
        "cpu.cfs_quota_us": int(limits.cpu * CPU_PERIOD_US),
    }


def _set(group: Path, file: str, value: int | str) -> None:
    """Each cgroup version has its own half of these files; one that is absent is not missed."""
    with contextlib.suppress(OSError):
        fd = os.open(group / file, os.O_WRONLY)
        try:
            os.write(fd, str(value).encode())
        finally:
            os.close(fd)


def join_file(group: Path) -> Path:
    """Where a process writes "0" to join. In v1 the thread file: it spares the kernel a wait of some milliseconds."""
    tasks = group / "tasks"
    return tasks if tasks.exists() else group / "cgroup.procs"


def remove(groups: list[Path], patience_s: float = 1.0) -> bool:
    """Remove empty groups; the kernel may need a moment after the last process ended."""
    until = time.monotonic() + patience_s
    while groups:
        left = []
        for group in groups:
            try:
                group.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                left.append(group)
        groups = left
        if groups:
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
    return True


def sweep() -> None:
    """Remove empty groups of owners that are gone, whatever home their records were in. Groups in use refuse it."""
    for parent in _parents(os.geteuid()):
        for group in parent.iterdir():
            owner = group.name.partition("-")[0]
            with contextlib.suppress(OSError):
                if owner.isdigit() and not Path("/proc", owner).exists() and time.time() - group.stat().st_mtime > 60:
                    group.rmdir()
