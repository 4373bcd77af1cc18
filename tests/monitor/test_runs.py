"""A run directory with a real store, written by the real gateway and its test engine, looked at from outside."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml
from rich.console import Console
from typer.testing import CliRunner

from swe_lightning.commands.trajectory import app
from swe_lightning.errors import DataError
from swe_lightning.evaluation.result import EvalRecord, EvalResult
from swe_lightning.gateway.client import GatewayClient
from swe_lightning.gateway.fakes import ANSWER, FakeEngine
from swe_lightning.gateway.tokens import Keyring
from swe_lightning.monitor.rows import stats_of
from swe_lightning.monitor.runs import list_runs, open_store, show_rollout, show_run
from swe_lightning.monitor.tables import rollout_view, run_view, runs_table
from swe_lightning.records import InfraReason, Outcome, Rollout
from swe_lightning.rundir import RunDir
from swe_lightning.trajectory import commands

ISSUE = "add() subtracts\nwhen asked to add."
VERDICT = {"f2p": {"t::a": False}, "p2p_failed": ["t::b"], "dropped_paths": ["conftest.py"]}


def rollout(name: str, mode: str = "train") -> Rollout:
    task = {"instance_id": "calc__1", "repo": "calc", "problem_statement": ISSUE, "bug_file": "calc.py", "bug_line": 2}
    return Rollout(rollout_id=name, group_id="g", mode=mode, max_attempts=1, task=task)


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    application: Any = FakeEngine()
    server = uvicorn.Server(uvicorn.Config(application, port=0, access_log=False, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, engine: str) -> Path:
    """Four rollouts: one of two turns and graded, one resolved, one broken, one queuing."""
    run = tmp_path_factory.mktemp("runs") / "deep" / "first"
    process = subprocess.Popen([sys.executable, "-m", "swe_lightning.gateway.server", "--run", str(run)])
    try:
        deadline = time.monotonic() + 60
        while not (run / "gateway.json").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        url = json.loads((run / "gateway.json").read_bytes())["url"]
        token = Keyring.load_or_create(RunDir(run).key_file).mint("control", ttl_s=600)
        with GatewayClient(url, token) as gateway:
            _play(gateway, engine)
    finally:
        process.terminate()
        process.wait(30)
    recipe = {"name": "mini", "training": {"steps": 3}, "model": {"path": "m"}}
    recipe["sandbox"] = {"whitelist": ["db.example.org:5432"]}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lines = [
        {"step": 0, "reward_mean": 0.1},
        {"step": 1, "reward_mean": 9.0},
        {"step": 1, "reward_mean": 0.25, "val_rate": 0.5},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2, "rew')
    EvalResult("step2", 1, 0.7, [EvalRecord("e", "calc__1", "calc", 0, reward=1.0)]).save(run)
    return run


def _play(gateway: GatewayClient, engine: str) -> None:
    gateway.register_model(engine, version=4, name="policy", max_context=4096)
    gateway.create_rollouts([rollout("two-turns"), rollout("solved", "val"), rollout("broken"), rollout("waiting")])
    outcomes = {
        "two-turns": Outcome(reward=0.0, exit_status="submitted", message="1 of 1 fail", verdict=VERDICT),
        "solved": Outcome(reward=1.0, exit_status="submitted"),
        "broken": Outcome(infra_reason=InfraReason.SANDBOX_LOST, message="box gone"),
    }
    for name, outcome in outcomes.items():
        lease = gateway.claim(name, "test")
        if name == "two-turns":
            messages = [{"role": "system", "content": "Fix it."}, {"role": "user", "content": "t fails"}]
            for observation in ("saw this", None):
                headers = {"authorization": f"Bearer {lease.agent_token}"}
                body = {"model": "policy", "messages": messages}
                reply = httpx.post(lease.base_url + "/chat/completions", json=body, headers=headers, timeout=30)
                text = reply.raise_for_status().json()["choices"][0]["message"]["content"]
                messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": observation}]
        gateway.report(name, lease.rollout.attempt, outcome, token=lease.grade_token)


def printed(view: Any) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_list(run_dir: Path) -> None:
    (found,) = list_runs(run_dir.parent.parent)
    assert (found["name"], found["state"], found["step"], found["steps"]) == ("mini", "stopped", 2, 3)
    assert (found["reward_mean"], found["val_rate"]) == (0.25, 0.5), "of two lines of one step the later counts"
    assert found["rollouts"] == {"queuing": 1, "running": 0, "succeeded": 2, "failed": 1}
    json.dumps(found)
    assert "mini" in printed(runs_table([found]))
    assert "no runs here" in printed(runs_table([]))


def test_a_run_is_finished_with_its_last_step_counted_from_0(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"name": "mini", "training": {"steps": 2}}))
    for step, state in enumerate(("stopped", "finished")):
        RunDir(tmp_path).append_metrics({"step": step})
        assert show_run(tmp_path)["state"] == state
    assert show_run(tmp_path)["step"] == 2


def test_a_damaged_store_does_not_hide_other_runs(run_dir: Path, tmp_path: Path) -> None:
    for name in ("broken", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_bytes((run_dir / "recipe.yaml").read_bytes())
    (tmp_path / "broken" / "gateway.db").write_bytes(b"no database" * 500)
    states = {Path(row["path"]).name: row["state"] for row in list_runs(tmp_path)}
    assert states == {"broken": "unreadable", "whole": "stopped"}
    assert "unreadable" in printed(runs_table(list_runs(tmp_path)))


def test_show_run(run_dir: Path) -> None:
    data = show_run(run_dir)
    assert data["outcomes"] == {"train": {"submitted": 1}, "val": {"resolved": 1}}
    assert data["infra"] == {"sandbox_lost": 1}
    assert data["calls"] == 2
    assert [e["label"] for e in data["evaluations"]] == ["step2"]
    json.dumps(data)
    text = printed(run_view(data))
    for expected in ("step 2/3", "1 sandbox_lost", "two-turns", "box gone", "step2", "open to db.example.org:5432"):
        assert expected in text


def test_state_follows_the_lock(run_dir: Path) -> None:
    run = RunDir(run_dir)
    run.lock()
    try:
        assert show_run(run_dir)["state"] == "running"
    finally:
        run.unlock()
    assert show_run(run_dir)["state"] == "stopped"


def test_follow_one_rollout(run_dir: Path) -> None:
    data = show_rollout(run_dir, "two-turns")
    assert data["issue"] == ISSUE
    first, second = data["turns"]
    assert (first["reply"], first["observation"]) == (ANSWER, "saw this")
    assert second["observation"] is None
    assert first["weight_versions"] == [4, 4]
    assert first["logprob_mean"] == -0.5
    sampled = len(ANSWER) + 1
    assert [t["trained_tokens"] for t in data["turns"]] == [sampled, sampled]
    (row,) = data["rows"]
    assert (row["trained"], row["calls"]) == (2 * sampled, [t["sequence"] for t in data["turns"]])
    assert data["outcome"]["verdict"] == VERDICT
    assert [e["kind"] for e in data["events"]] == ["claimed", "reward"]
    json.dumps(data)
    text = printed(rollout_view(data))
    for expected in ("add() subtracts", "calc.py:2", "saw this", "reward 0.0", "fails  t::a", "conftest.py", "row 0"):
        assert expected in text


def test_rollouts_without_calls_or_verdict(run_dir: Path) -> None:
    broken = show_rollout(run_dir, "broken")
    assert broken["dropped"] == {"rollout:no_model_calls": 1}
    assert "no verdict: sandbox_lost: box gone" in printed(rollout_view(broken))
    assert "not finished" in printed(rollout_view(show_rollout(run_dir, "waiting")))


def test_reading_changes_nothing(run_dir: Path) -> None:
    before = (run_dir / "gateway.db").read_bytes()
    show_run(run_dir)
    with open_store(run_dir) as store:
        assert store.graded("train") == ["two-turns"]
        assert len(store.calls("two-turns")) == 2
    assert (run_dir / "gateway.db").read_bytes() == before


def test_mistakes_get_one_sentence(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rollout two in this run; there are for example two-turns"):
        show_rollout(run_dir, "two")
    for broken in (show_run, list_runs):
        with pytest.raises(DataError):
            broken(tmp_path / "nothing")
    (tmp_path / "gateway.db").write_bytes(os.urandom(4096))
    with pytest.raises(DataError, match="cannot read the store"):
        show_run(tmp_path)


def test_row_statistics_of_a_run_follow_its_recipe_and_account_for_every_rollout(run_dir: Path, tmp_path: Path) -> None:
    data = json.loads(json.dumps(stats_of(run_dir)))
    assert data["dropped"] == {"infra:sandbox_lost": 1}
    assert data["stats"]["rollouts"] == 1  # of the two that ended, one was graded
    assert data["stats"]["trained_tokens"] == data["stats"]["tokens_kept"] > 0
    assert stats_of(run_dir, step=0)["stats"].get("rollouts", 0) == 0
    text = commands.stats_text(data)
    assert "rows_per_rollout" in text
    assert "infra:sandbox_lost" in text

    limited = tmp_path / "limited"
    limited.mkdir()
    (limited / "gateway.db").symlink_to(run_dir / "gateway.db")
    (limited / "recipe.yaml").write_text(yaml.safe_dump({"training": {"prompt_limit": 999, "response_limit": 1}}))
    cut = stats_of(limited)
    rows = cut["stats"]["rows"]
    assert (cut["stats"]["tokens_kept"], cut["stats"]["rows_cut"]) == (rows, rows)
    assert cut["lost_tokens"] == {"row:response_cut": cut["stats"]["trained_tokens"] - rows}
    assert cut["rollouts_half_in"] == ["two-turns"]
    assert "half in: two-turns" in commands.stats_text(cut)
    shown = show_rollout(limited, "two-turns")
    assert sum(row["trained"] for row in shown["rows"]) == rows
    assert "lost to a limit" in commands.show_text(shown)


def test_rows_are_printed_for_a_person_and_as_json(run_dir: Path) -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["show", str(run_dir), "two-turns"])
    assert shown.exit_code == 0, shown.output
    assert "row 0:" in shown.output
    assert "  + [" in shown.output
    data = json.loads(runner.invoke(app, ["show", str(run_dir), "two-turns", "--json"]).output)
    assert data["rows"][0]["segments"][1]["trained"] is True
    assert json.loads(runner.invoke(app, ["stats", str(run_dir), "--json"]).output)["stats"]["rollouts"] == 1
