"""`swel recipe`: the schema, and the recipes that ship with the package."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(help="Look at recipes.", no_args_is_help=True)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a recipe, for editors."""
    from swe_lightning.recipe import Recipe

    typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))


@app.command("list")
def list_recipes(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the built-in recipes."""
    from swe_lightning.recipe import BUILTIN_DIR, load_recipe, missing_engine

    rows = []
    for path in sorted(BUILTIN_DIR.glob("*.yaml")):
        missing = missing_engine(load_recipe(str(path)))
        rows.append({"name": path.name, "runs_here": missing is None, "note": missing or ""})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        for row in rows:
            typer.echo(f"{row['name']:24} {row['note'] or 'runs on this machine'}")
