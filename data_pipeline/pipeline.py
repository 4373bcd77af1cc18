"""`swel data filter`: rows in; train.jsonl, val.jsonl, dropped.jsonl, and what tells of them (outputs.py) out.

One pass over the input reduces every row to its facts (scan.py); the chosen stages (stages/) then take rows out in
order, whole rows are read again only where a stage needs them, and what is left is split and copied to the result.
Same inputs, settings and seed give the same bytes. What is expensive (validation, difficulty) is kept in OUT beside the
result as it comes, so an interrupted command goes on where it was.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from data_pipeline import outputs, stages
from data_pipeline import probe as probing
from data_pipeline.files import Raw, Source
from data_pipeline.histograms import histograms
from data_pipeline.ledger import Ledger
from data_pipeline.probe_results import load_results
from data_pipeline.report import build_report
from data_pipeline.scan import Facts, Rules, scan
from data_pipeline.settings import FilterSettings, Tools
from data_pipeline.sources import iterate_rows, open_sources
from data_pipeline.split import split_rows
from data_pipeline.stage_work import Rejected, StageWork
from data_pipeline.stages.leaks import EvaluationSet
from data_pipeline.store import RowStore
from swe_lightning.errors import DataError
from swe_lightning.paths import want_directory

__all__ = ["FilterResult", "FilterSettings", "Tools", "filter_rows", "run_filter"]


@dataclass
class FilterResult:
    """Facts of the rows on each side, the ledger, and the report."""

    train: Sequence[Mapping[str, Any]]
    val: Sequence[Mapping[str, Any]]
    ledger: Ledger
    report: dict[str, Any] = field(default_factory=dict)


def run_filter(
    inputs: Sequence[str],
    out: Path,
    settings: FilterSettings | None = None,
    tools: Tools | None = None,
    *,
    probe_results: Path | None = None,
    overwrite: bool = False,
) -> FilterResult:
    """Filter, split and write. DataError if `out` holds another result and `overwrite` is not given."""
    settings, tools = settings or FilterSettings(), tools or Tools()
    stages.choose(settings.preset, settings.add, settings.skip)
    want_directory(out, "--out")
    if probe_results is not None:
        tools = replace(tools, outcomes=load_results(probe_results))
    sources = open_sources(inputs, settings.hub_split, stream=tools.stream)
    evaluation = _evaluation_set(settings.eval_set)
    given = {"probe_results": str(probe_results) if probe_results else None, "branches": tools.branches_file}
    names = [*inputs, *settings.eval_set, *filter(None, given.values())]
    with ThreadPoolExecutor(1) as aside, RowStore(sources) as store:

        def described() -> Future[dict[str, Any]]:
            more = {"settings": asdict(settings), "probe": tools.probe_identity, **given, "also": list(tools.also)}
            return aside.submit(outputs.describe_inputs, inputs, names, **more)

        digest = None
        if outputs.holds_result(out) and not overwrite:
            digest = described()
            outputs.refuse_other_result(out, digest.result())
        fresh_probe = tools.rollouts is not None and probing.holds_other(out, tools.probe_identity)
        if fresh_probe and not overwrite:
            raise DataError(f"{out} holds a probe of another model or recipe; choose another --out or give --overwrite")
        rows = scan(sources, _rules(settings), store)
        with outputs.owned(out), outputs.artist(len(rows)) as artist, _frozen():
            digest = digest or described()  # every byte of the inputs, beside stages and writing
            if tools.rollouts is not None:
                probing.claim(out, tools.probe_identity, fresh=fresh_probe)
            result = filter_facts(rows, store, settings, tools, evaluation, out)
            _write(out, result, store, sources, digest, artist)
    return result


@contextmanager
def _frozen() -> Iterator[None]:
    """The facts of all rows live to the end: nothing is gained by looking through them again and again."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def filter_rows(
    rows: Sequence[Mapping[str, Any]], settings: FilterSettings, tools: Tools | None = None, out: Path | None = None
) -> FilterResult:
    """The stages on rows in memory; nothing is written (but what validation and probe keep in `out`)."""
    source = Source("memory", lambda: (Raw(n, dict(row)) for n, row in enumerate(rows, 1)))
    with RowStore([source]) as store:
        facts = scan([source], _rules(settings), store)
        return filter_facts(facts, store, settings, tools or Tools(), _evaluation_set(settings.eval_set), out)


