"""The gateway's log: one JSON object a line, in RUN/logs/gateway.jsonl, rotated; the same lines as text on stderr.

At level info a line says what happened to which rollout, call or model server, never what was said: no prompt, no
answer, no token. The words of a model server may quote a prompt, so they go into the store (for whoever holds the
control token) and appear here only at level debug.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
import time
from pathlib import Path
from typing import Any

from swe_lightning.gateway.jsonio import dumps

ROTATE_BYTES, KEPT_FILES = 20 * 2**20, 5
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """time, level, logger, message, then whatever was given as `extra`, then the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        try:
            return dumps(line).decode()
        except (TypeError, ValueError):
            return dumps({k: str(v) for k, v in line.items()}).decode()


class Text(logging.Formatter):
    """The same for a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return " ".join([super().formatMessage(record), *(f"{k}={v}" for k, v in _extras(record).items())])


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in vars(record).items() if k not in _STANDARD}


def configure(file: Path, *, level: str = "info") -> None:
    """Send the root logger to `file` and to stderr. Libraries speak only from warning on."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rotating = logging.handlers.RotatingFileHandler(file, maxBytes=ROTATE_BYTES, backupCount=KEPT_FILES)
    rotating.setFormatter(JsonLines())
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setFormatter(Text())
    logging.basicConfig(level=logging.WARNING, handlers=[rotating, terminal], force=True)
    logging.getLogger("swel").setLevel(level.upper())
