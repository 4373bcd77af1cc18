"""A box that somebody else runs (a Docker daemon, a cluster): its owner has a command server's line and a name.

What both have in common: the same requests over the line, and a box that stops answering is SandboxLost with the
account of whoever runs it, asked for once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

from swe_lightning.errors import SandboxLost
from swe_lightning.sandbox.base import ExecResult, TreeDiff
from swe_lightning.sandbox.client import CommandClient
from swe_lightning.sandbox.remote_tree import remote_diff
from swe_lightning.sandbox.treediff import BaseTree


class RemoteBox:
    """Commands are serial: a second thread waits for the first."""

    def __init__(self, name: str, server: CommandClient, base: BaseTree) -> None:
        self.name = name
        self.left_out: list[str] = []
        self._server, self._base = server, base
        self._closing = threading.Lock()
        self._open = True
        self._why_lost: SandboxLost | None = None

    def run(self, command: str, *, timeout_s: float, env: Mapping[str, str] | None = None) -> ExecResult:
        with self._attributed():
            return self._server.run(command, timeout_s=timeout_s, env=env)

    def read_file(self, path: str) -> bytes:
        with self._attributed():
            return self._server.read_file(path)

    def write(self, changes: TreeDiff) -> None:
        with self._attributed():
            self._server.write(changes)

    def diff(self) -> TreeDiff:
        with self._attributed():
            found, self.left_out = remote_diff(self._server, self._base)
            return found

    def destroy(self) -> None:
        """Idempotent, from any thread."""
        with self._closing:
            if self._open:
                self._open = False
                self._server.close()
                self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    def _why(self) -> str:
        """Why it is gone, in the words of whoever runs it; "" if they do not know."""
        raise NotImplementedError

    def _remove(self) -> None:
        """All of it; called once."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _attributed(self) -> Iterator[None]:
        try:
            yield
        except SandboxLost as error:
            if self._why_lost is None:
                why = self._why() if self._open else ""
                self._why_lost = SandboxLost(f"{error}: {why}" if why else str(error))
            raise self._why_lost from error
