"""When an image was last needed here, and which ones we pulled: what pruning goes by. One small file per image."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from swe_lightning import paths


def _file(image_id: str) -> Path:
    place = paths.home() / "image-use"
    place.mkdir(exist_ok=True)
    return place / f"{image_id.removeprefix('sha256:')[:32]}.json"


def used(image_id: str, pulled_as: str = "") -> None:
    """Now. `pulled_as`: we pulled it under this name, so we may remove it again."""
    file = _file(image_id)
    names = set(pulled(image_id)) | ({pulled_as} if pulled_as else set())
    temporary = file.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}")
    temporary.write_text(json.dumps(sorted(names)))
    temporary.rename(file)


def last_use(image_id: str) -> float:
    """Seconds since the epoch; 0 = never seen."""
    try:
        return _file(image_id).stat().st_mtime
    except OSError:
        return 0.0


def pulled(image_id: str) -> list[str]:
    """Names under which we pulled it."""
    try:
        return list(json.loads(_file(image_id).read_text()))
    except (OSError, ValueError):
        return []


def forget(image_id: str) -> None:
    _file(image_id).unlink(missing_ok=True)
