"""`swel model ...`: a policy small enough for any machine, and its supervised start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Make a tiny policy.", no_args_is_help=True)


def register(root: typer.Typer) -> None:
    root.command()(sft)


def sft(
    recipe: Annotated[str, typer.Argument(help="Recipe with a warm_start section.")],
    run: Annotated[
        Path | None, typer.Option(help="Run directory; default runs/<name>. `swel train` goes on from it.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override one recipe key.")] = None,
) -> None:
    """Fine-tune a fresh tiny policy on scripted demonstrations (the first stage of `swel train`)."""
    from swe_lightning.errors import UserError
    from swe_lightning.recipe import load_recipe
    from swe_lightning.training.loop import warm_up

    settings = load_recipe(recipe, overrides)
    if settings.warm_start is None:
        raise UserError(f"recipe {recipe} has no warm_start section; use tiny_cpu.yaml")
    typer.echo(f"policy in {warm_up(settings, run or Path('runs') / settings.name)}")


@app.command()
def tiny(
    out: Annotated[Path, typer.Argument(help="Directory for model and tokenizer (Hugging Face layout).")],
    recipe: Annotated[str, typer.Option(help="Recipe whose warm_start section gives the shape.")] = "tiny_cpu.yaml",
) -> None:
    """Create a tiny policy with random weights, and its tokenizer."""
    from swe_lightning.errors import UserError
    from swe_lightning.paths import want_directory
    from swe_lightning.recipe import load_recipe
    from swe_lightning.training.warm import create_policy

    want_directory(out, "swel model tiny")
    settings = load_recipe(recipe)
    if settings.warm_start is None:
        raise UserError(f"recipe {recipe} has no warm_start section; use tiny_cpu.yaml")
    if (out / "config.json").exists():
        raise UserError(f"{out} already holds a model; choose another directory")
    create_policy(settings.warm_start, out, settings.model.max_context, settings.training.seed)
    typer.echo(f"policy and tokenizer in {out}")
