"""`swel sandbox ...`: look into a box, see what it stops on this machine, remove what crashed runs left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from swe_lightning.recipe import SandboxSection

app = typer.Typer(help="Look into sandboxes, check and clean them.", no_args_is_help=True)

BackendName = Annotated[str, typer.Option(help="local, docker or kubernetes.")]
SectionOf = Annotated[
    str | None, typer.Option("--recipe", help="Recipe whose sandbox section holds (cluster, namespace, registry).")
]


def _section(backend: str, recipe: str | None) -> SandboxSection:
    from swe_lightning.recipe import SandboxSection, load_recipe, validated

    given = load_recipe(recipe).sandbox.model_dump() if recipe else {}
    return validated(SandboxSection, {**given, "backend": backend}, "--backend")


@app.command()
def shell(
    tasks: Annotated[Path, typer.Argument(help="Task file.")],
    task: Annotated[str | None, typer.Option(help="instance_id; needed if the file holds several.")] = None,
    command: Annotated[str | None, typer.Option("-c", "--command", help="Run this command and end.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe whose harness and sandbox sections hold.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override, for example sandbox.cpu=2.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Wall time of one command.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per command.")] = False,
) -> None:
    """Look around in a task's sandbox as the agent would; without a terminal, run a script from standard input."""
    import sys

    from data_pipeline.sources import load_tasks
    from swe_lightning.recipe import Harness, SandboxSection, load_recipe
    from swe_lightning.sandbox import ExecResult
    from swe_lightning.sandbox import shell as room

    if overrides and recipe is None:
        raise typer.BadParameter("--set changes a recipe; name one with --recipe")
    loaded = load_recipe(recipe, overrides) if recipe else None
    section, harness = (loaded.sandbox, loaded.harness) if loaded else (SandboxSection(), Harness())
    chosen = room.choose(load_tasks(tasks), task, str(tasks))

    def show(result: ExecResult) -> None:
        if as_json:
            text = result.output.decode(errors="replace")
            flags = {"timed_out": result.timed_out, "truncated": result.truncated}
            typer.echo(json.dumps({"exit_code": result.exit_code, **flags, "output": text}))
            return
        sys.stdout.flush()
        sys.stdout.buffer.write(result.output)
        sys.stdout.buffer.flush()
        if result.timed_out:
            typer.echo(f"swel: timed out after {timeout_s:g} s; everything in the sandbox was killed", err=True)

    interactive = command is None and sys.stdin.isatty()
    with room.open_box(chosen, section, harness) as box:
        if interactive:
            typer.echo(f"{chosen.instance_id}: each line is one command, as for the agent; end with Ctrl-D", err=True)
            commands = room.lines(f"{chosen.instance_id}$ ")
        else:
            commands = iter([command if command is not None else sys.stdin.read()])
        code = room.talk(box, commands, timeout_s, show)
        if interactive:
            typer.echo(room.changes(box.diff()), err=True)
    if code and not interactive:
        raise typer.Exit(code)


@app.command()
def check(
    backend: BackendName = "local",
    image: Annotated[str | None, typer.Option(help="Image to try it in (docker, kubernetes).")] = None,
    recipe: SectionOf = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try the known escapes in a box on this machine and print what happened."""
    from rich.console import Console
    from rich.table import Table

    from swe_lightning.errors import UserError
    from swe_lightning.sandbox import make_backend
    from swe_lightning.sandbox.check import check_host, escape_report

    section = _section(backend, recipe)
    section.image = image or section.image
    if backend == "local" and (missing := check_host()) is not None:
        raise missing
    if backend != "local" and not section.image:
        raise UserError(f"swel sandbox check --backend {backend} needs --image, an image with bash and Python")
    made = make_backend(section)
    rows = escape_report(made, cgroup=None if backend == "local" else True, interface=backend == "kubernetes")
    made.close()
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
def gc(
    label: Annotated[str | None, typer.Option(help="Only boxes with this label.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="local, docker or kubernetes. Default: local, and docker if a daemon answers.")
    ] = None,
    recipe: SectionOf = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Remove what crashed runs left behind."""
    from swe_lightning.errors import MissingPart
    from swe_lightning.sandbox import make_backend

    removed = {}
    for name in [backend] if backend else ["local", "docker"]:
        try:
            removed[name] = make_backend(_section(name, recipe)).gc(label)
        except MissingPart:
            if backend:
                raise
    if as_json:
        typer.echo(json.dumps(removed))
    else:
        typer.echo(f"removed {sum(removed.values())} orphaned sandboxes")
