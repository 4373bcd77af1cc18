"""Who owns what a daemon or a cluster keeps running, and whether that owner certainly ended."""

from __future__ import annotations

import os
from pathlib import Path

from swe_lightning.sandbox.registry import start_time


def owner_stamp() -> str:
    """Who owns a container: process id, its start time, and the namespace and boot they are valid in."""
    return f"{os.getpid()} {start_time(os.getpid())} {_namespace()}"


def owner_is_gone(stamp: str) -> bool:
    """Whether that owner certainly ended. One of another boot is; one of another namespace cannot be judged."""
    try:
        pid, started, boot, namespace = stamp.split(" ")
    except ValueError:
        return False
    here_boot, here_namespace = _namespace().split(" ")
    if boot != here_boot:
        return True
    return namespace == here_namespace and start_time(int(pid)) != started


def _namespace() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
