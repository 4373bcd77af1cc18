"""The store: atomic, idempotent, grouped, and honest about faults."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from swe_lightning.errors import DataError
from swe_lightning.gateway import compact, schema
from swe_lightning.gateway.histories import Histories
from swe_lightning.gateway.problems import Problem
from swe_lightning.gateway.store import Store
from swe_lightning.records import InfraReason, ModelCall, Outcome, Rollout


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'gateway.db'}", linger_s=0)
    yield store
    store.close()


def create(store: Store, *names: str, **fields: Any) -> list[Rollout]:
    wanted = [Rollout(rollout_id=n, group_id="g", **fields) for n in names]
    return store.writer.call(store.create_rollouts(wanted))[0]


def claim(store: Store, name: str, claim_id: str = "") -> Rollout:
    return store.writer.call(store.claim(name, "w", claim_id))


def call(name: str, attempt: int = 1, **fields: Any) -> ModelCall:
    defaults: dict[str, Any] = {"prompt_ids": [1, 2], "response_ids": [3], "logprobs": [-0.5]}
    return ModelCall(name, attempt=attempt, call_id=uuid.uuid4().hex, **(defaults | fields))


def code(action: Callable[[], Any]) -> str:
    with pytest.raises(Problem) as e:
        action()
    return e.value.code


def test_creation_is_idempotent_and_all_or_nothing(store: Store) -> None:
    create(store, "a", task={"x": 1, "y": [2**70]})
    claim(store, "a")
    assert create(store, "a", task={"y": [2**70], "x": 1})[0].state == "running"
    assert code(lambda: create(store, "b", "a", task={"x": 2})) == "rollout_differs"
    assert [r.rollout_id for r in store.list_rollouts(None, None, 10)] == ["a"]


def test_what_is_created_is_what_is_read_and_its_end_comes_behind_the_cursor(store: Store) -> None:
    create(store, "old", "late")
    for name in ("old", "late"):
        claim(store, name)
    store.writer.call(store.report("old", 1, Outcome(reward=1.0)))
    wanted = [Rollout(rollout_id=n, group_id="h", mode="val", max_attempts=2, timeout_s=9.5, task={"a": [1, None, 0.1]},
                      config={"k": {}}, state="failed", attempt=7) for n in ("new", "late2", "new")]  # fmt: skip
    created, cursor = store.writer.call(store.create_rollouts(wanted))
    assert created == [store.get_rollout(n) for n in ("new", "late2", "new")]
    assert (created[0].state, created[0].attempt, cursor) == ("queuing", 0, 1)
    assert store.terminal(cursor, 10) == ([], 1)
    store.writer.call(store.report("late", 1, Outcome(reward=0.0)))
    assert [r.rollout_id for r in store.terminal(cursor, 10)[0]] == ["late"]
    assert store.writer.call(store.create_rollouts([]))[1] == 2


def test_thousands_are_created_in_a_few_statements(store: Store) -> None:
    """Two questions for each took longer than a client waits."""
    wanted = [Rollout(rollout_id=f"r{i}", group_id=f"g{i // 8}", task={"n": i // 8}) for i in range(3000)]
    statements: list[str] = []
    sa.event.listen(store.engine, "before_cursor_execute", lambda *a: statements.append(a[2]))
    created, _ = store.writer.call(store.create_rollouts(wanted))
    first = len(statements)
    again, _ = store.writer.call(store.create_rollouts(wanted))
    assert first < 30
    assert len(statements) - first < 30
    assert again == created
    assert [r.rollout_id for r in created] == [r.rollout_id for r in wanted]


def test_one_of_many_claims_wins(store: Store) -> None:
    create(store, "a")

    def attempt(i: int) -> str:
        try:
            return str(claim(store, "a", f"claim-{i}").attempt)
        except Problem as problem:
            return problem.code

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(attempt, range(8)))
    assert sorted(results) == ["1"] + ["not_queuing"] * 7


def test_a_repeated_claim_returns_its_own_attempt(store: Store) -> None:
    create(store, "a")
    assert claim(store, "a", "mine").attempt == claim(store, "a", "mine").attempt == 1
    assert code(lambda: claim(store, "a", "other")) == "not_queuing"


def test_a_lost_attempt_goes_back_until_none_is_left(store: Store) -> None:
    create(store, "a", max_attempts=2)
    fault = Outcome(infra_reason=InfraReason.WORKER_LOST)
    claim(store, "a")
    assert store.writer.call(store.report("a", 1, fault, event_id="e1")).state == "queuing"
    assert store.writer.call(store.report("a", 1, fault, event_id="e1")).state == "queuing"  # repeated, not late
    assert claim(store, "a").attempt == 2
    assert code(lambda: store.writer.call(store.report("a", 1, Outcome(reward=1.0)))) == "rollout_ended"
    ended = store.writer.call(store.report("a", 2, fault))
    assert (ended.state, ended.outcome and ended.outcome.infra_reason) == ("failed", "worker_lost")
    assert [r.rollout_id for r in store.terminal(0, 10)[0]] == ["a"]


def test_sequences_are_dense_per_attempt_and_survive_reopening(store: Store, tmp_path: Path) -> None:
    create(store, "a")
    claim(store, "a")
    for _ in range(3):
        store.writer.call(store.record_call(call("a")))
    store.writer.call(store.add_event("a", 1, "note", {"n": 1}, "e"))
    assert store.writer.call(store.add_event("a", 1, "note", {"n": 1}, "e")) == 5
    store.close()
    again = Store(f"sqlite:///{tmp_path / 'gateway.db'}")
    assert again.writer.call(again.record_call(call("a"))) == 6
    assert [e["sequence"] for e in again.events("a")] == [1, 2, 3, 4, 5, 6]
    assert again.cached_live("a", 1) is not None
    again.close()


def test_late_calls_are_not_recorded(store: Store) -> None:
    create(store, "a")
    claim(store, "a")
    store.writer.call(store.report("a", 1, Outcome(reward=0.0)))
    assert code(lambda: store.writer.call(store.record_call(call("a")))) == "rollout_ended"
    assert code(lambda: store.live("a", 1)) == "rollout_ended"
    assert store.call_rows("a", None) == []


def test_cancelling_a_running_rollout_ends_its_attempt_for_good(store: Store) -> None:
    create(store, "a")
    claim(store, "a")
    assert store.writer.call(store.cancel("a", "enough")).state == "failed"
    assert store.writer.call(store.cancel("a", "again")).outcome == Outcome(infra_reason="cancelled", message="enough")
    assert [e["kind"] for e in store.events("a")] == ["claimed", "cancelled"]
    assert code(lambda: store.writer.call(store.record_call(call("a")))) == "rollout_ended"
    assert [r.rollout_id for r in store.terminal(0, 10)[0]] == ["a"]


def test_weight_versions_and_completion_log(store: Store) -> None:
    create(store, "a", "b", "c")
    for name, version in (("b", 4), ("a", 7)):
        claim(store, name)
        store.writer.call(store.record_call(call(name, version_start=version, version_end=version)))
        store.writer.call(store.report(name, 1, Outcome(reward=1.0)))
    ended, cursor = store.terminal(0, 10)
    assert [(r.rollout_id, r.weight_versions) for r in ended] == [("b", [4]), ("a", [7])]
    assert store.terminal(cursor, 10) == ([], cursor)
    assert [r.rollout_id for r in store.terminal(1, 10)[0]] == ["a"]


def test_a_claim_and_its_end_in_one_commit_leave_nothing_running(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'x.db'}", linger_s=0.2)
    create(store, "a")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store.writer.call, store.claim("a", "w", ""))
        second = pool.submit(store.writer.call, store.cancel("a", "no"))
        first.result(), second.result()
    assert store.cached_live("a", 1) is None
    store.close()


def test_many_writers_share_commits(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'x.db'}", linger_s=0.02)
    create(store, *(f"r{i}" for i in range(40)))
    before = store.writer.commits
    with ThreadPoolExecutor(40) as pool:
        list(pool.map(lambda i: claim(store, f"r{i}"), range(40)))
    assert store.writer.commits - before <= 10
    store.close()


def test_a_failing_operation_hits_only_itself(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'x.db'}", linger_s=0.2)
    create(store, "a")
    claim(store, "a")
    bad = call("a", prompt_ids=[2**40])
    together = [call("a"), bad, call("a")]
    start = threading.Barrier(3)

    def record(c: ModelCall) -> Any:
        start.wait()
        try:
            return store.writer.call(store.record_call(c))
        except OverflowError as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(record, together))
    assert isinstance(results[1], OverflowError)
    assert sorted(results[::2]) == [2, 3]
    assert len(list(compact.decode(store.call_rows("a", 1)))) == 2
    store.close()


def test_a_full_disk_is_507_and_passes(store: Store) -> None:
    create(store, "a")
    claim(store, "a")

    def limit(pages: int) -> None:
        store.writer.call(lambda tx: tx.connection.exec_driver_sql(f"PRAGMA max_page_count={pages}"))

    limit(1)  # SQLite takes the current size
    large = {"messages": [{"role": "user", "content": "".join(chr(33 + i * i % 90) * 2 for i in range(90_000))}]}
    problem = None
    for _ in range(40):
        try:
            store.writer.call(store.record_call(call("a", request=large)))
        except Problem as error:
            problem = error
    assert problem is not None
    assert (problem.status, problem.code) == (507, "store_full")
    limit(1_000_000)
    sequence = store.writer.call(store.record_call(call("a")))
    assert sequence == len(store.events("a"))


def test_an_attempt_that_began_and_ended_in_one_transaction_is_over(store: Store) -> None:
    create(store, "a")
    both = store.claim("a", "w", ""), store.report("a", 1, Outcome(reward=1.0))
    store.writer.call(lambda tx: [operation(tx) for operation in both])
    assert store.cached_live("a", 1) is None
    assert store.kept() == {"running": 0, "histories": 0}


def test_what_is_remembered_of_attempts_that_ended_elsewhere_is_bounded(store: Store) -> None:
    known = Histories(kept=4)
    store.writer.call(lambda tx: [known.of(tx, ("r", attempt)) for attempt in range(9)])
    assert len(known) == 4


def test_text_that_is_no_text_is_422(store: Store) -> None:
    with pytest.raises(Problem, match="surrogates") as e:
        create(store, "a\ud800")
    assert e.value.status == 422


def test_closing_commits_what_is_queued_first(store: Store) -> None:
    begun, done = threading.Event(), []

    def operation(name: str) -> Callable[[Any], None]:
        def run(tx: Any) -> None:
            begun.set()
            time.sleep(0.1)
            store.create_rollouts([Rollout(rollout_id=name, group_id="g")])(tx)
            tx.hooks.append(lambda: done.append(name))

        return run

    with ThreadPoolExecutor(5) as pool:
        jobs = [pool.submit(store.writer.call, operation("r0"))]
        begun.wait()
        jobs += [pool.submit(store.writer.call, operation(f"r{n}")) for n in range(1, 5)]
        while store.writer._queue.qsize() < 4:
            time.sleep(0.01)
        store.writer.close()
        assert sorted(done) == [f"r{n}" for n in range(5)]
        [job.result(timeout=5) for job in jobs]
    with pytest.raises(Problem, match="shutting down"):
        store.writer.call(operation("late"))


def test_a_newer_or_foreign_file_is_refused(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'x.db'}")
    store.writer.call(store.set_meta("schema_version", str(schema.VERSION + 1)))
    store.close()
    with pytest.raises(DataError, match="newer"):
        Store(f"sqlite:///{tmp_path / 'x.db'}")
    (tmp_path / "y.db").write_text("not a database, but long enough to look at" * 100)
    with pytest.raises(DataError, match="not a store"):
        Store(f"sqlite:///{tmp_path / 'y.db'}")


def test_commits_are_synced_to_disk(store: Store) -> None:
    with store.engine.connect() as c:
        assert c.execute(sa.text("PRAGMA synchronous")).scalar() == 2
        assert c.execute(sa.text("PRAGMA journal_mode")).scalar() == "wal"
