"""The owner's end of the line to a pod: a numbered request, one reply, over exec streams that may break at any time.

To the rest of the room it has the face of a socket (client.Stream). Beneath, every request carries a number; when the
stream breaks, or is silent for too long, a new one is opened and the same request asked again, which the keeper in the
pod (boxside/pod.py) never runs twice. So a restarting API server or an impatient load balancer costs seconds, not the
box. A pod that is gone is not waited for.
"""

from __future__ import annotations

import contextlib
import random
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from swe_lightning.sandbox.boxside.wire import pack, unpack
from swe_lightning.sandbox.kubernetes_api import Cluster

if TYPE_CHECKING:
    import websocket

PROTOCOL = "v4.channel.k8s.io"
STDIN, STDOUT, STDERR, STATUS = range(4)
PIECE = 1 << 17
OPEN_TIMEOUT_S = 15.0
QUIET_S = 15.0
"""Silence after which the keeper is asked whether it is there."""
RECONNECT_S = 60.0
MAX_STDERR = 2000


class ExecStream:
    """A process in a container; bytes in, bytes out, exact. OSError for everything that goes wrong."""

    def __init__(self, cluster: Cluster, pod: str, container: str, argv: list[str]) -> None:
        self.stderr = bytearray()
        self._lock = threading.Lock()
        self._sock = _connect(cluster, pod, container, argv)

    def send(self, data: bytes, timeout_s: float) -> None:
        import websocket

        view = memoryview(data)
        try:
            with self._lock:
                self._sock.settimeout(timeout_s)
                for at in range(0, len(view), PIECE):
                    self._sock.send_binary(bytes((STDIN,)) + view[at : at + PIECE])
        except (websocket.WebSocketException, ssl.SSLError) as error:
            raise ConnectionResetError(f"the exec stream broke: {error}") from error

    def recv(self, timeout_s: float) -> bytes:
        """Some bytes of standard output. TimeoutError when none come, ConnectionResetError at its end."""
        import websocket

        until = time.monotonic() + timeout_s
        while True:
            try:
                self._sock.settimeout(max(0.01, until - time.monotonic()))
                opcode, data = self._sock.recv_data()
            except websocket.WebSocketTimeoutException as error:
                raise TimeoutError("nothing came") from error
            except (websocket.WebSocketException, ssl.SSLError) as error:
                raise ConnectionResetError(f"the exec stream broke: {error}") from error
            if opcode == websocket.ABNF.OPCODE_CLOSE or (data and data[0] == STATUS):
                said = data[1:].decode(errors="replace") if data[:1] == b"\x03" else ""
                raise ConnectionResetError(f"the exec stream ended {said} {self.stderr.decode(errors='replace')}")
            if data and data[0] == STDERR and len(self.stderr) < MAX_STDERR:
                self.stderr += data[1:]
            if data and data[0] == STDOUT and len(data) > 1:
                return data[1:]

    def fileno(self) -> int:
        """Readable when `recv` has something to read, unless it is `buffered` already."""
        return int(self._sock.fileno())

    def buffered(self) -> bool:
        sock = self._sock.sock
        return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._sock.shutdown()


def _connect(cluster: Cluster, pod: str, container: str, argv: list[str]) -> websocket.WebSocket:
    """The kubernetes package's own `stream` knows no timeout and turns bytes into text unless told otherwise; so the
    handshake is made here, with the credentials it has loaded."""
    import websocket

    config = cluster.configuration
    query = [
        ("container", container),
        *(("command", a) for a in argv),
        ("stdin", "1"),
        ("stdout", "1"),
        ("stderr", "1"),
    ]
    host = urlsplit(config.host)
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{quote(pod)}/exec?{urlencode(query)}"
    url = f"{'wss' if host.scheme == 'https' else 'ws'}://{host.netloc}{host.path.rstrip('/')}{path}"
    tls: dict[str, Any] = {"context": cluster.tls} if cluster.tls else {}
    if config.tls_server_name:
        tls["server_hostname"] = config.tls_server_name
    proxy = urlsplit(config.proxy) if config.proxy else None
    try:
        return websocket.create_connection(
            url, timeout=OPEN_TIMEOUT_S, sslopt=tls, header=cluster.headers(),
            subprotocols=[PROTOCOL], skip_utf8_validation=True, enable_multithread=True,
            http_proxy_host=proxy.hostname if proxy else None, http_proxy_port=proxy.port if proxy else None,
            http_no_proxy=config.no_proxy.split(",") if config.no_proxy else None,
        )  # fmt: skip
    except (websocket.WebSocketException, ssl.SSLError, TimeoutError) as error:
        raise ConnectionRefusedError(f"no exec stream to pod {pod}: {' '.join(str(error).split())[:300]}") from error


