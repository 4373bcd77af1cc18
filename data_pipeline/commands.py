"""What `swel data ...` runs: one function per command, explicit keywords, no command-line library.

Each returns a small dict for `--json` and prints nothing itself, so the command line decides how it looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swe_lightning.errors import UserError


def synth(
    *,
    out: Path,
    pypi: Sequence[str] = (),
    held_out: Sequence[str] = (),
    repo: str | Path | None = None,
    manifest: Path | None = None,
    write_manifest: Path | None = None,
    tasks_per_package: int = 20,
    combinations: int | None = None,
    kinds: Sequence[str] = (),
    one_edit: bool = False,
    seed: int = 0,
    workers: int = 2,
    timeout_s: float = 60.0,
    max_seconds: float | None = None,
    test_cmd: str | None = None,
    test_env: Mapping[str, str] | None = None,
    train_limit: int | None = None,
    held_out_limit: int | None = None,
    issue_model: Any = None,
    backend: Any = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Make tasks in OUT/tasks.jsonl: searched (`pypi`, `held_out`: NAME==VERSION; `repo`: PATH[@REVISION]) or from a
    `manifest`. The same command again finds them made (`reused`); another one needs `overwrite`.

    `one_edit` keeps bugs that one edit of the closed set repairs and whose failing tests are few and quick;
    `combinations` per package are several bugs at once; `max_seconds` leaves out bugs whose test run takes longer;
    `write_manifest` saves what was found (with `manifest`: what still holds); `issue_model` (an IssueModel) writes the
    issue texts. Packages that give no task are reported, not fatal, unless none does.
    """
    from data_pipeline import order as orders
    from swe_lightning.paths import want_directory

    want_directory(out, "--out")
    if kinds:
        _refuse_unknown_kinds(kinds)
    if manifest is not None and (pypi or held_out or repo or issue_model):
        raise UserError("--manifest already says which packages; leave out --pypi, --held-out, --repo, --issue-model")
    if manifest is None and not (pypi or held_out or repo):
        raise UserError("nothing to make tasks from: give --pypi NAME==VERSION, --repo DIR or --manifest FILE")
    if manifest is not None:
        order: orders.Order = orders.FromManifest(manifest, train_limit, held_out_limit, max_seconds)
    else:
        search = orders.SearchOptions(
            tasks_per_package, tuple(kinds), one_edit, seed, workers, timeout_s, max_seconds, combinations
        )
        order = orders.Search(
            tuple(pypi),
            tuple(held_out),
            str(repo) if repo else None,
            search,
            test_cmd,
            dict(test_env or {}),
            issue_model,
        )
    return orders.make(order, out, write_manifest=write_manifest, backend=backend, workers=workers, overwrite=overwrite)


def _refuse_unknown_kinds(kinds: Sequence[str]) -> None:
    from data_pipeline.mutation_rules import KINDS

    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise UserError(f"--kind {unknown[0]}: no such kind of bug; choose among {', '.join(sorted(KINDS))}")


def stats(*, inputs: Sequence[str]) -> dict[str, Any]:
    """Counts of task files or output directories: rows, repositories, tests per task, issue lengths, kinds of bugs."""
    from data_pipeline import look

    return look.stats([look.open_set(name) for name in inputs])


def show(*, inputs: Sequence[str], instance_id: str) -> dict[str, Any]:
    """One row. DataError with its reason if it left, or with close names if the id is unknown."""
    return find(inputs=inputs, instance_id=instance_id)[1]


def find(*, inputs: Sequence[str], instance_id: str) -> tuple[str, dict[str, Any]]:
    """The same with the side it is on."""
    from data_pipeline import look

    return look.find([look.open_set(name) for name in inputs], instance_id)


def diff(*, before: str, after: str) -> dict[str, Any]:
    """What differs between two task files or output directories; see compare.py."""
    from data_pipeline.compare import compare
    from data_pipeline.look import open_set

    return compare(open_set(before), open_set(after))


def filter(
    *,
    inputs: Sequence[str],
    out: Path,
    preset: str = "paper",
    stages: Sequence[str] = (),
    skip: Sequence[str] = (),
    seed: int = 0,
    hub_split: str | None = None,
    stream: bool = False,
    test_cap: int = 200,
    eval_set: Sequence[str] = (),
    branches: Path | None = None,
    of_image: Any = None,
    validations: int = 0,
    grade: Any = None,
    grade_identity: str = "",
    workers: int = 2,
    probe_results: Path | None = None,
    rollouts: Any = None,
    probe_identity: str | None = None,
    k: int = 4,
    keep_none_solved: int = 1000,
    split: str = "auto",
    val_size: int | None = None,
    held_out_repos: Sequence[str] = (),
    overwrite: bool = False,
    also: Sequence[str] = (),
) -> dict[str, Any]:
    """Clean and split task files into OUT; returns the report (also in OUT/report.json).

    `branches` is a JSON file {repository or image: [branch names]} for rows without a local repository, `of_image` asks
    the images themselves. `validations` runs the tests of every row through `grade`. `rollouts` (see probe.Rollouts)
    turns the difficulty probe on; `probe_results` imports one. `probe_identity` says which model is probed and how:
    outcomes of another one in OUT are refused, or with `overwrite` dropped. `also`: options of the command line for the
    data card to repeat, which are known here only by what was made of them (the grader's time limit).
    """
    from typing import get_args

    from data_pipeline.pipeline import FilterSettings, Tools, run_filter
    from data_pipeline.split import Mode
    from data_pipeline.stages.branches import read_table

    if split not in get_args(Mode):
        raise UserError(f"--split {split}: choose one of {', '.join(get_args(Mode))}")
    if k < 1 or test_cap < 1 or (val_size is not None and val_size < 1):
        raise UserError("--k, --test-cap and --val-size must be at least 1")
    settings = FilterSettings(
        preset=preset,  # type: ignore[arg-type]
        add=tuple(stages),
        skip=tuple(skip),
        seed=seed,
        hub_split=hub_split,
        test_cap=test_cap,
        eval_set=tuple(eval_set),
        validations=validations,
        k=k,
        keep_none_solved=keep_none_solved,
        split=split,  # type: ignore[arg-type]
        val_size=val_size,
        held_out_repos=tuple(held_out_repos),
    )
    tools = Tools(
        branches=read_table(branches) if branches else None,
        of_image=of_image,
        branches_file=str(branches) if branches else None,
        also=tuple(also),
        rollouts=rollouts,
        probe_identity=probe_identity,
        grade=grade,
        grade_identity=grade_identity,
        workers=workers,
        stream=stream,
    )
    return run_filter(inputs, out, settings, tools, probe_results=probe_results, overwrite=overwrite).report


def validate(
    *,
    inputs: Sequence[str],
    out: Path,
    grade: Any,
    grade_identity: str = "",
    repeats: int = 3,
    workers: int = 2,
    hub_split: str | None = None,
) -> dict[str, Any]:
    """Run the tests of every row: OUT/tasks.jsonl holds the rows that keep their word, OUT/dropped.jsonl the others."""
    from data_pipeline.sources import open_sources
    from data_pipeline.validation_run import run_validation

    return run_validation(
        open_sources(inputs, hub_split), out, grade, repeats=repeats, workers=workers, settings=grade_identity
    )
