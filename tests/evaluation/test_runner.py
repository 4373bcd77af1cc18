"""Evaluations through a real gateway: what is run, kept, run again, counted and written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swe_lightning.controller.runner import attempt_file
from swe_lightning.errors import DataError
from swe_lightning.evaluation.result import EvalResult
from swe_lightning.evaluation.runner import evaluate
from swe_lightning.gateway.client import GatewayClient
from swe_lightning.recipe import Recipe, validate_recipe
from swe_lightning.records import InfraReason, Outcome, Rollout, Task

TASKS = [Task(instance_id=f"pkg{i % 2}__t{i}", repo=f"pkg{i % 2}", FAIL_TO_PASS=["t"]) for i in range(3)]
Controller = Callable[[Callable[[Rollout], Outcome]], list[str]]


@pytest.fixture
def recipe() -> Recipe:
    data = {"name": "r", "tasks": {"train": "a", "val": "b"}, "model": {"path": "m"}, "rollout": {"max_attempts": 2}}
    return validate_recipe(data, "test")


def reward(value: float) -> Outcome:
    return Outcome(reward=value, exit_status="submitted", message="because")


def test_outcomes_rates_and_files(
    gateway: GatewayClient, controller: Controller, recipe: Recipe, run_dir: Path
) -> None:
    def decide(rollout: Rollout) -> Outcome:
        assert rollout.mode == "val"
        assert rollout.config["sampling"] == {"temperature": 0.7, "top_p": 1.0}
        name = rollout.task["instance_id"]
        if name == "pkg0__t2":
            return Outcome(infra_reason=InfraReason.SANDBOX_LOST, message="gone")
        file = attempt_file(run_dir, rollout.rollout_id, rollout.attempt, "patch")
        file.parent.mkdir(parents=True)
        file.write_bytes("diff ä\r\n".encode())
        return reward(1.0 if name == "pkg0__t0" or rollout.rollout_id.endswith("-1") else 0.0)

    ran = controller(decide)
    ticks: list[int] = []
    result = evaluate(
        gateway=gateway, tasks=TASKS, recipe=recipe, samples=2, temperature=0.7, label="base", run_dir=run_dir,
        progress=ticks.append,
    )  # fmt: skip
    assert (result.graded, result.resolved, result.rate, dict(result.infra)) == (4, 3, 0.75, {"sandbox_lost": 2})
    assert sum(ticks) == 6
    assert ran.count("eval-base-pkg0__t2-0") == 2, "the gateway retried the broken one"
    assert result.by_task() == {"pkg0__t0": 1.0, "pkg1__t1": 0.5}
    assert result.pass_at(1) == pytest.approx(0.75)
    assert result.pass_at(2) == 1.0
    assert "3/4 = 0.750" in result.line()
    loaded = EvalResult.load(run_dir / "evals" / "base.json")
    assert loaded == result
    lines = (run_dir / "evals" / "base.s1.predictions.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"instance_id": t, "model_name_or_path": "base", "model_patch": "diff ä\r\n"} for t in ("pkg0__t0", "pkg1__t1")
    ]


def test_again_keeps_verdicts_and_runs_infrastructure_failures_again(
    gateway: GatewayClient, controller: Controller, recipe: Recipe, run_dir: Path
) -> None:
    broken = True

    def decide(rollout: Rollout) -> Outcome:
        if broken and rollout.task["instance_id"] == "pkg1__t1":
            return Outcome(infra_reason=InfraReason.GRADING_ERROR)
        return reward(0.0)

    ran = controller(decide)
    arguments: dict[str, Any] = {"gateway": gateway, "tasks": TASKS, "recipe": recipe, "samples": 1, "label": "x"}
    arguments |= {"run_dir": run_dir, "temperature": 0.7}
    assert evaluate(**arguments).graded == 2
    first = len(ran)
    again = evaluate(**arguments)
    assert again.graded == 2
    assert set(ran[first:]) == {"eval-x-pkg1__t1-0-again1"}
    broken = False
    before = len(ran)
    repaired = evaluate(**arguments)
    assert repaired.graded == 3
    assert ran[before:] == ["eval-x-pkg1__t1-0-again2"]
    assert evaluate(**arguments).graded == 3
    assert len(ran) == before + 1, "nothing was left to run"
    with pytest.raises(DataError, match="choose another label"):
        evaluate(**arguments | {"temperature": 0.1})


def test_the_log_of_what_ended_before_is_not_read_again(
    gateway: GatewayClient, controller: Controller, recipe: Recipe, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller(lambda rollout: reward(1.0))
    arguments: dict[str, Any] = {"gateway": gateway, "tasks": TASKS, "recipe": recipe, "samples": 1, "temperature": 0.7}
    evaluate(**arguments, label="before", run_dir=run_dir)
    heard: list[Rollout] = []
    listen = gateway.terminal

    def listening(**options: Any) -> tuple[list[Rollout], int]:
        found, cursor = listen(**options)
        heard.extend(found)
        return found, cursor

    monkeypatch.setattr(gateway, "terminal", listening)
    assert evaluate(**arguments, label="after", run_dir=run_dir).graded == len(TASKS)
    assert {r.group_id.split("-")[1] for r in heard} == {"after"}


def test_a_stopped_evaluation_continues(
    gateway: GatewayClient, controller: Controller, recipe: Recipe, run_dir: Path
) -> None:
    class Stop(Exception):
        pass

    def stop(_: int) -> None:
        raise Stop

    arguments: dict[str, Any] = {"gateway": gateway, "tasks": TASKS, "recipe": recipe, "samples": 1, "label": "stopped"}
    arguments |= {"run_dir": run_dir, "temperature": 0.7}
    with pytest.raises(Stop):
        evaluate(**arguments, progress=stop)
    ran = controller(lambda rollout: reward(1.0))
    assert evaluate(**arguments).rate == 1.0
    assert len(ran) == 3


def test_duplicate_tasks_and_odd_labels_are_refused(gateway: GatewayClient, recipe: Recipe, run_dir: Path) -> None:
    arguments: dict[str, Any] = {"gateway": gateway, "recipe": recipe, "samples": 1, "temperature": 0.7}
    with pytest.raises(DataError, match="twice"):
        evaluate(**arguments, tasks=[TASKS[0], TASKS[0]], label="x", run_dir=run_dir)
    with pytest.raises(DataError, match="label"):
        evaluate(**arguments, tasks=TASKS, label="../x", run_dir=run_dir)
