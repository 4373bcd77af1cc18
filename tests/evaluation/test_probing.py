"""What a difficulty probe calls itself, so that outcomes of two different ones are never put together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swe_lightning.errors import UserError
from swe_lightning.evaluation.probing import make_prober
from swe_lightning.evaluation.result import EvalRecord
from swe_lightning.gateway.client import GatewayClient
from swe_lightning.records import InfraReason, Outcome, Rollout


def identity(model: str, out: Path, *overrides: str) -> str:
    return make_prober("tiny_cpu.yaml", list(overrides), model, out).identity


def test_the_identity_follows_model_weights_and_recipe(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    seen = {identity("script:noop", tmp_path), identity("script:enumerate", tmp_path)}
    for weights in (b"one", b"two"):
        (model / "model.safetensors").write_bytes(weights)
        seen.add(identity(str(model), tmp_path))
    seen.add(identity(str(model), tmp_path, "rollout.temperature=0.5"))
    assert len(seen) == 5
    assert identity(str(model), tmp_path, "rollout.temperature=0.5") in seen


def test_what_cannot_be_probed_is_refused(tmp_path: Path) -> None:
    for model in ("script:nosuch", str(tmp_path)):
        with pytest.raises(UserError, match="--probe-model"):
            identity(model, tmp_path)


def test_partly_right_is_not_solved_for_the_probe_nor_for_an_evaluation(
    gateway: GatewayClient, controller: Any, tmp_path: Path
) -> None:
    rewards = {"none": 0.0, "half": 0.5, "nearly": 0.999, "all": 1.0, "lost": None}

    def decide(rollout: Rollout) -> Outcome:
        reward = rewards[rollout.task["instance_id"]]
        return Outcome(infra_reason=InfraReason.SANDBOX_LOST) if reward is None else Outcome(reward=reward)

    controller(decide)
    prober = make_prober("tiny_cpu.yaml", ["rollout.max_attempts=1"], "script:noop", tmp_path)
    stack: Any = SimpleNamespace(gateway=gateway, supervisor=SimpleNamespace(check=lambda: None))
    prober._stack = stack
    prober.start([({"instance_id": name, "repo": "r"}, 0) for name in rewards])
    found: dict[str, bool | None] = {}
    while len(found) < len(rewards):
        found |= {name: solved for name, _, solved in prober.finished()}
    assert found == {"none": False, "half": False, "nearly": False, "all": True, "lost": None}
    for name, reward in rewards.items():
        assert EvalRecord("r", name, "repo", 0, reward=reward).resolved is bool(found[name])


def test_what_an_earlier_probe_left_is_known_at_once_and_the_log_is_read_from_its_end(
    gateway: GatewayClient, controller: Any, tmp_path: Path
) -> None:
    controller(lambda rollout: Outcome(reward=1.0))
    names = ["earlier", "too"]
    for asked in (names, [*names, "later"]):
        _, end = gateway.create_to_follow([])
        prober = make_prober("tiny_cpu.yaml", [], "script:noop", tmp_path)
        prober._stack = SimpleNamespace(gateway=gateway, supervisor=SimpleNamespace(check=lambda: None))  # type: ignore[assignment]
        prober.start([({"instance_id": name, "repo": "r"}, 0) for name in asked[:2]])
        assert prober._cursor >= end
        ended = list(prober.finished())
        prober.start([({"instance_id": name, "repo": "r"}, 0) for name in asked[2:]])
        while len(ended) < len(asked):
            ended += prober.finished()
        assert sorted(ended) == sorted((name, 0, True) for name in asked)
