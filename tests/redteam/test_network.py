"""The network: there is none, by name, address, family or abstract socket.

Each attack tries for real and asserts that nothing was gained. Where it would succeed on an open machine, the test also
makes sure that the target is there: otherwise "not found" would prove nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from .conftest import Say


@pytest.fixture
def tcp() -> Iterator[int]:
    """A real service on the host's loopback, IPv4, that the host itself can reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        yield port


def test_the_hosts_loopback_is_out_of_reach(py: Say, sh: Say, tcp: int) -> None:
    said = py(f"import socket; socket.create_connection(('127.0.0.1', {tcp}), 3); print('CONNECTED')")
    assert "CONNECTED" not in said
    assert "ConnectionRefusedError" in said
    assert "CONNECTED" not in sh(f"(exec 3<>/dev/tcp/127.0.0.1/{tcp}) 2>/dev/null && echo CONNECTED")


def test_the_hosts_ipv6_loopback_is_out_of_reach(py: Say) -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    with server:
        said = py(f"import socket; socket.create_connection(('::1', {server.getsockname()[1]}), 3); print('CONNECTED')")
    assert "CONNECTED" not in said


def test_only_a_loopback_exists(py: Say, sh: Say) -> None:
    assert len(os.listdir("/sys/class/net")) > 1
    interfaces = [line.split(":")[0].strip() for line in sh("cat /proc/net/dev").splitlines()[2:]]
    assert interfaces == ["lo"]
    assert sh("tail -n +2 /proc/net/route") == ""
    said = py(
        "import socket\n"
        "for a in ('192.0.2.1', '10.0.0.1', '169.254.169.254', '224.0.0.1', '255.255.255.255'):\n"
        "    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "    s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)\n"
        "    try: s.sendto(b'x', (a, 53)); print('SENT', a)\n"
        "    except OSError: pass\n"
    )
    assert said == ""


def test_names_are_not_resolved(py: Say) -> None:
    said = py("import socket; print('RESOLVED', socket.getaddrinfo('pypi.org', 443))", timeout_s=30)
    assert "RESOLVED" not in said
    assert "gaierror" in said


@pytest.mark.parametrize(
    "family", ["AF_INET", "AF_INET6", "AF_PACKET", "AF_NETLINK", "AF_VSOCK", "AF_ALG", "AF_BLUETOOTH"]
)
def test_raw_and_exotic_sockets_do_not_open(py: Say, family: str) -> None:
    said = py(f"import socket; socket.socket(socket.{family}, socket.SOCK_RAW); print('OPENED')")
    assert "OPENED" not in said


def test_the_upper_half_of_a_register_opens_no_socket(py: Say) -> None:
    """The kernel reads a family as 32 bits; a filter that compares 64 would let these through."""
    said = py(
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "number = {'x86_64': 41}.get(os.uname().machine, 198)\n"
        "for family in (16, 17, 38, 40):\n"
        "    if libc.syscall(number, ctypes.c_ulong(family | 1 << 32), ctypes.c_ulong(3), ctypes.c_ulong(0)) >= 0:\n"
        "        print('OPENED', family)"
    )
    assert said == ""


def test_abstract_sockets_of_the_host_are_out_of_reach(py: Say) -> None:
    name = f"swel-red-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind("\0" + name)
        server.listen()
        client.connect("\0" + name)
        said = py(f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}'); print('CONNECTED')")
    assert "CONNECTED" not in said
    assert "ConnectionRefusedError" in said


def test_the_metadata_address_answers_nobody(py: Say, sh: Say, request: pytest.FixtureRequest) -> None:
    """Where cloud machines hand out their credentials, IPv4 and IPv6, by every client at hand."""
    said = py(
        "import socket\n"
        "for family, address in ((socket.AF_INET, '169.254.169.254'), (socket.AF_INET6, 'fd00:ec2::254')):\n"
        "    s = socket.socket(family); s.settimeout(2)\n"
        "    try: s.connect((address, 80)); print('CONNECTED', address)\n"
        "    except OSError as e: print(e.errno or 110)\n"
    )
    assert "CONNECTED" not in said
    nowhere = {99, 101, 113}  # no address, no network, no route
    if "kubernetes" in request.node.name:
        nowhere |= {110, 111}  # a network plugin drops or rejects what a policy forbids
    assert {int(line) for line in said.splitlines()} <= nowhere
    assert "GOT" not in sh("(exec 3<>/dev/tcp/169.254.169.254/80) 2>/dev/null && echo GOT; true")
