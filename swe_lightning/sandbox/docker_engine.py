"""The Docker daemon as the rest of the room sees it: one connection per process, typed errors, bounded starts.

A daemon that is absent is a MissingPart, an image that is absent is `image_unavailable`, and what an overloaded daemon
says (500, 429, a timeout) is tried again a few times with growing, jittered pauses before it becomes a start error.
Never a command line: everything goes over the API, so no value shows in a process list.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from swe_lightning.errors import MissingPart, SandboxStartError
from swe_lightning.records import InfraReason
from swe_lightning.sandbox.image_names import local_names, parse

if TYPE_CHECKING:
    import docker

T = TypeVar("T")
RETRIED = {408, 422, 429, 500, 502, 503, 504}
ATTEMPTS = 4
FIRST_PAUSE_S = 0.2
POOL = 64
MAX_STDERR = 4000
SEND_CHECK_S = 1.0
OWNER = "swel.owner"
"""Label of every container we make, helpers too: gc goes by it."""


def connect(timeout_s: float = 60) -> docker.APIClient:
    """The daemon of this machine. MissingPart, in one sentence, when there is none."""
    try:
        import docker
        import docker.utils
    except ImportError:
        raise MissingPart("docker sandboxes need the docker package: pip install 'swe-lightning[docker]'") from None
    where = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if not where.startswith("unix://"):
        raise MissingPart(
            f"DOCKER_HOST is {where}: docker sandboxes mount trees of this machine, so they need its own daemon "
            "(unix:///var/run/docker.sock)"
        )
    try:
        return docker.APIClient(version="auto", timeout=timeout_s, max_pool_size=POOL, **docker.utils.kwargs_from_env())
    except docker.errors.DockerException as error:
        raise MissingPart(
            f"no Docker daemon answers at {where} ({short(error)}); start it (systemctl start docker), and make sure "
            "this user may use it (group docker)"
        ) from error


def find_image(client: docker.APIClient, image: str) -> dict[str, Any]:
    """The image under any of its spellings, as the daemon knows it. SandboxStartError(image_unavailable) if absent."""
    import docker.errors

    pinned = parse(image).digest
    for name in local_names(image):
        # Pulled from a mirror, an image has its pinned digest under the mirror's name only.
        for known_as in [name, replace(parse(name), digest="").name] if pinned else [name]:
            with contextlib.suppress(docker.errors.NotFound):
                info: dict[str, Any] = client.inspect_image(known_as)
                if not pinned or any(d.endswith(f"@{pinned}") for d in info.get("RepoDigests") or []):
                    return info
    raise SandboxStartError(
        f"image {image} is not on this machine: swel images pull {image}", InfraReason.IMAGE_UNAVAILABLE
    )


def short(error: BaseException) -> str:
    """The daemon's own words on one line."""
    text = getattr(error, "explanation", None) or str(error)
    return " ".join(str(text).split())[:400]


def starting(what: str, call: Callable[[], T], until: float) -> T:
    """`call` with retries while the daemon is overloaded and there is time. SandboxStartError when it stays so."""
    import docker.errors
    import requests

    pause = FIRST_PAUSE_S
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except docker.errors.ImageNotFound as error:
            raise SandboxStartError(f"{what}: {short(error)}", InfraReason.IMAGE_UNAVAILABLE) from error
        except docker.errors.APIError as error:
            last: Exception = error
            if error.status_code not in RETRIED:
                raise SandboxStartError(f"{what}: {short(error)}") from error
        except requests.exceptions.RequestException as error:
            last = error
        pause *= 1 + random.random()
        if attempt == ATTEMPTS or time.monotonic() + pause > until:
            break
        time.sleep(pause)
    raise SandboxStartError(f"{what}: the Docker daemon failed {attempt} times: {short(last)}") from last


class AttachedStream:
    """stdin and stdout of a container with the face of a socket; its stderr is kept for error messages.

    Without a terminal the daemon frames both outputs: stream number, three zero bytes, length, data.
    """

    def __init__(self, client: docker.APIClient, container: str) -> None:
        self._client, self._container = client, container
        params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        self._attached: Any = client.attach_socket(container, params=params)
        raw = getattr(self._attached, "_sock", self._attached)
        self._sock = socket.socket(fileno=os.dup(raw.fileno()))
        self._raw, self._ready, self.stderr = bytearray(), bytearray(), bytearray()

    def recv(self, n: int) -> bytes:
        until = None if (timeout := self._sock.gettimeout()) is None else time.monotonic() + timeout
        while not self._ready:
            self._unframe()
            if self._ready:
                break
            if until is not None and time.monotonic() > until:
                raise TimeoutError("no reply")
            part = self._sock.recv(1 << 20)
            if not part:
                return b""
            self._raw += part
        data = bytes(self._ready[:n])
        del self._ready[:n]
        return data

    def _unframe(self) -> None:
        while len(self._raw) >= 8:
            stream, length = struct.unpack_from("!BxxxI", self._raw)
            if len(self._raw) < 8 + length:
                return
            data = self._raw[8 : 8 + length]
            if stream == 1:
                self._ready += data
            elif len(self.stderr) < MAX_STDERR:
                self.stderr += data
            del self._raw[: 8 + length]

    def sendall(self, data: bytes) -> None:
        """The daemon leaves the stream open when a container dies before it has read everything: so ask."""
        timeout = self._sock.gettimeout()
        until = time.monotonic() + (timeout if timeout is not None else 3600)
        view = memoryview(data)
        try:
            while view:
                self._sock.settimeout(max(0.01, min(SEND_CHECK_S, until - time.monotonic())))
                try:
                    view = view[self._sock.send(view) :]
                except TimeoutError:
                    if time.monotonic() > until or not self._running():
                        raise
        finally:
            self._sock.settimeout(timeout)

    def _running(self) -> bool:
        try:
            return bool(self._client.inspect_container(self._container)["State"]["Running"])
        except Exception:
            return False

    def settimeout(self, timeout_s: float | None) -> None:
        self._sock.settimeout(timeout_s)

    def gettimeout(self) -> float | None:
        return self._sock.gettimeout()

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()
        with contextlib.suppress(Exception):
            self._attached.close()
        with contextlib.suppress(Exception):
            self._attached._response.close()
