"""`swel doctor` finds before a run what would otherwise end it: real model server, real box, real database."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import uvicorn

from swe_lightning import doctor
from swe_lightning.gateway.fakes import FakeEngine, chat_reply


@pytest.fixture
def engine() -> Iterator[tuple[FakeEngine, str]]:
    fake: Any = FakeEngine()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(fake, log_level="error", access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield fake, f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join(10)


def swel_doctor(folder: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    command = [sys.executable, "-m", "cli", "doctor", *arguments, "--run", str(folder / "runs"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    rows = json.loads(done.stdout) if done.stdout else []
    return done.returncode, {row["name"]: row for row in rows}, done.stderr


def test_an_engine_that_can_be_trained_from_passes(engine: tuple[FakeEngine, str], tmp_path: Path) -> None:
    fake, url = engine
    code, rows, _ = swel_doctor(tmp_path, "--url", url, "--model", "mine")
    assert rows[f"model server {url}"]["ok"]
    assert fake.seen[-1]["model"] == "mine"
    assert {"sandbox", "store", "disk", "open files"} < set(rows)
    assert (code == 0) == all(row["ok"] for row in rows.values())
    assert not list(tmp_path.iterdir()), "a check leaves nothing behind"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (("prompt_token_ids",), "prompt_token_ids"),
        (("choices", 0, "token_ids"), "choices[0].token_ids"),
        (("choices", 0, "logprobs"), "choices[0].logprobs"),
    ],
)
def test_what_the_engine_lacks_is_named(engine: tuple[FakeEngine, str], path: tuple[Any, ...], field: str) -> None:
    fake, url = engine

    def behaviour(_path: str, body: dict[str, Any]) -> Any:
        reply: Any = chat_reply(body)
        holder = reply
        for step in path[:-1]:
            holder = holder[step]
        del holder[path[-1]]
        return 200, orjson.dumps(reply), {}

    fake.behaviour = behaviour
    found = doctor.examine(None, urls=[url], model="policy", run=Path("runs"))[0]
    assert not found.ok
    assert field in found.detail


def test_a_server_that_is_not_there_is_exit_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    code, rows, errors = swel_doctor(tmp_path, "--url", f"http://127.0.0.1:{port}")
    assert code == 1
    assert "no model server answers" in rows[f"model server http://127.0.0.1:{port}"]["detail"]
    assert "Traceback" not in errors


def test_a_recipe_is_checked_without_running_it(tmp_path: Path) -> None:
    code, rows, errors = swel_doctor(tmp_path, "tiny_cpu.yaml", "--set", f"tasks.train={tmp_path / 'no.jsonl'}")
    assert (code, rows["tasks"]["ok"]) == (1, False)
    assert "no.jsonl is not there" in rows["tasks"]["detail"]
    assert rows["recipe"]["ok"], errors
    code, _, errors = swel_doctor(tmp_path, "no_such_recipe.yaml")
    assert (code, len(errors.strip().splitlines())) == (2, 1)


def test_a_database_that_does_not_answer_is_one_line_without_its_password(tmp_path: Path) -> None:
    pytest.importorskip("psycopg", reason="needs the [postgres] extra: pip install 'swe-lightning[postgres]'")
    url = "postgresql://me:hidden-word@127.0.0.1:1/db?connect_timeout=2"
    found = doctor.examine(None, urls=[], model="", run=tmp_path, store_url=url)
    store = next(check for check in found if check.name == "store")
    assert not store.ok
    assert "hidden-word" not in store.detail
    assert "\n" not in store.detail
