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
    store: Annotated[
        str | None,
        typer.Option(help="postgresql://USER@HOST/DATABASE, password in PGPASSWORD; default: SQLite in the run."),
    ] = None,
    pause_wait_s: Annotated[float, typer.Option(help="A held call gets 503 after this long.")] = 600.0,
    max_in_flight: Annotated[int, typer.Option(help="Calls at the model servers at once.")] = 1024,
    max_waiting: Annotated[int, typer.Option(help="Calls held at once; the next one gets 429.")] = 8192,
    max_per_rollout: Annotated[int, typer.Option(help="Open calls of one rollout; the next one gets 429.")] = 64,
    patience_s: Annotated[float, typer.Option(help="Wait this long for a model server that is away.")] = 300.0,
    call_timeout_s: Annotated[float, typer.Option(help="Wall time of one generation.")] = 3600.0,
    health_interval_s: Annotated[float, typer.Option(help="Between health checks of a model server; 0 = none.")] = 2.0,
    grace_s: Annotated[float, typer.Option(help="On SIGTERM, calls in flight may take this long.")] = 10.0,
    log_level: Annotated[str, typer.Option(help="debug, info or warning.")] = "info",
) -> None:
    """The model proxy that records every call."""
    from swe_lightning.errors import UserError
    from swe_lightning.gateway.server import serve
    from swe_lightning.gateway.settings import Settings

    if log_level not in ("debug", "info", "warning"):
        raise UserError(f"--log-level {log_level} is unknown; use debug, info or warning")
    settings = Settings(
        pause_wait_s=pause_wait_s,
        max_in_flight=max_in_flight,
        max_waiting=max_waiting,
        max_per_rollout=max_per_rollout,
        patience_s=patience_s,
        call_timeout_s=call_timeout_s,
        health_interval_s=health_interval_s,
        grace_s=grace_s,
    )
    serve(run_dir=run, host=host, port=port, store_url=store, settings=settings, log_level=log_level)


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
