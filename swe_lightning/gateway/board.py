"""The board: what the gateways of one PostgreSQL store know of each other, and the one place where calls are admitted.

Each gateway has a row with its numbers of calls in flight and waiting, and one per rollout that has calls open there.
A gateway admits calls only by writing itself up here while it holds the lock on the pause, so a pause that is committed
admits nothing anywhere, and limits hold over all gateways. Numbers are written absolutely: whatever a crash or a lost
commit did to them, the next write mends it. A gateway whose row has not moved for LEASE_S, as seen by one that watched
all that time, is dead and its places are free; no clock is compared with another machine's.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from swe_lightning.gateway.gate import GateLimits
from swe_lightning.gateway.schema import gateways, holds, meta, models, turn

LEASE_S = 10.0
BEAT_S = 2.0
"""A gateway writes at least this often."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a gateway says of itself, and asks for."""

    held: dict[str, int]
    """Calls it holds, of rollouts for which that changed."""
    arrivals: dict[str, int] = field(default_factory=dict)
    """Further calls of rollouts, to be held from now on if their limits allow."""
    in_flight: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """The answer."""

    paused: bool
    granted: int
    """Waiting calls that may go to the model servers."""
    accepted: dict[str, int]
    in_flight: int
    """Of all gateways, as `waiting`."""
    waiting: int
    gateways: int
    changes: int
    models: list[dict[str, Any]]
    forgotten: bool
    """The others took this gateway for dead (or it is new): it must report everything it holds."""


class Board:
    """Used by one thread at a time."""

    def __init__(self, engine: sa.Engine, gateway_id: str, limits: GateLimits, *, lease_s: float = LEASE_S) -> None:
        self._engine, self._me, self._limits, self._lease_s = engine, gateway_id, limits, lease_s
        self._beats: dict[str, tuple[int, float]] = {}
        """Of other gateways: last beat seen, and since when (monotonic)."""
        self._written: tuple[int, int] | None = None
        self._beat_at = 0.0
        with self._engine.begin() as c:
            c.execute(insert(meta).values(name="paused", value="0").on_conflict_do_nothing())

    def exchange(self, report: Report) -> Seen:
        """Say, ask and look around in one transaction. After an error nothing was granted; just report again."""
        try:
            with self._engine.begin() as c:
                seen = self._exchange(c, report)
        except BaseException:
            self._beats.clear()  # we did not watch: everybody gets a whole lease again
            self._written = None
            raise
        self._written = report.in_flight + seen.granted, report.waiting
        return seen

    def in_flight(self) -> int:
        """Calls at the model servers, of all gateways that are not known to be dead."""
        with self._engine.connect() as c:
            return int(c.execute(sa.select(sa.func.coalesce(sa.func.sum(gateways.c.in_flight), 0))).scalar_one())

    def leave(self, gateway_id: str | None = None) -> None:
        """Take a gateway off the board (default: this one)."""
        with self._engine.begin() as c:
            _remove(c, gateway_id or self._me)

    def _exchange(self, c: sa.Connection, report: Report) -> Seen:
        query = sa.select(meta.c.value).where(meta.c.name == "paused")
        asks = bool(report.arrivals) or report.waiting > 0
        paused = c.execute(query.with_for_update() if asks else query).scalar_one() == "1"
        rows = {row.gateway_id: row for row in c.execute(sa.select(gateways)).all()}
        mine = rows.pop(self._me, None)
        for dead in self._dead(rows):
            _remove(c, dead)
            del rows[dead]
        accepted = self._accept(c, report, rows) if report.arrivals else {}
        granted = 0 if paused else self._room(report, list(rows.values()))
        if not granted and not accepted:
            c.exec_driver_sql(
                "SET LOCAL synchronous_commit = off"
            )  # others see it; a crash is mended by the next write
        self._write(c, report, accepted, granted, known=mine is not None)
        return Seen(
            paused=paused,
            granted=granted,
            accepted=accepted,
            in_flight=report.in_flight + granted + sum(row.in_flight for row in rows.values()),
            waiting=report.waiting + sum(row.waiting for row in rows.values()),
            gateways=len(rows) + 1,
            changes=c.execute(sa.select(turn.c.changes)).scalar_one(),
            models=[dict(row) for row in c.execute(sa.select(models)).mappings()],
            forgotten=mine is None,
        )

    def _dead(self, rows: dict[str, Any]) -> list[str]:
        now, dead = time.monotonic(), []
        for gateway_id, row in rows.items():
            beat, since = self._beats.get(gateway_id, (None, now))
            if beat != row.beat:
                self._beats[gateway_id] = row.beat, now
            elif now - since > self._lease_s:
                dead.append(gateway_id)
        self._beats = {gateway_id: self._beats[gateway_id] for gateway_id in rows.keys() - set(dead)}
        return dead

    def _accept(self, c: sa.Connection, report: Report, rows: dict[str, Any]) -> dict[str, int]:
        """How many of the arrivals each rollout's limit leaves room for."""
        where = holds.c.rollout_id.in_(list(report.arrivals)), holds.c.gateway_id.in_(list(rows))
        query = sa.select(holds.c.rollout_id, sa.func.sum(holds.c.held)).where(*where).group_by(holds.c.rollout_id)
        elsewhere = {row[0]: int(row[1]) for row in c.execute(query)}
        room = {r: self._limits.max_per_rollout - elsewhere.get(r, 0) - report.held.get(r, 0) for r in report.arrivals}
        return {r: max(0, min(asked, room[r])) for r, asked in report.arrivals.items()}

    def _room(self, report: Report, others: list[Any]) -> int:
        """Waiting calls to admit. While others wait too, nobody takes more than its share of the places."""
        limit = self._limits.max_in_flight
        room = limit - report.in_flight - sum(row.in_flight for row in others)
        rivals = sum(1 for row in others if row.waiting)
        if rivals:
            room = min(room, math.ceil(limit / (rivals + 1)) - report.in_flight)
        return max(0, min(room, report.waiting))

    def _write(self, c: sa.Connection, report: Report, accepted: dict[str, int], granted: int, *, known: bool) -> None:
        held = {r: n + accepted.get(r, 0) for r, n in report.held.items()}
        kept = [{"rollout_id": r, "gateway_id": self._me, "held": n} for r, n in held.items() if n]
        if kept:
            put = insert(holds)
            key = [holds.c.rollout_id, holds.c.gateway_id]
            c.execute(put.on_conflict_do_update(index_elements=key, set_={"held": put.excluded.held}), kept)
        gone = [r for r, n in held.items() if not n]
        if gone:
            c.execute(sa.delete(holds).where(holds.c.gateway_id == self._me, holds.c.rollout_id.in_(gone)))
        now, numbers = time.monotonic(), (report.in_flight + granted, report.waiting)
        if known and not held and numbers == self._written and now - self._beat_at < BEAT_S:
            return
        values = {"in_flight": numbers[0], "waiting": numbers[1]}
        if known:
            mine = gateways.c.gateway_id == self._me
            c.execute(sa.update(gateways).where(mine).values(beat=gateways.c.beat + 1, **values))
        else:
            c.execute(sa.insert(gateways).values(gateway_id=self._me, beat=1, **values))
        self._beat_at = now


def _remove(c: sa.Connection, gateway_id: str) -> None:
    c.execute(sa.delete(holds).where(holds.c.gateway_id == gateway_id))
    c.execute(sa.delete(gateways).where(gateways.c.gateway_id == gateway_id))
