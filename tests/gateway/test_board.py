"""Limits over several gateways, on a real PostgreSQL: absolute numbers, leases, shares."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from swe_lightning.gateway.board import Board, Report
from swe_lightning.gateway.gate import GateLimits
from swe_lightning.gateway.schema import holds, meta
from swe_lightning.gateway.shared_gate import SharedGate
from swe_lightning.gateway.store import Store
from swe_lightning.gateway.upstream import Upstreams

from .postgres import Postgres, database, server, text  # noqa: F401

LIMITS = GateLimits(max_in_flight=4, max_per_rollout=3)


@pytest.fixture
def store(database: str) -> Iterator[Store]:  # noqa: F811
    store = Store(database, linger_s=0)
    yield store
    store.close()


def board(store: Store, name: str, **options: Any) -> Board:
    board = Board(store.engine, name, LIMITS, **options)
    board.exchange(Report({}))
    return board


def test_the_global_limit_holds_and_a_waiting_gateway_gets_its_share(store: Store) -> None:
    a, b = board(store, "a"), board(store, "b")
    assert a.exchange(Report({}, in_flight=0, waiting=9)).granted == 4
    assert b.exchange(Report({}, in_flight=0, waiting=9)).granted == 0
    assert a.exchange(Report({}, in_flight=3, waiting=5)).granted == 0  # b waits, and a has more than half
    assert b.exchange(Report({}, in_flight=0, waiting=9)).granted == 1
    assert a.exchange(Report({}, in_flight=1, waiting=5)).granted == 1
    assert a.in_flight() == 3


def test_the_limit_of_a_rollout_counts_calls_elsewhere(store: Store) -> None:
    a, b = board(store, "a"), board(store, "b")
    assert a.exchange(Report({"r": 0, "s": 0}, {"r": 2, "s": 5})).accepted == {"r": 2, "s": 3}
    assert b.exchange(Report({"r": 0, "s": 0}, {"r": 2, "s": 1})).accepted == {"r": 1, "s": 0}
    a.exchange(Report({"r": 1}))
    assert b.exchange(Report({"r": 1}, {"r": 1})).accepted == {"r": 1}
    a.exchange(Report({"r": 0}))
    assert a.exchange(Report({"r": 0}, {"r": 3})).accepted == {"r": 1}


def test_nothing_is_granted_after_a_committed_pause(store: Store) -> None:
    a = board(store, "a")
    store.writer.call(store.set_meta("paused", "1"))
    assert (a.exchange(Report({}, waiting=1)).granted, a.exchange(Report({}, waiting=1)).paused) == (0, True)
    store.writer.call(store.set_meta("paused", "0"))
    assert a.exchange(Report({}, waiting=1)).granted == 1


def test_who_asks_while_a_pause_is_being_committed_waits_for_it(store: Store) -> None:
    a = board(store, "a")
    with ThreadPoolExecutor(1) as pool:
        with store.engine.begin() as c:
            c.execute(sa.update(meta).where(meta.c.name == "paused").values(value="1"))
            asked = pool.submit(a.exchange, Report({}, waiting=1))
            with pytest.raises(TimeoutError):
                asked.result(timeout=0.3)
        assert (asked.result().granted, asked.result().paused) == (0, True)


def test_a_gateway_that_was_taken_for_dead_writes_its_seats_up_again(store: Store) -> None:
    def held() -> list[tuple[str, int]]:
        with store.engine.connect() as c:
            rows = c.execute(sa.select(holds.c.rollout_id, holds.c.held).where(holds.c.gateway_id == "a"))
            return sorted((row.rollout_id, row.held) for row in rows)

    async def scenario() -> None:
        gate = SharedGate(Board(store.engine, "a", LIMITS), LIMITS, Upstreams(), lambda _: None)
        await gate.start()
        try:
            async with gate.admit("r"), gate.admit("r"), gate.admit("s"):
                assert held() == [("r", 2), ("s", 1)]
                b = board(store, "b")
                b.leave("a")
                assert held() == []
                async with asyncio.timeout(10):
                    while held() != [("r", 2), ("s", 1)]:
                        await asyncio.sleep(0.02)
                assert b.exchange(Report({"r": 0}, {"r": 3})).accepted == {"r": 1}
            async with asyncio.timeout(10):
                while held():
                    await asyncio.sleep(0.02)
        finally:
            async with asyncio.timeout(10):  # the calls have just left and woken its task: it must end even so
                await gate.stop()

    asyncio.run(scenario())


def test_a_silent_gateway_loses_its_places_and_reports_everything_when_it_is_back(store: Store) -> None:
    a, b = board(store, "a", lease_s=0.3), board(store, "b")
    b.exchange(Report({"r": 0}, {"r": 3}, in_flight=4, waiting=0))
    assert a.exchange(Report({"r": 0}, {"r": 1}, waiting=1)).granted == 0
    time.sleep(0.4)
    seen = a.exchange(Report({"r": 0}, {"r": 2}, waiting=2))
    assert (seen.granted, seen.accepted, seen.gateways) == (2, {"r": 2}, 1)
    assert b.exchange(Report({}, in_flight=4)).forgotten
    seen = a.exchange(Report({}, in_flight=2, waiting=3))
    assert (seen.granted, seen.in_flight, seen.gateways) == (0, 6, 2)


def test_seats_that_are_left_during_an_outage_are_free_after_it(server: Postgres) -> None:  # noqa: F811
    store = Store(text(server.create()), linger_s=0)

    async def scenario() -> None:
        gate = SharedGate(Board(store.engine, "a", LIMITS), LIMITS, Upstreams(), lambda _: None)
        await gate.start()
        async with gate.admit("r"), gate.admit("r"):
            server.stop()
        await asyncio.sleep(0.5)
        server.start()
        b = board(store, "b")
        async with asyncio.timeout(20):
            while b.exchange(Report({"r": 0}, {"r": 3})).accepted != {"r": 3}:
                await asyncio.sleep(0.05)
        await gate.stop()

    asyncio.run(scenario())
    store.close()


def test_a_gateway_with_nothing_to_say_is_not_taken_for_dead(store: Store) -> None:
    a, b = board(store, "a", lease_s=2.5), board(store, "b")
    for _ in range(30):
        b.exchange(Report({}))
        time.sleep(0.1)
        assert a.exchange(Report({})).gateways == 2


def test_a_beating_gateway_keeps_its_places(store: Store) -> None:
    a, b = board(store, "a", lease_s=0.3), board(store, "b")
    for number in range(6):
        b.exchange(Report({}, in_flight=3 + number % 2))
        time.sleep(0.1)
        assert a.exchange(Report({}, waiting=9)).gateways == 2


def test_an_outage_gives_everybody_a_whole_lease_again(server: Postgres) -> None:  # noqa: F811
    from sqlalchemy.exc import SQLAlchemyError

    store = Store(text(server.create()), linger_s=0)
    a, b = board(store, "a", lease_s=0.5), board(store, "b")
    assert b.exchange(Report({}, waiting=4)).granted == 4
    a.exchange(Report({}, waiting=1))
    server.stop()
    with pytest.raises(SQLAlchemyError):
        a.exchange(Report({}, waiting=1))
    time.sleep(0.6)
    server.start()
    assert a.exchange(Report({}, waiting=1)).granted == 0
    store.close()
