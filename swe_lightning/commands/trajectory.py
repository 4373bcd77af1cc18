"""`swel trajectory ...`: what the trainer makes of recorded calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Look at token rows and their masks.", no_args_is_help=True)

Run = Annotated[Path, typer.Argument(help="Run directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def show(run: Run, rollout: str, as_json: AsJson = False) -> None:
    """Print one rollout's rows: which tokens are trained, where and why a row broke."""
    from swe_lightning.monitor.runs import decoder, open_store
    from swe_lightning.trajectory import commands

    with open_store(run) as store:
        data = commands.show(store.calls(rollout), decode=decoder(run))
    typer.echo(json.dumps(data, indent=2) if as_json else commands.show_text(data))


@app.command()
def stats(run: Run, as_json: AsJson = False) -> None:
    """Print a run's row statistics and drop ledger."""
    from swe_lightning.monitor.runs import open_store
    from swe_lightning.trajectory import commands

    with open_store(run) as store:
        data = commands.stats(store.calls(rollout_id) for rollout_id in store.graded("train"))
    typer.echo(json.dumps(data, indent=2) if as_json else commands.stats_text(data))
