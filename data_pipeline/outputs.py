"""The directory a filtered set is written to: whole or not at all, and never over another result.

All files are written beside their targets first. Then the old report.json leaves, the files are renamed into place, and
the new report.json comes last: a directory with a report.json is whole. The report's digest covers inputs, settings and
seed, so the same command may run again, and another one is refused unless told to overwrite.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import orjson

from data_pipeline.card import card
from data_pipeline.plots import FUNNEL, HISTOGRAMS, draw, load
from data_pipeline.processes import forked, no_interrupts
from data_pipeline.report import markdown
from data_pipeline.store import encode
from swe_lightning.errors import BusyError, DataError

__all__ = ["OUTPUTS", "describe_inputs", "encode", "holds_result", "owned", "refuse_other_result", "replace_files"]
DIGEST_BYTES = 8 << 20
DRAWN_BESIDE_ROWS = 2000
OUTPUTS = (
    "train.jsonl",
    "val.jsonl",
    "dropped.jsonl",
    "funnel.png",
    "histograms.png",
    "card.md",
    "report.md",
    "report.json",
)


def describe_inputs(inputs: Sequence[str], files: Sequence[str], **more: Any) -> dict[str, Any]:
    """What the result is made from: names, digests of all `files`, everything in `more`; and a digest of it all."""
    digests = {name: file_digest(Path(name)) for name in files if Path(name).is_file()}
    described = {"inputs": list(inputs), "sha256": digests, **{k: v for k, v in more.items() if v}}
    text = json.dumps(described, sort_keys=True, default=list)
    return {**described, "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}


def file_digest(file: Path) -> str:
    """In large pieces: a thread that hashes beside other work waits for its turn after each."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(DIGEST_BYTES))
    with file.open("rb", buffering=0) as f:
        while size := f.readinto(piece):
            digest.update(piece[:size])
    return digest.hexdigest()


def holds_result(out: Path) -> bool:
    return (out / "report.json").exists()


def refuse_other_result(out: Path, source: Mapping[str, Any]) -> None:
    """DataError if `out` holds a result of other inputs or settings."""
    report = out / "report.json"
    if not report.exists():
        return
    try:
        before = json.loads(report.read_text())["source"]["digest"]
    except (ValueError, KeyError, OSError, TypeError):
        before = None
    if before != source["digest"]:
        raise DataError(f"{out} holds a result of other inputs or settings; choose another --out or give --overwrite")


@contextmanager
def owned(out: Path) -> Iterator[None]:
    """Create `out` and keep other commands from writing to it meanwhile; BusyError if one does."""
    created = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    fd = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"{out} is being written to by another command; wait for it or choose another") from None
        yield
    except BaseException:
        if created:
            with suppress(OSError):  # not empty: what came so far is there to go on from
                out.rmdir()
        raise
    finally:
        os.close(fd)


def write_result(
    out: Path,
    train: Iterable[bytes],
    val: Iterable[bytes],
    dropped: Iterable[bytes],
    report: dict[str, Any],
    source: Callable[[], Mapping[str, Any]],
    pictures: Callable[[], Mapping[str, bytes]],
) -> None:
    """Replace all outputs; the report that declares them whole comes last.

    `source` and `pictures` are asked for when the rows are written: both take as long as that, and beside it.
    """
    digests = {name: hashlib.sha256() for name in ("train.jsonl", "val.jsonl")}

    def told() -> dict[str, str]:
        return {name: digest.hexdigest() for name, digest in digests.items()}

    def whole() -> dict[str, Any]:
        report["source"] = source()
        return report

    def later(text: Callable[[], bytes]) -> Iterator[bytes]:
        yield text()  # when the files before it are written: only then are their digests known

    replace_files(
        out,
        {
            "train.jsonl": _hashed(train, digests["train.jsonl"]),
            "val.jsonl": _hashed(val, digests["val.jsonl"]),
            "dropped.jsonl": dropped,
            "report.md": [markdown(report).encode()],
            FUNNEL: later(lambda: pictures()[FUNNEL]),
            HISTOGRAMS: later(lambda: pictures()[HISTOGRAMS]),
            "card.md": later(lambda: card(whole(), out, told()).encode()),
            "report.json": later(lambda: orjson.dumps({**whole(), "outputs": told()}, option=orjson.OPT_INDENT_2)),
        },
    )


Artist = Callable[[Mapping[str, Any]], Callable[[], Mapping[str, bytes]]]
"""Given a report, begins to draw it; what it returns gives the pictures when they are needed."""


@contextmanager
def artist(rows: int) -> Iterator[Artist]:
    """For a large set a process of its own, which loads the library while the stages run and draws while rows are
    written."""
    if rows < DRAWN_BESIDE_ROWS:
        yield lambda report: cache(partial(draw, report))
        return
    with forked(1) as pool:
        with no_interrupts():
            pool.submit(load)
        yield lambda report: pool.submit(draw, report).result


def _hashed(lines: Iterable[bytes], digest: Any) -> Iterator[bytes]:
    for line in lines:
        digest.update(line)
        yield line


def replace_files(out: Path, contents: Mapping[str, Iterable[bytes]]) -> None:
    """Write all files, then put them in place; the last of them is away until all others are there."""
    with ExitStack() as leftovers:
        written = {name: _write(out, name, lines, leftovers) for name, lines in contents.items()}
        (out / list(contents)[-1]).unlink(missing_ok=True)
        for name, path in written.items():
            os.replace(path, out / name)


def _write(out: Path, name: str, lines: Iterable[bytes], leftovers: ExitStack) -> Path:
    fd, path = tempfile.mkstemp(dir=out, prefix=f".{name}.")
    leftovers.callback(Path(path).unlink, missing_ok=True)
    with os.fdopen(fd, "wb", buffering=1 << 20) as f:
        f.writelines(lines)
        f.flush()
        os.fsync(f.fileno())
    return Path(path)
