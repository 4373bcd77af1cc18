"""The admission gate: who may reach the model now, and who waits.

Paused means nothing new is admitted; what arrives waits and notices only a slow call. Admission is bounded globally and
per rollout; waiting calls are served round-robin over rollouts, and a call that finds the queue full is refused (429)
rather than dropped. Draining has a deadline and ends in a typed error, never in an endless loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from swe_lightning.gateway.meter import CALL_S, Histogram
from swe_lightning.gateway.problems import Problem, shutting_down


@dataclass(frozen=True)
class GateLimits:
    """Bounds of admission."""

    max_in_flight: int = 1024
    """Calls at the model servers at once."""
    max_waiting: int = 8192
    """Calls held back at once; the next one gets 429."""
    max_per_rollout: int = 64
    """Calls of one rollout, held or in flight; the next one gets 429."""
    pause_wait_s: float = 600.0
    """How long a call waits before it gets 503 with Retry-After."""


class Gate:
    """Counts calls in and out; must be used from one event loop."""

    def __init__(self, limits: GateLimits | None = None, *, paused: bool = False) -> None:
        self.limits = limits or GateLimits()
        self.paused = paused
        self.closed = False
        self.in_flight = 0
        self.waiting = 0
        self.refused = 0
        self.waited = Histogram(CALL_S)
        self._per_rollout: dict[str, int] = {}
        self._queues: OrderedDict[str, deque[asyncio.Future[bool]]] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def admit(self, rollout_id: str) -> AsyncIterator[None]:
        """Hold a place while the call is at the model; waits while paused or full. Problem 429 or 503."""
        if self.closed:
            raise shutting_down()
        held = self._per_rollout.get(rollout_id, 0)
        if held >= self.limits.max_per_rollout:
            raise self._busy(rollout_id, held)
        self._per_rollout[rollout_id] = held + 1
        try:
            await self._take_place(rollout_id)
            try:
                yield
            finally:
                self._leave()
        finally:
            self._let_go(rollout_id)

    async def start(self) -> None:
        """Before the first call."""

    async def stop(self) -> None:
        """After the last call."""

    def __len__(self) -> int:
        """Rollouts with an open call."""
        return len(self._per_rollout)

    def pause(self) -> None:
        """Stop admitting. What is in flight goes on; use drain() to wait for it."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self._pump()

    def close(self) -> None:
        """The gateway stops: calls that wait, and those that come, get Problem 503 `shutting_down`."""
        self.closed = True
        for queue in self._queues.values():
            for place in queue:
                place.cancel()
        self._queues.clear()
        self.waiting = 0

    async def drain(self, deadline_s: float) -> None:
        """Wait until nothing is in flight; Problem 504 `drain_timeout` after the deadline. The gate stays paused."""
        if self._idle.is_set():  # waiting for no time at all would time out even so
            return
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            message = (
                f"{self.in_flight} calls still in flight after {deadline_s:g} s; the gate stays paused: "
                "drain again with a longer drain_s, or resume"
            )
            raise Problem(504, "drain_timeout", message, details={"in_flight": self.in_flight}) from None

    def state(self) -> dict[str, object]:
        return {
            "paused": self.paused,
            "in_flight": self.in_flight,
            "waiting": self.waiting,
            "refused": self.refused,
            "rollouts": len(self._per_rollout),
        }

    async def _take_place(self, rollout_id: str) -> None:
        if self.paused or self.in_flight >= self.limits.max_in_flight:
            await self._wait(rollout_id)
        else:
            self._enter()

    def _let_go(self, rollout_id: str) -> None:
        if self._per_rollout[rollout_id] == 1:
            del self._per_rollout[rollout_id]
        else:
            self._per_rollout[rollout_id] -= 1

    def _busy(self, rollout_id: str, held: int) -> Problem:
        self.refused += 1
        message = f"rollout {rollout_id} has {held} calls open, its limit is {self.limits.max_per_rollout}"
        return Problem(429, "rollout_busy", message, retry_after_s=1)

    async def _wait(self, rollout_id: str) -> None:
        """Wait in the rollout's queue for _pump to take a place for this call."""
        if self.waiting >= self.limits.max_waiting:
            self.refused += 1
            raise Problem(429, "gateway_busy", f"{self.waiting} calls are waiting already", retry_after_s=5)
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        queue = self._queues.setdefault(rollout_id, deque())
        queue.append(place)
        self.waiting += 1
        since = time.monotonic()
        try:
            await asyncio.wait({place}, timeout=self.limits.pause_wait_s)
        except asyncio.CancelledError:
            if (
                place.done() and not place.cancelled() and place.result()
            ):  # admitted in the same moment: give the place back
                self._leave()
            raise
        finally:
            self.waited.observe(time.monotonic() - since)
            if not place.done():
                place.cancel()
                self.waiting -= 1
                queue.remove(place)
                if not queue:
                    self._queues.pop(rollout_id, None)
        if place.cancelled():
            if self.closed:
                raise shutting_down()
            code, why = ("paused", "paused") if self.paused else ("gateway_busy", "full")
            message = f"the gateway is {why}; waited {time.monotonic() - since:.0f} s"
            raise Problem(503, code, message, retry_after_s=30)
        if not place.result():
            raise self._busy(rollout_id, self.limits.max_per_rollout)

    def _pump(self) -> None:
        """Admit waiting calls, one per rollout in turn, while there is room."""
        while self._queues and not self.paused and self.in_flight < self.limits.max_in_flight:
            self._admit_first(next(iter(self._queues)))

    def _admit_first(self, rollout_id: str) -> None:
        """Admit the rollout's oldest waiting call; the rollout goes to the end of the line."""
        queue = self._queues.pop(rollout_id)
        place = queue.popleft()
        if queue:
            self._queues[rollout_id] = queue
        self.waiting -= 1
        self._enter()
        place.set_result(True)

    def _enter(self) -> None:
        self.in_flight += 1
        self._idle.clear()

    def _leave(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()
        self._pump()
