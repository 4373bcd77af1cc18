"""The difficulty probe on the real stack, killed in the middle: the same command goes on, and no rollout runs twice."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TASKS, K = 4, 3


@pytest.fixture
def tasks(repository: Path, task: dict[str, Any], tmp_path: Path) -> Path:
    """Four tasks on the one bug, each with a branch of its own."""
    clone = tmp_path / "shop.git"
    subprocess.run(["git", "clone", "-q", "--bare", str(repository), str(clone)], check=True)
    rows = []
    for number in range(TASKS):
        name = f"shop.copy{number}"
        subprocess.run(["git", "branch", name, task["instance_id"]], cwd=clone, check=True)
        rows.append({**task, "instance_id": name, "repo_path": str(clone)})
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.slow
def test_a_killed_probe_goes_on(tasks: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcomes = out / "probe.jsonl"
    command = [
        *(sys.executable, "-m", "cli", "data", "filter", "--input", str(tasks), "--out", str(out), "--json"),
        *("--probe-model", "script:noop", "--k", str(K), "--val-size", "1"),
        *("--set", "rollout.workers=1", "--set", "rollout.concurrency=1"),
    ]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 150
    while not outcomes.exists() or outcomes.read_bytes().count(b"\n") < 2:
        assert first.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    before = outcomes.read_bytes()
    assert before.count(b"\n") < TASKS * K
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["difficulty"] == {"all_solved": 0, "mixed": 0, "none_solved": TASKS, "undecided": 0}
    assert outcomes.read_bytes().startswith(before), "what was known stayed"
    records = [json.loads(line) for line in outcomes.read_text().splitlines()]
    every = sorted((f"shop.copy{task}", number) for task in range(TASKS) for number in range(K))
    assert sorted((r["instance_id"], r["rollout"]) for r in records) == every
    assert not any(r["solved"] for r in records)
    with sqlite3.connect(f"file:{out / 'probe' / 'gateway.db'}?mode=ro", uri=True) as db:
        names = [name for (name,) in db.execute("SELECT rollout_id FROM rollouts ORDER BY rollout_id")]
    assert names == [f"probe-{name}-{number}" for name, number in every], "the store holds each rollout once"
