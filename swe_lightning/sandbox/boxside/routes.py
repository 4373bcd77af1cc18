"""Named services on the loopback of a pod that has no network: listened for here, carried to the owner in frames.

It runs in the `wire`, which shares the pod's addresses with the box and nothing else: no process of the box carries the
bytes, so none can be killed or replaced. It ends with its exec stream, and the owner starts another one; connections
that were open are lost then, as with any service that restarts.
"""

import _socket
import os
import select
import sys
from errno import EADDRINUSE
from struct import unpack_from as _unpack_from
from time import monotonic, sleep

from .channels import CHUNK, CONNECTIONS, OPEN, PING, READY, REFUSED, Channels
from .wire import pack, unpack

BIND_PATIENCE_S = 5.0
"""How long the one before may take to notice that its stream is gone."""
ACCEPT_BELOW = 1 << 20
"""Bytes that wait for the owner: connections that come and go at once cost frames, which nothing else would bound."""


class Routes:
    def __init__(self, doors) -> None:
        """`doors`: listening sockets, in the owner's order."""
        self.doors = {door.fileno(): (index, door) for index, door in enumerate(doors)}
        self.inbox, self.outbox = bytearray(), bytearray(pack(b"", READY, b""))
        self.channels = Channels(self.outbox.extend)
        self.accepted = 0

    def run(self) -> None:
        """Until the owner's end of the stream is gone."""
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        while True:
            poll = select.poll()
            poll.register(0, select.POLLIN)
            poll.register(1, select.POLLOUT if self.outbox else 0)
            if len(self.channels.open) < CONNECTIONS and len(self.outbox) < ACCEPT_BELOW:
                for fd in self.doors:
                    poll.register(fd, select.POLLIN)
            numbers = {}
            for fd, events, number in self.channels.interests():
                numbers[fd] = number
                poll.register(fd, events)
            for fd, events in poll.poll():
                if fd == 0:
                    if not self._hear():
                        return
                elif fd == 1:
                    if not self._say(events):
                        return
                elif fd in self.doors:
                    self._accept(fd)
                else:
                    self.channels.ready(numbers[fd], events)

    def _accept(self, fd: int) -> None:
        index, door = self.doors[fd]
        try:
            client, _ = door._accept()
        except OSError:  # it has given up already
            return
        self.accepted += 1
        number = b"%d" % self.accepted
        self.outbox += pack(number, OPEN, b"%d" % index)
        self.channels.add(number, _socket.socket(fileno=client))

    def _hear(self) -> bool:
        data = os.read(0, CHUNK)
        self.inbox += data
        while len(self.inbox) >= 4:
            (length,) = _unpack_from("!I", self.inbox)
            if len(self.inbox) < 4 + length:
                break
            number, kind, said = unpack(bytes(self.inbox[4 : 4 + length]))
            del self.inbox[: 4 + length]
            if kind == PING:
                self.outbox += pack(b"", PING, b"")
            else:
                self.channels.heard(number, kind, said)
        return bool(data)

    def _say(self, events: int) -> bool:
        if events & (select.POLLERR | select.POLLHUP):
            return False
        try:
            del self.outbox[: os.write(1, memoryview(self.outbox)[:CHUNK])]
        except BlockingIOError:
            pass
        return True


def routes(*places: tuple[str, int]) -> None:
    try:
        doors = [_listen(address, port) for address, port in places]
    except OSError as error:
        os.write(1, pack(b"", REFUSED, str(error).encode()))
        sys.exit(1)
    Routes(doors).run()


def _listen(address: str, port: int):
    until = monotonic() + BIND_PATIENCE_S
    while True:
        door = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        door.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        try:
            door.bind((address, port))
            door.listen(CONNECTIONS)
            door.setblocking(False)
            return door
        except OSError as error:
            door.close()
            if error.errno != EADDRINUSE or monotonic() > until:
                raise OSError(error.errno, f"{address}:{port}: {error.strerror}") from None
        sleep(0.1)
