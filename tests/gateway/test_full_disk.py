"""A disk that is really full (a small tmpfs): calls are answered 507, what was acknowledged stays, space ends it.

Mounting needs root.
"""

from __future__ import annotations

import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from .conftest import EngineServer, GatewayProcess, ask, code_of, running, until
from .postgres import Postgres, server, text  # noqa: F401

TEXT = "".join(chr(33 + i * i % 90) for i in range(20_000))


@contextmanager
def small_disk(folder: Path, size: str, owner: str | None = None) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    options = f"size={size}" + (f",mode=700,uid={pwd.getpwnam(owner).pw_uid}" if owner else "")
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "swel-test", folder], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"no small file system here (mount -t tmpfs: {mount.stderr.strip()}); run the tests as root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill_and_free(gateway: GatewayProcess, engine: EngineServer, disk: Path, left: int) -> None:
    """Calls until the disk, of which `left` bytes are free, is full; then with space again."""
    lease = gateway.lease(register=engine.url, rollout_id="r0")
    (disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(disk).free - left))
    answers: list[httpx.Response] = []
    until(lambda: answers.append(ask(lease, f"{len(answers)} {TEXT}")) or answers[-1].status_code != 200)
    assert code_of(answers[-1]) == (507, "store_full")
    assert gateway.client.get_rollout("r0").state == "running"
    (disk / "ballast").unlink()
    assert ask(lease, "after").status_code == 200
    kept = [c.request["messages"][0]["content"] for c in gateway.client.calls("r0") if c.trainable]
    assert kept == [f"{i} {TEXT}" for i, a in enumerate(answers) if a.status_code == 200] + ["after"]
    events = gateway.client.events("r0")
    assert [e["sequence"] for e in events] == list(range(1, len(events) + 1))


def test_sqlite(tmp_path: Path, engine: EngineServer) -> None:
    with small_disk(tmp_path, "3m"), running(tmp_path) as gateway:
        fill_and_free(gateway, engine, tmp_path, 200_000)


def test_a_tablespace_of_postgres(
    server: Postgres,  # noqa: F811
    tmp_path: Path,
    engine: EngineServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with small_disk(server.home / "small", "32m", server.user) as disk:
        url = server.create()
        admin = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        (disk / "space").mkdir()
        shutil.chown(disk / "space", server.user)
        with admin.connect() as c:
            c.exec_driver_sql(f"CREATE TABLESPACE small LOCATION '{disk / 'space'}'")
        full = server.create("TABLESPACE small")
        monkeypatch.setenv("SWEL_STORE_URL", text(full))
        try:
            with running(tmp_path) as gateway:
                fill_and_free(gateway, engine, disk, 400_000)
        finally:
            with admin.connect() as c:
                c.exec_driver_sql(f"DROP DATABASE {full.database} WITH (FORCE)")
                c.exec_driver_sql("DROP TABLESPACE small")
