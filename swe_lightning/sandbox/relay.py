"""Carries bytes between listening sockets of boxes and the one service behind each; one thread for all boxes.

The sockets were opened inside boxes (their network namespaces), the connections out are made here, on the host, where
names are resolved. A box can fill its own connections and nothing else: their number and buffers are bounded. What a
service resolves to is checked at every connection, so a name cannot be pointed at the machine's own link.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from swe_lightning.services import Service, may_connect

CONNECTIONS = 64
"""At once per listening socket; more wait in its backlog."""
CONNECT_TIMEOUT_S = 10.0
CHUNK = 1 << 16
T = TypeVar("T")


class Relay:
    """Thread-safe."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()

    def open(self, listeners: Sequence[int], targets: Sequence[Service]) -> RelayedBox:
        """Serve these listening descriptors, which belong to the returned box from now on, until it is closed."""
        routes = [(socket.socket(fileno=fd), target) for fd, target in zip(listeners, targets, strict=True)]

        async def start() -> list[asyncio.Task[None]]:
            return [asyncio.create_task(_serve(sock, target)) for sock, target in routes]

        return RelayedBox(self, self.call(start()))

    def carry(self, client: socket.socket, target: Service) -> Future[None]:
        """One connection, which belongs to the relay from now on; cancel what is returned to end it."""

        async def carry() -> None:
            with client:
                await _carry(client, target)

        return asyncio.run_coroutine_threadsafe(carry(), self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def close(self) -> None:
        """Ends the thread and every connection with it. Boxes may be closed before or after."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()


class RelayedBox:
    """The routes of one box."""

    def __init__(self, relay: Relay, serving: list[asyncio.Task[None]]) -> None:
        self._relay, self._serving = relay, serving

    def close(self) -> None:
        """When it returns, no connection of the box is open. Idempotent."""

        async def end() -> None:
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

        if not self._relay.closed:
            self._relay.call(end())


async def _serve(listener: socket.socket, target: Service) -> None:
    listener.setblocking(False)
    room = asyncio.Semaphore(CONNECTIONS)
    clients: set[socket.socket] = set()

    def done(client: socket.socket, _: object) -> None:
        client.close()
        clients.discard(client)
        room.release()

    try:
        async with asyncio.TaskGroup() as connections:
            while True:
                await room.acquire()
                await _readable(listener)
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    client, _ = listener.accept()
                    clients.add(client)
                    task = connections.create_task(_carry(client, target))
                    task.add_done_callback(partial(done, client))
                    continue
                room.release()
    finally:  # a task that was cancelled before it began has closed nothing
        for sock in (listener, *clients):
            sock.close()


async def _readable(sock: socket.socket) -> None:
    """Not sock_accept(): cancelled at the wrong moment, that loses a connection it has accepted."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


async def _carry(client: socket.socket, target: Service) -> None:
    client.setblocking(False)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            service = await _connect(target)
        with service:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(_pump(client, service))
                ways.create_task(_pump(service, client))


async def _connect(target: Service) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    last: OSError = ConnectionRefusedError(f"{target} resolves to no address a box may reach")
    for family, kind, protocol, _, address in found:
        if not may_connect(str(address[0])):
            continue
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            last = error
        except BaseException:
            sock.close()
            raise
    raise last


async def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Until the source ends; then the sink hears no more, and may go on answering."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while data := await loop.sock_recv(source, CHUNK):
            await loop.sock_sendall(sink, data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
