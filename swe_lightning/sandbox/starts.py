"""Starting a box when the machine is busy: few at once, a few tries, the first error kept.

A machine that is asked for hundreds of boxes refuses some of them for a moment (process table, memory, mounts). Starts
are therefore counted apart from the boxes that run, and a refusal is tried again after a random wait, so that those who
were refused together do not come back together. What cannot get better (a missing part, a missing tree) is not tried.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from swe_lightning.errors import SandboxStartError

AT_ONCE = 16
TRIES = 3
WAIT_S = 0.2
T = TypeVar("T")


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
