"""Whole rows on disk, a few columns of each in memory: what lets 60,000 rows be filtered in little memory.

A row of a plain .jsonl file stays where it is, and only its place is kept; rows of other inputs that survived the rules
are written to an unnamed temporary file. `line` gives the bytes for the result: as published where nothing had to be
normalised. The input may not change in between; a row that is no longer the one that was read is an error.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, BinaryIO, NamedTuple, cast

import orjson

from data_pipeline.files import Source, exact
from data_pipeline.sources import distinct, normalise
from swe_lightning.errors import DataError
from swe_lightning.paths import home

COLUMNS = ("instance_id", "repo", "package", "role", "image_name", "repo_path", "strategy")
"""Kept in memory where a row has them, beside `tests`, `issue_chars`, `ref` and what a rule said."""


class Ref(NamedTuple):
    """Where a row lies. `source`: the input's number, or below 0 a spool's; `changed`: normalised when read."""

    source: int
    offset: int
    size: int
    changed: bool


class Spool:
    """An unnamed temporary file of normalised rows. One process writes it, another may read it afterwards."""

    def __init__(self, number: int, stream: BinaryIO) -> None:
        self.number, self.stream = number, stream
        self._offset = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to a forked process: the open file went there with the fork."""
        return _inherited, (self.number, self.stream.fileno())

    @contextmanager
    def writing(self) -> Iterator[None]:
        yield
        self.stream.flush()

    def keep(self, row: Mapping[str, Any]) -> Ref:
        data = encode(row)
        ref = Ref(self.number, self._offset, len(data), False)
        self.stream.write(data)
        self._offset += len(data)
        return ref


def _inherited(number: int, descriptor: int) -> Spool:
    return Spool(number, os.fdopen(os.dup(descriptor), "wb", buffering=1 << 20))


class RowStore:
    """Use as a context manager; the temporary file has no name, so nothing is left behind however the process ends."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._files: dict[int, int] = {}
        self._spools: list[Spool] = []
        self._own: Spool | None = None
        self._exit = ExitStack()

    def __enter__(self) -> RowStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def new_spool(self) -> Spool:
        stream = self._exit.enter_context(tempfile.TemporaryFile(dir=home(), buffering=1 << 20))  # noqa: SIM115
        self._spools.append(Spool(-1 - len(self._spools), cast(BinaryIO, stream)))
        return self._spools[-1]

    def keep(self, row: Mapping[str, Any]) -> Ref:
        """Write a normalised row to a temporary file."""
        self._own = self._own or self.new_spool()
        return self._own.keep(row)

    def row(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The whole row, normalised."""
        return self._row(facts, orjson.loads)

    def _row(self, facts: Mapping[str, Any], parse: Callable[[bytes], Any]) -> dict[str, Any]:
        ref: Ref = facts["ref"]
        row = self._parse(self._read(ref), facts, parse)
        if ref.changed:
            normalise(row, self._sources[ref.source].folder)
            distinct(row)
        return row

    def line(self, facts: Mapping[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> bytes:
        """The row as a line of JSON; `change` rewrites it on the way out."""
        ref: Ref = facts["ref"]
        if ref.changed or change is not None:
            row = self._row(facts, exact)
            return encode(change(row) if change is not None else row)
        data = self._read(ref)
        if facts["instance_id"].encode() not in data:
            self._parse(data, facts, orjson.loads)
        return data if data.endswith(b"\n") else data + b"\n"

    def _read(self, ref: Ref) -> bytes:
        if ref.source < 0:
            spool = self._spools[-1 - ref.source]
            spool.stream.flush()
            return os.pread(spool.stream.fileno(), ref.size, ref.offset)
        if ref.source not in self._files:
            file = self._sources[ref.source].file
            assert file is not None
            stream = self._exit.enter_context(file.open("rb", buffering=0))
            self._files[ref.source] = stream.fileno()
        return os.pread(self._files[ref.source], ref.size, ref.offset)

    def _parse(self, data: bytes, facts: Mapping[str, Any], parse: Callable[[bytes], Any]) -> dict[str, Any]:
        try:
            row: dict[str, Any] = parse(data)
            if row["instance_id"] == facts["instance_id"]:
                return row
        except (ValueError, TypeError, KeyError):
            pass
        source: Source = self._sources[facts["ref"].source]
        raise DataError(f"{source.name} changed while it was read; run the command again")


def encode(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSON. DataError names a column of bytes or decimals, which it cannot hold."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(row, option=options) + b"\n"
    except TypeError as error:
        with suppress(TypeError, ValueError):  # integers over 64 bits
            return json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        raise DataError(f"{row.get('instance_id')}: column {_unfit(row, options)}: {error}; leave it out") from error


def _unfit(row: Mapping[str, Any], options: int) -> str:
    for column, value in row.items():
        try:
            orjson.dumps({column: value}, option=options)
        except TypeError:
            return str(column)
    return "unknown"
