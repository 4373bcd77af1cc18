"""`swel train` and `swel demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override one recipe key: section.key=value.")]


def register(app: typer.Typer) -> None:
    app.command()(train)
    app.command()(demo)


def train(
    recipe: Annotated[str, typer.Argument(help="Recipe file, or the name of a built-in one.")],
    run: Annotated[
        Path | None, typer.Option(help="Run directory; default runs/<name>. An unfinished run resumes.")
    ] = None,
    overrides: SetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe and check it; run nothing.")
    ] = False,
) -> None:
    """Train by rollout-level GRPO through the real harness."""
    import yaml

    from swe_lightning.errors import UserError
    from swe_lightning.harness.templates import check_templates
    from swe_lightning.recipe import find_recipe, load_recipe, missing_engine

    path, builtin = find_recipe(recipe)
    resolved = load_recipe(recipe, overrides)
    check_templates(resolved.harness)
    missing = missing_engine(resolved)
    if dry_run:
        typer.echo(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False), nl=False)
        typer.echo(f"recipe {path}{' (built in)' if builtin else ''} is valid", err=True)
        for file in (resolved.tasks.train, resolved.tasks.val):
            if not file.is_file():
                typer.echo(f"task file {file} is not there yet", err=True)
        if missing:
            typer.echo(f"not runnable yet: {missing}", err=True)
        return
    if missing:
        raise UserError(f"{path}: {missing}")
    typer.echo(f"recipe {path}{' (built in)' if builtin else ''}", err=True)
    from swe_lightning.training.loop import train as run_training

    run_training(resolved, run or Path("runs") / resolved.name)


def demo(
    out: Annotated[Path, typer.Option(help="Where tasks, runs and the report go.")] = Path("runs/demo"),
    control: Annotated[bool, typer.Option(help="Also train the shuffled-reward control.")] = True,
) -> None:
    """Do everything once on this machine: make tasks, clean them, train a tiny policy, evaluate it."""
    from swe_lightning.demo import run_demo
    from swe_lightning.paths import want_directory

    want_directory(out, "--out")
    run_demo(out, control=control)
