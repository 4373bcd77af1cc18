"""The network namespace of a box with named services: a loopback, and listening sockets on it that others serve.

The launcher makes it, not bubblewrap, because only here is there the power to listen on low ports and on addresses
other than the loopback's; the box's processes get neither. A failure here ends the start: a box never runs in the
namespace of the host.
"""

from __future__ import annotations

import fcntl
import socket
import struct

from .kernel import call

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
IFF_UP, IFF_RUNNING = 1, 64
BACKLOG = 128


def enter_with_listeners(routes: list[tuple[str, int]]) -> list[socket.socket]:
    """Move this process into a fresh namespace and listen there on each (IPv4 address, port)."""
    call("unshare", CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _set(control, SIOCSIFFLAGS, "lo", struct.pack("h", IFF_UP | IFF_RUNNING))
        others = dict.fromkeys(address for address, _ in routes if not address.startswith("127."))
        for number, address in enumerate(others):
            for request, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.255")):
                packed = struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(value))
                _set(control, request, f"lo:{number}", packed)
    listeners = []
    for address, port in routes:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.bind((address, port))
        sock.listen(BACKLOG)
        listeners.append(sock)
    return listeners


def _set(control: socket.socket, request: int, name: str, value: bytes) -> None:
    fcntl.ioctl(control, request, struct.pack("16s24s", name.encode(), value))
