"""`swel doctor`: try everything a run needs, before the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    recipe: Annotated[str | None, typer.Argument(help="Recipe file, or the name of a built-in one.")] = None,
    url: Annotated[list[str] | None, typer.Option(help="Model server to ask once, with or without /v1.")] = None,
    model: Annotated[str, typer.Option(help="Model name to ask for.")] = "policy",
    run: Annotated[Path, typer.Option(help="Where the run will lie.")] = Path("runs"),
    store: Annotated[str | None, typer.Option(help="Database URL, if not SQLite; password in PGPASSWORD.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override one recipe key.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check model servers, sandbox, store and disk before a run; exit 1 if anything is missing."""
    from swe_lightning.doctor import examine
    from swe_lightning.recipe import load_recipe

    if store is not None:
        from swe_lightning.gateway.database import check_no_password

        check_no_password(store, "--store")
    resolved = load_recipe(recipe, overrides) if recipe is not None else None
    checks = examine(resolved, urls=url or [], model=model, run=run, store_url=store)
    if as_json:
        typer.echo(json.dumps([check.as_json() for check in checks], indent=2))
    else:
        for check in checks:
            typer.echo(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}")
    if not all(check.ok for check in checks):
        raise typer.Exit(1)
