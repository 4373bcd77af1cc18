"""The two ways out of a box, and that there is no third: the gateway's route, and services a user names."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn

from swe_lightning.gateway.fakes import FakeEngine
from swe_lightning.recipe import SandboxSection
from swe_lightning.sandbox import Limits, make_backend
from swe_lightning.sandbox.local import LocalBackend, LocalSandbox
from swe_lightning.sandbox.network import GATEWAY_URL, Network, endpoints
from swe_lightning.services import Service, may_connect, parse_service


@pytest.fixture
def backend(local_backend: LocalBackend) -> LocalBackend:
    """Only local boxes: how they are kept, not what they promise."""
    return local_backend


@pytest.fixture
def box(local_box: LocalSandbox) -> LocalSandbox:
    return local_box


SMALL = Limits(cpu=2, memory_mb=512, pids=128, disk_mb=64)

GET = "import urllib.request; print(urllib.request.urlopen('{url}', timeout=5).read().decode())"
TRY = """
import socket
for family, address in {targets}:
    s = socket.socket(getattr(socket, family))
    s.settimeout(2)
    try:
        s.connect(address)
        print("CONNECTED", address)
    except OSError:
        pass
try:
    print("RESOLVED", socket.getaddrinfo("pypi.org", 443))
except OSError:
    pass
"""


def py(box: LocalSandbox, source: str, timeout_s: float = 30) -> str:
    return box.run(f"python - 2>&1 <<'END'\n{source}\nEND", timeout_s=timeout_s).output.decode(errors="replace")


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"hello {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def service() -> Iterator[int]:
    """A web service of the host, on all its addresses."""
    with ThreadingHTTPServer(("0.0.0.0", 0), Hello) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture(scope="module")
def engine() -> Iterator[int]:
    application: Any = FakeEngine()
    server = uvicorn.Server(uvicorn.Config(application, port=0, access_log=False, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        pass
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(10)


def own_addresses() -> list[str]:
    found = [a.address for addresses in psutil.net_if_addrs().values() for a in addresses if a.family == socket.AF_INET]
    return [a for a in found if not a.startswith("127.")]


CHAT = """
import json, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
request = urllib.request.Request("%s/v1/chat/completions", body, {"content-type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=10))["choices"][0]["message"]["content"])
"""


def test_a_client_inside_reaches_the_gateway_and_nothing_else(
    backend: LocalBackend, tree: Path, engine: int, service: int
) -> None:
    with backend.create(tree, limits=SMALL, gateway=Service("127.0.0.1", engine)) as box:
        assert py(box, CHAT % GATEWAY_URL) == "ok\n"
        targets = [("AF_INET", (a, p)) for a in ("127.0.0.1", *own_addresses()) for p in (engine, service)]
        targets += [("AF_INET", (a, 80)) for a in ("169.254.169.254", "192.0.2.1", "127.0.1.1")]
        targets += [("AF_INET6", (a, p)) for a in ("::1", "fd00:ec2::254") for p in (8080, engine)]
        assert py(box, TRY.format(targets=targets), 60) == ""
        assert box.run("cat /proc/net/route | tail -n +2; ls /proc/net/unix", timeout_s=5).output == b"/proc/net/unix\n"
        interfaces = box.run("tail -n +3 /proc/net/dev | cut -d: -f1", timeout_s=5).output
        assert interfaces.split() == [b"lo"]


def test_the_route_survives_what_kills_everything_in_the_box(backend: LocalBackend, tree: Path, engine: int) -> None:
    with backend.create(tree, limits=SMALL, gateway=Service("127.0.0.1", engine)) as box:
        box.run("kill -9 -1", timeout_s=5)
        assert box.run("sleep 30", timeout_s=0.2).timed_out
        assert py(box, CHAT % GATEWAY_URL) == "ok\n"


def test_a_box_without_a_route_has_none(box: LocalSandbox) -> None:
    assert "refused" in py(box, GET.format(url=GATEWAY_URL))


def test_power_is_the_same_with_a_route(backend: LocalBackend, tree: Path, engine: int) -> None:
    with backend.create(tree, limits=SMALL, gateway=Service("127.0.0.1", engine)) as box:
        status = box.run("cat /proc/self/status", timeout_s=5).output.decode()
        wanted = {"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"}
        assert {line.split()[1] for line in status.splitlines() if line.split(":")[0] in wanted} == {"0" * 16}
        listen = "import socket\ntry: socket.create_server(('127.0.0.1', 80)); print('LOW PORT')\nexcept OSError: pass"
        assert py(box, listen) == ""
        assert b"WROTE" not in box.run("echo x >>/etc/hosts && echo WROTE", timeout_s=5).output


def test_whitelisted_services_are_reached_by_name_and_address(able: None, tree: Path, service: int) -> None:
    addresses = own_addresses()[:1]
    names = ["localhost", socket.gethostname()]
    with_names = [f"{name}:{service}" for name in (*names, *addresses)]
    backend = LocalBackend(whitelist=tuple(parse_service(text) for text in with_names))
    try:
        with backend.create(tree, limits=SMALL) as box:
            for text in with_names:
                assert py(box, GET.format(url=f"http://{text}/x")) == "hello /x\n", text
            other = [("AF_INET", (a, p)) for a in ("127.0.0.1", "127.0.1.1", *addresses) for p in (22, service + 1)]
            assert py(box, TRY.format(targets=other)) == ""
    finally:
        backend.close()


def test_low_ports_and_dead_services(able: None, tree: Path) -> None:
    """The box starts, the client sees a connection that ends; nothing waits for a name nobody knows."""
    backend = LocalBackend(whitelist=(Service("service.invalid", 443), Service("localhost", 1)))
    try:
        with backend.create(tree, limits=SMALL) as box:
            for host, port in (("service.invalid", 443), ("localhost", 1)):
                said = py(box, f"import socket; print(socket.create_connection(('{host}', {port}), 20).recv(9))", 60)
                assert said == "b''\n" or "ConnectionReset" in said
    finally:
        backend.close()


def settled_descriptors() -> int:
    """Open descriptors once their number has stood still: the service's threads are in this process too."""
    seen, since = -1, time.monotonic()
    until = since + 15
    while time.monotonic() < until and time.monotonic() - since < 1:
        if (now := len(os.listdir("/proc/self/fd"))) != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.02)
    return seen


def test_connections_and_descriptors_end_with_the_box(backend: LocalBackend, tree: Path, service: int) -> None:
    gateway = Service("127.0.0.1", service)
    backend.create(tree, gateway=gateway).destroy()
    before = settled_descriptors()
    many = "import socket, time\nc = [socket.create_connection(('127.0.0.1', 8080)) for _ in range(100)]\n"
    with backend.create(tree, limits=SMALL, gateway=gateway) as box:
        ask = "c[0].sendall(b'GET /y HTTP/1.0\\r\\n\\r\\n'); print(b'hello /y' in c[0].makefile('rb').read())"
        assert py(box, many + ask) == "True\n"
        box.run(f'python -c "{many}time.sleep(60)" & sleep 1', timeout_s=10)
    assert settled_descriptors() <= before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("https://pypi.org", "is a URL"),
        ("pypi.org", "has no port"),
        ("pypi.org:0", "has no port"),
        ("pypi.org:99999", "has no port"),
        ("pypi.org:http", "has no port"),
        ("*.pypi.org:443", "is a pattern"),
        ("[::1]:80", "IPv6"),
        ("::1:80", "IPv6"),
        ("a b:80", "names no host"),
        ("1.2.3:80", "names no host"),
        (":80", "names no host"),
        ("169.254.169.254:80", "no box may reach"),
        ("0.0.0.0:80", "no box may reach"),
    ],
)
def test_wrong_entries_are_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse_service(text)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=words):
        SandboxSection(whitelist=[text])


