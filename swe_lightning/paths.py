"""Where swel keeps what runs share: exported trees, test environments, downloads. One variable: SWEL_HOME."""

from __future__ import annotations

import os
from pathlib import Path

from swe_lightning.errors import UserError


def home() -> Path:
    """`$SWEL_HOME`, else `$XDG_CACHE_HOME/swe-lightning`, else `~/.cache/swe-lightning`; created on demand."""
    explicit = os.environ.get("SWEL_HOME")
    base = Path(explicit) if explicit else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "swe-lightning"
    path = base.expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


def want_directory(path: Path, option: str) -> None:
    """UserError unless `path` is a directory one may write into, or can become one. Creates nothing."""
    for place in (path.absolute(), *path.absolute().parents):
        if place.is_dir():
            if not os.access(place, os.W_OK | os.X_OK):
                raise UserError(f"{place} cannot be written to; choose another directory for {option}")
            return
        if place.exists() or place.is_symlink():
            raise UserError(f"{place} is a file; {option} wants a directory, choose another place")
