"""Rows as they lie in files: .jsonl, .json (a list, or an object of rows), .parquet; the first two also .gz or .zst.

Everything is read as a stream, a row at a time (`.json` alone has to be parsed as a whole), so the size of a file says
nothing about the memory it takes. A row of a plain .jsonl comes with its place in the file, so that whoever keeps it
can copy the bytes instead of writing the row anew. Faults name file and line; a damaged file is never half-read.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from swe_lightning.errors import DataError, MissingPart

BATCH_ROWS = 128
"""Rows of a columnar file that are turned into Python objects at once."""


class Raw(NamedTuple):
    """A row before it is checked. `span`: (offset, bytes) of its line if the file is plain JSONL."""

    number: int
    row: Any
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class Source:
    """One input: how its rows are read, and how a place in it is called."""

    name: str
    read: Callable[[], Iterator[Raw]]
    unit: str = ": row "
    file: Path | None = None
    folder: Path | None = None
    """What a relative `repo_path` is relative to."""
    described: dict[str, Any] = field(default_factory=dict)
    """Which data this is (a hub revision, for example); goes into the report."""

    def place(self, number: int) -> str:
        return f"{self.name}{self.unit}{number}"


def open_file(path: Path) -> Source:
    """DataError if the name says nothing about the format."""
    suffixes = [s.lower() for s in path.suffixes]
    packed = suffixes[-1] if suffixes and suffixes[-1] in (".gz", ".zst") else ""
    kind = suffixes[-2] if packed and len(suffixes) > 1 else path.suffix.lower()
    folder = path.absolute().parent
    if kind == ".parquet" and not packed:
        return Source(str(path), lambda: _parquet(path), file=path, folder=folder)
    if kind == ".json":
        return Source(str(path), lambda: _json(path, packed), file=path, folder=folder)
    if kind in (".jsonl", ".ndjson"):
        return Source(str(path), lambda: _json_lines(path, packed), unit=":", file=path, folder=folder)
    raise DataError(f"{path}: unknown format; use .jsonl, .json (also .gz, .zst) or .parquet")


def _json_lines(path: Path, packed: str) -> Iterator[Raw]:
    offset = 0
    for number, line in enumerate(_lines(path, packed), 1):
        if not line.isspace() and line:
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise DataError(f"{path}:{number}: not valid JSON ({error})") from error
            yield Raw(number, row, None if packed else (offset, len(line)))
        offset += len(line)


def _json(path: Path, packed: str) -> Iterator[Raw]:
    data = b"\n".join(_lines(path, packed)) if packed == ".zst" else b"".join(_lines(path, packed))
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
    for number, row in enumerate(value, 1):
        yield Raw(number, row)


def _lines(path: Path, packed: str) -> Iterator[bytes]:
    import zstandard

    try:
        if packed == ".gz":
            with gzip.open(path) as stream:
                yield from stream
            return
        with path.open("rb", buffering=1 << 20) as stream:
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


def _parquet(path: Path) -> Iterator[Raw]:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingPart(f"{path}: reading parquet needs pyarrow; pip install 'swe-lightning[swe]'") from error
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
                for row in rows_of(batch):
                    number += 1
                    yield Raw(number, row)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path} is not a readable parquet file: {' '.join(str(error).split())}") from error


def rows_of(batch: Any) -> Iterator[dict[str, Any]]:
    """Rows of an Arrow batch or table. Lists of text, nearly all of such data, take a way past one object per cell."""
    columns = {name: _values(batch.column(name)) for name in batch.schema.names}
    for index in range(batch.num_rows):
        yield {name: values[index] for name, values in columns.items()}


def _values(column: Any) -> list[Any]:
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in _values(chunk)]
    kind = column.type
    is_text_list = (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and (
        pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type)
    )
    if not is_text_list:
        return column.to_pylist()
    texts = column.values.to_numpy(zero_copy_only=False).tolist()
    offsets = column.offsets.to_pylist()
    known = column.is_valid().to_pylist()
    return [texts[offsets[i] : offsets[i + 1]] if known[i] else None for i in range(len(column))]
