"""Rows as they lie in files: .jsonl, .json (a list, or an object of rows), .parquet; the first two also .gz or .zst.

Everything is read as a stream, a row at a time (`.json` alone has to be parsed as a whole), so the size of a file says
nothing about the memory it takes. A row of a plain .jsonl comes with its place in the file, so that whoever keeps it
can copy the bytes instead of writing the row anew. Faults name file and line; a damaged file is never half-read.
"""

from __future__ import annotations

import gzip
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from swe_lightning.errors import DataError, MissingPart

BATCH_ROWS = 128
"""Rows of a columnar file that are turned into Python objects at once."""
PARALLEL_BYTES = 64 << 20
"""Inputs at least this large (unpacked) are read by several processes."""
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_MANY_DIGITS = b"0" * 19
END: Any = object()
"""The row of a last `Raw` that only says how many lines there were."""


class Raw(NamedTuple):
    """A row before it is checked. `span`: (offset, bytes) of its line if the file is plain JSONL."""

    number: int
    row: Any
    span: tuple[int, int] | None = None


def exact(data: bytes) -> Any:
    """JSON of a row that is to be written anew: orjson makes floats of integers over 64 bits. ValueError if it is none.

    Where the bytes themselves are kept, or only a few columns are looked at, orjson alone is right and faster.
    """
    value = orjson.loads(data)
    return json.loads(data) if _MANY_DIGITS in data.translate(_DIGITS) else value


class BadLine(ValueError):
    """A line of a piece that is no row; `number` counts from the start of the piece."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


Reader = Callable[[], Iterator[Raw]]


def _undivided(parts: int, least_bytes: int) -> list[Reader]:
    return []


@dataclass(frozen=True)
class Source:
    """One input: how its rows are read, and how a place in it is called."""

    name: str
    read: Reader
    unit: str = ": row "
    file: Path | None = None
    folder: Path | None = None
    """What a relative `repo_path` is relative to."""
    described: dict[str, Any] = field(default_factory=dict)
    """Which data this is (a hub revision, for example); goes into the report."""
    divide: Callable[[int, int], list[Reader]] = _undivided
    """(processes, least bytes) -> readers of pieces in order, for that many processes; none if it is smaller."""
    spans: bool = False
    """Rows come with their place in the file."""

    def place(self, number: int) -> str:
        return f"{self.name}{self.unit}{number}"


def open_file(path: Path) -> Source:
    """DataError if the name says nothing about the format."""
    suffixes = [s.lower() for s in path.suffixes]
    packed = suffixes[-1] if suffixes and suffixes[-1] in (".gz", ".zst") else ""
    kind = suffixes[-2] if packed and len(suffixes) > 1 else path.suffix.lower()
    folder = path.absolute().parent
    if kind == ".parquet" and not packed:
        return Source(str(path), lambda: _parquet(path), file=path, folder=folder, divide=partial(_row_groups, path))
    if kind == ".json":
        return Source(str(path), lambda: _json(path, packed), file=path, folder=folder)
    if kind in (".jsonl", ".ndjson"):
        lines = Source(str(path), lambda: _json_lines(path, packed), unit=":", file=path, folder=folder)
        return lines if packed else replace(lines, divide=partial(_stretches, path), spans=True)
    raise DataError(f"{path}: unknown format; use .jsonl, .json (also .gz, .zst) or .parquet")


def _json_lines(path: Path, packed: str) -> Iterator[Raw]:
    try:
        yield from _parsed(_lines(path, packed), None if packed else 0)
    except BadLine as bad:
        raise DataError(f"{path}:{bad.number}: {bad}") from bad


def _parsed(lines: Iterable[bytes], offset: int | None) -> Iterator[Raw]:
    """`offset` of the first line, where rows are to come with their place. A byte order mark is no part of a row."""
    marked = not offset
    parse = exact if offset is None else orjson.loads
    for number, line in enumerate(lines, 1):
        size = len(line)
        if marked and number == 1:
            line = line.removeprefix(BOM_UTF8)
        if line and not line.isspace():
            try:
                row = parse(line)
            except ValueError as error:
                raise BadLine(number, f"not valid JSON ({error})") from error
            yield Raw(number, row, None if offset is None else (offset + size - len(line), len(line)))
        if offset is not None:
            offset += size


def _stretches(path: Path, processes: int, least_bytes: int) -> list[Reader]:
    size = path.stat().st_size
    if size < least_bytes:
        return []
    return [partial(_stretch, path, *bounds) for bounds in cut(path, max(processes * 4, size >> 25))]


def _stretch(path: Path, start: int, end: int) -> Iterator[Raw]:
    number = 0

    def lines() -> Iterator[bytes]:
        nonlocal number
        with path.open("rb", buffering=1 << 20) as stream:
            left = end - stream.seek(start)
            while left > 0 and (line := stream.readline()):
                number += 1
                left -= len(line)
                yield line

    yield from _parsed(lines(), start)
    yield Raw(number, END)


def cut(file: Path, parts: int) -> list[tuple[int, int]]:
    """(start, end) of stretches of whole lines that cover the file."""
    size = file.stat().st_size
    starts = [0]
    with file.open("rb") as stream:
        for part in range(1, parts):
            stream.seek(max(size * part // parts - 1, 0))
            stream.readline()
            if starts[-1] < stream.tell() < size:
                starts.append(stream.tell())
    return list(zip(starts, [*starts[1:], size], strict=True))


def _json(path: Path, packed: str) -> Iterator[Raw]:
    data = b"\n".join(_lines(path, packed)) if packed == ".zst" else b"".join(_lines(path, packed))
    try:
        value = exact(data.removeprefix(BOM_UTF8))
    except ValueError as error:
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


def _parquet(path: Path, groups: Sequence[int] | None = None) -> Iterator[Raw]:
    """Rows of these row groups, or of all."""
    with _readable(path), _arrow().ParquetFile(path) as file:
        number = 0
        for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=groups, use_threads=False):
            for row in rows_of(batch):
                number += 1
                yield Raw(number, row)


def _row_groups(path: Path, processes: int, least_bytes: int) -> list[Reader]:
    """A reader for each few row groups: about equally many, so that no process waits long for the others."""
    with _readable(path), _arrow().ParquetFile(path) as file:
        count = file.num_row_groups
        if sum(file.metadata.row_group(n).total_byte_size for n in range(count)) < least_bytes:
            return []
    parts = min(processes * 4, count)
    return [partial(_parquet, path, range(count * n // parts, count * (n + 1) // parts)) for n in range(parts)]


def _arrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPart("reading parquet needs pyarrow; pip install 'swe-lightning[swe]'") from error
    return pyarrow.parquet


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (DataError, MissingPart):
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
