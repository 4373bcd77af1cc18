"""The durable store: rollouts, their events and model calls, registered models, the pause, and counters of refusals.

Writes are operations of the writer thread (writer.py) and are acknowledged only after their commit; the state machine
(lifecycle.py) is consulted inside the transaction, so two claims or a report and a late call cannot both win. Reads use
their own connections and see committed data only. Every write that a client may repeat carries an id, and a repetition
returns what the first one did.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from swe_lightning.gateway import compact, lifecycle, rows, schema
from swe_lightning.gateway.jsonio import dumps
from swe_lightning.gateway.problems import Problem, unknown_rollout
from swe_lightning.gateway.rows import CALL_KIND, Live
from swe_lightning.gateway.schema import events, meta, models, rollouts
from swe_lightning.gateway.writer import Transaction, Writer
from swe_lightning.records import ModelCall, Outcome, Rollout, RolloutState


class Store:
    """One per gateway process. Called from the writer thread: `on_change` after a rollout changed its state, `on_end`
    with its id after an attempt ended."""

    def __init__(self, url: str, *, on_change: Callable[[], None] = lambda: None, linger_s: float = 0.002) -> None:
        self.engine = schema.open_engine(url)
        self.on_change = on_change
        self.on_end: Callable[[str], None] = lambda rollout_id: None
        self._next: dict[tuple[str, int], int] = {}
        self._encoders: dict[tuple[str, int], compact.Encoder] = {}
        self._live: dict[str, Live] = {}
        with self.engine.connect() as c:
            columns = (rollouts.c.rollout_id, rollouts.c.attempt, rollouts.c.mode, rollouts.c.config)
            for row in c.execute(sa.select(*columns).where(rollouts.c.state == RolloutState.RUNNING)):
                self._live[row.rollout_id] = rows.live(row.attempt, row.mode, row.config)
        self.writer = Writer(self.engine, on_rollback=self._forget, linger_s=linger_s)

    def close(self) -> None:
        self.writer.close()
        self.engine.dispose()

    # ---- rollouts -------------------------------------------------------------------------------------------------

    def create_rollouts(self, wanted: Sequence[Rollout]) -> Callable[[Transaction], list[Rollout]]:
        """Operation: all or none are created; an id that exists with the same content is returned as it stands."""

        def operation(tx: Transaction) -> list[Rollout]:
            found = {r.rollout_id: _row(tx, r.rollout_id) for r in wanted}
            digests = {r.rollout_id: rows.digest(r) for r in wanted}
            for r in wanted:
                row = found[r.rollout_id]
                if (row is not None and row.digest != digests[r.rollout_id]) or digests[r.rollout_id] != rows.digest(r):
                    message = f"rollout {r.rollout_id} exists with other content; choose another rollout_id"
                    raise Problem(409, "rollout_differs", message)
            now, missing = time.time(), [r for r in wanted if found[r.rollout_id] is None]
            new = {r.rollout_id: rows.new_row(r, digests[r.rollout_id], now) for r in missing}
            if new:
                tx.connection.execute(sa.insert(rollouts), list(new.values()))
                tx.hooks.append(self.on_change)
            return [rows.rollout(_require_row(tx, r.rollout_id)) for r in wanted]

        return operation

    def claim(self, rollout_id: str, worker: str, claim_id: str) -> Callable[[Transaction], Rollout]:
        """Operation: start the next attempt. The same `claim_id` again returns the attempt it started."""

        def operation(tx: Transaction) -> Rollout:
            row = _require_row(tx, rollout_id)
            if claim_id and row.claim_id == claim_id and row.state == RolloutState.RUNNING:
                return rows.rollout(row)
            changes = lifecycle.claim(rows.position(row), time.time())
            self._update(tx, row, changes | {"claim_id": claim_id or None, "worker": worker})
            attempt = changes["attempt"]
            self._append(tx, rollout_id, attempt, "claimed", {"worker": worker}, claim_id or uuid.uuid4().hex)
            live = rows.live(attempt, row.mode, row.config)
            tx.hooks.append(lambda: self._live.__setitem__(rollout_id, live))
            return rows.rollout(_require_row(tx, rollout_id))

        return operation

    def report(
        self, rollout_id: str, attempt: int, outcome: Outcome, *, kind: str = "reward", event_id: str = ""
    ) -> Callable[[Transaction], Rollout]:
        """Operation: the attempt ended. Late reports are refused; the same `event_id` again changes nothing."""

        def operation(tx: Transaction) -> Rollout:
            row = _require_row(tx, rollout_id)
            if event_id and _known_event(tx, rollout_id, event_id):
                return rows.rollout(row)
            changes = lifecycle.report(rows.position(row), attempt, outcome, time.time())
            data = {"outcome": outcome.model_dump(mode="json")}
            self._append(tx, rollout_id, attempt, kind, data, event_id or uuid.uuid4().hex)
            self._update(tx, row, changes)
            self._end_attempt(tx, rollout_id, attempt)
            return rows.rollout(_require_row(tx, rollout_id))

        return operation

    def cancel(self, rollout_id: str, message: str) -> Callable[[Transaction], Rollout]:
        def operation(tx: Transaction) -> Rollout:
            row = _require_row(tx, rollout_id)
            changes = lifecycle.cancel(rows.position(row), message, time.time())
            if changes:
                if row.attempt:
                    data = {"outcome": changes["outcome"].model_dump(mode="json")}
                    self._append(tx, rollout_id, row.attempt, "cancelled", data, uuid.uuid4().hex)
                self._update(tx, row, changes)
                self._end_attempt(tx, rollout_id, row.attempt)
            return rows.rollout(_require_row(tx, rollout_id))

        return operation

    def get_rollout(self, rollout_id: str) -> Rollout:
        with self.engine.connect() as c:
            row = c.execute(sa.select(rollouts).where(rollouts.c.rollout_id == rollout_id)).first()
        if row is None:
            raise unknown_rollout(rollout_id)
        return rows.rollout(row)

    def list_rollouts(self, state: str | None, group_id: str | None, limit: int) -> list[Rollout]:
        """In order of creation."""
        query = sa.select(rollouts).order_by(rollouts.c.position).limit(limit)
        if state:
            query = query.where(rollouts.c.state == state)
        if group_id:
            query = query.where(rollouts.c.group_id == group_id)
        with self.engine.connect() as c:
            return [rows.rollout(row) for row in c.execute(query)]

    def terminal(self, after: int, limit: int) -> tuple[list[Rollout], int]:
        """The completion log after cursor `after`, and the cursor behind what is returned."""
        query = sa.select(rollouts).where(rollouts.c.terminal > after).order_by(rollouts.c.terminal).limit(limit)
        with self.engine.connect() as c:
            found = c.execute(query).all()
        return [rows.rollout(row) for row in found], found[-1].terminal if found else after

    def cached_live(self, rollout_id: str, attempt: int) -> Live | None:
        """The running attempt if this process knows it to run; None says nothing."""
        live = self._live.get(rollout_id)
        return live if live is not None and live.attempt == attempt else None

    def live(self, rollout_id: str, attempt: int) -> Live:
        """The running attempt; Problem 404 or 409 if there is no such rollout or the attempt is not running."""
        live = self.cached_live(rollout_id, attempt)
        if live is None:
            with self.engine.connect() as c:
                row = c.execute(sa.select(rollouts).where(rollouts.c.rollout_id == rollout_id)).first()
            if row is None:
                raise unknown_rollout(rollout_id)
            lifecycle.must_be_current(rows.position(row), attempt)
            return rows.live(row.attempt, row.mode, row.config)
        return live

    # ---- events ---------------------------------------------------------------------------------------------------

    def add_event(
        self, rollout_id: str, attempt: int, kind: str, data: dict[str, Any], event_id: str
    ) -> Callable[[Transaction], int]:
        """Operation: append a custom event to the running attempt; returns its sequence number."""

        def operation(tx: Transaction) -> int:
            known = _known_event(tx, rollout_id, event_id) if event_id else None
            if known is not None:
                return known
            lifecycle.must_be_current(rows.position(_require_row(tx, rollout_id)), attempt)
            return self._append(tx, rollout_id, attempt, kind, data, event_id or uuid.uuid4().hex)

        return operation

    def record_call(self, call: ModelCall, *, unless_known: bool = False) -> Callable[[Transaction], int]:
        """Operation: append a model call to its running attempt; sets and returns its sequence number.

        `unless_known`: a call whose id is recorded already (it was cancelled while it was being committed) stays.
        """

        def operation(tx: Transaction) -> int:
            known = _known_event(tx, call.rollout_id, call.call_id) if unless_known else None
            if known is not None:
                return known
            if self.cached_live(call.rollout_id, call.attempt) is None:  # not cached: ask the table
                lifecycle.must_be_current(rows.position(_require_row(tx, call.rollout_id)), call.attempt)
            key = (call.rollout_id, call.attempt)
            call.sequence = self._take_sequence(tx, key)
            encoder = self._encoders.setdefault(key, compact.Encoder())
            tx.add_event_row(
                {
                    "rollout_id": call.rollout_id,
                    "attempt": call.attempt,
                    "sequence": call.sequence,
                    "kind": CALL_KIND,
                    "event_id": call.call_id,
                    "at": call.ended_at,
                    "started_at": call.started_at,
                    "version_start": call.version_start,
                    "version_end": call.version_end,
                    "trainable": call.trainable,
                    **encoder.encode(call),
                }
            )
            return call.sequence

        return operation

    def events(self, rollout_id: str, attempt: int | None = None) -> list[dict[str, Any]]:
        """All events in order; a model call appears without ids and log-probs (ask `call_rows` for these)."""
        query = sa.select(events).where(events.c.rollout_id == rollout_id)
        if attempt is not None:
            query = query.where(events.c.attempt == attempt)
        with self.engine.connect() as c:
            found = c.execute(query.order_by(events.c.attempt, events.c.sequence)).mappings().all()
        return [rows.event(row) for row in found]

    def call_rows(self, rollout_id: str, attempt: int | None) -> list[dict[str, Any]]:
        """Compact rows of an attempt's model calls (None: the rollout's last attempt), in order."""
        if attempt is None:
            attempt = self.get_rollout(rollout_id).attempt
        columns = [c for c in events.c if c.name != "kind"]
        where = (events.c.rollout_id == rollout_id, events.c.attempt == attempt, events.c.kind == CALL_KIND)
        with self.engine.connect() as c:
            found = c.execute(sa.select(*columns).where(*where).order_by(events.c.sequence)).mappings()
            return [dict(row) for row in found]

    # ---- models, pause, counters ----------------------------------------------------------------------------------

    def models(self) -> list[dict[str, Any]]:
        with self.engine.connect() as c:
            return [dict(row) for row in c.execute(sa.select(models).order_by(models.c.url)).mappings()]

    @staticmethod
    def save_model(values: dict[str, Any]) -> Callable[[Transaction], None]:
        return lambda tx: schema.save_model(tx.connection, values)

    @staticmethod
    def delete_model(url: str) -> Callable[[Transaction], bool]:
        return lambda tx: bool(tx.connection.execute(sa.delete(models).where(models.c.url == url)).rowcount)

    @staticmethod
    def set_meta(name: str, value: str) -> Callable[[Transaction], None]:
        return lambda tx: schema.set_meta(tx.connection, name, value)

    def get_meta(self, name: str) -> str | None:
        with self.engine.connect() as c:
            return c.execute(sa.select(meta.c.value).where(meta.c.name == name)).scalar()

    @staticmethod
    def count(name: str) -> Callable[[Transaction], int]:
        """Operation: add one to a durable counter (`late_calls`, `late_reports`)."""

        def operation(tx: Transaction) -> int:
            found = tx.connection.execute(sa.select(meta.c.value).where(meta.c.name == name)).scalar()
            schema.set_meta(tx.connection, name, str(int(found or 0) + 1))
            return int(found or 0) + 1

        return operation

    def counts(self) -> dict[str, int]:
        """Rollouts by state."""
        with self.engine.connect() as c:
            found = c.execute(sa.select(rollouts.c.state, sa.func.count()).group_by(rollouts.c.state)).all()
        return {state: 0 for state in RolloutState} | {row[0]: row[1] for row in found}

    # ---- inside a transaction -------------------------------------------------------------------------------------

    def _take_sequence(self, tx: Transaction, key: tuple[str, int]) -> int:
        sequence = self._next.get(key)
        if sequence is None:
            where = (events.c.rollout_id == key[0], events.c.attempt == key[1])
            sequence = (
                tx.connection.execute(sa.select(sa.func.max(events.c.sequence)).where(*where)).scalar() or 0
            ) + 1
        self._next[key] = sequence + 1
        return sequence

    def _append(
        self, tx: Transaction, rollout_id: str, attempt: int, kind: str, data: dict[str, Any], event_id: str
    ) -> int:
        sequence = self._take_sequence(tx, (rollout_id, attempt))
        row = {"rollout_id": rollout_id, "attempt": attempt, "sequence": sequence, "kind": kind, "event_id": event_id}
        tx.connection.execute(sa.insert(events), row | {"at": time.time(), "body": dumps(data)})
        return sequence

    def _update(self, tx: Transaction, row: Any, changes: dict[str, Any]) -> None:
        values = dict(changes)
        if isinstance(values.get("outcome"), Outcome):
            values["outcome"] = dumps(values["outcome"].model_dump(mode="json"))
        if "state" in values and RolloutState(values["state"]).terminal:
            last = tx.connection.execute(sa.select(sa.func.max(rollouts.c.terminal))).scalar() or 0
            where = (events.c.rollout_id == row.rollout_id, events.c.kind == CALL_KIND)
            seen = sa.select(events.c.version_end).distinct().where(*where, events.c.attempt == row.attempt)
            versions = sorted(v for v in tx.connection.execute(seen).scalars() if v is not None)
            values |= {"terminal": last + 1, "weight_versions": dumps(versions)}
        tx.connection.execute(sa.update(rollouts).where(rollouts.c.rollout_id == row.rollout_id).values(**values))
        tx.hooks.append(self.on_change)

    def _end_attempt(self, tx: Transaction, rollout_id: str, attempt: int) -> None:
        """Later operations of the same batch must see the end too, so the cache is emptied now; and again after the
        commit, in case the attempt's claim is in the same batch and its hook fills the cache."""
        self._live.pop(rollout_id, None)
        tx.hooks.append(lambda: self._live.pop(rollout_id, None))
        tx.hooks.append(lambda: self.on_end(rollout_id))
        self._next.pop((rollout_id, attempt), None)
        self._encoders.pop((rollout_id, attempt), None)

    def _forget(self) -> None:
        """A batch was rolled back: sequence numbers and tips it took are void. `_live` may lack entries, not lie."""
        self._next.clear()
        self._encoders.clear()


def _require_row(tx: Transaction, rollout_id: str) -> Any:
    row = _row(tx, rollout_id)
    if row is None:
        raise unknown_rollout(rollout_id)
    return row


def _row(tx: Transaction, rollout_id: str) -> Any:
    return tx.connection.execute(sa.select(rollouts).where(rollouts.c.rollout_id == rollout_id)).first()


def _known_event(tx: Transaction, rollout_id: str, event_id: str) -> int | None:
    where = (events.c.rollout_id == rollout_id, events.c.event_id == event_id)
    return tx.connection.execute(sa.select(events.c.sequence).where(*where)).scalar()
