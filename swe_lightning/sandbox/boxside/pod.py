"""The two containers of a pod: `box` runs the commands, `wire` holds the owner's end of the line to them.

An exec stream ends in a process, which commands of the same container could kill, and it breaks when an API server
restarts or a load balancer loses patience. So it ends in the wire, out of the commands' reach: `bridge` copies bytes to
`keeper`, the wire's process 1, which holds the one connection to the box's server. Requests are numbered; one that is
asked again over a new bridge is not run again, it gets the reply it has or will have. A keeper that hears nothing of
its owner for `patience_s` exits, and with it the box: nothing outlives its owner by more.

It trusts what its owner sends. The volume it shares with the box is read-only there, and empty once the box is up.
"""

import _socket
import os
import select
import sys
from errno import EINPROGRESS
from struct import unpack_from as _unpack_from
from time import monotonic, sleep

from .container import ContainerServer
from .wire import FAILED, OK, pack, unpack

DOOR = "/run/swel/door"
"""Where bridges find the keeper: a volume of the wire's own."""
SERVER = "/run/swel-line/server"
"""Where the box's server finds the keeper, once."""
CHUNK = 1 << 18


class Peer:
    """One end of a connection that never blocks."""

    def __init__(self, sock) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.inbox, self.outbox = bytearray(), bytearray()

    def read(self) -> bool:
        """False: there is nobody at the other end."""
        try:
            data = self.sock.recv(CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.inbox += data
        return bool(data)

    def write(self) -> None:
        try:
            sent = self.sock.send(memoryview(self.outbox)[:CHUNK])
        except BlockingIOError:
            return
        except OSError:
            sent = len(self.outbox)  # the next read tells
        del self.outbox[:sent]

    def frames(self):
        while len(self.inbox) >= 4:
            (length,) = _unpack_from("!I", self.inbox)
            if len(self.inbox) < 4 + length:
                return
            frame = bytes(self.inbox[: 4 + length])
            del self.inbox[: 4 + length]
            yield frame


class Keeper:
    def __init__(self, original: str, patience_s: float) -> None:
        self.original, self.patience_s = os.fsencode(original), patience_s
        self.doors = {listen(path): path for path in (DOOR, SERVER)}
        self.bridge: Peer | None = None
        self.server: Peer | None = None
        self.greeted = False
        self.for_server = bytearray()
        self.number, self.reply = 0, b""
        self.heard = monotonic()

    def run(self) -> None:
        """Returns when the box is gone, its owner has ended it, or has been silent for too long."""
        while (left := self.heard + self.patience_s - monotonic()) > 0:
            poll = select.poll()
            for door in self.doors:
                poll.register(door.fileno(), select.POLLIN)
            for peer in (self.bridge, self.server):
                if peer is not None:
                    poll.register(peer.sock.fileno(), select.POLLIN | (select.POLLOUT if peer.outbox else 0))
            ready = dict(poll.poll(left * 1000 + 1))
            for door in [d for d in self.doors if d.fileno() in ready]:
                self._accept(door)
            if self.server is not None and self.server.sock.fileno() in ready and not self._serve(self.server, ready):
                return
            if self.bridge is not None and self.bridge.sock.fileno() in ready and not self._hear(self.bridge, ready):
                return

    def _accept(self, door) -> None:
        fd, _ = door._accept()
        peer = Peer(_socket.socket(fileno=fd))
        if self.doors[door] == SERVER:
            os.unlink(self.doors.pop(door))
            door.close()
            self.server = peer
            peer.outbox += self.for_server
            return
        if self.bridge is not None:
            self.bridge.sock.close()
        self.bridge, self.heard = peer, monotonic()

    def _serve(self, server: Peer, ready) -> bool:
        if ready[server.sock.fileno()] & select.POLLOUT:
            server.write()
        alive = server.read()
        for frame in server.frames():
            if self.greeted:
                self._answer(frame)
            self.greeted = True  # its first frame only says that it is there
        return alive

    def _hear(self, bridge: Peer, ready) -> bool:
        """False: the owner wants the end."""
        if ready[bridge.sock.fileno()] & select.POLLOUT:
            bridge.write()
        alive = bridge.read()
        self.heard = monotonic()
        for frame in bridge.frames():
            number, target, payload = unpack(frame[4:])
            if target == b"end":
                self._end(bridge)
                return False
            if target == b"ping":
                bridge.outbox += pack(b"0", pack(OK))
            else:
                self._request(int(number), target, payload)
        if not alive:
            bridge.sock.close()
            self.bridge = None
        return True

    def _request(self, number: int, target: bytes, payload: bytes) -> None:
        if number <= self.number:
            if number == self.number and self.reply and self.bridge is not None:
                self.bridge.outbox += self.reply
            return
        self.number, self.reply = number, b""
        if target == b"keeper":
            kind, *fields = unpack(payload[4:])
            try:
                self._answer(pack(OK, *getattr(self, "on_" + kind.decode())(fields)))
            except OSError as error:
                self._answer(pack(FAILED, b"%d" % (error.errno or 5), str(error).encode(errors="surrogateescape")))
        elif self.server is None:
            self.for_server += payload
        else:
            self.server.outbox += payload

    def _answer(self, frame: bytes) -> None:
        self.reply = pack(b"%d" % self.number, frame)
        if self.bridge is not None:
            self.bridge.outbox += self.reply

    def _end(self, bridge: Peer) -> None:
        """The box's server ends when its line does, and everything in the box with it."""
        if self.server is not None:
            self.server.sock.setblocking(True)
            self.server.sock.settimeout(5)
            try:
                self.server.sock.shutdown(_socket.SHUT_WR)
                while self.server.sock.recv(CHUNK):
                    pass
            except OSError:
                pass
        bridge.sock.settimeout(5)
        try:
            bridge.sock.send(pack(b"0", pack(OK)))
        except OSError:
            pass

    # -- requests to the keeper itself

    def on_lay(self, fields: list[bytes]) -> list[bytes]:
        """(path, kind, time in ns, data) repeated: d directory, l link, 755 or 644 file, + more of a file."""
        for at in range(0, len(fields), 4):
            path, kind, time_ns, data = fields[at : at + 4]
            place = self.original + b"/" + path
            if kind == b"d":
                os.mkdir(place, 0o755)
            elif kind == b"l":
                os.symlink(data, place)
            else:
                flags = os.O_WRONLY | (os.O_APPEND if kind == b"+" else os.O_CREAT | os.O_EXCL)
                fd = os.open(place, flags, 0o755 if kind == b"755" else 0o644)
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.utime(fd, ns=(int(time_ns), int(time_ns)))
                os.close(fd)
        return []

    def on_probe(self, fields: list[bytes]) -> list[bytes]:
        """Seconds, then (address, port) repeated, the API server's own added -> those that could be connected to."""
        targets = [(fields[at].decode(), int(fields[at + 1])) for at in range(1, len(fields), 2)]
        environment = os.environ
        if environment.get("KUBERNETES_SERVICE_HOST"):
            port = environment.get("KUBERNETES_SERVICE_PORT", "443")
            targets.append((environment["KUBERNETES_SERVICE_HOST"], int(port)))
        return [f"{host}:{port}".encode() for host, port in reached(targets, float(fields[0]))]


def reached(targets, timeout_s: float) -> list:
    """Which of the TCP addresses accept a connection."""
    attempts = {}
    poll = select.poll()
    for host, port in targets:
        sock = _socket.socket(_socket.AF_INET6 if ":" in host else _socket.AF_INET, _socket.SOCK_STREAM)
        sock.setblocking(False)
        if sock.connect_ex((host, port)) in (0, EINPROGRESS):
            attempts[sock.fileno()] = (sock, (host, port))
            poll.register(sock.fileno(), select.POLLOUT)
    found = []
    until = monotonic() + timeout_s
    while attempts and (left := until - monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000 + 1):
            poll.unregister(fd)
            sock, target = attempts.pop(fd)
            if not sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR):
                found.append(target)
    return found


