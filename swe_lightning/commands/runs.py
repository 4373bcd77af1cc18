"""`swel runs ...`: what a run did, down to one rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="List runs and look into them.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_command(
    root: Annotated[Path, typer.Argument(help="Directory that holds run directories.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs below a directory."""
    from rich.console import Console

    from swe_lightning.monitor.runs import list_runs
    from swe_lightning.monitor.tables import runs_table

    rows = list_runs(root)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        Console().print(runs_table(rows))


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    rollout: Annotated[str | None, typer.Argument(help="Rollout id: follow this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run, or follow one rollout from issue text to reward and rows."""
    from rich.console import Console

    from swe_lightning.monitor.runs import show_rollout, show_run
    from swe_lightning.monitor.tables import rollout_view, run_view

    data = show_rollout(run, rollout) if rollout else show_run(run)
    if as_json:
        typer.echo(json.dumps(data, indent=2))
    else:
        Console().print(rollout_view(data) if rollout else run_view(data))
