"""The durable store: rollouts, their events and model calls, registered models, the pause, and counters of refusals.

Writes are operations of the writer thread (writer.py) and are acknowledged only after their commit; the state machine
(lifecycle.py) is consulted inside the transaction, so two claims or a report and a late call cannot both win. Every
write that a client may repeat carries an id, and a repetition returns what the first one did.

Several processes may share a PostgreSQL store. Each transaction first locks the one row of `turn`: commits have one
order, which is the order of sequence numbers and of the completion log, so a reader never sees a later entry before an
earlier one. The row also says whether somebody else wrote meanwhile; only then are caches doubted.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from swe_lightning.errors import UserError
from swe_lightning.gateway import database, lifecycle, rows, schema
from swe_lightning.gateway.histories import Histories
from swe_lightning.gateway.jsonio import dumps
from swe_lightning.gateway.problems import Problem, unknown_rollout
from swe_lightning.gateway.reads import Reads
from swe_lightning.gateway.rows import CALL_KIND, Live
from swe_lightning.gateway.schema import events, meta, models, rollouts, turn
from swe_lightning.gateway.tokens import KEY_VARIABLE
from swe_lightning.gateway.writer import Transaction, Writer
from swe_lightning.records import ModelCall, Outcome, Rollout, RolloutState


class Store(Reads):
    """One per gateway process. Called from the writer thread: `on_change` after a rollout changed its state, `on_end`
    with its id and number after an attempt ended."""

    def __init__(self, url: str, *, on_change: Callable[[], None] = lambda: None, linger_s: float = 0.002) -> None:
        self.engine = database.open_engine(url)
        self.shared = database.is_shared(self.engine)
        self.on_change = on_change
        self.on_end: Callable[[str, int], None] = lambda rollout_id, attempt: None
        self._name = uuid.uuid4().hex
        self._own_changes = self._others_changes = 0
        self._histories = Histories()
        self._live: dict[str, tuple[Live, int]] = {}
        """Running attempts and the epoch (see histories.py) in which that was certain."""
        with self.reading() as c:
            for row in c.execute(rows.WHOLE.where(rollouts.c.state == RolloutState.RUNNING)):
                self._live[row.rollout_id] = rows.live(rows.rollout(row)), 0
        begin, end = (self._take_turn, self._end_turn) if self.shared else (_nothing, _nothing)
        self.writer = Writer(self.engine, begin=begin, end=end, on_rollback=self._forget, linger_s=linger_s)

    def close(self) -> None:
        self.writer.close()
        self.engine.dispose()

    def kept(self) -> dict[str, int]:
        """Entries in memory of attempts in progress."""
        return {"running": len(self._live), "histories": len(self._histories)}

    def belong_to(self, key: str) -> None:
        """Bind a shared store to the run that signs with `key`; UserError if it is another run's.

        All gateways of a run accept each other's tokens, and rollout ids are only unique within a run.
        """

        def operation(tx: Transaction) -> str:
            query = sa.select(meta.c.value).where(meta.c.name == "signing_key")
            owner = tx.connection.execute(query).scalar()
            if owner is None:
                schema.set_meta(tx.connection, "signing_key", key)
            return owner or key

        if self.shared and self.writer.call(operation) != key:
            raise UserError(
                f"the store {self.engine.url.database} belongs to a run with another signing key; "
                f"set {KEY_VARIABLE} to that run's key, or give this run a database of its own"
            )

    # ---- rollouts -------------------------------------------------------------------------------------------------

    def create_rollouts(self, wanted: Sequence[Rollout]) -> Callable[[Transaction], tuple[list[Rollout], int]]:
        """Operation: all or none are created; an id that exists with the same content is returned as it stands.

        Returns them and the end of the completion log in the same moment: which of them end later is behind it.
        """

        def operation(tx: Transaction) -> tuple[list[Rollout], int]:
            standing, digests = _standing(tx, [r.rollout_id for r in wanted])
            bodies: dict[bytes, bytes] = {}
            new, now = [], time.time()
            for r in wanted:
                digest = rows.digest(r)
                if digests.setdefault(r.rollout_id, digest) != digest:
                    message = f"rollout {r.rollout_id} exists with other content; choose another rollout_id"
                    raise Problem(409, "rollout_differs", message)
                if r.rollout_id not in standing:
                    new.append(rows.new_row(r, digest, now, bodies))
                    standing[r.rollout_id] = rows.as_new(r, now)
            if new:
                schema.save_contents(tx.connection, bodies)
                tx.connection.execute(sa.insert(rollouts), new)
                tx.hooks.append(self.on_change)
            return [standing[r.rollout_id] for r in wanted], _log_end(tx)

        return operation

    def claim(self, rollout_id: str, worker: str, claim_id: str) -> Callable[[Transaction], Rollout]:
        """Operation: start the next attempt. The same `claim_id` again returns the attempt it started."""
        claim_id = claim_id or uuid.uuid4().hex

        def operation(tx: Transaction) -> Rollout:
            row = _require_row(tx, rollout_id)
            if row.claim_id == claim_id and row.state == RolloutState.RUNNING:
                return _whole(tx, rollout_id)
            changes = lifecycle.claim(rows.position(row), time.time())
            event_id = rows.request_id("claimed", changes["attempt"], claim_id)
            self._update(tx, row, changes | {"claim_id": claim_id, "worker": worker})
            self._append(tx, rollout_id, changes["attempt"], "claimed", {"worker": worker}, event_id)
            rollout = _whole(tx, rollout_id)
            live = rows.live(rollout), self._histories.epoch
            tx.hooks.append(lambda: self._live.__setitem__(rollout_id, live))
            return rollout

        return operation

    def report(
        self, rollout_id: str, attempt: int, outcome: Outcome, *, kind: str = "reward", event_id: str = ""
    ) -> Callable[[Transaction], Rollout]:
        """Operation: the attempt ended. Late reports are refused; the same `event_id` again changes nothing."""
        event_id = rows.request_id(kind, attempt, event_id or uuid.uuid4().hex)

        def operation(tx: Transaction) -> Rollout:
            row = _require_row(tx, rollout_id)
            if _known_event(tx, rollout_id, event_id):
                return _whole(tx, rollout_id)
            changes = lifecycle.report(rows.position(row), attempt, outcome, time.time())
            data = {"outcome": outcome.model_dump(mode="json")}
            self._append(tx, rollout_id, attempt, kind, data, event_id)
            self._update(tx, row, changes)
            self._end_attempt(tx, rollout_id, attempt)
            return _whole(tx, rollout_id)

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
            return _whole(tx, rollout_id)

        return operation

    def cached_live(self, rollout_id: str, attempt: int) -> Live | None:
        """The running attempt if this process has seen it run; None says nothing. Another gateway may have ended it
        a moment ago: what is written is checked again, inside its transaction."""
        live, _ = self._live.get(rollout_id, (None, 0))
        return live if live is not None and live.attempt == attempt else None

    def heard(self, changes: int) -> None:
        """So many commits have changed rollouts, ours included. What others did wakes long polls and empties the cache
        of running attempts. From any thread."""
        if changes - self._own_changes != self._others_changes:
            self._others_changes = changes - self._own_changes
            self._live.clear()
            self.on_change()

    def live(self, rollout_id: str, attempt: int) -> Live:
        """The running attempt; Problem 404 or 409 if there is no such rollout or the attempt is not running."""
        live = self.cached_live(rollout_id, attempt)
        if live is None:
            with self.reading() as c:
                row = c.execute(rows.WHOLE.where(rollouts.c.rollout_id == rollout_id)).first()
            if row is None:
                raise unknown_rollout(rollout_id)
            lifecycle.must_be_current(rows.position(row), attempt)
            live = rows.live(rows.rollout(row))
        return live

    # ---- events ---------------------------------------------------------------------------------------------------

    def add_event(
        self, rollout_id: str, attempt: int, kind: str, data: dict[str, Any], event_id: str
    ) -> Callable[[Transaction], int]:
        """Operation: append a custom event to the running attempt; returns its sequence number."""
        event_id = rows.request_id("custom", attempt, event_id or uuid.uuid4().hex)

        def operation(tx: Transaction) -> int:
            known = _known_event(tx, rollout_id, event_id)
            if known is not None:
                return known
            lifecycle.must_be_current(rows.position(_require_row(tx, rollout_id)), attempt)
            return self._append(tx, rollout_id, attempt, kind, data, event_id)

        return operation

    def record_call(self, call: ModelCall, *, unless_known: bool = False) -> Callable[[Transaction], int]:
        """Operation: append a model call to its running attempt; sets and returns its sequence number.

        `unless_known`: a call whose id is recorded already (it was cancelled while it was being committed) stays.
        """

        def operation(tx: Transaction) -> int:
            known = _known_event(tx, call.rollout_id, call.call_id) if unless_known or tx.again else None
            if known is not None:
                call.sequence = known
                return known
            self._must_run(tx, call.rollout_id, call.attempt)
            history = self._histories.of(tx, (call.rollout_id, call.attempt))
            call.sequence = history.take()
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
                    **history.encoder.encode(call),
                }
            )
            return call.sequence

        return operation

    # ---- models, pause, counters ----------------------------------------------------------------------------------

    @staticmethod
    def save_model(values: dict[str, Any]) -> Callable[[Transaction], None]:
        return lambda tx: schema.upsert(tx.connection, models, values)

    @staticmethod
    def delete_model(url: str) -> Callable[[Transaction], bool]:
        return lambda tx: bool(tx.connection.execute(sa.delete(models).where(models.c.url == url)).rowcount)

    @staticmethod
    def set_meta(name: str, value: str) -> Callable[[Transaction], None]:
        return lambda tx: schema.set_meta(tx.connection, name, value)

    @staticmethod
    def count(name: str) -> Callable[[Transaction], int]:
        """Operation: add one to a durable counter (`late_calls`, `late_reports`)."""

        def operation(tx: Transaction) -> int:
            found = tx.connection.execute(sa.select(meta.c.value).where(meta.c.name == name)).scalar()
            schema.set_meta(tx.connection, name, str(int(found or 0) + 1))
            return int(found or 0) + 1

        return operation

    # ---- inside a transaction -------------------------------------------------------------------------------------

    def _take_turn(self, tx: Transaction) -> None:
        """Wait until no other process writes; doubt what is remembered if one wrote since our last turn."""
        holder = tx.connection.execute(sa.select(turn.c.holder).with_for_update()).scalar_one()
        if holder != self._name:
            self._histories.epoch += 1
            tx.connection.execute(sa.update(turn).values(holder=self._name))

    def _end_turn(self, tx: Transaction) -> None:
        """Tell the other processes that a rollout changed (they look at this number; see board.py)."""
        if tx.hooks:
            tx.connection.execute(sa.update(turn).values(changes=turn.c.changes + 1))
            tx.hooks.append(self._count_own)

    def _count_own(self) -> None:
        self._own_changes += 1

    def _must_run(self, tx: Transaction, rollout_id: str, attempt: int) -> None:
        """Problem unless the attempt runs; asks the table only if this process cannot know."""
        live, epoch = self._live.get(rollout_id, (None, 0))
        if live is not None and live.attempt == attempt and epoch == self._histories.epoch:
            return
        lifecycle.must_be_current(rows.position(_require_row(tx, rollout_id)), attempt)
        if self.shared:
            if (
                live is None or live.attempt != attempt
            ):  # else only its end was in doubt: mode and sampling never change
                live = rows.live(_whole(tx, rollout_id))
            self._live[rollout_id] = live, self._histories.epoch

    def _append(
        self, tx: Transaction, rollout_id: str, attempt: int, kind: str, data: dict[str, Any], event_id: str
    ) -> int:
        sequence = self._histories.of(tx, (rollout_id, attempt)).take()
        row = {"rollout_id": rollout_id, "attempt": attempt, "sequence": sequence, "kind": kind, "event_id": event_id}
        tx.connection.execute(sa.insert(events), row | {"at": time.time(), "body": dumps(data)})
        return sequence

    def _update(self, tx: Transaction, row: Any, changes: dict[str, Any]) -> None:
        values = dict(changes)
        if isinstance(values.get("outcome"), Outcome):
            values["outcome"] = dumps(values["outcome"].model_dump(mode="json"))
        if "state" in values and RolloutState(values["state"]).terminal:
            last = _log_end(tx)
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
        tx.hooks.append(lambda: self.on_end(rollout_id, attempt))
        self._histories.drop((rollout_id, attempt))

    def _forget(self) -> None:
        """A batch was rolled back: the numbers and tips it took are void, and so is what it saw of itself."""
        self._histories.clear()
        self._histories.epoch += self.shared


def _nothing(_: Transaction) -> None:
    pass


def _require_row(tx: Transaction, rollout_id: str) -> Any:
    row = _row(tx, rollout_id)
    if row is None:
        raise unknown_rollout(rollout_id)
    return row


def _standing(tx: Transaction, rollout_ids: list[str]) -> tuple[dict[str, Rollout], dict[str, bytes]]:
    """Those of the rollouts that exist, and the digests of their content."""
    found, digests = {}, {}
    for at in range(0, len(rollout_ids), 500):  # SQLite bounds the variables of a statement
        query = rows.WHOLE.where(rollouts.c.rollout_id.in_(rollout_ids[at : at + 500]))
        for row in tx.connection.execute(query):
            found[row.rollout_id], digests[row.rollout_id] = rows.rollout(row), row.digest
    return found, digests


def _log_end(tx: Transaction) -> int:
    """Cursor behind the last entry of the completion log."""
    return int(tx.connection.execute(sa.select(sa.func.max(rollouts.c.terminal))).scalar() or 0)


def _whole(tx: Transaction, rollout_id: str) -> Rollout:
    return rows.rollout(tx.connection.execute(rows.WHOLE.where(rollouts.c.rollout_id == rollout_id)).one())


def _row(tx: Transaction, rollout_id: str) -> Any:
    return tx.connection.execute(sa.select(rollouts).where(rollouts.c.rollout_id == rollout_id)).first()


def _known_event(tx: Transaction, rollout_id: str, event_id: str) -> int | None:
    where = (events.c.rollout_id == rollout_id, events.c.event_id == event_id)
    return tx.connection.execute(sa.select(events.c.sequence).where(*where)).scalar()
