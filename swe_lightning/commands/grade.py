"""`swel grade`: verdicts without a model: one patch, a predictions file, the gold or the null patch of every task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(grade)


def grade(
    tasks: Annotated[Path, typer.Argument(help="Task file.")],
    task: Annotated[str | None, typer.Option(help="Only this instance_id.")] = None,
    patch: Annotated[Path | None, typer.Option(help="Patch for --task.")] = None,
    predictions: Annotated[Path | None, typer.Option(help="Predictions in SWE-bench form.")] = None,
    gold: Annotated[bool, typer.Option("--gold", help="Grade the fix itself: must resolve every task.")] = False,
    null: Annotated[bool, typer.Option("--null", help="Grade an empty patch: must resolve none.")] = False,
    timeout_s: Annotated[float, typer.Option(min=1, help="Wall time of the test command.")] = 300.0,
    workers: Annotated[int, typer.Option(min=1, help="Gradings at once.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Take verdicts in fresh sandboxes."""
    from rich.console import Console

    from data_pipeline.sources import load_tasks
    from swe_lightning.errors import UserError
    from swe_lightning.grading import commands
    from swe_lightning.grading.grade import Grader
    from swe_lightning.recipe import Grading, SandboxSection
    from swe_lightning.sandbox import make_backend

    if sum([patch is not None, predictions is not None, gold, null]) != 1:
        raise UserError("say what to grade: exactly one of --patch FILE, --predictions FILE, --gold, --null")
    chosen = [t for t in load_tasks(tasks) if task is None or t.instance_id == task]
    if not chosen:
        raise UserError(f"no task {task} in {tasks}")
    grader = Grader(make_backend(SandboxSection()), Grading(timeout_s=timeout_s))
    if patch is not None:
        if len(chosen) != 1:
            raise UserError("--patch needs --task INSTANCE_ID")
        if not patch.is_file():
            raise UserError(f"no patch file {patch}")
        rows = [commands.grade_patch(grader, chosen[0], patch.read_bytes())]
    elif predictions is not None:
        rows = commands.grade_predictions(grader, chosen, commands.read_predictions(predictions), parallel=workers)
    else:
        rows = (commands.grade_gold if gold else commands.grade_null)(grader, chosen, parallel=workers)
    if as_json:
        typer.echo(json.dumps([row.as_dict() for row in rows], indent=2))
    else:
        Console().print(commands.summary_table(rows, str(tasks)))
