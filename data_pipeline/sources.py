"""Task rows from files and from the Hugging Face hub, normalised once and checked where they enter.

Files: .jsonl, .json (a list, or an object of rows), .parquet; the first two also .gz or .zst. Anything else that looks
like OWNER/NAME is a hub data set. Lists that arrive as strings (JSON or Python spelling) become lists, image columns
become `image_name`, a relative `repo_path` becomes absolute; unknown columns stay. Faults name file, line and column.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from swe_lightning.errors import DataError, MissingPart
from swe_lightning.records import Task

REQUIRED = ("instance_id", "repo")
MAX_ISSUE_CHARS = 1_000_000
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")
Row = dict[str, Any]


def load_tasks(path: Path) -> list[Task]:
    """Validated tasks of one file, `repo_path` absolute. What training and evaluation read."""
    return [Task.model_validate(row) for row in read_rows([str(path)])]


def read_rows(inputs: Sequence[str], *, split: str = "train") -> list[Row]:
    """Rows of all inputs in order. DataError on the first unusable row, on duplicate ids and on an empty result."""
    rows: list[Row] = []
    seen: dict[str, str] = {}
    for name in inputs:
        for place, raw in _open(name, split):
            row = normalise_row(raw, place, _folder(name))
            first = seen.setdefault(row["instance_id"], place)
            if first != place:
                raise DataError(f"{place}: instance_id {row['instance_id']!r} was already given at {first}")
            rows.append(row)
    if not rows:
        raise DataError(f"no rows in {', '.join(inputs) or 'no input'}")
    return rows


def normalise_row(raw: Any, place: str, folder: Path | None = None) -> Row:
    """One row in the shape of `records.Task`; `place` (file:line) opens every complaint."""
    if not isinstance(raw, dict):
        raise DataError(f"{place}: a row must be a JSON object, not {type(raw).__name__}")
    missing = [column for column in REQUIRED if not isinstance(raw.get(column), str) or not raw[column]]
    if missing:
        raise DataError(f"{place}: column {' and '.join(missing)} is missing or not text (has {', '.join(raw)})")
    row = dict(raw)
    if not _ID.fullmatch(row["instance_id"]) or ".." in row["instance_id"] or len(row["instance_id"]) > 250:
        raise DataError(f"{place}: instance_id {row['instance_id']!r} cannot name a branch and a directory")
    for column in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        row[column] = _as_list(row.get(column), column, place)
    statement = row.get("problem_statement")
    if statement is not None and not isinstance(statement, str):
        raise DataError(f"{place}: problem_statement must be text, not {type(statement).__name__}")
    if statement and len(statement) > MAX_ISSUE_CHARS:
        raise DataError(
            f"{place}: problem_statement has {len(statement)} characters; more than {MAX_ISSUE_CHARS} is no issue text"
        )
    if not row.get("image_name"):
        row["image_name"] = row.get("image") or row.get("docker_image")
    if row.get("repo_path"):
        row["repo_path"] = os.path.normpath((folder or Path.cwd()) / row["repo_path"])
    try:
        Task.model_validate(row)
    except ValueError as error:
        first = error.errors()[0] if hasattr(error, "errors") else {"loc": ("row",), "msg": str(error)}
        raise DataError(f"{place}: column {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return row


def _as_list(value: Any, column: str, place: str) -> list[str]:
    """A list of ids, published as a list, as JSON text or as a Python literal."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        value = _parse_list(value, column, place)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise DataError(f"{place}: {column} must be a list of test ids")
    return list(dict.fromkeys(value))


def _parse_list(text: str, column: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise DataError(f"{place}: {column} is text but neither a JSON nor a Python list") from error


def _folder(name: str) -> Path | None:
    path = Path(name)
    return path.absolute().parent if path.exists() else None


def _open(name: str, split: str) -> Iterator[tuple[str, Any]]:
    path = Path(name)
    if path.is_file():
        return _read_file(path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not path.suffix:
        return _read_hub(name, split)
    if name and path.is_dir():
        raise DataError(f"{name} is a directory; give the task file in it")
    raise DataError(f"no file {name} (and it does not look like a hub data set OWNER/NAME)")


def _read_file(path: Path) -> Iterator[tuple[str, Any]]:
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] == ".parquet":
        return _read_parquet(path)
    packed = suffixes[-1] if suffixes and suffixes[-1] in (".gz", ".zst") else ""
    kind = suffixes[-2] if packed and len(suffixes) > 1 else path.suffix.lower()
    if kind == ".json":
        return _read_json(path, b"\n".join(_lines(path, packed)))
    if kind in (".jsonl", ".ndjson"):
        return _read_lines(path, packed)
    raise DataError(f"{path}: unknown format; use .jsonl, .json (also .gz, .zst) or .parquet")


def _lines(path: Path, packed: str) -> Iterator[bytes]:
    """Lines as they are read, so that a large file is never in memory as a whole."""
    import zstandard

    try:
        if packed == ".gz":
            with gzip.open(path) as stream:
                yield from stream
            return
        with path.open("rb") as stream:
            yield from _unpack_zst(stream) if packed else stream
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path} cannot be read, it is damaged or truncated: {error}") from error


def _unpack_zst(stream: BinaryIO) -> Iterator[bytes]:
    """Lines of zstandard frames. EOFError where the last frame is cut: the library's own reader would say nothing."""
    import zstandard

    frame, rest = zstandard.ZstdDecompressor().decompressobj(), b""
    while packed := stream.read(1 << 20):
        while packed:
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            *lines, rest = (rest + frame.decompress(packed)).split(b"\n")
            yield from lines
            packed = frame.unused_data
    if not frame.eof:
        raise EOFError("the file ends in the middle")
    yield rest


def _read_lines(path: Path, packed: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_lines(path, packed), 1):
        if line.strip():
            try:
                yield f"{path}:{number}", orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise DataError(f"{path}:{number}: not valid JSON ({error})") from error


def _read_json(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    if isinstance(value, dict) and all(isinstance(row, dict) for row in value.values()):
        value = list(value.values())
    elif isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise DataError(f"{path} must hold a list of rows")
    return ((f"{path}: row {number}", row) for number, row in enumerate(value, 1))


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingPart(f"{path}: reading parquet needs pyarrow; pip install 'swe-lightning[swe]'") from error
    try:
        rows: Iterable[Row] = pq.read_table(path).to_pylist()
    except Exception as error:
        raise DataError(f"{path} is not a readable parquet file: {' '.join(str(error).split())}") from error
    return ((f"{path}: row {number}", row) for number, row in enumerate(rows, 1))


def _read_hub(name: str, split: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise MissingPart(f"hub data set {name} needs `datasets`; pip install 'swe-lightning[swe]'") from error
    try:
        loaded = datasets.load_dataset(name, split=split)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"cannot load {name} (split {split}) from the hub and it is not cached here ({reason}); "
            "download it where there is a network and give the file with --input"
        ) from error
    return ((f"{name}: row {number}", dict(row)) for number, row in enumerate(loaded, 1))
