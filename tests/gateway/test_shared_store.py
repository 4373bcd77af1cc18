"""One PostgreSQL store under several gateways: one order of commits, dense numbers, no lie in any cache."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from swe_lightning.gateway import compact
from swe_lightning.gateway.database import as_problem, connection_lost
from swe_lightning.gateway.problems import Problem
from swe_lightning.gateway.store import Store
from swe_lightning.gateway.writer import Transaction
from swe_lightning.records import InfraReason, ModelCall, Outcome, Rollout

from .postgres import Postgres, database, server, text  # noqa: F401


@pytest.fixture
def pair(database: str) -> Iterator[tuple[Store, Store]]:  # noqa: F811
    """Two stores as two gateway processes have them; together they are opened on an empty database."""
    with ThreadPoolExecutor(2) as pool:
        a, b = pool.map(lambda _: Store(database, linger_s=0), range(2))
    yield a, b
    a.close()
    b.close()


def create(store: Store, *names: str, **fields: Any) -> list[Rollout]:
    wanted = [Rollout(rollout_id=n, group_id="g", **fields) for n in names]
    return store.writer.call(store.create_rollouts(wanted))[0]


def call(name: str, prompt: list[int], response: list[int], attempt: int = 1) -> ModelCall:
    request = {"messages": [{"role": "user", "content": str(i)} for i in prompt[::10]]}
    logprobs = [-0.5] * len(response)
    return ModelCall(
        name, prompt, response, logprobs, attempt=attempt, call_id=uuid.uuid4().hex, request=request, trainable=True
    )


def test_one_of_many_claims_wins_across_gateways(pair: tuple[Store, Store]) -> None:
    names = [f"r{i}" for i in range(20)]
    create(pair[0], *names)

    def claim(job: tuple[str, Store]) -> str:
        name, store = job
        try:
            return str(store.writer.call(store.claim(name, "w", "")).attempt)
        except Problem as problem:
            return problem.code

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(claim, [(n, s) for n in names for s in pair * 2]))
    for i in range(20):
        assert sorted(results[4 * i : 4 * i + 4]) == ["1"] + ["not_queuing"] * 3


def test_creation_is_idempotent_across_gateways(pair: tuple[Store, Store]) -> None:
    def make(i: int) -> Any:
        return create(pair[i % 2], *(f"r{n}" for n in range(30)), task={"same": "x" * 100})

    with ThreadPoolExecutor(6) as pool:
        assert all(len(r) == 30 for r in pool.map(make, range(6)))
    assert len(pair[0].list_rollouts(None, None, 100)) == 30


def test_sequences_are_dense_and_calls_stay_deltas_through_both(pair: tuple[Store, Store]) -> None:
    """Each call builds on one that the other gateway recorded."""
    create(pair[0], "r")
    pair[0].writer.call(pair[0].claim("r", "w", ""))
    prompt, made = list(range(100)), []
    for turn in range(12):
        one = call("r", list(prompt), [1000 + turn, 7])
        store = pair[turn % 2]
        assert store.writer.call(store.record_call(one)) == len(made) * 2 + 2
        assert store.writer.call(store.add_event("r", 1, "note", {}, "")) == len(made) * 2 + 3
        made.append(one)
        prompt += [1000 + turn, 7, 5000 + turn]
    rows = pair[0].call_rows("r", 1)
    assert [row["parent"] for row in rows] == [None, *range(2, 24, 2)]
    assert all(len(row["prompt"]) < 20 for row in rows[1:])
    for before, after in zip(made, compact.decode(rows), strict=True):
        assert after.prompt_ids.tolist() == before.prompt_ids
        assert after.request == before.request


def test_concurrent_writers_of_one_attempt_leave_no_gap(pair: tuple[Store, Store]) -> None:
    create(pair[0], "r")
    pair[0].writer.call(pair[0].claim("r", "w", ""))

    def write(i: int) -> int:
        store = pair[i % 2]
        if i % 3:
            return int(store.writer.call(store.record_call(call("r", [1, 2], [3]))))
        return int(store.writer.call(store.add_event("r", 1, "note", {"i": i}, "")))

    with ThreadPoolExecutor(16) as pool:
        taken = list(pool.map(write, range(300)))
    assert sorted(taken) == list(range(2, 302))
    assert [e["sequence"] for e in pair[1].events("r")] == list(range(1, 302))


def test_what_ended_through_the_other_gateway_is_late(pair: tuple[Store, Store]) -> None:
    a, b = pair
    create(a, "r")
    a.writer.call(a.claim("r", "w", ""))
    a.writer.call(a.record_call(call("r", [1], [2])))
    assert b.live("r", 1).mode == "train"
    b.writer.call(b.report("r", 1, Outcome(infra_reason=InfraReason.WORKER_LOST)))
    assert a.cached_live("r", 1) is not None  # a does not know yet; the transaction does
    with pytest.raises(Problem, match="over"):
        a.writer.call(a.record_call(call("r", [1], [2])))
    assert b.writer.call(b.claim("r", "w2", "")).attempt == 2
    assert a.writer.call(a.record_call(call("r", [1], [2], attempt=2))) == 2


def test_what_others_committed_empties_the_cache_of_running_attempts(pair: tuple[Store, Store]) -> None:
    """So a late call is refused before a model server is asked, and what this gateway did itself costs nothing."""
    a, b = pair
    create(a, "r")
    a.writer.call(a.claim("r", "w", ""))
    a.heard(2)
    assert a.cached_live("r", 1) is not None
    b.writer.call(b.report("r", 1, Outcome(reward=1.0)))
    a.heard(3)
    assert a.cached_live("r", 1) is None


def test_a_commit_whose_answer_is_lost_is_looked_up_before_it_is_repeated(
    pair: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    psycopg = pytest.importorskip("psycopg", reason="needs the [postgres] extra")
    store = pair[0]
    create(store, "r")
    store.writer.call(store.claim("r", "w", ""))
    connection = store.writer._connection.connection.dbapi_connection  # type: ignore[union-attr]
    commit = connection.commit

    def lose_the_answer() -> None:
        commit()
        connection.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(connection, "commit", lose_the_answer)
    assert store.writer.call(store.record_call(call("r", [1], [2]))) == 2
    assert [e["sequence"] for e in store.events("r")] == [1, 2]


def test_nothing_is_believed_of_a_transaction_that_was_lost(pair: tuple[Store, Store]) -> None:
    store = pair[0]
    create(store, "r")

    def lost(tx: Transaction) -> None:
        store.claim("r", "w", "")(tx)
        store.record_call(call("r", [1], [2]))(tx)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.writer.call(lost)
    with pytest.raises(Problem, match="no attempt 1"):
        store.writer.call(store.record_call(call("r", [1], [2])))
    assert store.events("r") == []


def test_a_commit_is_durable_and_a_frozen_gateway_bounded_whatever_the_servers_defaults_are(
    server: Postgres,  # noqa: F811
) -> None:
    url = server.create()
    admin = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with admin.connect() as c:
        for setting in ("synchronous_commit = off", "idle_in_transaction_session_timeout = 0", "lock_timeout = 0"):
            c.exec_driver_sql(f"ALTER DATABASE {url.database} SET {setting}")
    store = Store(text(url), linger_s=0)
    names = ("synchronous_commit", "idle_in_transaction_session_timeout", "lock_timeout")
    found = store.writer.call(lambda tx: [tx.connection.exec_driver_sql(f"SHOW {name}").scalar() for name in names])
    assert found == ["on", "20s", "30s"]
    store.close()


@pytest.mark.parametrize(
    "name",
    ["AdminShutdown", "TooManyConnections", "ReadOnlySqlTransaction", "LockNotAvailable", "DeadlockDetected",
     "SerializationFailure", "IdleInTransactionSessionTimeout", "ConnectionFailure"],
)  # fmt: skip
def test_what_another_try_can_cure_is_tried_again_and_then_503(name: str) -> None:
    errors = pytest.importorskip("psycopg.errors", reason="needs the [postgres] extra")
    error = sa.exc.OperationalError("INSERT", {}, getattr(errors, name)("words"))
    problem = as_problem(error)
    assert connection_lost(error)
    assert isinstance(problem, Problem)
    assert (problem.status, problem.code) == (503, "store_unavailable")


def test_a_full_disk_of_the_database_server_is_507() -> None:
    errors = pytest.importorskip("psycopg.errors", reason="needs the [postgres] extra")
    full = errors.DiskFull("could not extend file: No space left on device")
    problem = as_problem(sa.exc.OperationalError("INSERT", {}, full))
    assert isinstance(problem, Problem)
    assert (problem.status, problem.code) == (507, "store_full")


def test_the_completion_log_never_shows_a_later_entry_first(pair: tuple[Store, Store]) -> None:
    """A takes its place in the log and is slow to commit; B ends meanwhile. A reader must not step over A's entry."""
    a, b = pair
    create(a, "slow", "quick")
    for name in ("slow", "quick"):
        a.writer.call(a.claim(name, "w", ""))
    placed = threading.Event()

    def slowly(tx: Transaction) -> Rollout:
        done = a.report("slow", 1, Outcome(reward=1.0))(tx)
        placed.set()
        time.sleep(0.5)
        return done

    seen: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(a.writer.call, slowly)
        placed.wait()
        second = pool.submit(b.writer.call, b.report("quick", 1, Outcome(reward=1.0)))
        cursor, deadline = 0, time.monotonic() + 10
        while len(seen) < 2 and time.monotonic() < deadline:
            found, cursor = b.terminal(cursor, 10)
            seen += [r.rollout_id for r in found]
        first.result(), second.result()
    assert seen == ["slow", "quick"]


