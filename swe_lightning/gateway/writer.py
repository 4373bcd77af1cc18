"""The writer thread: the one place where the store changes, many changes per commit.

An operation is a function of a transaction. Operations queue up, run in order, and share one commit; each caller is
answered only after that commit, so an answer means durable. An operation that refuses (Problem) must do so before it
writes; its neighbours are not affected. If anything else fails, the batch is rolled back and each of its operations is
run again in a transaction of its own, so that a fault hits only the one that causes it. If the database went away, the
batch is tried again for a while: whether the lost commit happened is not known, so `again` tells the operations to look
for their ids first.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from swe_lightning.gateway import database, schema
from swe_lightning.gateway.meter import COMMIT_S, Histogram
from swe_lightning.gateway.problems import Problem

Operation = Callable[["Transaction"], Any]
BATCH = 512


class Transaction:
    """What an operation may use: the connection, buffered event rows, and hooks that run after the commit."""

    def __init__(self, connection: sa.Connection, *, again: bool = False) -> None:
        self._connection = connection
        self.again = again
        """This may have been committed already; what carries an id must look for it."""
        self._rows: list[dict[str, Any]] = []
        self.hooks: list[Callable[[], Any]] = []

    @property
    def connection(self) -> sa.Connection:
        """The connection, with every buffered row written: reads see all earlier operations."""
        self.flush()
        return self._connection

    def add_event_row(self, row: dict[str, Any]) -> None:
        self._rows.append(row)

    def flush(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, []
            self._connection.execute(_INSERT_EVENT, rows)


_INSERT_EVENT = sa.insert(schema.events)


class _Job:
    __slots__ = ("error", "future", "loop", "operation", "result")

    def __init__(self, operation: Operation, future: Any, loop: asyncio.AbstractEventLoop | None) -> None:
        self.operation, self.future, self.loop = operation, future, loop
        self.result: Any = None
        self.error: BaseException | None = None

    def settle(self) -> None:
        if self.future.cancelled() or self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class Writer:
    """Runs operations on one connection in one thread.

    `begin` and `end` bracket the operations of a transaction; `on_rollback` drops what was remembered of a lost batch.
    """

    def __init__(
        self,
        engine: sa.Engine,
        *,
        begin: Callable[[Transaction], None] = lambda _: None,
        end: Callable[[Transaction], None] = lambda _: None,
        on_rollback: Callable[[], None],
        linger_s: float = 0.002,
        patience_s: float = 10.0,
    ) -> None:
        self._engine, self._begin, self._end, self._on_rollback = engine, begin, end, on_rollback
        self._linger_s, self._patience_s = linger_s, patience_s
        self._connection: sa.Connection | None = None
        self._lost_since: float | None = None
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self.commits = 0
        self.commit_seconds = Histogram(COMMIT_S)
        self._company = False
        self.operations = 0
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def call(self, operation: Operation) -> Any:
        """Run `operation` durably from a plain thread and return its result."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._put(_Job(operation, future, None))
        return future.result()

    async def acall(self, operation: Operation) -> Any:
        """Run `operation` durably from an event loop. Cancelling the wait does not undo the operation."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._put(_Job(operation, future, loop))
        return await future

    def close(self) -> None:
        """Commit what is queued and stop."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    def _put(self, job: _Job) -> None:
        if self._closed:
            raise Problem(503, "shutting_down", "the gateway is shutting down", retry_after_s=1)
        self._queue.put(job)

    def _run(self) -> None:
        try:
            while (jobs := self._next_batch()) is not None:
                error, again = self._patiently(jobs)
                if error is not None and len(jobs) > 1 and not database.connection_lost(error):
                    for job in jobs:
                        self._commit([job], again)
                self._answer(jobs)
        finally:
            self._disconnect()

    def _patiently(self, jobs: list[_Job]) -> tuple[Exception | None, bool]:
        """Commit, again and again while the database is away and patience lasts: one patience for one outage."""
        again = False
        while True:
            error = self._commit(jobs, again)
            if error is None or not database.connection_lost(error):
                self._lost_since = None
                return error, again
            self._disconnect()
            now = time.monotonic()
            self._lost_since = self._lost_since or now
            if self._closed or now - self._lost_since >= self._patience_s:
                return error, again
            again = True
            time.sleep(0.1)

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sa.exc.SQLAlchemyError):
                self._connection.invalidate()
                self._connection.close()
            self._connection = None

    def _next_batch(self) -> list[_Job] | None:
        """Wait for a job, linger briefly for company, take all there is. None = closed and empty."""
        first = self._queue.get()
        if first is None:
            return None
        if self._linger_s and (self._company or not self._queue.empty()):
            time.sleep(self._linger_s)
        jobs = [first]
        with contextlib.suppress(queue.Empty):
            while len(jobs) < BATCH:
                job = self._queue.get_nowait()
                if job is None:
                    self._queue.put(None)
                    break
                jobs.append(job)
        self._company = len(jobs) > 1  # who came alone last time does not wait for company
        return jobs

    def _commit(self, jobs: list[_Job], again: bool) -> Exception | None:
        started = time.monotonic()
        try:
            if self._connection is None:
                self._connection = database.writing(self._engine.connect())
            transaction = Transaction(self._connection, again=again)
            with self._connection.begin():
                self._begin(transaction)
                for job in jobs:
                    job.result = job.error = None
                    try:
                        job.result = job.operation(transaction)
                    except Problem as problem:
                        job.error = problem
                transaction.flush()
                self._end(transaction)
        except Exception as error:
            self._on_rollback()
            for job in jobs:
                job.error = database.as_problem(error)
            return error
        self.commit_seconds.observe(time.monotonic() - started)
        for hook in transaction.hooks:
            hook()
        self.commits += 1
        self.operations += len(jobs)
        return None

    @staticmethod
    def _answer(jobs: list[_Job]) -> None:
        """One wake-up per event loop, however many jobs it waits for."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
        for job in jobs:
            if job.loop is None:
                job.settle()
            else:
                by_loop.setdefault(job.loop, []).append(job)
        for loop, mine in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
                loop.call_soon_threadsafe(_settle_all, mine)


def _settle_all(jobs: list[_Job]) -> None:
    for job in jobs:
        job.settle()
