"""What a directory of made tasks remembers of its making: OUT/synth.json.

The same command finds its tasks made and does nothing; another one is refused unless told to overwrite; and tasks that
were made by other versions, damaged or taken away are made anew (from remembered test runs, so that is quick). Written
last: a directory that has one is whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from data_pipeline.dataset import TASK_FILE
from data_pipeline.outputs import file_digest, owned
from swe_lightning.errors import DataError
from swe_lightning.rundir import write_atomic

RECORD = "synth.json"
Asked = Mapping[str, Any]


def made_once(
    out: Path,
    asked: Asked,
    versions: Mapping[str, str],
    work: Callable[[], dict[str, Any]],
    *,
    overwrite: bool,
    anew: bool = False,
) -> dict[str, Any]:
    """`work`'s result, or what it gave before for the same `asked` and versions; `reused` says which.

    `overwrite`: whatever is there goes. `anew`: what is there is not enough, but another command's is still refused.
    """
    asked = json.loads(json.dumps(asked, default=str))
    before = _read(out / RECORD)
    if before is not None and not overwrite:
        changed = [key for key in {**before["asked"], **asked} if before["asked"].get(key) != asked.get(key)]
        if changed:
            raise DataError(
                f"{out} holds tasks made with other options ({', '.join(sorted(changed))}); "
                "choose another --out or give --overwrite"
            )
        if not anew and before["versions"] == versions and before["holds"] == _holds(out):
            return {**before["result"], "file": str(out / TASK_FILE), "reused": True}
    with owned(out):
        (out / RECORD).unlink(missing_ok=True)
        result = {**work(), "reused": False}
        record = {"asked": asked, "versions": dict(versions), "holds": _holds(out), "result": result}
        write_atomic(out / RECORD, json.dumps(record, indent=2))
    return result


def _read(file: Path) -> dict[str, Any] | None:
    """None if there is none, or none that can be read: then the tasks are made anew."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return record if {"asked", "versions", "holds", "result"} <= record.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _holds(out: Path) -> dict[str, str]:
    """Digests of the task file, and of the stream that each repository was built from."""
    task_file = out / TASK_FILE
    found = {TASK_FILE: file_digest(task_file)} if task_file.is_file() else {}
    marks = sorted(out.glob("repos/*.git/swel-digest"))
    return {**found, **{mark.parent.name: mark.read_text(encoding="utf-8") for mark in marks}}
