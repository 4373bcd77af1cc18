"""A store as JSON lines, and back: what is imported is what was exported, token for token.

    {"store": "swel", "schema": 3}                     first line
    {"content": {...}} {"rollout": {...}} {"event": {...}} {"model": {...}} {"meta": {...}}
    {"end": {"content": 12, "rollout": 64, ...}}       last line: how many of each came before

Model calls stay differences to an earlier call of their attempt (`parent`, `shared`, see compact.py), with ids and
log-probs as numbers, so a file costs what the store costs. Both directions stream: memory does not grow with the store.
An export is one snapshot, also of a run in progress. An import is one transaction into an empty store; a file that was
cut off, changed or of a schema not in READ imports nothing. Which processes shared the store is not exported.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import sqlalchemy as sa
import zstandard

from swe_lightning.errors import DataError
from swe_lightning.gateway import compact, database, schema
from swe_lightning.gateway.jsonio import dumps, loads
from swe_lightning.gateway.rows import CALL_KIND
from swe_lightning.gateway.schema import contents, events, meta, models, rollouts, turn

READ = (2, schema.VERSION)
"""Schemas of the exports that can be imported. Of schema 2 the calls do not say what their client spoke."""
BLOCK, BLOCK_BYTES = 64, 2**20
_NOT_EXPORTED = ("schema_version", "signing_key")
_TABLES = {"content": contents, "rollout": rollouts, "event": events, "model": models, "meta": meta}
_ORDER = {
    "content": [contents.c.digest],
    "rollout": [rollouts.c.position],
    "event": [events.c.rollout_id, events.c.attempt, events.c.sequence],
    "model": [models.c.url],
    "meta": [meta.c.name],
}
_PACKED = {"prompt": compact.unpack_ids, "response": compact.unpack_ids, "logprobs": compact.unpack_floats}
_HEX = {"content": ("digest",), "rollout": ("task", "config", "digest")}


def export(engine: sa.Engine) -> Iterator[bytes]:
    """The lines of a store, each with its newline."""
    yield dumps({"store": "swel", "schema": schema.VERSION}) + b"\n"
    counts: Counter[str] = Counter()
    with engine.connect() as connection:
        if database.is_shared(engine):
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
        for kind, table in _TABLES.items():
            # Text is compared as bytes, so that two databases export in the same order.
            query = sa.select(table).order_by(*(_bytewise(engine, column) for column in _ORDER[kind]))
            stream = connection.execution_options(stream_results=True, yield_per=BLOCK).execute(query)
            for row in stream.mappings():
                if kind == "meta" and row["name"] in _NOT_EXPORTED:
                    continue
                counts[kind] += 1
                yield dumps({kind: _shown(kind, dict(row))}) + b"\n"
    yield dumps({"end": counts}) + b"\n"


def restore(engine: sa.Engine, lines: Iterable[bytes], name: str) -> dict[str, int]:
    """Fill an empty store; returns how many of each kind. DataError that names the line; then nothing was imported."""
    with database.writing(engine.connect()) as connection, connection.begin():
        if database.is_shared(engine):
            connection.execute(sa.select(turn.c.holder).with_for_update())
        if connection.execute(sa.select(rollouts.c.position).limit(1)).first():  # nothing else is there without one
            raise DataError("the store to import into is not empty; give a new run directory or database")
        try:
            return _fill(connection, lines, name)
        except (sa.exc.IntegrityError, sa.exc.DataError) as error:
            raise DataError(
                f"{name} holds what no store can ({database.as_problem(error)}); nothing was imported"
            ) from None


def _fill(connection: sa.Connection, lines: Iterable[bytes], name: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    waiting: list[dict[str, Any]] = []
    kind, number, size, ended = "", 0, 0, False

    def flush() -> None:
        nonlocal size
        size = 0
        if waiting:
            if kind == "meta":
                for values in waiting:
                    schema.upsert(connection, meta, values)
            else:
                connection.execute(sa.insert(_TABLES[kind]), waiting)
            waiting.clear()

    for number, line in enumerate(lines, 1):
        if ended:
            raise DataError(f"{name} line {number} comes after the last line; give one export, unchanged")
        found, value = _parse(line, number, name)
        if found == "end":
            if value != counts:
                raise DataError(f"{name} line {number} counts other lines than were read; the file was changed")
            ended = True
        elif number > 1:
            if found != kind or len(waiting) >= BLOCK or size >= BLOCK_BYTES:
                flush()
            kind, size = found, size + len(line)
            counts[kind] += 1
            waiting.append(_read(kind, value, number, name))
    if not ended:
        raise DataError(f"{name} ends after line {number} without its last line: it was cut off; nothing was imported")
    flush()
    return dict(counts)


def _parse(line: bytes, number: int, name: str) -> tuple[str, Any]:
    """Kind and value of a line; the first one must be a header of this version."""
    if not line.endswith(b"\n"):
        raise DataError(f"{name} line {number} is not complete: the file was cut off; nothing was imported")
    try:
        entry = loads(line)
        if number == 1:
            if entry["store"] != "swel":
                raise ValueError
            if entry["schema"] not in READ:
                raise DataError(
                    f"{name} line 1: an export of schema {entry['schema']}; this version reads {READ[0]} to {READ[-1]}"
                )
            return "header", entry
        ((kind, value),) = entry.items()
        if kind != "end" and kind not in _TABLES:
            raise ValueError
        return kind, value
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{name} line {number} is not a line of an export of swel; nothing was imported") from None


def _shown(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row as JSON."""
    row.pop("position", None)
    for column in _HEX.get(kind, ()):
        row[column] = row[column].hex()
    if row.get("kind") == CALL_KIND:
        row["body"] = zstandard.ZstdDecompressor().decompress(row["body"])
        for column, unpack in _PACKED.items():
            array = unpack(row[column])
            exact = array.dtype.kind != "f" or bool(np.isfinite(array).all())
            row[column] = array.tolist() if exact else _raw(row[column])
    for column in ("body", "outcome", "weight_versions"):
        if row.get(column) is not None:
            row[column] = _json(row[column])
    return {column: value for column, value in row.items() if value is not None}


