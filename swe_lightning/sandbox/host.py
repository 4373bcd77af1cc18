"""What the machine allows local boxes: whose user they run as, where their stage lies, and why none can start."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

from swe_lightning import paths
from swe_lightning.errors import MissingPart, SandboxStartError

ROOT_BOX_UID = 1_879_048_192  # first id no distribution hands out


def start_error(said: str, *, permanent: bool = False) -> SandboxStartError | MissingPart:
    """bubblewrap's own words, unless they mean that this machine can start no box at all."""
    if "namespace" in said or "setting up uid map" in said:
        return MissingPart(why_no_namespaces(said))
    return SandboxStartError(f"cannot start a sandbox: {said}", permanent=permanent)


def why_no_namespaces(detail: str) -> str:
    """One sentence for a machine that forbids user namespaces, with the setting to change where it is known."""
    switches = {
        "/proc/sys/user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    }
    for path, (bad, cure) in switches.items():
        with contextlib.suppress(OSError):
            if Path(path).read_text().strip() == bad:
                return f"local sandboxes need user namespaces, which this machine forbids: allow them with `{cure}`"
    return (
        f"local sandboxes need user and mount namespaces, which this machine forbids ({detail}); "
        "in a container, start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    )


def kernel() -> tuple[int, int]:
    major, minor = re.findall(r"\d+", os.uname().release)[:2]
    return int(major), int(minor)


def unprivileged_uid() -> int | None:
    """As root: the host uid boxes run under. None: we are not root (of the host), the box runs as ourselves."""
    if os.geteuid() != 0:
        return None
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, _, count = map(int, line.split())
        if inside <= ROOT_BOX_UID < inside + count:
            return ROOT_BOX_UID
        if inside <= 65534 < inside + count:
            return 65534
    return None


def stage_directory(box_uid: int | None) -> Path:
    """An empty directory the launcher covers in its own namespace; the box's user must be able to reach it."""
    if box_uid is None:
        place = paths.home() / "stage"
        place.mkdir(exist_ok=True)
        return place
    for parent in ("/run", "/var/lib", "/var/tmp", "/tmp"):
        place = Path(parent) / "swe-lightning-stage"
        with contextlib.suppress(OSError):
            place.mkdir(mode=0o755, exist_ok=True)
            info = place.lstat()
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid():
                return place
    raise SandboxStartError("no directory for the sandbox stage: tried /run, /var/lib, /var/tmp and /tmp")
