"""`swel`: the command line of swe-lightning.

This module assembles the command tree and turns errors into one sentence and an exit code; what commands do lies in the
rooms below. It imports nothing heavy: `swel --help` answers at once, and each command imports its room when it runs.
"""

from __future__ import annotations

import os
import sys

import typer

from swe_lightning.commands import (
    data,
    doctor,
    evaluate,
    gateway,
    grade,
    images,
    model,
    recipe,
    runs,
    sandbox,
    serve,
    train,
    trajectory,
)
from swe_lightning.commands.tree import TreeGroup

app = typer.Typer(
    name="swel",
    cls=TreeGroup,
    help="Clean tasks, train the model behind a coding agent with the real harness in the loop, evaluate.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def root(ctx: typer.Context) -> None:
    """Clean tasks, train the model behind a coding agent with the real harness in the loop, evaluate."""


@app.command()
def version() -> None:
    """Print the version."""
    from swe_lightning import __version__

    typer.echo(f"swe-lightning {__version__}")


app.add_typer(data.app, name="data")
train.register(app)
doctor.register(app)
model.register(app)
evaluate.register(app)
grade.register(app)
app.add_typer(recipe.app, name="recipe")
app.add_typer(runs.app, name="runs")
app.add_typer(trajectory.app, name="trajectory")
app.add_typer(model.app, name="model")
app.add_typer(sandbox.app, name="sandbox")
app.add_typer(images.app, name="images")
app.add_typer(serve.app, name="serve")
app.add_typer(gateway.app, name="gateway")


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 failed, 2 the user can mend it, 130 interrupted."""
    try:
        sys.exit(app(args=arguments, prog_name="swel", standalone_mode=True))
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:
        # One that names a file is a path the user can mend; any other is a bug.
        if error.strerror is None or not isinstance(error.filename, str | bytes | os.PathLike):
            raise
        typer.echo(f"swel: {os.fsdecode(error.filename)}: {error.strerror}", err=True)
        sys.exit(2)
    except Exception as error:
        # Imported late: the error tree brings the records with it, which `--help` does not need.
        from swe_lightning.errors import SwelError

        if not isinstance(error, SwelError):
            raise
        typer.echo(f"swel: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
