"""A pod's way to the services it may reach: through its owner, over an exec stream, never through its network.

The policies deny a pod everything, with or without services. The listening sockets lie on the pod's own loopback
(boxside/routes.py); what they accept travels here in frames and goes on through the same relay as for containers, which
resolves names, refuses the machine's own link and connects to that one service. So no policy has to be opened, the
gateway needs no address that nodes can reach, and any cluster will do.

One thread per box that has services. When the stream breaks another one is opened; connections do not survive that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from swe_lightning.errors import SandboxStartError
from swe_lightning.sandbox.boxside.channels import CONNECTIONS, OPEN, PING, READY, REFUSED, Channels
from swe_lightning.sandbox.boxside.wire import pack, unpack
from swe_lightning.sandbox.bundle import launch
from swe_lightning.sandbox.kubernetes_line import ExecStream
from swe_lightning.sandbox.network import Endpoint
from swe_lightning.sandbox.relay import Relay
from swe_lightning.services import Service

logger = logging.getLogger("kubernetes")

PING_S = 15.0
SILENT_S = 40.0
"""After which a stream is taken for broken."""
REOPEN_S = 0.5
SEND_S = 15.0


def listening(endpoints: Sequence[Endpoint]) -> list[str]:
    """The command that serves these inside the pod."""
    places = ", ".join(repr((e.address, e.port)) for e in endpoints)
    return launch("-c", f"from boxside.routes import routes; routes({places})")


class PodRoutes:
    """`connect` starts the pod's end; `gone` says why no further one can be started, or nothing."""

    def __init__(
        self, connect: Callable[[], ExecStream], gone: Callable[[], str], targets: Sequence[Service], relay: Relay
    ) -> None:
        self._connect, self._gone, self._targets, self._relay = connect, gone, targets, relay
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closed = False
        self._link = _Link(connect(), targets, relay)
        self._thread = threading.Thread(target=self._serve, name="pod-routes", daemon=True)

    def start(self, until: float) -> None:
        """Returns when every service is listened for. SandboxStartError when one cannot be."""
        try:
            while not self._link.listening:
                if time.monotonic() > until:
                    raise SandboxStartError("the services of a sandbox could not be opened in time")
                self._link.turn(self._wake, 0.5)
        except OSError as error:
            raise SandboxStartError(f"the services of a sandbox could not be opened: {error}") from error
        self._thread.start()

    def close(self) -> None:
        """When it returns, no connection of the box is open. Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.write(self._waker, b"x")
        if self._thread.ident is not None:
            self._thread.join()
        self._link.close()
        os.close(self._wake)
        os.close(self._waker)

    def _serve(self) -> None:
        while not self._closed:
            try:
                self._link.turn(self._wake, PING_S)
            except OSError as error:
                self._link.close()
                if not self._reopen(error):
                    return

    def _reopen(self, why: OSError) -> bool:
        while not self._closed and not self._gone():
            logger.info("a sandbox's route to its services is opened again: %s", why)
            try:
                self._link = _Link(self._connect(), self._targets, self._relay)
                return True
            except OSError as error:
                why = error
                select.select([self._wake], [], [], REOPEN_S)
        return False


class _Link:
    """One exec stream and the connections it carries."""

    def __init__(self, stream: ExecStream, targets: Sequence[Service], relay: Relay) -> None:
        self._stream, self._targets, self._relay = stream, targets, relay
        self._inbox, self._outbox = bytearray(), bytearray()
        self._channels = Channels(self._outbox.extend)
        self._carried: dict[bytes, Future[None]] = {}
        self._heard = self._pinged = time.monotonic()
        self.listening = False

    def turn(self, wake: int, timeout_s: float) -> None:
        """Wait until something can be done, and do it. OSError when the stream is of no more use."""
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        poll.register(self._stream.fileno(), select.POLLIN)
        numbers = {}
        for fd, events, number in self._channels.interests():
            numbers[fd] = number
            poll.register(fd, events)
        ready = dict(poll.poll(0 if self._stream.buffered() else timeout_s * 1000))
        for fd in numbers.keys() & ready.keys():
            self._channels.ready(numbers[fd], ready[fd])
        if self._stream.fileno() in ready or self._stream.buffered():
            with contextlib.suppress(TimeoutError):  # a part of a message, or none of ours
                try:
                    self._take(self._stream.recv(1.0))
                except (ValueError, IndexError, struct.error) as error:
                    raise ConnectionResetError(f"the pod's end said what is no frame: {error}") from error
        self._say()

    def close(self) -> None:
        self._channels.close()
        for carried in self._carried.values():
            carried.cancel()
        self._stream.close()

    def _say(self) -> None:
        now = time.monotonic()
        if now > self._pinged + PING_S:
            self._pinged = now
            self._outbox += pack(b"", PING, b"")
        if now > self._heard + SILENT_S:
            raise ConnectionResetError("the pod's end is silent")
        if self._outbox:
            data = bytes(self._outbox)
            self._outbox.clear()
            self._stream.send(data, SEND_S)

    def _take(self, data: bytes) -> None:
        self._heard = time.monotonic()
        self._inbox += data
        while len(self._inbox) >= 4:
            (length,) = struct.unpack_from("!I", self._inbox)
            if len(self._inbox) < 4 + length:
                return
            number, kind, said = unpack(bytes(self._inbox[4 : 4 + length]))
            del self._inbox[: 4 + length]
            if kind == READY:
                self.listening = True
            elif kind == REFUSED:
                raise ConnectionRefusedError(said.decode(errors="replace"))
            elif kind == OPEN:
                self._open(number, self._targets[int(said)])
            else:
                self._channels.heard(number, kind, said)

    def _open(self, number: bytes, target: Service) -> None:
        ours, relays = socket.socketpair()
        self._channels.add(number, ours)
        self._carried = {n: carried for n, carried in self._carried.items() if not carried.done()}
        if len(self._carried) >= CONNECTIONS:  # what a service leaves half open counts until its place is wanted
            for ended in self._carried.keys() - self._channels.open.keys():
                self._carried.pop(ended).cancel()
        if len(self._carried) >= CONNECTIONS:
            relays.close()
            self._channels.drop(number)
        else:
            self._carried[number] = self._relay.carry(relays, target)