def test_names_may_not_lead_to_the_machines_link() -> None:
    refused = ["169.254.169.254", "fe80::1%eth0", "::ffff:169.254.169.254", "0.0.0.0", "::", "224.0.0.1"]
    assert [a for a in refused if may_connect(a)] == []
    assert all(may_connect(a) for a in ("127.0.0.1", "10.0.0.1", "::1", "93.184.216.34"))


def test_each_name_has_an_address_and_the_gateways_port_is_taken() -> None:
    listed = tuple(parse_service(t) for t in ("a.org:443", "b.org:443", "a.org:80", "localhost:5432", "10.0.0.7:6379"))
    found, hosts = endpoints(Network(Service("127.0.0.1", 9), listed))
    assert [f"{e.address}:{e.port}" for e in found] == [
        "127.0.0.1:8080", "127.0.1.1:443", "127.0.1.2:443", "127.0.1.1:80", "127.0.0.1:5432", "10.0.0.7:6379",
    ]  # fmt: skip
    assert hosts == "127.0.1.1 a.org\n127.0.1.2 b.org\n"
    with pytest.raises(ValueError, match="port 8080"):
        Network(Service("127.0.0.1", 9), (Service("localhost", 8080),))


def test_a_recipe_cannot_remember_what_a_service_answers() -> None:
    with pytest.raises(ValueError, match="remember_commands"):
        SandboxSection(whitelist=["a.org:443"], remember_commands="ls")


def test_the_recipes_backend_opens_its_whitelist(able: None, tree: Path, service: int) -> None:
    backend = make_backend(SandboxSection(whitelist=[f"localhost:{service}"]))
    with backend.create(tree, limits=SMALL) as box:
        assert py(box, GET.format(url=f"http://localhost:{service}/z")) == "hello /z\n"
