"""Finished rollouts to rows: infrastructure failures have neither reward nor rows; an empty step says why."""

from __future__ import annotations

from typing import Any

import pytest

from swe_lightning.errors import SwelError
from swe_lightning.recipe import load_recipe
from swe_lightning.records import InfraReason, ModelCall, Outcome, Rollout, RolloutState
from swe_lightning.training.collect import collect


class Calls:
    """The one question `collect` asks a gateway, answered from a table."""

    def __init__(self, table: dict[str, list[ModelCall]]) -> None:
        self.table = table

    def calls(self, rollout_id: str, attempt: int | None = None) -> list[ModelCall]:
        return self.table[rollout_id]


def call(rollout: str, prompt: list[int], response: list[int], **more: Any) -> ModelCall:
    return ModelCall(
        rollout_id=rollout, prompt_ids=prompt, response_ids=response, logprobs=[-1.0] * len(response), **more
    )


def ended(rollout: str, outcome: Outcome, group: str = "g") -> Rollout:
    state = RolloutState.FAILED if outcome.reward is None else RolloutState.SUCCEEDED
    return Rollout(rollout_id=rollout, group_id=group, state=state, attempt=1, outcome=outcome)


def test_a_broken_machine_gives_no_reward_and_no_rows() -> None:
    broken = Outcome(infra_reason=InfraReason.SANDBOX_LOST, message="the box died")
    rollouts = [ended("a", Outcome(reward=1.0, exit_status="submitted")), ended("b", broken)]
    found = collect(Calls({"a": [call("a", [1], [2, 3])]}), rollouts, load_recipe("tiny_cpu.yaml"))  # type: ignore[arg-type]
    assert found.rewards == {"a": 1.0, "b": None}
    assert [row.rollout_id for row in found.rows] == ["a"]
    assert found.rows[0].group_id == "g"
    assert found.dropped == {"infra:sandbox_lost": 1}


def test_rows_over_a_limit_leave_whole_and_counted() -> None:
    recipe = load_recipe("tiny_cpu.yaml", ["training.prompt_limit=2", "training.response_limit=3"])
    table = {
        "a": [call("a", [1, 2, 3], [4])],
        "b": [call("b", [1], [2, 3, 4, 5])],
        "c": [call("c", [1, 2], [3, 4, 5])],
    }
    found = collect(Calls(table), [ended(r, Outcome(reward=0.0)) for r in table], recipe)  # type: ignore[arg-type]
    assert [row.rollout_id for row in found.rows] == ["c"]
    assert found.dropped == {"row:prompt_too_long": 1, "row:response_too_long": 1}


def test_a_step_without_rows_is_an_error_that_counts_the_reasons() -> None:
    bad = {"trainable": False, "reason": "no_response_ids"}
    table = {"a": [call("a", [1], [], **bad)], "b": [call("b", [1], [], **bad)]}
    lost = Outcome(infra_reason=InfraReason.UPSTREAM_ERROR, message="connection refused by the model server")
    rollouts = [ended("a", Outcome(reward=0.0)), ended("b", Outcome(reward=0.0)), ended("c", lost)]
    with pytest.raises(SwelError) as caught:
        collect(Calls(table), rollouts, load_recipe("tiny_cpu.yaml"))  # type: ignore[arg-type]
    message = str(caught.value)
    assert "2 x call:no_response_ids" in message
    assert "1 x infra:upstream_error" in message
    assert "connection refused" in message
