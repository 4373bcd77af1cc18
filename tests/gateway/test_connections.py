"""A connection that brings no request in time, or a head without end, is closed; others notice nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
import uvicorn

from swe_lightning.gateway.connections import HEAD_BYTES, Connection

from .conftest import until

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"


class Hasty(Connection):
    request_s = 0.4


async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers after a second, when the body is there."""
    import asyncio

    while (message := await receive())["type"] == "http.request" and message["more_body"]:
        pass
    await asyncio.sleep(1)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    application: Any = slow
    server = uvicorn.Server(uvicorn.Config(application, port=0, http=Hasty, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


def closed_after(connection: socket.socket) -> float:
    """Seconds until the other side closes without an answer."""
    started = time.monotonic()
    try:
        assert connection.recv(100) == b""
    except ConnectionResetError:
        pass
    return time.monotonic() - started


def cut_off(connection: socket.socket, parts: Iterable[bytes]) -> bool:
    """Whether the other side closes while this is sent."""
    try:
        for part in parts:
            connection.sendall(part)
    except OSError:
        return True
    return False


@pytest.mark.parametrize("sent", [b"", GET[:-2], POST, POST + b"abc"])
def test_a_request_that_does_not_come_is_not_waited_for(port: int, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(sent)
        assert 0.3 < closed_after(connection) < 5


def test_who_sends_a_little_now_and_then_is_not_waited_for(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        drops = (b"y" for _ in range(100) if time.sleep(0.05) is None)
        assert cut_off(connection, chain([b"GET / HTTP/1.1\r\nx: "], drops))


def test_the_next_request_on_a_connection_has_the_same_time_and_an_answer_has_its_own(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(POST + b"abcd")
        assert b"200 OK" in connection.recv(1000), "longer than a request may take to come in"
        connection.sendall(GET + GET[:-2])
        assert b"200 OK" in connection.recv(1000), "though the one after it does not come"
        assert closed_after(connection) < 5
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(GET + POST)
        assert b"200 OK" in connection.recv(1000)
        assert closed_after(connection) < 5


def test_a_head_without_end_is_not_read(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        headers = [b"x: " + b"y" * 1000 + b"\r\n"] * (100 * HEAD_BYTES // 1000)
        assert cut_off(connection, chain([b"GET / HTTP/1.1\r\n"], headers))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1_000_000)
        assert b"200 OK" in connection.recv(1000), "a body is no head"
