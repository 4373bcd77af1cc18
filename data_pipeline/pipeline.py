"""`swel data filter`: rows in, train.jsonl, val.jsonl, dropped.jsonl, report.md and report.json out.

Stages in order: empty_issue, missing_branch, test_cap, then the difficulty probe if results or a runner are given,
then the split. Same inputs, settings and seed give the same bytes. All files are prepared first and replaced one by
one with report.json last, so a directory whose report.json is there is whole; nothing is written if anything fails.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from data_pipeline import probe as probing
from data_pipeline.filters import TEST_CAP, BranchIndex, empty_issue, missing_branch, too_many_tests
from data_pipeline.ledger import Ledger
from data_pipeline.report import markdown
from data_pipeline.sources import read_rows
from data_pipeline.split import Mode, is_held_out, split_rows
from swe_lightning import __version__
from swe_lightning.errors import DataError
from swe_lightning.rundir import write_atomic

Row = Mapping[str, Any]
PROBE_OUTCOMES, PROBE_RUN, PROBE_IDENTITY = "probe.jsonl", "probe", "probe_identity.txt"
"""Beside the outputs: outcomes of the difficulty probe, its run directory, and what was probed."""
OUTPUTS = ("train.jsonl", "val.jsonl", "dropped.jsonl", "report.md", "report.json")


@dataclass(frozen=True)
class FilterSettings:
    """Everything that decides the result; written into the report."""

    seed: int = 0
    hub_split: str = "train"
    test_cap: int = TEST_CAP
    k: int = 4
    keep_none_solved: int = probing.NONE_SOLVED_KEPT
    split: Mode = "auto"
    val_size: int | None = None
    held_out_repos: tuple[str, ...] = ()


@dataclass
class FilterResult:
    train: list[Row]
    val: list[Row]
    ledger: Ledger
    report: dict[str, Any] = field(default_factory=dict)


def run_filter(
    inputs: Sequence[str],
    out: Path,
    settings: FilterSettings | None = None,
    *,
    branches: Mapping[str, Collection[str]] | None = None,
    probe_results: Path | None = None,
    run_rollouts: probing.RunRollouts | None = None,
    probe_identity: str | None = None,
    overwrite: bool = False,
) -> FilterResult:
    """Filter, split and write. DataError if `out` holds another result and `overwrite` is not given.

    `probe_identity` names what `run_rollouts` probes. Outcomes of another probe are never counted for this one.
    """
    settings = settings or FilterSettings()
    source = describe_inputs(inputs, settings, probe_results, probe_identity)
    _refuse_other_result(out, source, overwrite)
    other_probe = run_rollouts is not None and _holds_other_probe(out, probe_identity)
    if other_probe and not overwrite:
        raise DataError(f"{out} holds a probe of another model or recipe; choose another --out or give --overwrite")
    rows = read_rows(inputs, split=settings.hub_split)
    out.mkdir(parents=True, exist_ok=True)
    if other_probe:
        _drop_probe(out)
    if run_rollouts is not None and probe_identity is not None:
        write_atomic(out / PROBE_IDENTITY, probe_identity)
    outcomes: Callable[[Sequence[Row]], probing.Results] | None = None
    if probe_results is not None:
        imported = probing.load_results(probe_results)
        outcomes = lambda _: imported  # noqa: E731
    elif run_rollouts is not None:
        runner = run_rollouts
        outcomes = lambda left: probing.probe(left, runner, k=settings.k, results_file=out / PROBE_OUTCOMES)  # noqa: E731
    result = filter_rows(rows, settings, branches=branches, outcomes=outcomes)
    result.report["source"] = source
    write_result(out, result)
    return result


def filter_rows(
    rows: Sequence[Row],
    settings: FilterSettings,
    *,
    branches: Mapping[str, Collection[str]] | None = None,
    outcomes: Callable[[Sequence[Row]], probing.Results] | None = None,
) -> FilterResult:
    """The stages on rows in memory; nothing is written. The held-out side is never probed: it is not trained on."""
    ledger = Ledger(len(rows))
    index = BranchIndex(branches)
    left = ledger.apply("empty_issue", rows, empty_issue(rows))
    left = ledger.apply("missing_branch", left, missing_branch(left, index))
    left = ledger.apply("test_cap", left, too_many_tests(left, settings.test_cap))
    classes: dict[str, str] = {}
    solve_rates: dict[str, dict[str, list[int]]] = {}
    if outcomes is not None:
        named = set(settings.held_out_repos)
        positions = [i for i, row in enumerate(left) if not is_held_out(row, named)]
        candidates = [left[i] for i in positions]
        results = outcomes(candidates)
        rejected, classes = probing.reject_by_difficulty(
            candidates, results, k=settings.k, keep_none=settings.keep_none_solved, seed=settings.seed
        )
        solve_rates = {column: probing.solve_table(candidates, results, column) for column in ("repo", "strategy")}
        left = ledger.apply("difficulty", left, {positions[i]: why for i, why in rejected.items()})
    if not left:
        reasons = ", ".join(f"{count} {reason}" for reason, count in ledger.reasons().items())
        raise DataError(f"no row is left of {len(rows)}: {reasons}")
    train, val, mode = split_rows(
        left,
        mode=settings.split,
        val_size=settings.val_size,
        seed=settings.seed,
        held_out_repos=settings.held_out_repos,
        difficulty=classes,
    )
    chosen = {row["instance_id"] for row in (*train, *val)}
    surplus = {
        i: ("val_size", "held out, but beyond --val-size") for i, r in enumerate(left) if r["instance_id"] not in chosen
    }
    ledger.apply("split", left, surplus)
    ledger.close([*train, *val])
    report = _report(ledger, train, val, settings, mode, index.unchecked, classes, solve_rates)
    return FilterResult(train, val, ledger, report)


def _report(
    ledger: Ledger,
    train: Sequence[Row],
    val: Sequence[Row],
    settings: FilterSettings,
    mode: str,
    unchecked: int,
    classes: Mapping[str, str],
    solve_rates: Mapping[str, Any],
) -> dict[str, Any]:
    repositories = sorted({row["repo"] for row in (*train, *val)})
    return {
        "rows_in": ledger.total,
        "funnel": [{"stage": name, "in": before, "out": after} for name, before, after in ledger.funnel],
        "dropped": ledger.reasons(),
        "train": len(train),
        "val": len(val),
        "split": mode,
        "branches_unchecked": unchecked,
        "repositories": {
            repo: {"train": sum(r["repo"] == repo for r in train), "val": sum(r["repo"] == repo for r in val)}
            for repo in repositories
        },
        "difficulty": {name: sum(c == name for c in classes.values()) for name in probing.CLASSES} if classes else {},
        "solve_rates": dict(solve_rates),
        "settings": asdict(settings),
        "swe_lightning": __version__,
    }


def describe_inputs(
    inputs: Sequence[str], settings: FilterSettings, probe_results: Path | None, probe_identity: str | None = None
) -> dict[str, Any]:
    """What the result was made from: names, and digests of files."""
    files = [Path(name) for name in inputs] + ([probe_results] if probe_results else [])
    digests = {str(f): _file_digest(f) for f in files if f.is_file()}
    described: dict[str, Any] = {"inputs": list(inputs), "sha256": digests, "settings": asdict(settings)}
    if probe_identity is not None:
        described["probe"] = probe_identity
    text = json.dumps(described, sort_keys=True, default=list)
    return {**described, "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}


def _file_digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _refuse_other_result(out: Path, source: Mapping[str, Any], overwrite: bool) -> None:
    if out.is_file():
        raise DataError(f"{out} is a file; --out wants a directory")
    report = out / "report.json"
    if overwrite or not report.exists():
        return
    try:
        before = json.loads(report.read_text())["source"]["digest"]
    except (ValueError, KeyError, OSError):
        before = None
    if before != source["digest"]:
        raise DataError(f"{out} holds a result of other inputs or settings; choose another --out or give --overwrite")


def _holds_other_probe(out: Path, identity: str | None) -> bool:
    """True if outcomes or rollouts of a probe are there that is not known to be this one."""
    if not any((out / name).exists() for name in (PROBE_OUTCOMES, PROBE_RUN)):
        return False
    try:
        before: str | None = (out / PROBE_IDENTITY).read_text(encoding="utf-8")
    except FileNotFoundError:
        before = None
    return before != identity


def _drop_probe(out: Path) -> None:
    """The identity stays until a new one replaces it: broken off in between, the rest still counts as another probe."""
    (out / PROBE_OUTCOMES).unlink(missing_ok=True)
    if (out / PROBE_RUN).exists():
        shutil.rmtree(out / PROBE_RUN)


def write_result(out: Path, result: FilterResult) -> None:
    """Replace the five files; the report that declares them whole comes last."""
    contents = {
        "train.jsonl": _lines(_relocated(result.train, out)),
        "val.jsonl": _lines(_relocated(result.val, out)),
        "dropped.jsonl": _lines([drop.as_json() for drop in result.ledger.drops]),
        "report.md": markdown(result.report).encode(),
        "report.json": orjson.dumps(result.report, option=orjson.OPT_INDENT_2),
    }
    for name in OUTPUTS:
        write_atomic(out / name, contents[name])


def _lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n" for row in rows)


def _relocated(rows: Sequence[Row], out: Path) -> list[Row]:
    """`repo_path` relative to the new file, so that the data directory can be moved as a whole."""
    base = out.absolute()
    return [
        {**row, "repo_path": os.path.relpath(row["repo_path"], base)} if row.get("repo_path") else row for row in rows
    ]
