"""Whole rows on disk, a few columns of each in memory: what lets 60,000 rows be filtered in little memory.

A row of a plain .jsonl file stays where it is, and only its place is kept; rows of other inputs that survived the rules
are written to an unnamed temporary file. `line` gives the bytes for the result: as published where nothing had to be
normalised. The input may not change in between; a row that is no longer the one that was read is an error.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from data_pipeline.files import Source
from data_pipeline.sources import distinct, normalise
from swe_lightning.errors import DataError
from swe_lightning.paths import home

COLUMNS = ("instance_id", "repo", "package", "role", "image_name", "repo_path", "strategy")
"""Kept in memory where a row has them, beside `tests`, `issue_chars`, `ref` and what a rule said."""


class Ref(NamedTuple):
    """Where a row lies. `source` is the input's number, -1 for the temporary file; `changed`: normalised when read."""

    source: int
    offset: int
    size: int
    changed: bool


class RowStore:
    """Use as a context manager; the temporary file has no name, so nothing is left behind however the process ends."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._files: dict[int, int] = {}
        self._spool: Any = None
        self._exit = ExitStack()

    def __enter__(self) -> RowStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def keep(self, row: Mapping[str, Any]) -> Ref:
        """Write a normalised row to the temporary file."""
        if self._spool is None:
            self._spool = self._exit.enter_context(tempfile.TemporaryFile(dir=home()))  # noqa: SIM115
        data = encode(row)
        offset = self._spool.tell()
        self._spool.write(data)
        return Ref(-1, offset, len(data), False)

    def row(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The whole row, normalised."""
        ref: Ref = facts["ref"]
        row = self._parse(self._read(ref), facts)
        if ref.changed:
            normalise(row, self._sources[ref.source].folder)
            distinct(row)
        return row

    def line(self, facts: Mapping[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> bytes:
        """The row as a line of JSON; `change` rewrites it on the way out."""
        ref: Ref = facts["ref"]
        if ref.changed or change is not None:
            row = self.row(facts)
            return encode(change(row) if change is not None else row)
        data = self._read(ref)
        if facts["instance_id"].encode() not in data:
            self._parse(data, facts)
        return data if data.endswith(b"\n") else data + b"\n"

    def _read(self, ref: Ref) -> bytes:
        if ref.source == -1:
            self._spool.flush()
        elif ref.source not in self._files:
            file = self._sources[ref.source].file
            assert file is not None
            stream = self._exit.enter_context(file.open("rb", buffering=0))
            self._files[ref.source] = stream.fileno()
        return os.pread(self._spool.fileno() if ref.source == -1 else self._files[ref.source], ref.size, ref.offset)

    def _parse(self, data: bytes, facts: Mapping[str, Any]) -> dict[str, Any]:
        try:
            row = orjson.loads(data)
            if row["instance_id"] == facts["instance_id"]:
                return row
        except (ValueError, TypeError, KeyError):
            pass
        source: Source = self._sources[facts["ref"].source]
        raise DataError(f"{source.name} changed while it was read; run the command again")


def encode(row: Mapping[str, Any]) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS) + b"\n"


def file_size(file: Path | None) -> int:
    return file.stat().st_size if file is not None else 0