def _read(kind: str, value: Any, number: int, name: str) -> dict[str, Any]:
    """A row from JSON; every column is present, as one statement inserts a block of rows."""
    try:
        row = {c.name: value.pop(c.name, None) for c in _TABLES[kind].columns if c.name != "position"}
        if value:
            raise ValueError
        for column in _HEX.get(kind, ()):
            row[column] = bytes.fromhex(row[column])
        for column in ("body", "outcome", "weight_versions"):
            if row.get(column) is not None:
                row[column] = _bytes(row[column])
        if row.get("kind") == CALL_KIND:
            row["body"] = zstandard.ZstdCompressor(level=1).compress(row["body"])
            for column in ("prompt", "response"):
                row[column] = compact.pack_ids(np.asarray(row[column], np.int32))
            packed = isinstance(row["logprobs"], dict)
            floats = row["logprobs"]
            row["logprobs"] = _bytes(floats) if packed else compact.pack_floats(np.asarray(floats, np.float32))
        if kind == "content" and schema.content_digest(row["body"]) != row["digest"]:
            raise ValueError
        missing = [c.name for c in _TABLES[kind].columns if not c.nullable and row.get(c.name, 0) is None]
        if missing:
            raise ValueError
        return row
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise DataError(f"{name} line {number}: this {kind} was changed or damaged; nothing was imported") from None


_RAW = "base64 of bytes that JSON would not give back exactly"


def _json(data: bytes) -> Any:
    """Parsed JSON if writing it again gives these bytes (and it cannot be mistaken), else the bytes."""
    parsed = loads(data)
    return parsed if dumps(parsed) == data and not (isinstance(parsed, dict) and _RAW in parsed) else _raw(data)


def _raw(data: bytes) -> dict[str, str]:
    return {_RAW: base64.b64encode(data).decode()}


def _bytes(value: Any) -> bytes:
    if isinstance(value, dict) and value.keys() == {_RAW}:
        return base64.b64decode(value[_RAW], validate=True)
    return dumps(value)


def _bytewise(engine: sa.Engine, column: sa.Column[Any]) -> Any:
    text = isinstance(column.type, sa.String)
    return column.collate("C") if text and database.is_shared(engine) else column
