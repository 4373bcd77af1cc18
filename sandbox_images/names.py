"""From what a user names (images, task files) to the images that are needed, and back into the task file as digests."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swe_lightning.errors import DataError, SandboxStartError, UserError
from swe_lightning.records import Task
from swe_lightning.sandbox.docker_engine import find_image
from swe_lightning.sandbox.image_names import DIGEST_COLUMN, parse, task_image

if TYPE_CHECKING:
    import docker


def needed(names: Sequence[str]) -> dict[str, list[Task]]:
    """Image -> the tasks that need it (none for an image named directly)."""
    from data_pipeline.sources import load_tasks

    found: dict[str, list[Task]] = {}
    for name in names:
        if not (name.endswith((".jsonl", ".json", ".parquet")) or Path(name).is_file()):
            parse(name)
            found.setdefault(name, [])
            continue
        for task in load_tasks(Path(name)):
            if image := task_image(task):
                found.setdefault(image, []).append(task)
    if not found:
        raise UserError(f"no task of {', '.join(names)} names an image")
    return found


def presence(client: docker.APIClient, wanted: dict[str, list[Task]]) -> list[dict[str, Any]]:
    rows = []
    for image, tasks in wanted.items():
        try:
            image_id = find_image(client, image)["Id"]
        except SandboxStartError:
            image_id = ""
        rows.append({"image": image, "tasks": len(tasks), "here": bool(image_id), "id": image_id})
    return rows


def task_file(names: Sequence[str]) -> Path:
    """The one task file whose rows get digests."""
    if len(names) != 1 or not Path(names[0]).is_file() or not names[0].endswith(".jsonl"):
        raise UserError("--pin writes one task file again: give exactly one .jsonl file")
    return Path(names[0])


def pin_digests(source: Path, digests: dict[str, str], target: Path) -> None:
    """Rows of `source` with the digest column, whole or not at all. A digest that is there stays."""
    lines = []
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        row = json.loads(line)
        if not isinstance(row, dict):
            raise DataError(f"{source}:{number} is not an object")
        image = task_image(Task.model_validate(row))
        if image in digests:
            row.setdefault(DIGEST_COLUMN, digests[image])
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text("".join(lines), encoding="utf-8")
    temporary.rename(target)
