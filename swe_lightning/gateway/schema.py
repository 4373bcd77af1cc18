"""Tables of the store and the engine that opens it.

SQLite in WAL mode with synchronous=FULL: a committed transaction survives the death of the process and of the machine.
The schema carries a version; a store written by a newer version is refused, an older one is migrated step by step.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Boolean, Column, Float, Integer, LargeBinary, String, Text

from swe_lightning.errors import DataError, MissingPart

VERSION = 1
metadata = sa.MetaData()

meta = sa.Table("meta", metadata, Column("name", String, primary_key=True), Column("value", Text, nullable=False))

rollouts = sa.Table(
    "rollouts",
    metadata,
    Column("position", Integer, primary_key=True, autoincrement=True),
    Column("rollout_id", String, nullable=False, unique=True),
    Column("group_id", String, nullable=False, index=True),
    Column("mode", String, nullable=False),
    Column("state", String, nullable=False, index=True),
    Column("attempt", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("timeout_s", Float, nullable=False),
    Column("task", LargeBinary, nullable=False),
    Column("config", LargeBinary, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("claim_id", String),
    Column("worker", String),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("outcome", LargeBinary),
    Column("weight_versions", LargeBinary),
    Column("terminal", Integer, unique=True),  # place in the completion log, dense from 1
)

# One history per attempt: claims, model calls, custom events and reports share one dense sequence from 1.
events = sa.Table(
    "events",
    metadata,
    Column("rollout_id", String, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("sequence", Integer, primary_key=True),
    Column("kind", String, nullable=False),
    Column("event_id", String, nullable=False),
    Column("at", Float, nullable=False),
    Column("body", LargeBinary, nullable=False),
    # The rest only for kind model_call; see compact.py.
    Column("started_at", Float),
    Column("version_start", Integer),
    Column("version_end", Integer),
    Column("trainable", Boolean),
    Column("parent", Integer),
    Column("shared", Integer),
    Column("shared_messages", Integer),
    Column("prompt", LargeBinary),
    Column("response", LargeBinary),
    Column("logprobs", LargeBinary),
    sa.UniqueConstraint("rollout_id", "event_id"),
)

models = sa.Table(
    "models",
    metadata,
    Column("url", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("version", Integer, nullable=False),
    Column("max_context", Integer),
)

# version N -> statements that bring a store of version N to N + 1
MIGRATIONS: dict[int, list[str]] = {}


def open_engine(url: str) -> sa.Engine:
    """An engine on `url` whose tables exist and have the current version."""
    if not url.startswith("sqlite"):
        raise MissingPart(f"store {url.split(':')[0]} is not part of this version; leave store_url unset to use SQLite")
    engine = sa.create_engine(
        url, connect_args={"timeout": 60, "check_same_thread": False}, pool_size=16, max_overflow=48
    )
    sa.event.listen(engine, "connect", _configure)
    sa.event.listen(engine, "begin", _begin)
    try:
        _check_version(engine)
    except sa.exc.OperationalError as error:
        engine.dispose()
        raise DataError(f"cannot open the store {url}: {error.orig}") from error
    except sa.exc.DatabaseError as error:
        engine.dispose()
        raise DataError(f"{url} is not a store of this program: {error.orig}") from error
    except BaseException:
        engine.dispose()
        raise
    return engine


def writing(connection: sa.Connection) -> sa.Connection:
    """Mark a connection so that its transactions take the write lock when they begin."""
    return connection.execution_options(writing=True)


def _configure(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions are begun by _begin, never implicitly
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "cache_size=-16000"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: sa.Connection) -> None:
    immediate = connection.get_execution_options().get("writing", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _check_version(engine: sa.Engine) -> None:
    with writing(engine.connect()) as connection, connection.begin():
        metadata.create_all(connection)
        row = connection.execute(sa.select(meta.c.value).where(meta.c.name == "schema_version")).first()
        found = VERSION if row is None else int(row.value)
        if found > VERSION:
            raise DataError(f"the store {engine.url} has schema {found}, newer than {VERSION}; upgrade swe-lightning")
        for step in range(found, VERSION):
            for statement in MIGRATIONS[step]:
                connection.exec_driver_sql(statement)
        set_meta(connection, "schema_version", str(VERSION))


def set_meta(connection: sa.Connection, name: str, value: str) -> None:
    _upsert(connection, meta, {"name": name, "value": value}, meta.c.name)


def save_model(connection: sa.Connection, values: dict[str, Any]) -> None:
    _upsert(connection, models, values, models.c.url)


def _upsert(connection: sa.Connection, table: sa.Table, values: dict[str, Any], key: sa.Column[Any]) -> None:
    """Portable: the store has one writer, so update-then-insert cannot race."""
    if not connection.execute(sa.update(table).where(key == values[key.name]).values(**values)).rowcount:
        connection.execute(sa.insert(table).values(**values))