class Line:
    """`connect` opens a stream to the keeper; `gone` says why no further one can be opened, or nothing."""

    def __init__(self, connect: Callable[[], ExecStream], gone: Callable[[], str]) -> None:
        self._connect, self._gone = connect, gone
        self._lock = threading.RLock()
        self._stream: ExecStream | None = None
        self._inbox = bytearray()
        self._number = 0
        self._request = b""
        self._closed = False

    def ask(self, target: bytes, payload: bytes, timeout_s: float) -> bytes:
        """The reply's frame. TimeoutError, or ConnectionResetError when the pod is gone or stays out of reach."""
        with self._lock:
            self._number += 1
            self._request = pack(b"%d" % self._number, target, payload)
            until = time.monotonic() + timeout_s
            try:
                return self._exchange(until)
            finally:
                self._request = b""

    def _exchange(self, until: float) -> bytes:
        lost_at: float | None = None
        sent = False
        while True:
            try:
                if self._stream is None:
                    self._open()
                    sent = False
                assert self._stream is not None
                if not sent:
                    self._stream.send(self._request, max(1.0, until - time.monotonic()))
                    sent = True
                return self._reply(until)
            except TimeoutError:
                self._drop()
                raise
            except OSError as error:
                self._drop()
                lost_at = lost_at or time.monotonic()
                why = "the line was closed" if self._closed else self._gone()
                if why:
                    raise ConnectionResetError(why) from error
                if time.monotonic() > min(until, lost_at + RECONNECT_S):
                    raise
                time.sleep(0.1 + 0.4 * random.random())

    def _reply(self, until: float) -> bytes:
        """Of the request under way. A stream on which even the keeper is silent is broken."""
        asked = False
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("no reply")
            try:
                number, frame = self._next_frame(min(left, QUIET_S))
            except TimeoutError:
                if asked:
                    raise ConnectionResetError("the keeper is silent") from None
                if left > QUIET_S:
                    asked = True
                    self._ping()
                continue
            asked = False
            if number == self._number:
                return frame

    def _next_frame(self, timeout_s: float) -> tuple[int, bytes]:
        until = time.monotonic() + timeout_s
        assert self._stream is not None
        while True:
            if len(self._inbox) >= 4:
                (length,) = struct.unpack_from("!I", self._inbox)
                if len(self._inbox) >= 4 + length:
                    number, frame = unpack(bytes(self._inbox[4 : 4 + length]))
                    del self._inbox[: 4 + length]
                    return int(number), frame
            self._inbox += self._stream.recv(max(0.01, until - time.monotonic()))

    def keep_alive(self) -> None:
        """Say to the keeper that its owner lives, and to what lies between that the stream is used. Never waits for a
        request that is under way: that one does the same by itself."""
        if self._closed or not self._lock.acquire(blocking=False):
            return
        try:
            if self._stream is None:
                self._open()
            self._ping()
            while self._next_frame(5.0)[0]:
                pass
        except OSError:
            self._drop()
        finally:
            self._lock.release()

    def end(self, timeout_s: float = 5.0) -> bool:
        """Have the keeper end the box; True once the box's process 1 is gone, which takes every other along."""
        self._closed = True
        idle = self._lock.acquire(blocking=False)
        stream = self._stream if idle else None
        try:
            stream = stream or self._connect()
            stream.send(pack(b"0", b"end", b""), timeout_s)
            return bool(stream.recv(timeout_s))
        except OSError:
            return False
        finally:
            if stream is not None:
                stream.close()
            if idle:
                self._lock.release()
            self.close()

    def close(self) -> None:
        """A request that is under way on another thread ends. Idempotent."""
        self._closed = True
        stream = self._stream
        if stream is not None:
            stream.close()

    def side(self, target: bytes) -> Side:
        return Side(self, target)

    def _open(self) -> None:
        if self._closed:
            raise ConnectionResetError("the line was closed")
        self._inbox.clear()
        self._stream = self._connect()

    def _ping(self) -> None:
        assert self._stream is not None
        self._stream.send(pack(b"0", b"ping", b""), 5.0)

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class Side:
    """One target behind the line, as a socket on which each `sendall` is a whole request (client.Stream)."""

    def __init__(self, line: Line, target: bytes) -> None:
        self._line, self._target = line, target
        self._timeout_s: float | None = None
        self._request = b""
        self._reply = memoryview(b"")

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def sendall(self, data: bytes) -> None:
        self._request = data

    def recv(self, n: int) -> bytes:
        if not self._reply:
            self._reply = memoryview(self._line.ask(self._target, self._request, self._timeout_s or 3600))
        data, self._reply = bytes(self._reply[:n]), self._reply[n:]
        return data

    def shutdown(self, how: int) -> None:
        """The line outlives its sides: its owner ends it, and the box with it."""

    def close(self) -> None:
        """As shutdown."""
