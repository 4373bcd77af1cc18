"""Many connections over one stream of frames; each has a window, so a slow one costs bounded memory, no other's time.

Both ends of a pod's route to its services use this: the one in the pod (boxside/routes.py), whose sockets were accepted
from the box, and the owner's (kubernetes_routes.py), whose sockets lead to the relay. A frame is (number, kind, data);
what a side may send ahead of the other's acknowledgement is WINDOW bytes for each connection.
"""

import select

from .wire import pack

DATA, ACK, END, CLOSE, OPEN, READY, REFUSED, PING = b"d", b"a", b"e", b"c", b"o", b"r", b"x", b"p"
WINDOW = 1 << 18
CHUNK = 1 << 16
CONNECTIONS = 64
"""At once in a box, all services together."""


class Channel:
    def __init__(self, sock) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.credit = WINDOW
        self.outbox = bytearray()
        self.reading, self.writing, self.other_ended = True, True, False


class Channels:
    """`send` takes a whole frame and never blocks."""

    def __init__(self, send) -> None:
        self.send = send
        self.open: dict[bytes, Channel] = {}

    def add(self, number: bytes, sock) -> None:
        self.open[number] = Channel(sock)

    def interests(self):
        """(descriptor, events, number) of every connection that waits for something."""
        for number, channel in self.open.items():
            events = (select.POLLIN if channel.reading and channel.credit else 0) | (
                select.POLLOUT if channel.outbox else 0
            )
            if events:
                yield channel.sock.fileno(), events, number

    def ready(self, number: bytes, events: int) -> None:
        channel = self.open.get(number)
        if channel is None:
            return
        try:
            if events & (select.POLLOUT | select.POLLERR) and channel.outbox:
                self._write(number, channel)
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR) and channel.reading and channel.credit:
                self._read(number, channel)
        except BlockingIOError:
            return
        except OSError:
            self.drop(number)
            return
        self._settle(number, channel)

    def heard(self, number: bytes, kind: bytes, data: bytes) -> None:
        """A frame of the other side. One that is about a connection no longer here was under way when it ended."""
        channel = self.open.get(number)
        if channel is None:
            return
        if kind == DATA:
            channel.outbox += data
            if len(channel.outbox) > WINDOW:
                self.drop(number)
                return
        elif kind == ACK:
            channel.credit += int(data)
        elif kind == END:
            channel.other_ended = True
        elif kind == CLOSE:
            self._forget(number)
            return
        self._settle(number, channel)

    def drop(self, number: bytes) -> None:
        self.send(pack(number, CLOSE, b""))
        self._forget(number)

    def close(self) -> None:
        for number in list(self.open):
            self._forget(number)

    def _read(self, number: bytes, channel: Channel) -> None:
        data = channel.sock.recv(min(CHUNK, channel.credit))
        if data:
            channel.credit -= len(data)
            self.send(pack(number, DATA, data))
        else:
            channel.reading = False
            self.send(pack(number, END, b""))

    def _write(self, number: bytes, channel: Channel) -> None:
        sent = channel.sock.send(memoryview(channel.outbox)[:CHUNK])
        del channel.outbox[:sent]
        self.send(pack(number, ACK, b"%d" % sent))

    def _settle(self, number: bytes, channel: Channel) -> None:
        """Pass the other side's end on once all it said is written; forget what has ended both ways."""
        if channel.other_ended and channel.writing and not channel.outbox:
            channel.writing = False
            try:
                channel.sock.shutdown(1)
            except OSError:
                self.drop(number)
                return
        if not channel.reading and not channel.writing:
            self._forget(number)

    def _forget(self, number: bytes) -> None:
        self.open.pop(number).sock.close()
