"""Can this machine run local boxes, and do they hold? One sentence when it cannot; a table of attempts when it can."""

from __future__ import annotations

import contextlib
from pathlib import Path


def why_no_namespaces(detail: str) -> str:
    """One sentence for a machine that forbids user namespaces, with the setting to change where it is known."""
    settings = {
        "/proc/sys/user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    }
    for path, (bad, cure) in settings.items():
        with contextlib.suppress(OSError):
            if Path(path).read_text().strip() == bad:
                return f"local sandboxes need user namespaces, which this machine forbids: allow them with `{cure}`"
    return (
        f"local sandboxes need user and mount namespaces, which this machine forbids ({detail}); "
        "in a container, start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    )
