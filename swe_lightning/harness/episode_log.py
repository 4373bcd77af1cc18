"""An episode on disk, step by step: one JSON line per message, one write per step.

Line 1 is a header (mini-SWE-agent version, configuration and its hash), the last line says how the episode ended.
A process killed at step n leaves n readable steps. The log is for people; the gateway's record is the truth.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson

RAW_OUTPUT_CHARS = 20_000


class EpisodeLog:
    """Appends the messages of one agent as they appear. Without a file it does nothing."""

    def __init__(self, file: Path | None) -> None:
        self._fd: int | None = None
        self._messages: list[dict[str, Any]] = []
        self._written = 0
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def header(self, **fields: Any) -> None:
        self._write(_line({"type": "header", **fields}))

    def follow(self, messages: list[dict[str, Any]]) -> None:
        """From now on this is the list whose messages are written."""
        self._messages = messages

    def flush(self) -> None:
        """Write the messages that are new since the last call."""
        if self._fd is None:
            return
        new = self._messages[self._written :]
        self._written += len(new)
        if new:
            self._write(b"".join(_line({"type": "message", **_shortened(m)}) for m in new))

    def end(self, **fields: Any) -> None:
        """Write what is left and the last line, and close. Idempotent."""
        if self._fd is None:
            return
        self.flush()
        self._write(_line({"type": "end", **fields}))
        os.close(self._fd)
        self._fd = None

    def _write(self, data: bytes) -> None:
        if self._fd is not None:
            os.write(self._fd, data)


def read_trajectory(file: Path) -> dict[str, Any]:
    """The log in mini-SWE-agent's own trajectory layout (`mini-swe-agent-1.1`). A torn last line is left out."""
    header: dict[str, Any] = {}
    end: dict[str, Any] = {}
    messages: list[dict[str, Any]] = []
    for line in file.read_bytes().split(b"\n"):
        if not line:
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            break
        kind = record.pop("type")
        if kind == "message":
            messages.append(record)
        else:
            (header if kind == "header" else end).update(record)
    info = {
        "exit_status": end.get("exit_status", ""),
        "submission": "",
        "mini_version": header.get("mini_version", ""),
        "model_stats": {"instance_cost": 0.0, "api_calls": sum(m["role"] == "assistant" for m in messages)},
        "config": {"agent": header.get("harness", {}), "hash": header.get("harness_hash", "")},
    }
    return {"trajectory_format": "mini-swe-agent-1.1", "info": info, "messages": messages, "end": end}


def _shortened(message: dict[str, Any]) -> dict[str, Any]:
    raw = message.get("extra", {}).get("raw_output")
    if raw is None or len(raw) <= RAW_OUTPUT_CHARS:
        return message
    return {**message, "extra": {**message["extra"], "raw_output": raw[:RAW_OUTPUT_CHARS], "raw_output_cut": len(raw)}}


def _line(record: dict[str, Any]) -> bytes:
    return orjson.dumps(record, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE)
