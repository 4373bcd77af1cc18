"""Where swel keeps what runs share: exported trees, test environments, downloads. One variable: SWEL_HOME."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """`$SWEL_HOME`, else `$XDG_CACHE_HOME/swe-lightning`, else `~/.cache/swe-lightning`; created on demand."""
    explicit = os.environ.get("SWEL_HOME")
    base = Path(explicit) if explicit else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "swe-lightning"
    path = base.expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path
