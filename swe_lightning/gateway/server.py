"""The gateway as a process: one run directory, one port, one store.

    swel serve gateway RUN_DIR --port 8080         (python -m swe_lightning.gateway.server --run RUN_DIR is the same)

The port is bound and the run directory locked before anything else is touched, so a second gateway is one clear
sentence and never two writers. SIGTERM lets calls finish for a while (shutdown.py) and commits what is queued; kill -9
loses nothing that was acknowledged. Writes RUN_DIR/gateway.json (url, pid, and the store if it is a database) once the
port is bound; GET /healthz answers when it is ready.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import fcntl
import logging
import os
import resource
import signal
import socket
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from swe_lightning.errors import BusyError, DataError, SwelError, UserError
from swe_lightning.gateway import logs
from swe_lightning.gateway.settings import Settings
from swe_lightning.rundir import RunDir, write_atomic

if TYPE_CHECKING:
    from swe_lightning.gateway.app import Gateway
    from swe_lightning.gateway.gate import Gate
    from swe_lightning.gateway.store import Store
    from swe_lightning.gateway.upstream import Upstreams

log = logging.getLogger("swel.gateway")

BACKLOG = 4096


def serve(
    *,
    run_dir: Path,
    host: str = "127.0.0.1",
    port: int,
    store_url: str | None = None,
    settings: Settings | None = None,
    log_level: str = "info",
) -> None:
    """Serve until SIGTERM or SIGINT. BusyError if the port or the run's gateway lock is taken; port 0 = any free.

    `store_url` names a PostgreSQL database, without password; left out: $SWEL_STORE_URL, else the store that the run
    had before, else SQLite in the run.
    """
    from swe_lightning.gateway import database
    from swe_lightning.gateway.shutdown import Server

    run, settings = RunDir(run_dir), settings or Settings()
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot create run directory {run.path}: {error.strerror}") from error
    with _bind(host, port) as listener, _only_one(run.path / "gateway.lock"):
        url = f"http://{host}:{listener.getsockname()[1]}"
        logs.configure(run.logs / "gateway.jsonl", level=log_level)
        raise_file_limit(settings.max_in_flight, settings.max_waiting)
        store_url = database.store_url(store_url, run.store_url)
        application = _build(run, store_url, settings)
        shared = database.without_password(store_url) if application.store.shared else None
        run.remember_served(url=url, pid=os.getpid(), store=shared)
        log.info("serving", extra={"url": url, "run": str(run.path), "pid": os.getpid()})
        signal.signal(signal.SIGTERM, _exit)  # uvicorn repeats the signal once it has stopped; that is no failure
        try:
            Server(application, grace_s=settings.grace_s).run(sockets=[listener])
        finally:
            log.info("stopped", extra={"url": url})


def _exit(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def raise_file_limit(in_flight: int, waiting: int) -> None:
    """Raise the soft limit of open files as far as needed and allowed: two sockets for a call, one for a held one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * in_flight + waiting + 512
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        message = "open files are limited; calls beyond that wait for a connection, raise `ulimit -n` to avoid it"
        log.warning(message, extra={"limit": allowed, "wanted": wanted})


def _build(run: RunDir, store_url: str, settings: Settings) -> Gateway:
    from swe_lightning.gateway.app import Gateway
    from swe_lightning.gateway.gate import Gate
    from swe_lightning.gateway.store import Store
    from swe_lightning.gateway.tokens import Keyring
    from swe_lightning.gateway.upstream import Upstreams

    keyring = Keyring.load_or_create(run.key_file)
    store = Store(store_url, linger_s=settings.linger_s)
    store.belong_to(keyring.fingerprint())
    upstreams, paused = Upstreams(settings.upstream), store.get_meta("paused") == "1"
    if store.shared:
        gate: Gate = _shared_gate(run, store, settings, upstreams, paused)
    else:
        gate = Gate(settings.gate, paused=paused)
    return Gateway(store, gate, upstreams, keyring, health=settings.health)


def _shared_gate(run: RunDir, store: Store, settings: Settings, upstreams: Upstreams, paused: bool) -> Gate:
    """A gate on the store's board. The run's lock says that its former gateway is dead: its places are free now."""
    from swe_lightning.gateway.board import Board
    from swe_lightning.gateway.shared_gate import SharedGate

    file, name = run.path / "gateway.id", uuid.uuid4().hex
    board = Board(store.engine, name, settings.gate)
    if file.exists():
        board.leave(file.read_text())
    write_atomic(file, name)
    return SharedGate(board, settings.gate, upstreams, store.heard, paused=paused)


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
    parser.add_argument("--store", help="PostgreSQL URL without password; default: $SWEL_STORE_URL, else SQLite in RUN")
    for setting in dataclasses.fields(Settings):
        option, default = f"--{setting.name.replace('_', '-')}", setting.default
        parser.add_argument(option, type=type(default), default=default)
    options = vars(parser.parse_args(arguments))
    run, host, port, store = (options.pop(name) for name in ("run", "host", "port", "store"))
    try:
        serve(run_dir=run, host=host, port=port, store_url=store, settings=Settings(**options))
    except SwelError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
