"""`swel images ...`: bring task images here, harden them, check them, and keep the disk within a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from swe_lightning.records import Task

app = typer.Typer(help="Images of task sandboxes.", no_args_is_help=True)

Names = Annotated[list[str], typer.Argument(help="Image names or task files (.jsonl).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def pull(
    images: Names,
    mirror: Annotated[list[str] | None, typer.Option(help="Registry to try as well, host[:port]; repeatable.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Pulls at once.")] = 2,
    per_hour: Annotated[float | None, typer.Option(min=0.1, help="Pulls that are started per hour at most.")] = None,
    patience_s: Annotated[float, typer.Option(min=0, help="How long one image may wait for a busy registry.")] = 900.0,
    pin: Annotated[Path | None, typer.Option(help="Write the task file again with each image's digest.")] = None,
    as_json: AsJson = False,
) -> None:
    """Pull what is not here yet, in any spelling, from any mirror; wait where a registry asks for it."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from sandbox_images.names import needed, pin_digests, task_file
    from sandbox_images.pull import Puller
    from swe_lightning.sandbox.docker_engine import connect

    wanted = needed(images)
    source = task_file(images) if pin else None
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, disable=as_json, transient=True) as progress:
        lines = {name: progress.add_task(name) for name in wanted}

        def say(image: str, what: str) -> None:
            progress.update(lines[image], description=f"{image}: {what}")

        puller = Puller(connect(600), mirrors=mirror or (), per_hour=per_hour, patience_s=patience_s, say=say)
        done = puller.pull(list(wanted), jobs)
    if pin and source:
        pin_digests(source, {p.image: p.digest for p in done if p.ok and p.digest}, pin)
    show([p.as_dict() for p in done], ["image", "state", "source", "detail"], as_json)
    if not all(p.ok for p in done):
        raise typer.Exit(1)


@app.command("list")
def list_images(
    tasks: Annotated[Path | None, typer.Argument(help="Task file: say which of its images are here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Images of tasks on this machine, the one needed least recently first."""
    from sandbox_images.inventory import units
    from sandbox_images.names import needed, presence
    from swe_lightning.sandbox.docker_engine import connect

    if tasks is not None:
        show(presence(connect(), needed([str(tasks)])), ["image", "tasks", "here", "id"], as_json)
        return
    show([u.as_dict() for u in units(connect())], ["names", "bytes", "hardened", "pulled", "running"], as_json)


@app.command()
def build(
    images: Names,
    push: Annotated[str | None, typer.Option(help="Registry (host[:port][/path]) for the nodes of a cluster.")] = None,
    as_json: AsJson = False,
) -> None:
    """Harden images ahead of time: command server in, git, history and caches out; optionally push them."""
    from sandbox_images.names import needed
    from sandbox_images.push import push_image
    from swe_lightning.sandbox.docker_engine import connect
    from swe_lightning.sandbox.hardening import Hardener, cluster_name

    client = connect(600)
    hardener = Hardener(client)
    made = []
    for image in needed(images):
        hardened = hardener.image(image)
        row = {"image": image, "hardened": hardened.name}
        if push:
            row |= push_image(client, hardened.name, push, cluster_name(image))
        made.append(row)
    show(made, ["image", "hardened", *(["pushed", "digest"] if push else [])], as_json)


@app.command()
def check(images: Names, as_json: AsJson = False) -> None:
    """Look into each image as an agent would: shell, Python, imports, tests."""
    from sandbox_images.check import check_image
    from sandbox_images.names import needed

    found = [finding.as_dict() for image, tasks in needed(images).items() for finding in check_image(image, one(tasks))]
    show(found, ["image", "check", "ok", "detail"], as_json)
    if not all(finding["ok"] for finding in found):
        raise typer.Exit(1)


@app.command()
def prune(
    keep_gb: Annotated[float, typer.Option(min=0, help="Disk budget for task images and what was made of them.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what was needed least recently until the rest fits the budget."""
    from sandbox_images.inventory import prune as remove
    from swe_lightning.sandbox.docker_engine import connect

    removed = remove(connect(600), int(keep_gb * 1e9), dry_run=dry_run)
    show([u.as_dict() for u in removed], ["names", "bytes", "hardened", "pulled"], as_json)


def one(tasks: list[Task]) -> Task | None:
    return tasks[0] if tasks else None


def show(rows: list[dict[str, Any]], columns: list[str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    Console().print(table if rows else "nothing")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value if value is not None else "")
