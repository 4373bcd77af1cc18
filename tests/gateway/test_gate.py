"""The gate: who waits, who is refused, who goes first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from swe_lightning.gateway.gate import Gate, GateLimits
from swe_lightning.gateway.problems import Problem


class Callers:
    """Starts calls that hold their place until told to leave, and notes the order of admission."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.order: list[str] = []
        self.leave = asyncio.Event()

    def start(self, rollout_id: str, name: str = "") -> asyncio.Task[None]:
        async def call() -> None:
            async with self.gate.admit(rollout_id):
                self.order.append(name or rollout_id)
                await self.leave.wait()

        return asyncio.ensure_future(call())


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(_coroutine(scenario), 10))


async def _coroutine(scenario: Callable[[], Awaitable[None]]) -> None:
    await scenario()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_paused_gate_holds_calls_and_resume_lets_them_go() -> None:
    async def scenario() -> None:
        gate = Gate()
        callers = Callers(gate)
        gate.pause()
        tasks = [callers.start(f"r{i}") for i in range(5)]
        await settle()
        assert (callers.order, gate.waiting, gate.in_flight) == ([], 5, 0)
        gate.resume()
        await settle()
        assert (len(callers.order), gate.waiting, gate.in_flight) == (5, 0, 5)
        callers.leave.set()
        await asyncio.gather(*tasks)
        assert gate.state() == {"paused": False, "in_flight": 0, "waiting": 0, "refused": 0, "rollouts": 0}

    run(scenario)


def test_waiting_ends_in_503_with_retry_after() -> None:
    async def scenario() -> None:
        for paused, code in ((True, "paused"), (False, "gateway_busy")):
            gate = Gate(GateLimits(pause_wait_s=0.05, max_in_flight=1), paused=paused)
            callers = Callers(gate)
            first = [] if paused else [callers.start("r")]
            await settle()
            with pytest.raises(Problem) as e:
                await callers.start("r")
            assert (e.value.status, e.value.code) == (503, code)
            assert "retry-after" in e.value.headers()
            callers.leave.set()
            await asyncio.gather(*first)
            assert (gate.waiting, gate.in_flight) == (0, 0)

    run(scenario)


def test_drain_waits_and_ends_in_a_typed_error() -> None:
    async def scenario() -> None:
        gate = Gate()
        await gate.drain(0)  # nothing in flight: drained, however short the time
        callers = Callers(gate)
        task = callers.start("r")
        await settle()
        gate.pause()
        with pytest.raises(Problem) as e:
            await gate.drain(0.05)
        assert (e.value.status, e.value.code, e.value.details) == (504, "drain_timeout", {"in_flight": 1})
        assert gate.paused
        callers.leave.set()
        await gate.drain(5)
        assert gate.in_flight == 0
        await task

    run(scenario)


def test_a_full_gate_serves_rollouts_in_turn() -> None:
    async def scenario() -> None:
        gate = Gate(GateLimits(max_in_flight=1))
        callers = Callers(gate)
        names = ["a0", "a1", "a2", "a3", "b0", "c0", "b1"]
        tasks = [callers.start(name[0], name) for name in names]
        await settle()
        callers.leave.set()
        await asyncio.gather(*tasks)
        assert callers.order == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]

    run(scenario)


def test_bounds_refuse_with_429_and_drop_nothing() -> None:
    async def scenario() -> None:
        gate = Gate(GateLimits(max_in_flight=1, max_waiting=1, max_per_rollout=2))
        callers = Callers(gate)
        held = [callers.start("a"), callers.start("a")]
        await settle()
        for rollout, code in (("a", "rollout_busy"), ("b", "gateway_busy")):
            with pytest.raises(Problem) as e:
                await callers.start(rollout)
            assert (e.value.status, e.value.code) == (429, code)
        callers.leave.set()
        await asyncio.gather(*held)
        assert (len(callers.order), gate.refused) == (2, 2)

    run(scenario)


def test_a_caller_that_leaves_gives_its_place_back() -> None:
    async def scenario() -> None:
        gate = Gate(GateLimits(max_in_flight=1))
        callers = Callers(gate)
        first, waiting, last = (callers.start(r) for r in "abc")
        await settle()
        waiting.cancel()
        await settle()
        assert gate.waiting == 1
        first.cancel()
        waiting2 = callers.start("d")
        await settle()
        assert callers.order == ["a", "c"]
        last.cancel()  # admits d; d is cancelled in the same moment
        waiting2.cancel()
        await asyncio.gather(first, waiting, last, waiting2, return_exceptions=True)
        assert (gate.in_flight, gate.waiting, gate.state()["rollouts"]) == (0, 0, 0)

    run(scenario)


def test_a_place_granted_to_a_cancelled_caller_is_not_lost() -> None:
    async def scenario() -> None:
        gate = Gate(paused=True)
        task = Callers(gate).start("r")
        await settle()
        gate.resume()  # grants the place; the task has not run yet
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (gate.in_flight, gate.waiting) == (0, 0)

    run(scenario)
