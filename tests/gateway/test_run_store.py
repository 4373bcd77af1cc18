"""A run whose store is a PostgreSQL database: the recipe names it, the stack uses it, `swel runs` reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa

from swe_lightning.controller.stack import Stack
from swe_lightning.errors import DataError, RecipeError
from swe_lightning.gateway import database as databases
from swe_lightning.monitor.runs import list_runs, open_store, show_rollout, show_run
from swe_lightning.recipe import load_recipe
from swe_lightning.records import Rollout
from swe_lightning.rundir import RunDir

from .postgres import database, empty_database, server  # noqa: F401


def swel(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)


def test_a_run_on_postgres_is_read_by_the_commands(
    tmp_path: Path,
    database: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    parsed = sa.make_url(database)
    public = databases.without_password(database)
    monkeypatch.setenv("PGPASSWORD", str(parsed.password))
    run = tmp_path / "runs" / "one"
    with Stack(RunDir(run), workers=1, concurrency=1, max_context=512, store=public) as stack:
        stack.gateway.create_rollouts([Rollout(rollout_id=f"r{i}", group_id="g", task={"n": i}) for i in range(3)])
        stack.gateway.claim("r1", "w")
        argv = [part for child in psutil.Process().children(recursive=True) for part in child.cmdline()]
        key = (run / "keys" / "signing.key").read_text().strip()
        assert public in argv
        assert not [part for part in argv if key in part or str(parsed.password) in part], "S19"
    assert not (run / "gateway.db").exists()
    assert json.loads((run / "gateway.json").read_text())["store"] == public
    with open_store(run) as store:
        assert store.counts() == {"queuing": 2, "running": 1, "succeeded": 0, "failed": 0}
        assert store.rollout("r1")["task"] == {"n": 1}
        with pytest.raises(sa.exc.InternalError, match="read-only"):
            store._connection.execute(sa.text("DELETE FROM rollouts"))
    assert show_run(run)["rollouts"]["running"] == 1
    assert [r["rollouts"]["queuing"] for r in list_runs(tmp_path / "runs")] == [2]
    assert show_rollout(run, "r1")["events"][0]["kind"] == "claimed"
    assert swel("gateway", "export", run, tmp_path / "x.jsonl").returncode == 0
    assert (tmp_path / "x.jsonl").read_text().count('{"rollout":') == 3

    again = databases.without_password(empty_database(request))
    assert swel("gateway", "import", tmp_path / "x.jsonl", tmp_path / "again", "--store", again).returncode == 0
    assert swel("gateway", "export", tmp_path / "again", tmp_path / "y.jsonl").returncode == 0, (
        "the run knows its store"
    )
    assert (tmp_path / "y.jsonl").read_bytes() == (tmp_path / "x.jsonl").read_bytes()
    assert not (tmp_path / "again" / "gateway.db").exists()

    refused = swel("runs", "show", run, PGPASSWORD="wrong")
    assert (refused.returncode, len(refused.stderr.strip().splitlines())) == (2, 1)
    assert "PGPASSWORD" in refused.stderr
    everything = "".join(p.read_text(errors="replace") for p in run.rglob("*") if p.is_file())
    assert str(parsed.password) not in everything


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://u:hidden-word@h/d", "PGPASSWORD"),
        ("postgresql://h/d?password=hidden-word", "PGPASSWORD"),
        ("mysql://hidden-word@h/d", "postgresql://USER@HOST/DATABASE"),
        ("postgresql://hidden-word@h", "postgresql://USER@HOST/DATABASE"),
        ("postgresql://hidden-word@h:port/d", "postgresql://USER@HOST/DATABASE"),
    ],
)
def test_a_recipe_names_a_database_and_holds_no_password(url: str, words: str) -> None:
    good = "postgresql://me@h:5433/d?passfile=/x&options=-csearch_path%3Drun7"
    assert load_recipe("tiny_cpu.yaml", [f"store={good}"]).store == good
    with pytest.raises(RecipeError, match=words) as e:
        load_recipe("tiny_cpu.yaml", [f"store={url}"])
    assert "hidden-word" not in str(e.value)


def test_what_is_written_down_of_a_url_is_no_secret() -> None:
    url = "postgresql+psycopg://u:secret@h:1/d?password=secret&passfile=/f"
    assert databases.without_password(url) == "postgresql://u@h:1/d?passfile=%2Ff"


def test_a_database_that_is_away_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "gateway.json").write_text('{"url": "http://x", "pid": 1, "store": "postgresql://u@127.0.0.1:1/d"}')
    with (
        pytest.raises(DataError, match=r"u@127\.0\.0\.1:1/d.*is the server up") as e,
        open_store(tmp_path),
    ):
        pass
    assert "\n" not in str(e.value)
    assert list_runs(tmp_path)[0]["state"] == "unreadable"
    done = swel("doctor", "--store", "postgresql://u:secret@h/d")
    assert (done.returncode, "secret" in done.stderr + done.stdout) == (2, False)