def listen(path: str):
    door = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    door.bind(path)
    os.chmod(path, 0o666)
    door.listen(4)
    return door


def keeper(original: str, patience_s: float) -> None:
    os.umask(0o022)
    Keeper(original, patience_s).run()


def bridge() -> None:
    """Standard input to the keeper, what the keeper says to standard output; ends when either does."""
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    sock.connect(DOOR)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(sock.fileno(), select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == 0:
                data = os.read(0, CHUNK)
                sock.sendall(data)
            else:
                data = sock.recv(CHUNK)
                view = memoryview(data)
                while view:
                    view = view[os.write(1, view) :]
            if not data:
                return


def box(tree: str, patience_s: float) -> None:
    """Process 1 of the box: the command server, on its connection to the keeper."""
    until = monotonic() + patience_s
    while True:
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            sock.connect(SERVER)
            break
        except OSError as error:
            sock.close()
            if monotonic() > until:
                sys.exit(f"no keeper at {SERVER}: {error}")
            sleep(0.02)
    os.set_inheritable(sock.fileno(), False)
    os.chdir(tree)
    ContainerServer(os.fsencode(tree), sock).serve()


def answer(port: int) -> None:
    """A service that a box must not reach: accepts connections and closes them."""
    door = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    door.bind(("0.0.0.0", port))
    door.listen(64)
    while True:
        fd, _ = door._accept()  # type: ignore[attr-defined]
        os.close(fd)


def reach(host: str, port: int, patience_s: float) -> None:
    """Exits with 0 as soon as that service accepts a connection, with 1 if it never does."""
    until = monotonic() + patience_s
    while monotonic() < until:
        if reached([(host, port)], 1.0):
            return
        sleep(0.2)
    sys.exit(f"{host}:{port} accepts no connection")
