"""Starting a box when the machine is busy: few at once, a few tries, the first error kept.

A machine that is asked for hundreds of boxes refuses some of them for a moment (process table, memory, mounts). Starts
are therefore counted apart from the boxes that run, and a refusal is tried again after a random wait, so that those who
were refused together do not come back together. What cannot get better (a missing part, a missing tree) is not tried.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from swe_lightning import paths
from swe_lightning.errors import SandboxStartError
from swe_lightning.sandbox.client import check_relative

AT_ONCE = 16
TRIES = 3
WAIT_S = 0.2
T = TypeVar("T")


def refuse_unusable(tree: Path, files: Iterable[str]) -> None:
    """What no try of any backend can start: SandboxStartError (permanent) without a tree, ValueError for a file that
    would lie outside it."""
    for path in files:
        check_relative(path)
    if not tree.is_dir():
        raise SandboxStartError(f"cannot start a sandbox: no directory {tree}", permanent=True)


class Starts:
    def __init__(self, at_once: int = AT_ONCE, tries: int = TRIES, wait_s: float = WAIT_S) -> None:
        self._room = threading.BoundedSemaphore(at_once)
        self._tries, self._wait_s = tries, wait_s

    def run(self, start: Callable[[], T]) -> T:
        """What `start` returns. SandboxStartError: the first one, with the number of tries, once all have failed."""
        first: SandboxStartError | None = None
        for number in range(1, self._tries + 1):
            try:
                with self._room:
                    return start()
            except SandboxStartError as error:
                first = first or error
                if error.permanent:
                    break
            if number < self._tries:
                time.sleep(random.uniform(0.5, 1.5) * self._wait_s * 2**number)
        assert first is not None
        raise first if first.permanent else SandboxStartError(f"{first} ({self._tries} tries)", first.reason) from first


@contextlib.contextmanager
def start_slot(limit: int, patience_s: float = 600, kind: str = "docker") -> Iterator[None]:
    """One of `limit` starts of this kind under way on this machine, over all processes; one that dies frees its own."""
    place = paths.home() / f"{kind}-starts"
    place.mkdir(exist_ok=True)
    until = time.monotonic() + patience_s
    order = random.sample(range(limit), limit)
    while True:
        for number in order:
            fd = os.open(place / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            try:
                yield
            finally:
                os.close(fd)
            return
        if time.monotonic() > until:
            raise SandboxStartError(f"no free place among {limit} sandbox starts for {patience_s:g} s")
        time.sleep(0.01 + 0.03 * random.random())
