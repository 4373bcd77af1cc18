"""The one pass over the input: every row is parsed, checked, tried by the rules, and reduced to its facts.

Facts are a few small columns, the row's place in the store, and the first rule that takes it out, if any; whole rows
are dropped as they go by. A large plain .jsonl file is read by several processes, each a stretch of whole lines; the
result, the order and every complaint are the same as from one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import orjson

from data_pipeline.files import Raw, Source
from data_pipeline.progress import progress
from data_pipeline.sources import Fault, Seen, distinct, normalise
from data_pipeline.stages import BY_NAME
from data_pipeline.stages.leaks import issue_digest
from data_pipeline.store import COLUMNS, Ref, RowStore, file_size
from swe_lightning.errors import DataError

Facts = dict[str, Any]
PARALLEL_BYTES = 64 << 20
"""Files at least this large are read by several processes."""


@dataclass(frozen=True)
class Rules:
    """The stages that look at one row, in order, and what they need."""

    stages: tuple[str, ...]
    test_cap: int
    digests: bool = False
    """Note a digest of the issue text, for the comparison with an evaluation set."""

    def facts(self, row: dict[str, Any]) -> Facts:
        facts: Facts = {column: row[column] for column in COLUMNS if row.get(column)}
        facts["repo"] = sys.intern(facts["repo"])
        facts["tests"] = len(row["FAIL_TO_PASS"]) + len(row["PASS_TO_PASS"])
        facts["issue_chars"] = len(row.get("problem_statement") or "")
        if row.get("test_patch") is not None:
            facts["has_test_patch"] = True
        for name in self.stages:
            check = BY_NAME[name].row
            assert check is not None
            found = check(row, self.test_cap)
            if found is not None:
                facts["rejected"] = (name, *found)
                return facts
        if distinct(row):
            facts["tests"] = len(row["FAIL_TO_PASS"]) + len(row["PASS_TO_PASS"])
            facts["changed"] = True
        if self.digests and facts["issue_chars"]:
            facts["issue_digest"] = issue_digest(row["problem_statement"])
        return facts


def scan(
    sources: Sequence[Source],
    rules: Rules,
    store: RowStore,
    *,
    workers: int | None = None,
    parallel_bytes: int = PARALLEL_BYTES,
) -> list[Facts]:
    """Facts of all rows in order. DataError on the first unusable row, on duplicate ids and on an empty result."""
    found: list[Facts] = []
    seen = Seen()
    processes = workers or min(os.cpu_count() or 1, 8)
    with progress("rows", None) as meter:
        for number, source in enumerate(sources):
            large = source.unit == ":" and file_size(source.file) >= parallel_bytes and _is_plain(source)
            rows = _stretches(number, source, rules, processes) if large else _one_by_one(number, source, rules, store)
            for line, facts in rows:
                seen.add(facts["instance_id"], source, line)
                found.append(facts)
                meter.advance()
    seen.close(sources)
    return found


def _is_plain(source: Source) -> bool:
    return source.file is not None and source.file.suffix.lower() in (".jsonl", ".ndjson")


def _one_by_one(number: int, source: Source, rules: Rules, store: RowStore) -> Iterator[tuple[int, Facts]]:
    for raw in source.read():
        try:
            facts = _facts(number, source.folder, rules, raw)
        except Fault as fault:
            raise DataError(f"{source.place(raw.number)}: {fault}") from fault
        if raw.span is None and "rejected" not in facts:
            facts["ref"] = store.keep(raw.row)
        yield raw.number, facts


def _facts(number: int, folder: Path | None, rules: Rules, raw: Raw) -> Facts:
    changed = normalise(raw.row, folder)
    facts = rules.facts(raw.row)
    changed |= facts.pop("changed", False)
    if raw.span is not None and "rejected" not in facts:
        facts["ref"] = Ref(number, *raw.span, changed)
    return facts


def _stretches(number: int, source: Source, rules: Rules, processes: int) -> Iterator[tuple[int, Facts]]:
    """Order of the file; line numbers are counted here, because a stretch does not know how many lines lie before."""
    assert source.file is not None
    bounds = cut(source.file, max(processes * 4, file_size(source.file) >> 25))
    work = partial(_stretch, number, source.file, source.folder, rules)
    lines = 0
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        try:
            with _no_interrupts():
                stretches = pool.map(work, bounds)
            for found, count, fault in stretches:
                for line, facts in found:
                    yield lines + line, facts
                if fault:
                    raise DataError(f"{source.place(lines + count)}: {fault}")
                lines += count
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _stretch(
    number: int, file: Path, folder: Path | None, rules: Rules, bounds: tuple[int, int]
) -> tuple[list[tuple[int, Facts]], int, str]:
    """(line in the stretch, facts) of each row, lines read, and what is wrong with the last of them."""
    found: list[tuple[int, Facts]] = []
    offset, end = bounds
    line = 0
    with file.open("rb", buffering=1 << 20) as stream:
        stream.seek(offset)
        while offset < end and (data := stream.readline()):
            line += 1
            if not data.isspace():
                try:
                    raw = Raw(line, orjson.loads(data), (offset, len(data)))
                    found.append((line, _facts(number, folder, rules, raw)))
                except orjson.JSONDecodeError as error:
                    return found, line, f"not valid JSON ({error})"
                except Fault as fault:
                    return found, line, str(fault)
            offset += len(data)
    return found, line, ""


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


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Hold back Ctrl-C while processes start: Python swallows one that comes in the middle of a fork.

    The processes inherit it and leave Ctrl-C, which reaches the whole group, to their parent.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
