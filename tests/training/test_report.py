"""Every sink of a run's numbers gets them, and an absent one is said before anything runs."""

from __future__ import annotations

import importlib.util
import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from swe_lightning.recipe import load_recipe
from swe_lightning.rundir import RunDir
from swe_lightning.training.report import Reporter

RECORD = {"step": 3, "reward_mean": 0.25, "loss": -0.001, "rows": 17.0, "rollout_s": 2.0, "dropped": {"x": 1}}


def test_a_step_is_one_line_and_one_record(tmp_path: Path) -> None:
    text = io.StringIO()
    run = RunDir(tmp_path)
    with Reporter(run, load_recipe("tiny_cpu.yaml"), Console(file=text, width=200)) as reporter:
        reporter.begin("step 3", 4)
        reporter.advance()
        reporter.step(RECORD)
    assert text.getvalue() == "step    3  reward 0.250  loss -0.0010  rows 17  rollout 2.0s\n"
    assert list(run.metrics()) == [RECORD]


@pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="wandb is not installed: pip install wandb")
def test_wandb_offline_gets_the_numbers(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    recipe = load_recipe("tiny_cpu.yaml", ["wandb.enabled=true"])
    with Reporter(run, recipe, Console(file=io.StringIO())) as reporter:
        reporter.step(RECORD)
    (offline,) = (tmp_path / "wandb").glob("offline-run-*")
    deadline = time.monotonic() + 30  # wandb's own process writes the file, and may end after finish() returned
    while b"reward_mean" not in next(offline.glob("*.wandb")).read_bytes():
        assert time.monotonic() < deadline, "the numbers never reached wandb's file"
        time.sleep(0.05)
