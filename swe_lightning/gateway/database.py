"""The engine under the store: SQLite in the run directory, or a PostgreSQL server that several gateways share.

A commit is durable on both: SQLite in WAL mode with synchronous=FULL, PostgreSQL with synchronous_commit=on whatever
the server's default is. Every database error leaves here as a Problem (a request failed) or one sentence (the store
cannot be opened); neither shows a statement, its values or a password.
"""

from __future__ import annotations

import os
from typing import Any

import sqlalchemy as sa

from swe_lightning.errors import DataError, MissingPart, UserError
from swe_lightning.gateway import schema
from swe_lightning.gateway.problems import Problem

URL_VARIABLE = "SWEL_STORE_URL"
SECRETS = (URL_VARIABLE, "PGPASSWORD", "PGPASSFILE")
"""Environment variables that may hold the store's password; nothing but the gateway needs them."""
_PREPARE_LOCK = 0x5357454C  # any constant: serialises processes that create or migrate the tables
# A gateway that is frozen inside a transaction must not hold the others up, nor must a vanished machine.
_SESSION = {
    "synchronous_commit": "on",
    "idle_in_transaction_session_timeout": "20s",
    "lock_timeout": "30s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}


def store_url(option: str | None, default: str) -> str:
    """The URL to use: the option, else $SWEL_STORE_URL, else `default`. UserError for a password in the option."""
    if option:
        check_no_password(option, "--store")
    return option or os.environ.get(URL_VARIABLE) or default


def without_password(url: str) -> str:
    """The URL as it may be written down."""
    parsed = parse_url(url).set(drivername="postgresql")._replace(password=None)  # set() takes None for "as it is"
    return parsed.difference_update_query(["password"]).render_as_string()


def check_no_password(url: str, where: str) -> None:
    parsed = parse_url(url)
    if parsed.password or "password" in parsed.query:
        raise UserError(
            f"{where} holds a password, which other users of the machine and the run's files would show; "
            f"leave it out and set PGPASSWORD (or the whole URL in {URL_VARIABLE}), or use ~/.pgpass"
        )


def is_shared(engine: sa.Engine) -> bool:
    """Whether other processes may write too."""
    return engine.dialect.name == "postgresql"


def open_engine(url: str) -> sa.Engine:
    """An engine on `url` whose tables exist and have the current version."""
    parsed = parse_url(url)
    engine = _sqlite(parsed) if parsed.get_backend_name() == "sqlite" else _postgres(parsed)
    shown = parsed.set(password=None, query={}).render_as_string()
    try:
        with writing(engine.connect()) as connection, connection.begin():
            if is_shared(engine):
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_PREPARE_LOCK)))
            schema.prepare(connection, shown)
    except sa.exc.OperationalError as error:
        engine.dispose()
        raise DataError(f"cannot open the store {shown}: {words(error)}") from error
    except sa.exc.DatabaseError as error:
        engine.dispose()
        raise DataError(f"{shown} is not a store of this program: {words(error)}") from error
    except BaseException:
        engine.dispose()
        raise
    return engine


def writing(connection: sa.Connection) -> sa.Connection:
    """Mark a connection so that its transactions on SQLite take the write lock when they begin."""
    return connection.execution_options(writing=True)


def connection_lost(error: BaseException) -> bool:
    """Whether the database went away, so that what was not committed can be tried again on a new connection."""
    if not isinstance(error, sa.exc.DBAPIError) or not hasattr(error.orig, "sqlstate"):
        return False
    state: str = getattr(error.orig, "sqlstate", None) or ""
    if error.connection_invalidated or (not state and isinstance(error, sa.exc.OperationalError)):
        return True
    # Shutdown, crash and start of the server, too many clients, a primary that became read-only, our time limits.
    return state[:2] in ("08", "57") or state in ("53300", "25006", "25P03", "55P03", "40001", "40P01")


def as_problem(error: Exception) -> Exception:
    """A database error as the refusal a client sees; any other error as it is."""
    if isinstance(error, UnicodeEncodeError):
        return Problem(422, "bad_request", f"a text cannot be stored: {error.reason}")
    if not isinstance(error, sa.exc.DBAPIError):
        return error
    text = words(error)
    if getattr(error.orig, "sqlstate", None) == "53100" or "full" in text or "disk I/O" in text:
        return Problem(507, "store_full", f"the store cannot grow ({text}); free disk space", retry_after_s=5)
    if connection_lost(error) or "database is locked" in text:
        return Problem(503, "store_unavailable", f"the store does not answer ({text})", retry_after_s=5)
    if isinstance(error, sa.exc.DataError):
        return Problem(422, "bad_request", f"a value cannot be stored: {text}")
    return Problem(500, "store_error", f"the store failed: {text}")


def parse_url(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
        backend = parsed.get_backend_name()
    except (sa.exc.ArgumentError, ValueError):
        raise UserError("the store URL cannot be read; give postgresql://USER@HOST/DATABASE or leave it out") from None
    if backend not in ("sqlite", "postgresql", "postgres"):
        raise UserError(f"no store on {backend}; give postgresql://USER@HOST/DATABASE or leave it out for SQLite")
    return parsed if backend == "sqlite" else parsed.set(drivername="postgresql+psycopg")


def _sqlite(url: sa.URL) -> sa.Engine:
    arguments = {"timeout": 60, "check_same_thread": False}
    engine = sa.create_engine(url, connect_args=arguments, pool_size=16, max_overflow=48, hide_parameters=True)
    sa.event.listen(engine, "connect", _configure_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions are begun by _begin_sqlite, never implicitly
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "cache_size=-16000"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: sa.Connection) -> None:
    immediate = connection.get_execution_options().get("writing", False)
    connection.connection.cursor().execute("BEGIN IMMEDIATE" if immediate else "BEGIN")


def reading_engine(url: str) -> sa.Engine:
    """An engine on a PostgreSQL store that can only look: nothing is created, migrated or locked."""
    parsed = parse_url(url)
    _want_psycopg()
    options = {"connect_timeout": 5, "application_name": "swel"}
    engine = sa.create_engine(parsed, connect_args=options, poolclass=sa.NullPool, hide_parameters=True)
    return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)


def _want_psycopg() -> None:
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise MissingPart("a PostgreSQL store needs psycopg; pip install 'swe-lightning[postgres]'") from None


def _postgres(url: sa.URL) -> sa.Engine:
    _want_psycopg()
    engine = sa.create_engine(
        url,
        connect_args={"connect_timeout": 5, "application_name": "swel-gateway"},
        isolation_level="READ COMMITTED",  # each statement after the turn's lock sees what its last holder committed
        pool_size=8,
        max_overflow=16,
        pool_pre_ping=True,
        hide_parameters=True,
    )
    sa.event.listen(engine, "connect", _configure_postgres)
    return engine


def _configure_postgres(connection: Any, _record: Any) -> None:
    before, connection.autocommit = connection.autocommit, True
    for name, value in _SESSION.items():
        connection.execute(f"SET {name} = '{value}'")
    connection.autocommit = before


def words(error: sa.exc.DBAPIError) -> str:
    """The database's own words, one line of them."""
    lines = str(error.orig).strip().splitlines()
    return lines[0] if lines else type(error.orig).__name__
