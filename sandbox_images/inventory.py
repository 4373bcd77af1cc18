"""What of ours lies on this machine, what it takes, and what goes first when the disk budget is exceeded.

One unit is one task image with all that was made of it: its hardened images and its checkout. The unit that was needed
least recently goes first; a unit with a running container stays, and so does an image that somebody else put here.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swe_lightning import paths
from swe_lightning.sandbox import image_usage as usage
from swe_lightning.sandbox.hardening import LABELS

if TYPE_CHECKING:
    import docker


@dataclass
class Unit:
    image_id: str
    """Of the task's image: what was pulled or hardened."""
    names: list[str] = field(default_factory=list)
    """All it goes by here: two registries, or two spellings, of one image are one unit."""
    hardened: list[str] = field(default_factory=list)
    pulled: bool = False
    bytes: int = 0
    """Of the largest image (hardened ones contain their source) and the checkout."""
    last_use: float = 0.0
    running: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def units(client: docker.APIClient) -> list[Unit]:
    """Least recently needed first."""
    images = {image["Id"]: image for image in client.images()}
    found: dict[str, Unit] = {}
    for image_id, image in images.items():
        if usage.pulled(image_id):
            unit = found.setdefault(image_id, Unit(image_id))
            unit.pulled, unit.bytes = True, max(unit.bytes, image["Size"])
        labels = image.get("Labels") or {}
        source_id = labels.get(LABELS["id"])
        if source_id:
            unit = found.setdefault(source_id, Unit(source_id))
            unit.names.append(labels[LABELS["source"]])
            unit.hardened += [tag for tag in image.get("RepoTags") or [] if tag != "<none>:<none>"] or [image_id]
            unit.bytes = max(unit.bytes, image["Size"])
            unit.last_use = max(unit.last_use, usage.last_use(image_id), float(image["Created"]))
    running = {container["ImageID"] for container in client.containers()}
    for unit in found.values():
        tags = images.get(unit.image_id, {}).get("RepoTags") or []
        unit.names = sorted({*unit.names, *usage.pulled(unit.image_id), *tags} - {"<none>:<none>"})
        unit.last_use = max(unit.last_use, usage.last_use(unit.image_id))
        unit.bytes += _size(_checkout(unit.image_id))
        ids = {unit.image_id} | {i for i, im in images.items() if set(im.get("RepoTags") or []) & set(unit.hardened)}
        unit.running = bool(ids & running)
    return sorted(found.values(), key=lambda unit: unit.last_use)


def prune(client: docker.APIClient, budget_bytes: int, *, dry_run: bool = False) -> list[Unit]:
    """Remove units until what is left fits; returns what was (or would be) removed."""
    known = units(client)
    total = sum(unit.bytes for unit in known)
    removed = []
    for unit in known:
        if total <= budget_bytes:
            break
        if unit.running:
            continue
        if not dry_run:
            remove(client, unit)
        total -= unit.bytes
        removed.append(unit)
    return removed


def remove(client: docker.APIClient, unit: Unit) -> None:
    """Its hardened images, its checkout, and the image itself if we pulled it, under the names we pulled it by."""
    import docker.errors

    for name in [*unit.hardened, *(usage.pulled(unit.image_id) if unit.pulled else [])]:
        with contextlib.suppress(docker.errors.NotFound):
            client.remove_image(name)
    if unit.pulled:
        with contextlib.suppress(docker.errors.APIError):  # other names of it are not ours
            client.remove_image(unit.image_id)
    shutil.rmtree(_checkout(unit.image_id), ignore_errors=True)
    usage.forget(unit.image_id)


def _checkout(image_id: str) -> Path:
    return paths.home() / "checkouts" / image_id.removeprefix("sha256:")[:16]


def _size(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.rglob("*")) if directory.is_dir() else 0
