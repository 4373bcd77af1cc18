"""The gateway as a process: one run directory, one port, one store.

    python -m swe_lightning.gateway.server --run RUN_DIR --port 8080

The port is bound and the run directory locked before anything else is touched, so a second gateway is one clear
sentence and never two writers. SIGTERM lets calls finish for a few seconds and commits what is queued; kill -9 loses
nothing that was acknowledged. Writes RUN_DIR/gateway.json (url, pid) once the port is bound; GET /healthz answers when
it is ready.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

from swe_lightning.errors import BusyError, DataError, SwelError, UserError
from swe_lightning.gateway.gate import GateLimits
from swe_lightning.gateway.upstream import UpstreamLimits
from swe_lightning.rundir import RunDir, write_atomic

BACKLOG = 4096


def serve(
    *,
    run_dir: Path,
    host: str = "127.0.0.1",
    port: int,
    store_url: str | None = None,
    gate: GateLimits | None = None,
    upstream: UpstreamLimits | None = None,
    linger_s: float = 0.002,
) -> None:
    """Serve until SIGTERM or SIGINT. BusyError if the port or the run's gateway lock is taken; port 0 = any free."""
    import uvicorn

    run = RunDir(run_dir)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot create run directory {run.path}: {error.strerror}") from error
    with _bind(host, port) as listener, _only_one(run.path / "gateway.lock"):
        url = f"http://{host}:{listener.getsockname()[1]}"
        application = _build(run, store_url or run.store_url, gate, upstream, linger_s)
        config = uvicorn.Config(
            application,
            access_log=False,
            log_level="warning",
            lifespan="on",
            timeout_graceful_shutdown=10,
            timeout_keep_alive=75,
            ws="none",
        )
        write_atomic(run.path / "gateway.json", json.dumps({"url": url, "pid": os.getpid()}))
        logging.getLogger("swel.gateway").info("serving %s for %s", url, run.path)
        uvicorn.Server(config).run(sockets=[listener])


def _build(
    run: RunDir, store_url: str, gate: GateLimits | None, upstream: UpstreamLimits | None, linger_s: float
) -> Any:
    from swe_lightning.gateway.app import Gateway
    from swe_lightning.gateway.gate import Gate
    from swe_lightning.gateway.store import Store
    from swe_lightning.gateway.tokens import Keyring
    from swe_lightning.gateway.upstream import Upstreams

    keyring = Keyring.load_or_create(run.key_file)
    store = Store(store_url, linger_s=linger_s)
    return Gateway(store, Gate(gate, paused=store.get_meta("paused") == "1"), Upstreams(upstream), keyring)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, because asyncio sets TCP_NODELAY only on sockets that say they are TCP; without it an answer takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use; stop what listens there or choose another port"
            raise BusyError(message) from None
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    except OverflowError:
        listener.close()
        raise UserError(f"port {port} is not between 0 and 65535; choose another") from None
    return listener


class _only_one:
    """Holds the lock of a run's gateway; the kernel releases it when the process dies."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            message = f"another gateway serves {self._path.parent}; stop it or use another run directory"
            raise BusyError(message) from None

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="swe_lightning.gateway.server", description="Serve the gateway of one run.")
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 = any free port, written to RUN/gateway.json")
    parser.add_argument("--pause-wait-s", type=float, default=GateLimits.pause_wait_s)
    parser.add_argument("--max-in-flight", type=int, default=GateLimits.max_in_flight)
    parser.add_argument("--max-waiting", type=int, default=GateLimits.max_waiting)
    parser.add_argument("--max-per-rollout", type=int, default=GateLimits.max_per_rollout)
    parser.add_argument("--patience-s", type=float, default=UpstreamLimits.patience_s)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    limits = GateLimits(options.max_in_flight, options.max_waiting, options.max_per_rollout, options.pause_wait_s)
    try:
        serve(
            run_dir=options.run,
            host=options.host,
            port=options.port,
            gate=limits,
            upstream=UpstreamLimits(patience_s=options.patience_s),
        )
    except SwelError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
