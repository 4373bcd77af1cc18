"""`swel eval`: checkpoints and scripted strategies on held-out tasks, with intervals and the paired comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override one recipe key: section.key=value.")]


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)


def evaluate(
    target: Annotated[str, typer.Argument(help="Recipe (evaluates its tasks.val), or a task file with --recipe.")],
    ckpt: Annotated[
        list[str] | None,
        typer.Option(
            help="stepN of --run, a model directory, or label=directory. The first is what others are compared with."
        ),
    ] = None,
    script: Annotated[list[str] | None, typer.Option(help="Scripted strategy to evaluate beside them.")] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run directory of the checkpoints; default runs/<recipe name>.")
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="Recipe for harness and sandbox if TARGET is a task file.")
    ] = "tiny_cpu.yaml",
    n: Annotated[int | None, typer.Option(min=1, help="Rollouts per task; default evaluation.samples.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N tasks.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where results go; default <run>/evals/<target>.")] = None,
    overrides: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Score checkpoints on held-out tasks: Wilson interval, paired difference clustered by package."""
    from rich.console import Console

    from data_pipeline.sources import load_tasks
    from swe_lightning.evaluation.session import parse_subjects, run_session, write_report
    from swe_lightning.recipe import load_recipe

    is_recipe = target.endswith((".yaml", ".yml"))
    settings = load_recipe(target if is_recipe else recipe, overrides)
    tasks_file = settings.tasks.val if is_recipe else Path(target)
    run = run or Path("runs") / settings.name
    subjects = parse_subjects(ckpt or [], script or [], run if run.is_dir() else None)
    tasks = load_tasks(tasks_file)[:limit]
    out = out or run / "evals" / tasks_file.stem
    results = run_session(
        settings,
        tasks,
        subjects,
        out,
        samples=n or settings.evaluation.samples,
        temperature=settings.evaluation.temperature,
        console=Console(stderr=True),
    )
    text = write_report(out, results)
    typer.echo((out / "report.json").read_text() if as_json else text)
