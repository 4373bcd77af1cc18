"""`swel train` as a process, at the smallest scale: it learns something, and nothing that dies can stop it.

Two groups of two rollouts and a few steps, with a tiny policy, real mini-SWE-agent, real boxes and real verdicts. The
run is killed in every way a machine can kill it; the same command goes on, and what was recorded is not sampled again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from swe_lightning.monitor.runs import open_store

pytestmark = [pytest.mark.train, pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = {
    "warm_start.demonstrations": "300",
    "warm_start.real_demonstrations": "3",
    "warm_start.steps": "40",
    "rollout.groups_per_step": "2",
    "rollout.group_size": "2",
    "rollout.workers": "1",
    "rollout.concurrency": "4",
    "training.save_every": "1",
}


def command(run: Path, task_file: Path, steps: int, **more: str) -> list[str]:
    values = {
        **SMALL,
        "tasks.train": str(task_file),
        "tasks.val": str(task_file.parent / "val.jsonl"),
        "training.steps": str(steps),
        **more,
    }
    options = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "cli", "train", "tiny_cpu.yaml", "--run", str(run), *options]


def metrics(run: Path) -> list[dict[str, float]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"the run ended early ({process.returncode}): {process.communicate()[1][-2000:]}")
        assert time.monotonic() < deadline, "not reached in time"
        time.sleep(0.05)


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(arguments: list[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def recorded(run: Path) -> dict[str, list[tuple[int, int]]]:
    """rollout -> (attempt, sampled tokens) of its calls."""
    with open_store(run) as store:
        return {
            rollout: [(call.attempt, len(call.response_ids)) for call in store.calls(rollout)]
            for rollout in store.graded("train")
        }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, task_file: Path) -> Path:
    """A run that nobody disturbed: two steps."""
    run = tmp_path_factory.mktemp("runs") / "quiet"
    finish(command(run, task_file, 2))
    return run


def test_the_whole_path_trains_on_what_was_sampled(trained: Path) -> None:
    lines = metrics(trained)
    assert [line["step"] for line in lines] == [0, 1]
    for line in lines:
        assert line["graded"] == 4
        assert line["rows"] >= 4
        # Token truth: what the engine reported is what the trainer computes for the same ids and weights.
        assert line["off_policy_diff_max"] < 1e-3
        assert line["trained_tokens"] > 0
    for step in (0, 1, 2):
        assert (trained / "checkpoints" / f"step{step}" / "complete").exists()
    calls = recorded(trained)
    assert sorted(calls) == [f"s{s:05d}-g{g:03d}-r{r:02d}" for s in (0, 1) for g in (0, 1) for r in (0, 1)]
    with open_store(trained) as store:
        assert {store.rollout(r)["task"]["instance_id"] for r in calls} == {"shop.plus_minus"}, (
            "held-out tasks stay out"
        )
        versions = {c.version_start for r in calls if r.startswith("s00001") for c in store.calls(r)}
    assert versions == {1}, "the second step must be sampled with the weights of the first update"


def test_a_finished_run_has_nothing_left_to_do(trained: Path, task_file: Path) -> None:
    before = recorded(trained)
    finish(command(trained, task_file, 2))
    assert recorded(trained) == before
    assert len(metrics(trained)) == 2


def test_another_recipe_is_refused_in_the_same_directory(trained: Path, task_file: Path) -> None:
    arguments = command(trained, task_file, 2, **{"training.lr": "0.1"})
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "changed: training.lr" in done.stderr


def test_no_secret_is_in_argv_or_logs(trained: Path) -> None:
    key = (trained / "keys" / "signing.key").read_bytes()
    assert (trained / "keys" / "signing.key").stat().st_mode & 0o077 == 0
    for log in (trained / "logs").rglob("*"):
        if log.is_file():
            assert key.strip() not in log.read_bytes()
            assert b"Bearer " not in log.read_bytes()


def test_every_process_may_be_killed(tmp_path: Path, task_file: Path) -> None:
    run = tmp_path / "run"
    arguments = command(run, task_file, 4, **{"training.save_every": "100"})
    with start(arguments) as process:
        for words in ("serve gateway", "serve model", "controller.worker", "serve controller"):
            wait_until(lambda: len(metrics(run)) >= 1, process)
            wait_until(lambda words=words: bool(children(process.pid, words)), process)  # type: ignore[misc]
            os.kill(children(process.pid, words)[0], signal.SIGKILL)
            time.sleep(0.5)
        wait_until(lambda: len(metrics(run)) >= 2, process)
        before = recorded(run)
        process.kill()
    finish(arguments)
    assert {line["step"] for line in metrics(run)} == {0, 1, 2, 3}
    after = recorded(run)
    assert len(after) == 16
    assert {r: after[r] for r in before} == before, "what was graded before the kill must not be sampled again"
    with open_store(run) as store:
        versions = {(int(r[1:6]), call.version_start) for r in after for call in store.calls(r)}
    assert versions == {(step, step) for step in range(4)}, "each step must be sampled with the weights before it"


def test_ctrl_c_finishes_the_step_and_the_same_command_goes_on(tmp_path: Path, task_file: Path) -> None:
    run = tmp_path / "run"
    arguments = command(run, task_file, 50, **{"training.save_every": "100"})
    with start(arguments) as process:
        wait_until(lambda: len(metrics(run)) >= 1, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
        assert process.stderr is not None
        assert "the same command resumes" in process.stderr.read()
    steps = len(metrics(run))
    assert (run / "checkpoints" / f"step{steps}" / "complete").exists()
    assert not left_behind(run)
    finish(command(run, task_file, steps + 1, **{"training.save_every": "100"}))
    assert [line["step"] for line in metrics(run)] == list(range(steps + 1))


def children(pid: int, words: str) -> list[int]:
    return [c.pid for c in psutil.Process(pid).children(recursive=True) if words in " ".join(safe_cmdline(c))]


def left_behind(run: Path) -> list[int]:
    return [p.pid for p in psutil.process_iter() if str(run) in " ".join(safe_cmdline(p))]


def safe_cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return []
