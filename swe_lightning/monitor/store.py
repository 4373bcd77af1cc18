"""A run's store, opened for reading only: a run in progress is never disturbed, a finished one never changed.

Reads the tables of gateway/schema.py and the compact rows of gateway/compact.py; knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from swe_lightning.errors import DataError
from swe_lightning.gateway import compact, database
from swe_lightning.gateway.jsonio import loads
from swe_lightning.gateway.schema import contents, events, meta, models, rollouts
from swe_lightning.records import ModelCall, RolloutState
from swe_lightning.rundir import RunDir

CALL_KIND = "model_call"
_REACHABLE = "; is the server up, and the password in PGPASSWORD or ~/.pgpass?"


class StoreReader:
    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def outcomes(self) -> Iterator[dict[str, Any]]:
        """Every rollout without its task and configuration, in order of creation."""
        names = (
            "rollout_id",
            "group_id",
            "mode",
            "state",
            "attempt",
            "created_at",
            "started_at",
            "ended_at",
            "outcome",
        )
        query = sa.select(*(rollouts.c[name] for name in names)).order_by(rollouts.c.position)
        for row in self._connection.execute(query).mappings():
            yield {**row, "outcome": loads(row["outcome"]) if row["outcome"] else None}

    def graded(self, mode: str) -> list[str]:
        """Ids of finished rollouts of a mode that have a reward, in order of creation."""
        return [o["rollout_id"] for o in self.outcomes() if o["mode"] == mode and _reward(o) is not None]

    def rollout(self, rollout_id: str) -> dict[str, Any]:
        """All columns of one rollout, JSON decoded. DataError if there is none."""
        query = sa.select(rollouts).where(rollouts.c.rollout_id == rollout_id)
        row = self._connection.execute(query).mappings().first()
        if row is None:
            raise DataError(f"no rollout {rollout_id} in this run{self._similar(rollout_id)}")
        found = {k: v for k, v in row.items() if k not in ("digest", "position", "claim_id")}
        for name in ("task", "config"):
            found[name] = loads(self._content(row[name]))
        for name in ("outcome", "weight_versions"):
            found[name] = loads(row[name]) if row[name] else None
        return found

    def _content(self, value: bytes) -> bytes:
        """A store of schema 1 is not migrated by looking at it: there the row holds the content itself."""
        version = self._connection.execute(sa.select(meta.c.value).where(meta.c.name == "schema_version")).scalar()
        if version == "1":
            return value
        found = self._connection.execute(sa.select(contents.c.body).where(contents.c.digest == value)).scalar_one()
        return bytes(found)

    def _similar(self, rollout_id: str) -> str:
        like = rollouts.c.rollout_id.contains(rollout_id, autoescape=True)
        near = self._connection.execute(sa.select(rollouts.c.rollout_id).where(like).limit(4)).scalars().all()
        near = near or self._connection.execute(sa.select(rollouts.c.rollout_id).limit(4)).scalars().all()
        return f"; there are for example {', '.join(near)}" if near else " (it holds no rollouts)"

    def calls(self, rollout_id: str, attempt: int | None = None, *, deltas: bool = False) -> list[ModelCall]:
        """Model calls of an attempt (default: the last), in order; `deltas`: prompts as stored (compact.decode)."""
        if attempt is None:
            attempt = self.rollout(rollout_id)["attempt"]
        columns = [c for c in events.c if c.name != "kind"]
        where = (events.c.rollout_id == rollout_id, events.c.attempt == attempt, events.c.kind == CALL_KIND)
        query = sa.select(*columns).where(*where).order_by(events.c.sequence)
        found = self._connection.execute(query).mappings()
        return list(compact.decode((dict(row) for row in found), deltas=deltas))

    def events(self, rollout_id: str) -> list[dict[str, Any]]:
        """What happened beside model calls: claims, releases, reports, custom events, of all attempts."""
        names = (events.c.attempt, events.c.sequence, events.c.kind, events.c.at, events.c.body)
        where = (events.c.rollout_id == rollout_id, events.c.kind != CALL_KIND)
        query = sa.select(*names).where(*where).order_by(events.c.attempt, events.c.sequence)
        found = self._connection.execute(query).mappings()
        return [{**{k: v for k, v in row.items() if k != "body"}, "data": loads(row["body"])} for row in found]

    def models(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self._connection.execute(sa.select(models)).mappings()]

    def call_count(self) -> int:
        query = sa.select(sa.func.count()).select_from(events).where(events.c.kind == CALL_KIND)
        return int(self._connection.execute(query).scalar() or 0)

    def counts(self) -> dict[str, int]:
        """Rollouts by state."""
        query = sa.select(rollouts.c.state, sa.func.count()).group_by(rollouts.c.state)
        found = {state: count for state, count in self._connection.execute(query).all()}
        return {state.value: found.get(state.value, 0) for state in RolloutState}


def _reward(row: dict[str, Any]) -> float | None:
    return (row["outcome"] or {}).get("reward")


def has_store(run_dir: Path) -> bool:
    return (run_dir / "gateway.db").is_file() or RunDir(run_dir).database is not None


@contextmanager
def open_store(run_dir: Path) -> Iterator[StoreReader]:
    """The store of a run directory, one snapshot. DataError if there is none or it cannot be read."""
    url, file = RunDir(run_dir).database, run_dir / "gateway.db"
    if url is None and not file.is_file():
        raise DataError(f"{run_dir} holds no store (gateway.db); give a run directory, see swel runs list")
    engine = _sqlite(file) if url is None else database.reading_engine(url)
    try:
        with engine.connect() as connection:
            yield StoreReader(connection)
    except sa.exc.DatabaseError as error:
        where, hint = (file, "") if url is None else (engine.url.set(query={}), _REACHABLE)
        raise DataError(f"cannot read the store {where}: {database.words(error)}{hint}") from error
    finally:
        engine.dispose()


def _sqlite(file: Path) -> sa.Engine:
    return sa.create_engine(f"sqlite:///file:{quote(str(file.absolute()))}?mode=ro&uri=true", poolclass=sa.NullPool)
