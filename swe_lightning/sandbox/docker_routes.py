"""Named services in a container that has no network: its server listens inside, the relay outside does the rest.

The listening sockets are opened by the box's command server, in the box's own network namespace, and handed out once
over a Unix socket that is gone before the first command runs. So the container holds nothing of the host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swe_lightning.errors import SandboxStartError
from swe_lightning.sandbox.boxside.wire import pack
from swe_lightning.sandbox.client import CommandClient
from swe_lightning.sandbox.network import Endpoint, Network, endpoints
from swe_lightning.services import Service

IN_BOX = "/run/swel-routes"
SOCKET = "out"


@dataclass(frozen=True)
class Routes:
    """What a container needs for its services: a mount (None: there are no services) and lines of its hosts file."""

    sockets: list[Endpoint]
    hosts: dict[str, str]
    directory: Path | None
    listener: socket.socket | None

    def collect(self, server: CommandClient, timeout_s: float) -> list[int]:
        """Have the server listen; returns the descriptors, in the order of `sockets`."""
        if self.listener is None:
            return []
        fields = [part for e in self.sockets for part in (e.address.encode(), b"%d" % e.port)]
        server.ask(pack(b"listen", f"{IN_BOX}/{SOCKET}".encode(), *fields), timeout_s)
        self.listener.settimeout(timeout_s)
        connection, _ = self.listener.accept()
        with connection:
            _, fds, _, _ = socket.recv_fds(connection, 1, len(self.sockets))
        if len(fds) != len(self.sockets):
            raise SandboxStartError("a sandbox handed out fewer listening sockets than it was asked for")
        return fds


@contextlib.contextmanager
def routes(gateway: Service | None, whitelist: tuple[Service, ...]) -> Iterator[Routes]:
    """For the time of a start. The directory is empty and gone afterwards; the container's mount of it stays empty."""
    found, lines = endpoints(Network(gateway, whitelist))
    hosts = {name: address for address, name in (line.split() for line in lines.splitlines())}
    if not found:
        yield Routes([], {}, None, None)
        return
    directory = Path(tempfile.mkdtemp(prefix="swel-"))
    listener = socket.socket(socket.AF_UNIX)
    try:
        directory.chmod(0o755)
        listener.bind(str(directory / SOCKET))
        os.chmod(directory / SOCKET, 0o666)
        listener.listen(1)
        yield Routes(found, hosts, directory, listener)
    finally:
        listener.close()
        shutil.rmtree(directory, ignore_errors=True)
