"""`swel grade`: verdicts without a model: a patch, predictions, a saved log, the gold or null patch of each task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from swe_lightning.grading.commands import Job
    from swe_lightning.grading.grade import Grader
    from swe_lightning.grading.sheet import GradeRow
    from swe_lightning.records import Task
    from swe_lightning.sandbox import Limits


def register(app: typer.Typer) -> None:
    app.command()(grade)


def grade(
    tasks: Annotated[Path | None, typer.Argument(help="Task file; left out where --task is a file.")] = None,
    task: Annotated[str | None, typer.Option(help="Only this instance_id, or a file that holds one row.")] = None,
    patch: Annotated[Path | None, typer.Option(help="Patch for --task.")] = None,
    log: Annotated[Path | None, typer.Option(help="Saved test log of --task: nothing is run.")] = None,
    predictions: Annotated[Path | None, typer.Option(help="Predictions in SWE-bench form.")] = None,
    gold: Annotated[bool, typer.Option("--gold", help="Grade the fix itself: must resolve every task.")] = False,
    null: Annotated[bool, typer.Option("--null", help="Grade an empty patch: must resolve none.")] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Gradings of each patch.")] = 1,
    tests: Annotated[str, typer.Option(help="listed, fail_to_pass_files or all.")] = "listed",
    timeout_s: Annotated[float, typer.Option(min=1, help="Wall time of the test command.")] = 300.0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Gradings at once; default: what the machine holds.")
    ] = None,
    backend: Annotated[str, typer.Option(help="Sandbox: local, docker or kubernetes.")] = "local",
    versions: Annotated[Path | None, typer.Option(help="JSON of instance_id -> version, for rows without.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Keep rows here; a second call grades only what has no verdict. Default: beside --predictions."
        ),
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Leave the tree of every graded box in this directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Take verdicts in fresh sandboxes, or from a saved log."""
    from rich.console import Console

    from swe_lightning.errors import UserError
    from swe_lightning.grading import commands
    from swe_lightning.grading.sheet import summary_table

    if sum([patch is not None, log is not None, predictions is not None, gold, null]) != 1:
        raise UserError(
            "say what to grade: exactly one of --patch FILE, --log FILE, --predictions FILE, --gold, --null"
        )
    chosen = _tasks(tasks, task, versions)
    if (patch or log) and len(chosen) != 1:
        raise UserError(f"--{'patch' if patch else 'log'} needs --task INSTANCE_ID")
    kind = "gold" if gold else "null" if null else ""
    if log is not None:
        rows = [commands.grade_log(chosen[0], _read(log, "log"))]
    else:
        patches = {chosen[0].instance_id: _read(patch, "patch")} if patch else {}
        if predictions is not None:
            from swe_lightning.grading.predictions import read_predictions

            patches, out = (
                read_predictions(predictions),
                out or predictions.with_name(predictions.name + ".verdicts.jsonl"),
            )
        if kind:
            jobs = commands.jobs_of(chosen, kind, repeat=repeat, scope=tests)
        else:
            jobs = commands.jobs_of_patches(chosen, patches, repeat=repeat, scope=tests)
        rows = _run(jobs, tests, timeout_s, workers, {"backend": backend, "keep": keep}, out)
        if keep is not None:
            typer.echo(f"swel: the trees of {len(rows)} gradings are in {keep}", err=True)
    if as_json:
        typer.echo(json.dumps([row.as_dict() for row in rows], indent=2))
    else:
        Console().print(summary_table(rows, str(tasks or task)))
    why = commands.failed(rows, kind)
    if why:
        typer.echo(f"swel: {why}", err=True)
        raise typer.Exit(1)


def _tasks(tasks: Path | None, task: str | None, versions: Path | None) -> list[Task]:
    from data_pipeline.sources import load_tasks
    from swe_lightning.errors import UserError
    from swe_lightning.grading.commands import with_versions

    if tasks is None:
        if task is None or not Path(task).is_file():
            raise UserError("give a task file, or with --task a file that holds one row")
        tasks, task = Path(task), None
        if len(load_tasks(tasks)) != 1:
            raise UserError(f"{tasks} holds more than one row; say `swel grade {tasks} --task INSTANCE_ID`")
    chosen = [t for t in load_tasks(tasks) if task is None or t.instance_id == task]
    if not chosen:
        raise UserError(f"no task {task} in {tasks}")
    return with_versions(chosen, versions) if versions else chosen


def _run(
    jobs: list[Job], tests: str, timeout_s: float, workers: int | None, sandbox: dict[str, Any], out: Path | None
) -> list[GradeRow]:
    from data_pipeline.progress import progress
    from swe_lightning.grading import commands
    from swe_lightning.grading.sheet import Sheet
    from swe_lightning.sandbox import Limits

    limits = Limits()
    grader = make_grader(sandbox, {"timeout_s": timeout_s, "tests": tests}, limits)
    with progress("grade", len(jobs)) as meter:
        return commands.grade_jobs(
            grader,
            jobs,
            workers=commands.bounded_workers(workers, limits),
            sheet=Sheet(out),
            progress=meter.advance,
        )


def make_grader(sandbox: dict[str, Any], grading: dict[str, Any], limits: Limits | None = None) -> Grader:
    """The grader that options of a command line ask for (`swel grade`, `swel data`); UserError names a wrong one."""
    from pydantic import ValidationError

    from swe_lightning.errors import UserError
    from swe_lightning.grading.grade import Grader
    from swe_lightning.recipe import Grading, SandboxSection
    from swe_lightning.sandbox import make_backend

    try:
        section, settings = SandboxSection.model_validate(sandbox), Grading.model_validate(grading)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UserError(f"--{str(wrong['loc'][0]).replace('_', '-')} {wrong['input']}: {wrong['msg']}") from error
    return Grader(make_backend(section), settings, limits=limits)


def _read(path: Path | None, what: str) -> bytes:
    from swe_lightning.errors import UserError

    if path is None or not path.is_file():
        raise UserError(f"no {what} file {path}")
    return path.read_bytes()
