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
    from swe_lightning.monitor.rows import rules_of
    from swe_lightning.monitor.runs import decoder, open_store
    from swe_lightning.trajectory import commands

    with open_store(run) as store:
        data = commands.show(store.calls(rollout, deltas=True), rules_of(run), decode=decoder(run))
    typer.echo(json.dumps(data, indent=2) if as_json else commands.show_text(data))


@app.command()
def stats(
    run: Run,
    step: Annotated[int | None, typer.Option(min=0, help="Only the rollouts of this training step.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print row statistics and the drop ledger of a run's training rollouts."""
    from swe_lightning.monitor.rows import stats_of
    from swe_lightning.trajectory import commands

    data = stats_of(run, step)
    typer.echo(json.dumps(data, indent=2) if as_json else commands.stats_text(data))
