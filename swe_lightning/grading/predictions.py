"""SWE-bench predictions files: JSON lines, a JSON list, or a JSON object by instance id -> the patch of each task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swe_lightning.errors import DataError


def read_predictions(path: Path) -> dict[str, bytes]:
    """Instance id -> patch, bytes as they are in the file; of several for one task the last counts."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read predictions {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a predictions file: it is not UTF-8 text (byte {error.start})") from error
    try:
        data = json.loads(text)
        items = [data] if isinstance(data, dict) and "instance_id" in data else data
        rows = [_named(i, row) for i, row in items.items()] if isinstance(items, dict) else items
    except json.JSONDecodeError:
        rows = [_json_line(path, n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if rows == []:
        raise DataError(f"{path} holds no predictions")
    try:
        return {row["instance_id"]: encode(row.get("model_patch") or "") for row in rows}
    except (TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is not a predictions file: every row needs instance_id and model_patch") from error


def _named(instance_id: str, row: Any) -> dict[str, Any]:
    """One entry of an object by instance id: a row, which need not repeat the id, or the patch itself."""
    return {"instance_id": instance_id, **(row if isinstance(row, dict) else {"model_patch": row})}


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _json_line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path} line {number} is not JSON: {error.msg}") from error
