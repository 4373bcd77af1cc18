"""What can be asked of the store: each question reads its own snapshot of committed data, and waits for no writer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from swe_lightning.gateway import database, rows
from swe_lightning.gateway.problems import unknown_rollout
from swe_lightning.gateway.rows import CALL_KIND
from swe_lightning.gateway.schema import events, meta, models, rollouts
from swe_lightning.records import Rollout, RolloutState


class Reads:
    """The reading half of a store. A database that does not answer is a Problem 503, as it is for writes."""

    engine: sa.Engine

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        try:
            with self.engine.connect() as connection:
                yield connection
        except sa.exc.SQLAlchemyError as error:
            raise database.as_problem(error) from error

    def get_rollout(self, rollout_id: str) -> Rollout:
        with self.reading() as c:
            row = c.execute(rows.WHOLE.where(rollouts.c.rollout_id == rollout_id)).first()
        if row is None:
            raise unknown_rollout(rollout_id)
        return rows.rollout(row)

    def list_rollouts(self, state: str | None, group_id: str | None, limit: int) -> list[Rollout]:
        """In order of creation."""
        query = rows.WHOLE.order_by(rollouts.c.position).limit(limit)
        if state:
            query = query.where(rollouts.c.state == state)
        if group_id:
            query = query.where(rollouts.c.group_id == group_id)
        with self.reading() as c:
            return [rows.rollout(row) for row in c.execute(query)]

    def terminal(self, after: int, limit: int) -> tuple[list[Rollout], int]:
        """The completion log after cursor `after`, and the cursor behind what is returned."""
        query = rows.WHOLE.where(rollouts.c.terminal > after).order_by(rollouts.c.terminal).limit(limit)
        with self.reading() as c:
            found = c.execute(query).all()
        return [rows.rollout(row) for row in found], found[-1].terminal if found else after

    def events(self, rollout_id: str, attempt: int | None = None) -> list[dict[str, Any]]:
        """All events in order; a model call appears without ids and log-probs (ask `call_rows` for these)."""
        query = sa.select(events).where(events.c.rollout_id == rollout_id)
        if attempt is not None:
            query = query.where(events.c.attempt == attempt)
        with self.reading() as c:
            found = c.execute(query.order_by(events.c.attempt, events.c.sequence)).mappings().all()
        return [rows.event(row) for row in found]

    def call_rows(self, rollout_id: str, attempt: int | None) -> list[dict[str, Any]]:
        """Compact rows of an attempt's model calls (None: the rollout's last attempt), in order."""
        if attempt is None:
            attempt = self.get_rollout(rollout_id).attempt
        columns = [c for c in events.c if c.name != "kind"]
        where = (events.c.rollout_id == rollout_id, events.c.attempt == attempt, events.c.kind == CALL_KIND)
        with self.reading() as c:
            found = c.execute(sa.select(*columns).where(*where).order_by(events.c.sequence)).mappings()
            return [dict(row) for row in found]

    def models(self) -> list[dict[str, Any]]:
        with self.reading() as c:
            return [dict(row) for row in c.execute(sa.select(models).order_by(models.c.url)).mappings()]

    def get_meta(self, name: str) -> str | None:
        with self.reading() as c:
            return c.execute(sa.select(meta.c.value).where(meta.c.name == name)).scalar()

    def counts(self) -> dict[str, int]:
        """Rollouts by state."""
        with self.reading() as c:
            found = c.execute(sa.select(rollouts.c.state, sa.func.count()).group_by(rollouts.c.state)).all()
        return {state: 0 for state in RolloutState} | {row[0]: row[1] for row in found}
