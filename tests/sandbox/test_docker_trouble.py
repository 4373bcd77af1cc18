"""A real daemon behind a proxy that hangs, fails and counts: starts stay bounded, time out alone and leak nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swe_lightning.errors import SandboxStartError
from swe_lightning.sandbox import Limits
from swe_lightning.sandbox.docker import DockerBackend
from swe_lightning.sandbox.docker_engine import connect

LIMITS = Limits(memory_mb=128, disk_mb=16, pids=32)
FAILURE = (
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 27\r\nConnection: close\r\n\r\n"
    + b'{"message":"overloaded  "}\n'
)


class Proxy:
    """One request per connection. `decide(request line)` says pass, hang or fail."""

    def __init__(self, path: Path) -> None:
        self.decide: Callable[[str], str] = lambda line: "pass"
        self.now = self.most = 0
        self._lock, self._released = threading.Lock(), threading.Event()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._released.set()
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as daemon:
            data = b""
            while b"\r\n\r\n" not in data:
                part = client.recv(65536)
                if not part:
                    return
                data += part
            line = data.split(b"\r\n", 1)[0].decode()
            action = self.decide(line)
            if action == "hang":
                self._released.wait(30)
                return
            if action == "fail":
                client.sendall(FAILURE)
                return
            creates = "/containers/create" in line
            with self._lock:
                self.now += creates
                self.most = max(self.most, self.now)
            daemon.connect("/var/run/docker.sock")
            if b"Upgrade" not in data:
                data = data.replace(b"Connection: keep-alive", b"Connection: close")
            daemon.sendall(data)
            threading.Thread(target=pump, args=(client, daemon), daemon=True).start()
            pump(daemon, client)
            with self._lock:
                self.now -= creates


def pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while part := source.recv(65536):
            sink.sendall(part)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@pytest.fixture
def proxy(
    docker_backend: DockerBackend, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Proxy]:
    docker_backend.create(tree, limits=LIMITS).destroy()  # the image is hardened
    place = Path("/tmp") / f"swel-proxy-{time.monotonic_ns()}"
    proxy = Proxy(place)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{place}")
    yield proxy
    monkeypatch.undo()
    proxy.close()
    place.unlink()


def made(label: str) -> list[object]:
    client = connect()
    try:
        return list(client.containers(all=True, filters={"label": f"swel.label={label}"}))
    finally:
        client.close()


def test_one_start_that_hangs_neither_leaks_nor_holds_up_its_sibling(
    proxy: Proxy, docker_image: str, tree: Path
) -> None:
    """S5: the start is given up at its time, its container is removed, the sibling works meanwhile."""
    hung: list[str] = []

    def decide(line: str) -> str:
        if line.startswith("POST") and line.split(" ")[1].endswith("/start") and not hung:
            hung.append(line)
            return "hang"
        return "pass"

    proxy.decide = decide
    backend = DockerBackend(image=docker_image, start_timeout_s=3)
    started = time.monotonic()

    def work(_: int) -> str:
        try:
            with backend.create(tree, limits=LIMITS, label="hang") as box:
                return box.run("echo fine", timeout_s=20).output.decode()
        except SandboxStartError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        said = sorted(pool.map(work, range(2)))
    assert time.monotonic() - started < 20
    assert said[1] == "fine\n"
    assert said[0].startswith("cannot start a sandbox: the Docker daemon failed 1 times")
    assert made("hang") == []
    backend.close()


def test_an_overloaded_daemon_is_asked_again_and_then_is_a_typed_error(
    proxy: Proxy, docker_image: str, tree: Path
) -> None:
    """S10: 500s are tried again with pauses; when they stay, the error says so."""
    failures = [2]

    def decide(line: str) -> str:
        if "/containers/create" in line and failures[0] > 0:
            failures[0] -= 1
            return "fail"
        return "pass"

    proxy.decide = decide
    backend = DockerBackend(image=docker_image)
    with backend.create(tree, limits=LIMITS, label="busy") as box:
        assert box.run("echo fine", timeout_s=20).output == b"fine\n"
    failures[0] = 1000
    with pytest.raises(SandboxStartError, match="the Docker daemon failed 4 times: overloaded"):
        backend.create(tree, limits=LIMITS, label="busy")
    assert made("busy") == []
    backend.close()


def test_creates_are_bounded_at_the_daemon(proxy: Proxy, docker_image: str, tree: Path) -> None:
    backend = DockerBackend(image=docker_image, start_limit=2)

    def work(_: int) -> bytes:
        with backend.create(tree, limits=LIMITS) as box:
            return box.run("echo fine", timeout_s=30).output

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [b"fine\n"] * 8
    assert proxy.most <= 2
    backend.close()
