"""The route of a pod to its services without a pod: the pod's end as a process on pipes, real sockets at both ends."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import swe_lightning.sandbox
from swe_lightning.errors import SandboxStartError
from swe_lightning.sandbox.boxside.channels import CLOSE, CONNECTIONS, DATA, WINDOW, Channels
from swe_lightning.sandbox.boxside.wire import pack, unpack
from swe_lightning.sandbox.kubernetes_routes import PodRoutes
from swe_lightning.sandbox.relay import Relay
from swe_lightning.services import Service

ROOM = Path(swe_lightning.sandbox.__file__).parent
Serve = Callable[[Callable[[socket.socket], None]], int]


class Pipes:
    """What an exec stream is to the room: a process, its standard input and output, and an end that may come."""

    def __init__(self, *ports: int) -> None:
        places = ", ".join(repr(("127.0.0.1", port)) for port in ports)
        argv = [sys.executable, "-c", f"from boxside.routes import routes; routes({places})"]
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOM, bufsize=0, env={"PATH": ""}
        )

    def fileno(self) -> int:
        assert self.process.stdout
        return self.process.stdout.fileno()

    def buffered(self) -> bool:
        return False

    def recv(self, timeout_s: float) -> bytes:
        if not select.select([self.fileno()], [], [], timeout_s)[0]:
            raise TimeoutError
        if data := os.read(self.fileno(), 1 << 16):
            return data
        raise ConnectionResetError("the process ended")

    def send(self, data: bytes, timeout_s: float) -> None:
        assert self.process.stdin
        view = memoryview(data)
        while view:
            view = view[os.write(self.process.stdin.fileno(), view) :]

    def close(self) -> None:
        for end in (self.process.stdin, self.process.stdout):
            assert end
            end.close()
        self.process.wait(10)


class Pod:
    """Its open streams, and how many there have been."""

    def __init__(self, *targets: Service) -> None:
        self.ports = [free_port() for _ in targets]
        self.streams: list[Pipes] = []
        self.why_gone = ""
        self.relay = Relay()
        self.routes = PodRoutes(self.connect, lambda: self.why_gone, targets, self.relay)  # type: ignore[arg-type]

    def connect(self) -> Pipes:
        self.streams.append(Pipes(*self.ports))
        return self.streams[-1]

    def dial(self, index: int = 0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.ports[index]), 10)

    def close(self) -> None:
        self.routes.close()
        self.relay.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A service on the loopback; every connection is answered by a thread of its own."""
    servers = []

    def serve(answer: Callable[[socket.socket], None]) -> int:
        server = socket.create_server(("127.0.0.1", 0), backlog=128)
        servers.append(server)

        def one(client: socket.socket) -> None:
            with client:
                answer(client)

        def accept() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=one, args=(client,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return int(server.getsockname()[1])

    yield serve
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


@pytest.fixture
def pod(serve: Serve) -> Iterator[Pod]:
    pod = Pod(Service("127.0.0.1", serve(echo)))
    pod.routes.start(time.monotonic() + 10)
    yield pod
    pod.close()


def echo(client: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while data := client.recv(1 << 16):
            client.sendall(data)


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while data := sock.recv(1 << 16):
        parts.append(data)
    return b"".join(parts)


def through(sock: socket.socket, data: bytes) -> bytes:
    """Sends all of it while all that comes back is read."""

    def write() -> None:
        with contextlib.suppress(OSError):  # what comes back tells
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)

    writer = threading.Thread(target=write)
    writer.start()
    with sock:
        back = read_all(sock)
    writer.join()
    return back


def test_bytes_arrive_whole_both_ways_at_once(pod: Pod) -> None:
    """Twelve windows in either direction: more than all buffers on the way hold."""
    data = os.urandom(12 * WINDOW + 17)
    assert through(pod.dial(), data) == data


def test_the_end_of_one_way_leaves_the_other_open(serve: Serve) -> None:
    """HTTP/1.0 and many scripts: the request ends with the sender's end, the answer comes after it."""
    pod = Pod(Service("127.0.0.1", serve(lambda client: client.sendall(read_all(client)[::-1]))))
    pod.routes.start(time.monotonic() + 10)
    with pod.dial() as sock:
        sock.sendall(b"abc")
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock) == b"cba"
    pod.close()


def test_each_port_leads_to_its_own_service(serve: Serve) -> None:
    targets = [Service("localhost", serve(lambda c, n=n: c.sendall(n))) for n in (b"one", b"two")]  # type: ignore[misc]
    pod = Pod(*targets)
    pod.routes.start(time.monotonic() + 10)
    answers = []
    for index in (1, 0, 1):
        with pod.dial(index) as sock:
            answers.append(read_all(sock))
    assert answers == [b"two", b"one", b"two"]
    pod.close()


