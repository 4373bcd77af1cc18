"""Tables of the store, their version, and the steps from older versions.

The same tables on SQLite and PostgreSQL. A store written by a newer version is refused; an older one is migrated in one
transaction when it is opened, so it is either of the old version or of the new one, never between. Nothing a run
recorded is dropped by a migration.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import BigInteger, Boolean, Column, Float, Integer, LargeBinary, String, Text

from swe_lightning.errors import DataError

log = logging.getLogger("swel.gateway")
VERSION = 3
metadata = sa.MetaData()

meta = sa.Table("meta", metadata, Column("name", String, primary_key=True), Column("value", Text, nullable=False))

# Tasks and configurations as JSON, once each: a group's rollouts share theirs, and so do the epochs of a run.
contents = sa.Table(
    "contents",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("body", LargeBinary, nullable=False),
)

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
    Column("task", LargeBinary, nullable=False),  # digest of its content
    Column("config", LargeBinary, nullable=False),  # digest of its content
    Column("digest", LargeBinary, nullable=False),
    Column("claim_id", String),
    Column("worker", String),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("outcome", LargeBinary),
    Column("weight_versions", LargeBinary),
    Column("terminal", Integer, unique=True),  # place in the completion log, dense from 1 in order of commits
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

# ---- what gateway processes of one store share; never exported ------------------------------------------------------

# One row. Whoever writes locks it first, so commits have one order; see store.py.
turn = sa.Table(
    "turn",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("holder", String, nullable=False),  # the gateway that committed last
    Column("changes", BigInteger, nullable=False),  # commits that changed a rollout
)

# One row per gateway process: a lease that `beat` keeps alive, and its calls at the model servers; see board.py.
gateways = sa.Table(
    "gateways",
    metadata,
    Column("gateway_id", String, primary_key=True),
    Column("beat", BigInteger, nullable=False),
    Column("in_flight", Integer, nullable=False),
    Column("waiting", Integer, nullable=False),
)

holds = sa.Table(
    "holds",
    metadata,
    Column("rollout_id", String, primary_key=True),
    Column("gateway_id", String, primary_key=True),
    Column("held", Integer, nullable=False),  # calls of the rollout, waiting or in flight there
)


def prepare(connection: sa.Connection, where: str) -> None:
    """Create the tables or bring them to VERSION, inside the caller's transaction. DataError if they are newer."""
    metadata.create_all(connection)
    row = connection.execute(sa.select(meta.c.value).where(meta.c.name == "schema_version")).first()
    found = VERSION if row is None else int(row.value)
    if found > VERSION:
        raise DataError(f"the store {where} has schema {found}, newer than {VERSION}; upgrade swe-lightning")
    for step in range(found, VERSION):
        log.warning("the store %s goes from schema %d to %d; older versions cannot open it then", where, step, step + 1)
        MIGRATIONS[step](connection)
    if row is None or found != VERSION:
        set_meta(connection, "schema_version", str(VERSION))
    if connection.execute(sa.select(turn.c.id)).first() is None:
        connection.execute(sa.insert(turn).values(id=1, holder="", changes=0))


def content_digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


def save_contents(connection: sa.Connection, bodies: dict[bytes, bytes]) -> None:
    """Store contents by their digests; those that are there already stay."""
    known: set[bytes] = set()
    digests = list(bodies)
    for at in range(0, len(digests), 500):  # SQLite bounds the variables of a statement
        part = sa.select(contents.c.digest).where(contents.c.digest.in_(digests[at : at + 500]))
        known |= set(connection.execute(part).scalars())
    new = [{"digest": digest, "body": body} for digest, body in bodies.items() if digest not in known]
    if new:
        connection.execute(sa.insert(contents), new)


def _share_contents(connection: sa.Connection) -> None:
    """1 to 2: each rollout held its task and configuration itself."""
    last, size = 0, 500
    while True:
        columns = (rollouts.c.position, rollouts.c.task, rollouts.c.config)
        query = sa.select(*columns).where(rollouts.c.position > last).order_by(rollouts.c.position).limit(size)
        found = connection.execute(query).all()
        if not found:
            return
        save_contents(connection, {content_digest(body): body for row in found for body in (row.task, row.config)})
        changed = [
            {"at": row.position, "t": content_digest(row.task), "c": content_digest(row.config)} for row in found
        ]
        target = rollouts.c.position == sa.bindparam("at")
        values: dict[str, Any] = {"task": sa.bindparam("t"), "config": sa.bindparam("c")}
        connection.execute(sa.update(rollouts).where(target).values(**values), changed)
        last = found[-1].position


def _name_protocols(_: sa.Connection) -> None:
    """2 to 3: the body of a call says what the client spoke. Of calls before, that is not known and stays left out; but
    older versions cannot read a body that says it."""


# version N -> the step that brings a store of version N to N + 1
MIGRATIONS: dict[int, Callable[[sa.Connection], None]] = {1: _share_contents, 2: _name_protocols}


def set_meta(connection: sa.Connection, name: str, value: str) -> None:
    upsert(connection, meta, {"name": name, "value": value})


def upsert(connection: sa.Connection, table: sa.Table, values: dict[str, Any]) -> None:
    """Portable: the store has one writer at a time, so update-then-insert cannot race."""
    key = sa.and_(*(column == values[column.name] for column in table.primary_key))
    if not connection.execute(sa.update(table).where(key).values(**values)).rowcount:
        connection.execute(sa.insert(table).values(**values))
