"""Where each running attempt's history ends: the next sequence number and what its next call can build on.

A cache of the writer thread. `epoch` grows whenever another process wrote in between; what was remembered in an earlier
epoch is compared with the table before it is used, and only what is missing is read. So a rollout whose calls arrive
through several gateways keeps dense numbers and stores only what each call adds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import sqlalchemy as sa

from swe_lightning.gateway.compact import Encoder
from swe_lightning.gateway.rows import CALL_KIND
from swe_lightning.gateway.schema import events
from swe_lightning.gateway.writer import Transaction

Key = tuple[str, int]
_ROW = [column for column in events.c if column.name != "kind"]


@dataclass(slots=True)
class History:
    next: int = 1
    encoder: Encoder = field(default_factory=Encoder)
    epoch: int = -1

    def take(self) -> int:
        """The next sequence number, taken."""
        self.next += 1
        return self.next - 1


class Histories:
    """One `History` per attempt in progress, right as of the transaction that asks."""

    def __init__(self, kept: int = 16_384) -> None:
        self.epoch, self._kept = 0, kept
        self._known: dict[Key, History] = {}

    def of(self, tx: Transaction, key: Key) -> History:
        history = self._known.get(key)
        if history is None:
            history = self._known[key] = History()
            if (
                len(self._known) > self._kept
            ):  # attempts that ended in another process; whoever is not over is read again
                self.drop(next(iter(self._known)))
        if history.epoch != self.epoch:
            self._catch_up(tx.connection, key, history)
            history.epoch = self.epoch
        return history

    def __len__(self) -> int:
        return len(self._known)

    def drop(self, key: Key) -> None:
        self._known.pop(key, None)

    def clear(self) -> None:
        """A transaction was rolled back: numbers and tips it took are void."""
        self._known.clear()

    @staticmethod
    def _catch_up(connection: sa.Connection, key: Key, history: History) -> None:
        mine = (events.c.rollout_id == key[0], events.c.attempt == key[1])
        last = connection.execute(sa.select(sa.func.max(events.c.sequence)).where(*mine)).scalar() or 0
        if last + 1 == history.next:
            return
        calls = sa.select(*_ROW).where(*mine, events.c.kind == CALL_KIND).order_by(events.c.sequence)
        new = calls.where(events.c.sequence >= history.next)
        if not history.encoder.follow(dict(row) for row in connection.execute(new).mappings()):
            history.encoder = Encoder()
            history.encoder.follow(dict(row) for row in connection.execute(calls).mappings())
        history.next = last + 1