def test_one_that_does_not_read_delays_no_other(pod: Pod) -> None:
    with pod.dial() as lazy:
        lazy.setblocking(False)
        sent, until = 0, time.monotonic() + 1
        while time.monotonic() < until:
            try:
                sent += lazy.send(b"x" * WINDOW)
            except BlockingIOError:
                time.sleep(0.01)
        assert sent > WINDOW
        began = time.monotonic()
        assert through(pod.dial(), b"quick") == b"quick"
        assert time.monotonic() - began < 5
        memory = pod.streams[0].process.pid
        assert psutil.Process(memory).memory_info().rss < 64 << 20


def test_more_connections_than_are_carried_wait_for_a_place(pod: Pod) -> None:
    held = [pod.dial() for _ in range(CONNECTIONS)]
    for number, sock in enumerate(held):
        sock.sendall(b"%d" % number)
    assert [int(sock.recv(9)) for sock in held] == list(range(CONNECTIONS))
    late = pod.dial()
    late.sendall(b"late")
    late.settimeout(0.5)
    with pytest.raises(TimeoutError):
        late.recv(9)
    held.pop().close()
    late.settimeout(10)
    assert late.recv(9) == b"late"
    for sock in (*held, late):
        sock.close()


def test_places_that_a_service_leaves_half_open_are_taken_back(serve: Serve) -> None:
    """It never ends its side: a box that opens and closes would be without a place after some of them."""
    pod = Pod(Service("127.0.0.1", serve(lambda client: time.sleep(30))))
    pod.routes.start(time.monotonic() + 10)
    for _ in range(2 * CONNECTIONS):
        with pod.dial() as sock:
            sock.sendall(b"x")
    with pod.dial() as sock:
        sock.settimeout(1)
        with pytest.raises(TimeoutError):  # open, not refused
            sock.recv(1)
    pod.close()


def test_a_service_that_is_not_there_ends_the_connection() -> None:
    pod = Pod(Service("127.0.0.1", free_port()))
    pod.routes.start(time.monotonic() + 10)
    with pod.dial() as sock:
        assert sock.recv(1) == b""
    pod.close()


def test_a_stream_that_breaks_is_opened_again(pod: Pod) -> None:
    held = pod.dial()
    held.sendall(b"x")
    assert held.recv(1) == b"x"
    pod.streams[0].process.kill()
    with held, contextlib.suppress(ConnectionResetError):
        assert held.recv(1) == b""

    def works() -> bool:
        with contextlib.suppress(OSError):
            return through(pod.dial(), b"again") == b"again"
        return False

    until = time.monotonic() + 20
    while not works():
        assert time.monotonic() < until
        time.sleep(0.05)
    assert all(works() for _ in range(20))
    assert len(pod.streams) == 2


def test_a_pod_that_is_gone_is_not_waited_for(pod: Pod) -> None:
    pod.why_gone = "deleted"
    pod.streams[0].process.kill()
    pod.routes._thread.join(10)
    assert not pod.routes._thread.is_alive()
    assert len(pod.streams) == 1


def test_a_port_that_is_taken_is_a_start_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        relay = Relay()
        pipes: list[Pipes] = []

        def connect() -> Pipes:
            pipes.append(Pipes(taken.getsockname()[1]))
            return pipes[0]

        routes = PodRoutes(connect, lambda: "", [Service("127.0.0.1", 1)], relay)  # type: ignore[arg-type, return-value]
        with pytest.raises(SandboxStartError, match="Address already in use"):
            routes.start(time.monotonic() + 30)
        routes.close()
        relay.close()


def test_nothing_is_left(serve: Serve) -> None:
    """Descriptors, threads and processes, with connections open when it is closed."""
    port = serve(echo)
    me = psutil.Process()
    counts = []
    for _ in range(3):
        pod = Pod(Service("127.0.0.1", port))
        pod.routes.start(time.monotonic() + 10)
        held = [pod.dial() for _ in range(5)]
        for sock in held:
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
        pod.close()
        pod.routes.close()  # twice is fine
        assert pod.streams[0].process.returncode == 0
        for sock in held:
            assert sock.recv(1) == b""
            sock.close()
        del pod
        time.sleep(0.2)  # the service's own threads
        counts.append((me.num_fds(), threading.active_count()))
    assert counts[2] == counts[1]


def test_a_side_that_ignores_the_window_is_cut_off() -> None:
    """The agent reaches neither side; a fault there must still not cost the other side's memory."""
    ours, theirs = socket.socketpair()
    frames: list[bytes] = []
    channels = Channels(frames.append)
    channels.add(b"1", ours)
    channels.heard(b"1", DATA, b"x" * WINDOW)
    assert frames == []
    channels.heard(b"1", DATA, b"x")
    assert [unpack(f[4:])[1] for f in frames] == [CLOSE]
    assert channels.open == {}
    channels.heard(b"1", DATA, b"late")
    assert pack(b"1", CLOSE, b"") == frames[0]
    assert theirs.recv(1) == b""
    theirs.close()
