"""A bare ASGI application for model servers, and how to run it. One call costs a few dozen microseconds here.

A route is an async function (body) -> (status, JSON-able, headers). A client that goes away cancels its route. Errors
of any kind become OpenAI error bodies; none escapes to a traceback on the wire.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from swe_lightning.errors import BusyError, SwelError
from swe_lightning.policy.wire import RequestError

log = logging.getLogger(__name__)

Reply = tuple[int, Any, dict[str, str]]
Route = Callable[[dict[str, Any]], Awaitable[Reply]]


class App:
    """Routes by (method, path)."""

    def __init__(self, routes: dict[tuple[str, str], Route]) -> None:
        self.routes = routes
        self.on_start: Callable[[], None] = lambda: None
        self.on_stop: Callable[[], None] = lambda: None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        data = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            data += message.get("body", b"")
            if not message.get("more_body"):
                break
        answer = asyncio.ensure_future(self._answer(scope["method"], scope["path"], data))
        watcher = asyncio.ensure_future(_until_gone(receive, answer))
        try:
            status, payload, headers = await answer
        except asyncio.CancelledError:
            return
        finally:
            watcher.cancel()
        content = orjson.dumps(payload)
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        head += [(k.encode(), v.encode()) for k, v in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, method: str, path: str, data: bytes) -> Reply:
        try:
            route = self.routes.get((method, path))
            if route is None:
                known = any(p == path for _, p in self.routes)
                status, code = (405, "method_not_allowed") if known else (404, "not_found")
                raise RequestError(status, code, f"no {method} {path} here")
            try:
                body = orjson.loads(data) if data else {}
            except orjson.JSONDecodeError as error:
                raise RequestError(400, "invalid_json", f"the body is not JSON: {error}") from error
            if not isinstance(body, dict):
                raise RequestError(400, "invalid_json", "the body must be a JSON object")
            return await route(body)
        except RequestError as error:
            return error.status, error.body(), {}
        except SwelError as error:
            return 409, RequestError(409, "conflict", str(error)).body(), {}
        except Exception as error:
            log.exception("%s %s failed", method, path)
            return 500, RequestError(500, "internal_error", f"{type(error).__name__}: {error}").body(), {}

    async def _lifespan(self, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.on_start()
                await send({"type": "lifespan.startup.complete"})
            else:
                self.on_stop()
                await send({"type": "lifespan.shutdown.complete"})
                return


async def _until_gone(receive: Any, answer: asyncio.Future[Reply]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.cancel()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; BusyError if the port is taken. Port 0 takes a free one."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise BusyError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port") from error
    return sock


def run(app: App, sock: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT. Requests still held then are cut after two seconds."""
    import uvicorn

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=600,
        timeout_graceful_shutdown=2,
        backlog=2048,
        lifespan="on",
        server_header=False,
        date_header=False,
        ws="none",
    )
    uvicorn.Server(config).run(sockets=[sock])
