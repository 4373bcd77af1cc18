"""One small file per live box, so that what a crashed owner left can be found by label and removed.

A box normally ends with its owner (its socket closes). This is for the rest: boxes stuck in the kernel, and cgroups.
A record counts as an orphan only if its owner is gone: process id and start time both have to differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

from swe_lightning import paths
from swe_lightning.sandbox import cgroups


def _directory() -> Path:
    place = paths.home() / "boxes"
    place.mkdir(exist_ok=True)
    return place


def start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot; "" if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    after_name = text.rpartition(")")[2].split()
    return "" if after_name[0] in "ZX" else after_name[19]


def remember(name: str, label: str, pidfd: int, groups: list[Path]) -> None:
    pid = _pid_of(pidfd)
    record = {
        "label": label,
        "owner": [os.getpid(), start_time(os.getpid())],
        "box": [pid, start_time(pid)],
        "groups": [str(g) for g in groups],
    }
    (_directory() / f"{name}.json").write_text(json.dumps(record))


def forget(name: str) -> None:
    (_directory() / f"{name}.json").unlink(missing_ok=True)


def collect(label: str | None) -> int:
    """Kill and clean up after dead owners; returns how many boxes were removed."""
    removed = 0
    cgroups.sweep()
    for path in _directory().glob("*.json"):
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        owner, started = record["owner"]
        if start_time(owner) == started or (label is not None and record["label"] != label):
            continue
        box, box_started = record["box"]
        if box > 0 and box_started and start_time(box) == box_started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(box, signal.SIGKILL)
        if cgroups.remove([Path(g) for g in record["groups"]]):
            path.unlink(missing_ok=True)
            removed += 1
    return removed


def _pid_of(pidfd: int) -> int:
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    return -1