def filter_facts(
    rows: list[Facts],
    store: RowStore,
    settings: FilterSettings,
    tools: Tools,
    evaluation: EvaluationSet | None,
    out: Path | None,
) -> FilterResult:
    """Every chosen stage in order, then the split. The held-out side is never probed: it is not trained on."""
    ledger, left = Ledger(len(rows)), rows
    work = StageWork(store, settings, tools, evaluation, out)
    for stage in stages.choose(settings.preset, settings.add, settings.skip):
        rejected = _by_rule(stage.name, left) if stage.row else work.run(stage.name, left)
        if rejected is not None:
            left = ledger.apply(stage.name, left, rejected)
    if not left:
        reasons = ", ".join(f"{count} {reason}" for reason, count in ledger.reasons().items())
        raise DataError(f"no row is left of {len(rows)}: {reasons}")
    train, val, mode = split_rows(
        left,
        mode=settings.split,
        val_size=settings.val_size,
        seed=settings.seed,
        held_out_repos=settings.held_out_repos,
        difficulty=work.classes,
    )
    chosen = {row["instance_id"] for row in (*train, *val)}
    surplus = {
        i: ("val_size", "held out, but beyond --val-size") for i, r in enumerate(left) if r["instance_id"] not in chosen
    }
    ledger.apply("split", left, surplus)
    ledger.close([*train, *val])
    sizes = histograms(rows, [*train, *val], work.solved)
    report = build_report(
        ledger, train, val, asdict(settings), mode, work.index.unchecked, work.classes, work.rates, sizes
    )
    if tools.outcomes is not None:
        known = {row["instance_id"] for row in rows}
        report["probe_results"] = {"tasks": len(tools.outcomes), "unknown": len(tools.outcomes.keys() - known)}
    return FilterResult(train, val, ledger, report)


def _by_rule(name: str, left: Sequence[Facts]) -> Rejected:
    """What the rules found while the rows were read; the first rule that takes a row out is the one that counts."""
    return {i: row["rejected"][1:] for i, row in enumerate(left) if row.get("rejected", ("",))[0] == name}


def _rules(settings: FilterSettings) -> Rules:
    chosen = stages.choose(settings.preset, settings.add, settings.skip)
    names = tuple(stage.name for stage in chosen if stage.row)
    compared = any(stage.name == "duplicate_issue" for stage in chosen)
    return Rules(names, settings.test_cap, digests=bool(settings.eval_set), sketches=compared)


def _evaluation_set(names: Sequence[str]) -> EvaluationSet | None:
    return EvaluationSet.of(iterate_rows(open_sources(names))) if names else None


def _write(
    out: Path,
    result: FilterResult,
    store: RowStore,
    sources: Sequence[Source],
    digest: Future[dict[str, Any]],
    artist: outputs.Artist,
) -> None:
    described = [source.described for source in sources if source.described]
    names = [source.described.get("data_set", source.name) for source in sources]
    pictures = artist(result.report)

    def source() -> dict[str, Any]:
        return {**digest.result(), "data_sets": names, **({"hub": described} if described else {})}

    def move(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "repo_path": os.path.relpath(row["repo_path"], out.absolute())}

    def lines(rows: Sequence[Mapping[str, Any]]) -> Any:
        return (store.line(row, move if row.get("repo_path") else None) for row in rows)

    dropped = (outputs.encode(drop.as_json()) for drop in result.ledger.drops)
    outputs.write_result(out, lines(result.train), lines(result.val), dropped, result.report, source, pictures)
