"""The one pass over the input: every row is parsed, checked, tried by the rules, and reduced to its facts.

Facts are a few small columns, the row's place in the store, and the first rule that takes it out, if any; whole rows
are dropped as they go by. A large input is read by several processes, each a piece of it (lines, row groups); the
result, the order and every complaint are the same as from one.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data_pipeline.files import END, PARALLEL_BYTES, BadLine, Raw, Reader, Source
from data_pipeline.processes import forked, no_interrupts
from data_pipeline.progress import progress
from data_pipeline.sources import Fault, Seen, distinct, normalise
from data_pipeline.stages import BY_NAME
from data_pipeline.stages.leaks import issue_digest
from data_pipeline.store import COLUMNS, Ref, RowStore, Spool
from swe_lightning.errors import DataError

Facts = dict[str, Any]


@dataclass(frozen=True)
class Rules:
    """The stages that look at one row, in order, and what they need."""

    stages: tuple[str, ...]
    test_cap: int
    digests: bool = False
    """Note a digest of the issue text, for the comparison with an evaluation set."""
    sketches: bool = False
    """Note a sketch of the issue text, for the comparison with each other."""

    def facts(self, row: dict[str, Any]) -> Facts:
        facts: Facts = {column: value for column in COLUMNS if (value := row.get(column))}
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
        if self.sketches:
            from data_pipeline.stages.duplicates import sketch  # numpy's work, which the paper's preset does without

            facts["sketch"] = sketch(row.get("problem_statement") or "")
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
    with progress("rows", None) as meter, _no_collections():
        for number, source in enumerate(sources):
            pieces = source.divide(processes, parallel_bytes)
            if len(pieces) > 1:
                rows = _by_processes(number, source, rules, store, pieces, processes)
            else:
                rows = _one_by_one(number, source, rules, store)
            for line, facts in rows:
                seen.add(facts["instance_id"], source, line)
                found.append(facts)
                meter.advance()
    seen.close(sources)
    return found


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


def _by_processes(
    number: int, source: Source, rules: Rules, store: RowStore, pieces: Sequence[Reader], processes: int
) -> Iterator[tuple[int, Facts]]:
    """Order of the input; rows are counted here, because a piece does not know how many lie before it."""
    # Before the fork: each piece writes its rows to a file of its own, which the store then reads.
    spools = [None if source.spans else store.new_spool() for _ in pieces]
    work = partial(_piece, number, source.folder, rules)
    before = 0
    with forked(processes) as pool:
        with no_interrupts():
            done = pool.map(work, pieces, spools)
        for found, count, fault in done:
            for line, facts in found:
                yield before + line, facts
            if fault:
                raise DataError(f"{source.place(before + count)}: {fault}")
            before += count


def _piece(
    number: int, folder: Path | None, rules: Rules, read: Reader, spool: Spool | None
) -> tuple[list[tuple[int, Facts]], int, str]:
    """(line in the piece, facts) of each row, lines read, and what is wrong with the last of them."""
    found: list[tuple[int, Facts]] = []
    line = 0
    with spool.writing() if spool is not None else nullcontext():
        try:
            for raw in read():
                line = raw.number
                if raw.row is not END:
                    facts = _facts(number, folder, rules, raw)
                    if spool is not None and "rejected" not in facts:
                        facts["ref"] = spool.keep(raw.row)
                    found.append((line, facts))
        except BadLine as bad:
            return found, bad.number, str(bad)
        except Fault as fault:
            return found, line, str(fault)
    return found, line, ""


@contextmanager
def _no_collections() -> Iterator[None]:
    """Rows have no cycles; looking for some among ever more facts is a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
