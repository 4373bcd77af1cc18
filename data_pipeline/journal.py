"""An append-only JSONL file of outcomes that cost something to get: one line each, written when it arrives.

A crash may tear the last line; it is cut off before anything is appended, and that outcome is simply got again. What
was appended survives a kill of the process (a crash of the machine may take the last seconds).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from swe_lightning.errors import DataError


class Journal:
    """Open for appending, by one process; safe for several threads. The file is made by the first line."""

    def __init__(self, file: Path) -> None:
        self._lock, self._file = threading.Lock(), file
        self._stream: BinaryIO | None = None
        if file.exists():
            drop_torn_line(file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def append(self, record: Mapping[str, Any]) -> None:
        data = json.dumps(record).encode() + b"\n"
        with self._lock:
            if self._stream is None:
                self._stream = cast(BinaryIO, self._file.open("ab", buffering=0))
            self._stream.write(data)

    @staticmethod
    def read(file: Path) -> Iterator[tuple[int, Any]]:
        """(line number, record) of each whole line; nothing if there is no such file. DataError for a bad line."""
        if not file.exists():
            return
        try:
            *lines, torn = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {file}: {error}") from error
        for number, line in enumerate([*lines, torn], 1):
            try:
                if line.strip():
                    yield number, json.loads(line)
            except ValueError as error:
                if number > len(lines):
                    return
                raise DataError(f"{file}:{number}: not valid JSON ({error})") from error


def drop_torn_line(file: Path) -> None:
    data = file.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with file.open("r+b") as stream:
            stream.truncate(whole)
