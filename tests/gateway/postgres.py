"""A real PostgreSQL server for tests: its own data directory, a loopback port, an unprivileged user, a password.

Uses SWEL_TEST_POSTGRES_URL if that is set (a server whose user may create databases); else the newest server found in
/usr/lib/postgresql or on PATH.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

OVERRIDE = "SWEL_TEST_POSTGRES_URL"


def binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: float(p.parts[4]))
    on_path = shutil.which("postgres")
    return found[-1].parent if found else Path(on_path).resolve().parent if on_path else None


class Postgres:
    """Started once; can be stopped hard and started again. `url(name)` is a fresh database."""

    def __init__(self, bin_dir: Path) -> None:
        self.bin = bin_dir
        # In memory where that is possible: killing processes is all that happens here, and a disk makes it slow.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.home = Path(tempfile.mkdtemp(prefix="swel-pg-", dir=memory))
        self.data = self.home / "data"
        self.user: str | None = "nobody" if os.geteuid() == 0 else None
        self.password = secrets.token_hex(8)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        (self.home / "pw").write_text(self.password)
        if self.user:
            entry = pwd.getpwnam(self.user)
            for path in (self.home, self.home / "pw"):
                os.chown(path, entry.pw_uid, entry.pw_gid)
        self._run("initdb", "-D", self.data, "-U", "swel", "--auth=scram-sha-256", "--pwfile", self.home / "pw")
        self.start()

    def _run(self, program: str, *arguments: Any) -> None:
        subprocess.run(
            [self.bin / program, *arguments],
            user=self.user,
            extra_groups=[] if self.user else None,
            cwd=self.home,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "HOME": str(self.home)},
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=60,
        )

    def start(self) -> None:
        options = f"-p {self.port} -h 127.0.0.1 -k {self.home} -c max_connections=200"
        self._run("pg_ctl", "-D", self.data, "-l", self.home / "log", "-o", options, "-w", "start")

    def stop(self, how: str = "immediate") -> None:
        """`immediate` is a crash: no checkpoint, clients are cut off, the next start recovers from the log."""
        self._run("pg_ctl", "-D", self.data, "-m", how, "-w", "stop")

    def remove(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    def create(self, options: str = "") -> sa.URL:
        server = sa.make_url(f"postgresql+psycopg://swel:{self.password}@127.0.0.1:{self.port}/postgres")
        return _create(server, options)


def _create(server: sa.URL, options: str = "") -> sa.URL:
    name = f"swel_{uuid.uuid4().hex[:12]}"
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name} {options}"))
    engine.dispose()
    return server.set(database=name)


def text(url: sa.URL) -> str:
    """The URL with its password, for the environment of a gateway."""
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


@pytest.fixture(scope="session")
def server() -> Iterator[Postgres]:
    """A server that the test may crash."""
    found = binaries()
    if found is None:
        pytest.skip("no PostgreSQL server here; install Debian's package postgresql")
    postgres = Postgres(found)
    yield postgres
    postgres.remove()


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str:
    return empty_database(request)


def empty_database(request: pytest.FixtureRequest) -> str:
    """URL of an empty database."""
    given = os.environ.get(OVERRIDE)
    if given:
        return text(_create(sa.make_url(given).set(drivername="postgresql+psycopg")))
    if binaries() is None:
        pytest.skip(f"no PostgreSQL server here; install Debian's package postgresql or set {OVERRIDE}")
    return text(request.getfixturevalue("server").create())