def test_a_log_read_while_many_end_has_no_gap(pair: tuple[Store, Store]) -> None:
    names = [f"r{i}" for i in range(120)]
    create(pair[0], *names)
    seen: list[str] = []

    def end(i: int) -> None:
        store = pair[i % 2]
        store.writer.call(store.claim(names[i], "w", ""))
        store.writer.call(store.report(names[i], 1, Outcome(reward=0.0)))

    with ThreadPoolExecutor(13) as pool:
        jobs = [pool.submit(end, i) for i in range(len(names))]
        cursor = 0
        while len(seen) < len(names):
            done = all(job.done() for job in jobs)
            found, cursor = pair[1].terminal(cursor, 7)
            seen += [r.rollout_id for r in found]
            assert found or not done, "the reader stepped over an entry"
    assert sorted(seen) == sorted(names)


def test_a_crash_of_the_server_is_a_slow_call_and_then_503(server: Postgres) -> None:  # noqa: F811
    store = Store(text(server.create()), linger_s=0)
    create(store, "r")
    store.writer.call(store.claim("r", "w", ""))
    acknowledged: list[int] = []
    stop = threading.Event()

    def work(i: int) -> None:
        while not stop.is_set():
            acknowledged.append(store.writer.call(store.record_call(call("r", [i], [3]))))

    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(work, i) for i in range(3)]
        for _ in range(2):
            time.sleep(0.3)
            server.stop()
            server.start()
        time.sleep(0.3)
        stop.set()
        [job.result() for job in jobs]
    assert sorted(acknowledged) == list(range(2, len(acknowledged) + 2))
    assert [e["sequence"] for e in store.events("r")] == list(range(1, len(acknowledged) + 2))
    store.writer._patience_s = 0.2
    server.stop()
    try:
        for action in (lambda: store.writer.call(store.add_event("r", 1, "n", {}, "")), lambda: store.events("r")):
            with pytest.raises(Problem) as e:
                action()
            assert (e.value.status, e.value.code) == (503, "store_unavailable")
            assert server.password not in str(e.value)
    finally:
        server.start()
    assert store.writer.call(store.add_event("r", 1, "n", {}, "")) == len(acknowledged) + 2
    store.close()


def test_text_that_postgres_cannot_hold_is_422(pair: tuple[Store, Store]) -> None:
    create(pair[0], "r")
    pair[0].writer.call(pair[0].claim("r", "w", ""))
    with pytest.raises(Problem) as e:
        pair[0].writer.call(pair[0].add_event("r", 1, "a\x00b", {}, ""))
    assert e.value.status == 422
    assert pair[0].writer.call(pair[0].add_event("r", 1, "note", {"nul": "\x00"}, "")) == 2
