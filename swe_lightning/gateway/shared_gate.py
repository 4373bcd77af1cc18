"""The gate of a gateway that shares its store with others: the same rules, decided on the board (board.py).

Calls queue here, in this process; a task reports to the board whenever something changed, and at least every POLL_S.
What it brings back is applied before any call is admitted: the pause, the registered models and their weight versions.
So other gateways notice a resume, a new model or a finished rollout within POLL_S; a pause needs no noticing, because
nothing is admitted without the board.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from swe_lightning.gateway import database
from swe_lightning.gateway.board import Board, Report, Seen
from swe_lightning.gateway.gate import Gate, GateLimits
from swe_lightning.gateway.problems import Problem
from swe_lightning.gateway.upstream import Upstreams

POLL_S = 0.2
log = logging.getLogger("swel.gateway")


class SharedGate(Gate):
    """`on_change(number)` is told, from the event loop, how many commits have changed rollouts."""

    def __init__(
        self,
        board: Board,
        limits: GateLimits,
        upstreams: Upstreams,
        on_change: Callable[[int], None],
        *,
        paused: bool = False,
    ) -> None:
        super().__init__(limits, paused=paused)
        self._board, self._upstreams, self._on_change = board, upstreams, on_change
        self._registered: dict[str, int] = {}
        """Calls of each rollout that the board counts for us; at most those we hold."""
        self._dirty: set[str] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._seen: Seen | None = None
        self._failing = False

    async def start(self) -> None:
        await self._exchange()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        with contextlib.suppress(SQLAlchemyError):  # then the lease ends it
            await asyncio.to_thread(self._board.leave)

    async def drain(self, deadline_s: float) -> None:
        """Wait until no gateway has a call in flight."""
        deadline, left = time.monotonic() + deadline_s, -1
        while True:
            with contextlib.suppress(SQLAlchemyError):  # a database that comes back in time is only a slow drain
                left = await asyncio.to_thread(self._board.in_flight)
            if left == 0 and self.in_flight == 0:
                return
            if time.monotonic() >= deadline:
                count = "an unknown number of" if left < 0 else max(left, self.in_flight)
                message = (
                    f"{count} calls still in flight in all gateways after {deadline_s:g} s; the gate stays paused: "
                    "drain again with a longer drain_s, or resume"
                )
                raise Problem(504, "drain_timeout", message, details={"in_flight": max(left, self.in_flight)})
            await asyncio.sleep(0.03)

    def state(self) -> dict[str, object]:
        """`in_flight` and `waiting` of all gateways (at most POLL_S old), and `here` of this one."""
        here = {"in_flight": self.in_flight, "waiting": self.waiting}
        seen = self._seen
        shared = {"in_flight": seen.in_flight, "waiting": seen.waiting, "gateways": seen.gateways} if seen else {}
        return super().state() | shared | {"here": here}

    async def _take_place(self, rollout_id: str) -> None:
        self._dirty.add(rollout_id)
        self._wake.set()
        await self._wait(rollout_id)

    def _let_go(self, rollout_id: str) -> None:
        super()._let_go(rollout_id)
        self._dirty.add(rollout_id)
        self._wake.set()

    def _pump(self) -> None:
        self._wake.set()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):  # wait_for() of Python 3.11 can swallow the cancellation by stop()
                    await self._wake.wait()
            self._wake.clear()
            await self._exchange()
            if self._failing:
                await asyncio.sleep(POLL_S)

    async def _exchange(self) -> None:
        report, models = self._report(), _models(self._upstreams)
        try:
            seen = await asyncio.to_thread(self._board.exchange, report)
        except SQLAlchemyError as error:
            self._dirty |= report.held.keys()
            if not self._failing:
                log.warning("the board does not answer, calls wait: %s", database.as_problem(error))
            self._failing = True
            return
        self._failing = False
        self._seen = seen
        self.paused = seen.paused
        if _models(self._upstreams) == models:  # else it was changed here meanwhile, which is newer than what we saw
            self._apply(seen.models, models)
        if seen.forgotten:
            self._dirty |= self._registered.keys()
        for rollout_id, asked in report.arrivals.items():
            accepted = seen.accepted.get(rollout_id, 0)
            self._registered[rollout_id] = self._registered.get(rollout_id, 0) + accepted
            self._turn_away(rollout_id, asked - accepted)
        self._grant(seen.granted)
        self._on_change(seen.changes)

    def _report(self) -> Report:
        dirty, self._dirty = self._dirty, set()
        held, arrivals = {}, {}
        for rollout_id in dirty:
            here = self._per_rollout.get(rollout_id, 0)
            held[rollout_id] = min(self._registered.pop(rollout_id, 0), here)
            if here:
                self._registered[rollout_id] = held[rollout_id]
            if here > held[rollout_id]:
                arrivals[rollout_id] = here - held[rollout_id]
        return Report(held, arrivals, self.in_flight, self.waiting)

    def _turn_away(self, rollout_id: str, count: int) -> None:
        """Refuse the newest waiting calls of a rollout whose limit is reached by those here and elsewhere."""
        queue = self._queues.get(rollout_id)
        while queue and count > 0:
            queue.pop().set_result(False)
            self.waiting -= 1
            count -= 1
        if queue is not None and not queue:
            del self._queues[rollout_id]

    def _grant(self, count: int) -> None:
        """Admit up to `count` calls, one per rollout in turn, none that the board does not count yet. Places that were
        taken for calls that left meanwhile are given back with the next report."""
        skipped = 0
        while count > 0 and skipped < len(self._queues):
            rollout_id = next(iter(self._queues))
            entered = self._per_rollout[rollout_id] - len(self._queues[rollout_id])
            if entered < self._registered.get(rollout_id, 0):
                self._admit_first(rollout_id)
                count, skipped = count - 1, 0
            else:
                self._queues.move_to_end(rollout_id)
                skipped += 1

    def _apply(self, models: list[dict[str, Any]], before: dict[str, dict[str, Any]]) -> None:
        for model in models:
            if before.pop(model["url"], None) != model:
                self._upstreams.register(**model)
        for url in before:
            self._upstreams.remove(url)


def _models(upstreams: Upstreams) -> dict[str, dict[str, Any]]:
    names = ("url", "name", "version", "max_context")
    return {endpoint.url: {name: getattr(endpoint, name) for name in names} for endpoint in upstreams.all()}
