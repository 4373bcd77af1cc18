"""`swel sandbox ...`: what the box on this machine stops, and what is left of crashed runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(help="Check and clean sandboxes.", no_args_is_help=True)


@app.command()
def check(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Try the known escapes in a box on this machine and print what happened."""
    from rich.console import Console
    from rich.table import Table

    from swe_lightning.sandbox.check import check_host, escape_report
    from swe_lightning.sandbox.local import LocalBackend

    missing = check_host()
    if missing is not None:
        raise missing
    rows = escape_report(LocalBackend())
    if as_json:
        typer.echo(json.dumps([{"attack": n, "stopped": ok, "detail": d} for n, ok, d in rows], indent=2))
    else:
        table = Table("attack", "stopped", "detail")
        for name, ok, detail in rows:
            table.add_row(name, "yes" if ok else "NO", detail)
        Console().print(table)
    if not all(ok for _, ok, _ in rows):
        raise typer.Exit(1)


@app.command()
def gc(label: Annotated[str | None, typer.Option(help="Only boxes with this label.")] = None) -> None:
    """Remove what crashed runs left behind."""
    from swe_lightning.sandbox.local import LocalBackend

    typer.echo(f"removed {LocalBackend().gc(label)} orphaned sandboxes")
