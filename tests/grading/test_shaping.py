"""Reward shaping: the ramps of the coding example, only on solved training rollouts, and never in the verdict."""

from __future__ import annotations

import pytest

from swe_lightning.errors import RecipeError
from swe_lightning.gateway.lifecycle import Position, report
from swe_lightning.gateway.problems import Problem
from swe_lightning.grading.shaping import Shaped, shape
from swe_lightning.recipe import Reward, load_recipe
from swe_lightning.records import InfraReason, Outcome, RolloutState

BOTH = Reward(turn_penalty=0.1, context_penalty=0.1)


def value(
    section: Reward = BOTH, raw: float = 1.0, mode: str = "train", turns: int = 1, tokens: int = 1
) -> float | None:
    shaped = shape(raw, section, mode=mode, turns=turns, turn_limit=100, longest_prompt_tokens=tokens)
    return None if shaped is None else pytest.approx(shaped.value)


def test_ramps_of_turns_and_context() -> None:
    assert [value(turns=n) for n in (1, 80, 90, 100, 500)] == [1.0, 1.0, 0.95, 0.9, 0.9]
    assert [value(tokens=n) for n in (0, 50_000, 57_000, 64_000, 99_000)] == [1.0, 1.0, 0.95, 0.9, 0.9]
    assert value(turns=100, tokens=64_000) == 0.8
    assert shape(1.0, BOTH, mode="train", turns=90, turn_limit=100, longest_prompt_tokens=57_000) == Shaped(
        pytest.approx(0.9), pytest.approx(0.05), pytest.approx(0.05)
    )


def test_unsolved_rollouts_and_validation_are_not_shaped() -> None:
    assert value(raw=0.0, turns=100, tokens=64_000) == 0.0
    assert value(mode="val", turns=100) is None
    assert value(Reward(), turns=100) is None, "off unless a recipe asks"


def test_the_limit_below_the_free_turns_costs_nothing_below_it() -> None:
    assert [value(Reward(turn_penalty=0.2, free_turns=200), turns=n) for n in (100, 200)] == [1.0, 1.0]


def test_only_training_reads_the_shaped_value() -> None:
    plain, shaped = Outcome(reward=1.0), Outcome(reward=1.0, shaped_reward=0.9)
    assert (plain.training_reward, shaped.training_reward, shaped.reward) == (1.0, 0.9, 1.0)
    assert Outcome(infra_reason=InfraReason.SANDBOX_LOST).training_reward is None


def test_collected_rewards_are_shaped_and_statistics_are_not() -> None:
    from swe_lightning.training.collect import Collector

    recipe = load_recipe("tiny_cpu.yaml")

    class NoCalls:
        def calls(self, *args: object, **options: object) -> list[object]:
            return []

    from swe_lightning.records import Rollout

    outcomes = [Outcome(reward=1.0, shaped_reward=0.8), Outcome(reward=0.0, shaped_reward=0.0)]
    rollouts = [
        Rollout(rollout_id=f"r{n}", group_id="g", state=RolloutState.SUCCEEDED, attempt=1, outcome=outcome)
        for n, outcome in enumerate(outcomes)
    ]
    collected = Collector(NoCalls(), recipe).collect(rollouts, 0)  # type: ignore[arg-type]
    assert collected.rewards == {"r0": 0.8, "r1": 0.0}
    assert collected.summary()["reward_mean"] == 0.5
    assert collected.summary()["shaped_reward_mean"] == 0.4


@pytest.mark.parametrize("shaped", [float("nan"), 0.5])
def test_a_shaped_reward_needs_a_reward(shaped: float) -> None:
    at = Position("r", RolloutState.RUNNING, 1, 3)
    outcome = Outcome(infra_reason=InfraReason.SANDBOX_LOST, shaped_reward=shaped)
    with pytest.raises(Problem, match="shaped reward"):
        report(at, 1, outcome, 0.0)


def test_recipe_section() -> None:
    recipe = load_recipe("tiny_cpu.yaml", ["reward.turn_penalty=0.1", "reward.free_turns=4"])
    assert (recipe.reward.active, recipe.reward.free_turns) == (True, 4)
    assert not load_recipe("tiny_cpu.yaml").reward.active
    with pytest.raises(RecipeError, match="below"):
        load_recipe("tiny_cpu.yaml", ["reward.free_context_tokens=64000"])
