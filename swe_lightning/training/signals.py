"""Ctrl-C in two stages: the first asks the run to finish its step and save, the second stops it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from swe_lightning.errors import Interrupted


class StopOnSignal:
    """Installs SIGINT and SIGTERM handlers while entered (main thread only) and restores the old ones after."""

    def __init__(self) -> None:
        self.requested = False
        self._forced = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def raise_if_forced(self) -> None:
        if self._forced:
            raise Interrupted("stopped at once; the run resumes from its last checkpoint")

    def raise_if_requested(self) -> None:
        """For stages without a step to finish."""
        if self.requested:
            raise Interrupted("stopped; the same command starts this stage again")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._forced = self.requested
        self.requested = True
        if self._forced:
            self.raise_if_forced()
