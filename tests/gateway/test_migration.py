"""A store of an older version, made by that version's own statements, is brought up to date in one transaction."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import orjson
import pytest
import sqlalchemy as sa
import zstandard

from swe_lightning.errors import DataError
from swe_lightning.gateway import compact, schema, transfer
from swe_lightning.gateway.store import Store
from swe_lightning.monitor.store import open_store
from swe_lightning.records import ModelCall, Rollout

from .postgres import database, server  # noqa: F401

# Schema 1, in words both databases understand.
OLD = """
CREATE TABLE meta (name VARCHAR PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE rollouts (position INTEGER PRIMARY KEY, rollout_id VARCHAR NOT NULL UNIQUE, group_id VARCHAR NOT NULL,
  mode VARCHAR NOT NULL, state VARCHAR NOT NULL, attempt INTEGER NOT NULL, max_attempts INTEGER NOT NULL,
  timeout_s FLOAT NOT NULL, task BLOB NOT NULL, config BLOB NOT NULL, digest BLOB NOT NULL, claim_id VARCHAR,
  worker VARCHAR, created_at FLOAT NOT NULL, started_at FLOAT, ended_at FLOAT, outcome BLOB, weight_versions BLOB,
  terminal INTEGER UNIQUE);
CREATE INDEX ix_rollouts_group_id ON rollouts (group_id);
CREATE INDEX ix_rollouts_state ON rollouts (state);
CREATE TABLE events (rollout_id VARCHAR, attempt INTEGER, sequence INTEGER, kind VARCHAR NOT NULL,
  event_id VARCHAR NOT NULL, at FLOAT NOT NULL, body BLOB NOT NULL, started_at FLOAT, version_start INTEGER,
  version_end INTEGER, trainable BOOLEAN, parent INTEGER, shared INTEGER, shared_messages INTEGER, prompt BLOB,
  response BLOB, logprobs BLOB, PRIMARY KEY (rollout_id, attempt, sequence), UNIQUE (rollout_id, event_id));
CREATE TABLE models (url VARCHAR PRIMARY KEY, name VARCHAR NOT NULL, version INTEGER NOT NULL, max_context INTEGER);
INSERT INTO meta VALUES ('schema_version', '1'), ('paused', '1');
"""
COLUMNS = (
    "position, rollout_id, group_id, mode, state, attempt, max_attempts, timeout_s, task, config, digest, created_at"
)
TASKS = [{"instance_id": f"t{i % 3}", "text": "long " * 50, "n": [2**70, i % 3]} for i in range(1200)]


def old_rows() -> list[tuple[object, ...]]:
    return [
        (i + 1, f"r{i}", "g", "train", "queuing", 0, 3, 60.0, json.dumps(task).encode(), b'{"k":1}', b"d", 1.0)
        for i, task in enumerate(TASKS)
    ]


def make_old_sqlite(file: Path) -> None:
    with sqlite3.connect(file) as c:
        c.executescript(OLD)
        c.executemany(f"INSERT INTO rollouts ({COLUMNS}) VALUES ({','.join('?' * 12)})", old_rows())


def check(store: Store) -> None:
    assert [r.task for r in store.list_rollouts(None, None, 2000)] == TASKS
    assert store.get_rollout("r5").config == {"k": 1}
    assert store.get_meta("schema_version") == str(schema.VERSION)
    assert store.get_meta("paused") == "1"
    with store.engine.connect() as c:
        assert c.execute(sa.select(sa.func.count()).select_from(schema.contents)).scalar() == 4
    assert store.writer.call(store.claim("r0", "w", "")).attempt == 1
    new = Rollout(rollout_id="new", group_id="g", task=TASKS[0])
    assert store.writer.call(store.create_rollouts([new]))[0][0].task == TASKS[0]


def test_an_old_store_is_read_as_it_is_and_migrated_when_it_is_opened(tmp_path: Path) -> None:
    make_old_sqlite(tmp_path / "gateway.db")
    with open_store(tmp_path) as reader:
        assert reader.rollout("r4")["task"] == TASKS[4]
        assert reader.counts()["queuing"] == 1200
    for _ in range(2):
        store = Store(f"sqlite:///{tmp_path / 'gateway.db'}")
        if store.get_rollout("r0").attempt == 0:
            check(store)
        store.close()
    with open_store(tmp_path) as reader:
        assert reader.rollout("r4")["task"] == TASKS[4]


def test_an_old_postgres_store_is_migrated(database: str) -> None:  # noqa: F811
    import psycopg

    with psycopg.connect(database) as c:
        c.execute(OLD.replace("BLOB", "BYTEA").replace("position INTEGER", "position SERIAL"))
        with c.cursor() as cursor:
            cursor.executemany(f"INSERT INTO rollouts ({COLUMNS}) VALUES ({','.join(['%s'] * 12)})", old_rows())
        c.execute("SELECT setval('rollouts_position_seq', 1200)")
    store = Store(database)
    check(store)
    store.close()


def test_a_migration_that_fails_leaves_the_old_store(tmp_path: Path) -> None:
    file = tmp_path / "gateway.db"
    make_old_sqlite(file)
    with sqlite3.connect(file) as c:  # one row in the last block that the step cannot take
        when = "BEFORE UPDATE ON rollouts WHEN OLD.position = 1100"
        c.execute(f"CREATE TRIGGER broken {when} BEGIN SELECT RAISE(ABORT, 'no'); END")
    with pytest.raises(DataError):
        Store(f"sqlite:///{file}")
    with sqlite3.connect(file) as c:
        assert c.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone() == ("1",)
        assert [json.loads(row[0]) for row in c.execute("SELECT task FROM rollouts ORDER BY position")] == TASKS
        c.execute("DROP TRIGGER broken")
    store = Store(f"sqlite:///{file}")
    check(store)
    store.close()


def make_schema_2(file: Path) -> None:
    """Schema 2 is schema 3 whose calls do not say what their client spoke."""
    store = Store(f"sqlite:///{file}", linger_s=0)
    store.writer.call(store.create_rollouts([Rollout(rollout_id="r", group_id="g")]))
    store.writer.call(store.claim("r", "w", ""))
    for i in range(3):
        store.writer.call(store.record_call(call_of(i)))
    store.close()
    with sqlite3.connect(file) as c:
        for rowid, body in c.execute("SELECT rowid, body FROM events WHERE kind = 'model_call'").fetchall():
            said = orjson.loads(zstandard.decompress(body))
            assert said.pop("protocol") == "messages"
            c.execute("UPDATE events SET body = ? WHERE rowid = ?", (zstandard.compress(orjson.dumps(said)), rowid))
        c.execute("UPDATE meta SET value = '2' WHERE name = 'schema_version'")


def call_of(i: int) -> ModelCall:
    return ModelCall("r", list(range(20 + 2 * i)), [20 + 2 * i], [-0.5], call_id=f"c{i}", protocol="messages")


def test_calls_of_schema_2_are_kept_and_imported_without_their_protocol(tmp_path: Path) -> None:
    make_schema_2(tmp_path / "gateway.db")
    with open_store(tmp_path) as reader:
        assert [call.protocol for call in reader.calls("r")] == [""] * 3
    a, b = Store(f"sqlite:///{tmp_path / 'gateway.db'}", linger_s=0), Store(f"sqlite:///{tmp_path / 'b.db'}")
    assert a.get_meta("schema_version") == str(schema.VERSION)
    lines = list(transfer.export(a.engine))
    old = [line.replace(b'"schema":%d' % schema.VERSION, b'"schema":2') for line in lines]
    transfer.restore(b.engine, old, "file")
    assert list(transfer.export(b.engine)) == lines
    for store in (a, b):
        store.writer.call(store.record_call(call_of(3)))
        assert [e["data"]["protocol"] for e in store.events("r")[1:]] == ["", "", "", "messages"]
        assert [call.protocol for call in compact.decode(store.call_rows("r", 1))] == ["", "", "", "messages"]
        store.close()
