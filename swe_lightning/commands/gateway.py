"""`swel gateway ...`: a run's store as a file, and back. The gateway itself is `swel serve gateway`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

if TYPE_CHECKING:
    import sqlalchemy as sa

app = typer.Typer(help="Export a run's store, or import one.", no_args_is_help=True)

Run = Annotated[Path, typer.Argument(help="Run directory.")]
File = Annotated[Path, typer.Argument(help="JSON lines; compressed if the name ends in .zst; - for standard output.")]
Source = Annotated[Path, typer.Argument(help="What export wrote; - for standard input.")]
StoreUrl = Annotated[
    str | None,
    typer.Option("--store", help="postgresql://USER@HOST/DATABASE, password in PGPASSWORD; default: SQLite in RUN."),
]


@app.command("export")
def export_command(run: Run, file: File, store: StoreUrl = None) -> None:
    """Write a run's store as JSON lines: rollouts, model calls, events. The run may be in progress."""
    from swe_lightning.errors import DataError
    from swe_lightning.gateway import database, transfer
    from swe_lightning.rundir import RunDir

    url = database.store_url(store, RunDir(run).store_url)
    if url.startswith("sqlite") and not (run / "gateway.db").is_file():
        raise DataError(f"{run} holds no store (gateway.db); give a run directory or --store")
    if str(file) != "-" and file.exists():
        raise DataError(f"{file} exists; remove it or choose another name")
    with _opened(url) as engine:
        with _writer(file) as out:
            for line in transfer.export(engine):
                out.write(line)
    typer.echo(f"{run} exported to {file}", err=True)


@app.command("import")
def import_command(file: Source, run: Run, store: StoreUrl = None) -> None:
    """Fill the empty store of a new run from what export wrote: all of it or nothing."""
    from swe_lightning.errors import DataError
    from swe_lightning.gateway import database, transfer
    from swe_lightning.rundir import RunDir

    if str(file) != "-" and not file.is_file():
        raise DataError(f"no file {file}; give what swel gateway export wrote")
    before = set(run.glob("*")) if run.is_dir() else None
    run.mkdir(parents=True, exist_ok=True)
    run_dir = RunDir(run)
    try:
        url = database.store_url(store, run_dir.store_url)
        with _opened(url) as engine, _reader(file) as lines:
            counts = transfer.restore(engine, lines, str(file))
            shared = database.is_shared(engine)
        if shared:  # the commands that follow look for the database where its gateway will write it too
            run_dir.remember_served(store=database.without_password(url))
    except BaseException:
        _remove_new(run, before)
        raise
    typer.echo(", ".join(f"{count} {kind}s" for kind, count in counts.items()) + f" imported into {run}", err=True)


def _remove_new(run: Path, before: set[Path] | None) -> None:
    """An import that failed leaves no empty store behind."""
    for path in run.glob("gateway.db*"):
        if before is None or path not in before:
            path.unlink()
    if before is None:
        run.rmdir()


@contextmanager
def _opened(url: str) -> Iterator[sa.Engine]:
    from swe_lightning.gateway import database

    engine = database.open_engine(url)
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def _writer(file: Path) -> Iterator[BinaryIO]:
    """Beside the target and renamed when complete, so that a file of that name is whole."""
    import sys

    import zstandard

    if str(file) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    partial = file.with_name(f".{file.name}.partial")
    try:
        with partial.open("wb") as raw:
            if file.suffix == ".zst":
                with zstandard.ZstdCompressor(level=6).stream_writer(raw, closefd=False) as out:
                    yield out
            else:
                yield raw
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _reader(file: Path) -> Iterator[Iterable[bytes]]:
    import io
    import sys

    import zstandard

    from swe_lightning.errors import DataError

    if str(file) == "-":
        yield sys.stdin.buffer
        return
    with file.open("rb") as raw:
        if file.suffix != ".zst":
            yield raw
            return
        try:
            yield io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
        except zstandard.ZstdError as error:
            raise DataError(f"{file} is damaged: {error}; nothing was imported") from None
