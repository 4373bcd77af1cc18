"""`swel serve ...`: the long-running processes of a run. Started by `swel train`, or by hand on several machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Run one of the services of a run.", no_args_is_help=True)

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")]
RunArgument = Annotated[Path, typer.Argument(help="Run directory (store, signing key).")]


@app.command()
def gateway(
    run: RunArgument,
    port: Port = 8080,
    host: Host = "127.0.0.1",
    store: Annotated[str | None, typer.Option(help="Database URL; default: SQLite in the run directory.")] = None,
) -> None:
    """The model proxy that records every call."""
    from swe_lightning.gateway.server import serve

    serve(run_dir=run, host=host, port=port, store_url=store)


@app.command()
def model(
    directory: Annotated[Path, typer.Argument(help="Hugging Face model directory.")],
    port: Port = 8001,
    host: Host = "127.0.0.1",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    version: Annotated[int, typer.Option(min=0, help="Weight version these weights have.")] = 0,
    max_context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and response; default: the model's.")
    ] = None,
) -> None:
    """The embedded inference server (OpenAI-compatible, CPU)."""
    from swe_lightning.policy.server import serve

    serve(model_dir=directory, host=host, port=port, threads=threads, version=version, max_context=max_context)


@app.command()
def script(
    strategy: Annotated[str, typer.Argument(help="demonstrator, random_edit, enumerate, noop or replay:FILE.json.")],
    port: Port = 8001,
    host: Host = "127.0.0.1",
    tokenizer: Annotated[Path | None, typer.Option(help="Directory of the tokenizer; default: bytes.")] = None,
) -> None:
    """A scripted strategy in place of a model: demonstrations, baselines, tests."""
    from swe_lightning.policy.scripted import serve_scripted

    serve_scripted(strategy, tokenizer, host=host, port=port)


@app.command()
def controller(
    run: RunArgument,
    gateway: Annotated[str, typer.Option(help="URL of the gateway.")],
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts at once per worker.")] = 32,
) -> None:
    """Execute queued rollouts on this machine."""
    from swe_lightning.controller.local import run_controller
    from swe_lightning.gateway.tokens import Keyring
    from swe_lightning.rundir import RunDir

    _check_controller(run, gateway)
    token = Keyring.load_or_create(RunDir(run).key_file).mint("control", ttl_s=30 * 86400)
    run_controller(gateway_url=gateway, token=token, workers=workers, concurrency=concurrency, run_dir=run)


def _check_controller(run: Path, gateway: str) -> None:
    """A controller joins a run: a key of its own making would be refused by every gateway."""
    import os
    from urllib.parse import urlsplit

    from swe_lightning.errors import UserError
    from swe_lightning.gateway.tokens import KEY_VARIABLE
    from swe_lightning.rundir import RunDir

    try:
        parts = urlsplit(gateway)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise UserError(f"--gateway {gateway} is not an http(s) URL; give one like http://127.0.0.1:8080")
    if not os.environ.get(KEY_VARIABLE) and not RunDir(run).key_file.is_file():
        raise UserError(
            f"{run} holds no signing key (keys/signing.key); give the gateway's run directory or set {KEY_VARIABLE}"
        )
