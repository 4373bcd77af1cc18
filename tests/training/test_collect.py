"""Finished rollouts to the rows of a step: what gives none has a reason, and the account adds up."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from swe_lightning.errors import NoTrainingRows, SwelError
from swe_lightning.gateway.compact import Encoder, decode
from swe_lightning.recipe import Recipe, load_recipe
from swe_lightning.records import InfraReason, ModelCall, Outcome, Rollout, RolloutState
from swe_lightning.rundir import RunDir
from swe_lightning.training.collect import Collected, Collector, batch_of, gather
from swe_lightning.training.report import Reporter


class Calls:
    """The one question a collector asks a gateway, answered from a table in the store's own form."""

    def __init__(self, table: dict[str, list[ModelCall]]) -> None:
        self.table = table

    def calls(self, rollout_id: str, attempt: int | None = None, *, deltas: bool = False) -> list[ModelCall]:
        encoder, rows = Encoder(), []
        for call in self.table[rollout_id]:
            names = ("rollout_id", "attempt", "sequence", "started_at", "version_start", "version_end", "trainable")
            row = {name: getattr(call, name) for name in names} | encoder.encode(call)
            rows.append(row | {"event_id": "", "at": call.ended_at})
        return list(decode(rows, deltas=deltas))


def call(rollout: str, prompt: list[int], response: list[int], **more: Any) -> ModelCall:
    return ModelCall(
        rollout_id=rollout, prompt_ids=prompt, response_ids=response, logprobs=[-1.0] * len(response), **more
    )


def ended(rollout: str, outcome: Outcome, group: str = "g") -> Rollout:
    state = RolloutState.FAILED if outcome.reward is None else RolloutState.SUCCEEDED
    return Rollout(rollout_id=rollout, group_id=group, state=state, attempt=1, outcome=outcome)


def recipe_with(*overrides: str) -> Recipe:
    return load_recipe("tiny_cpu.yaml", list(overrides))


def collect(table: dict[str, list[ModelCall]], rollouts: Sequence[Rollout], recipe: Recipe) -> Collected:
    return gather(lambda _: list(rollouts), Collector(Calls(table), recipe), rollouts, version=0)


def test_a_broken_machine_gives_no_reward_and_no_rows() -> None:
    broken = Outcome(infra_reason=InfraReason.SANDBOX_LOST, message="the box died")
    rollouts = [ended("a", Outcome(reward=1.0, exit_status="submitted")), ended("b", broken)]
    found = collect({"a": [call("a", [1], [2, 3])]}, rollouts, recipe_with())
    assert found.rewards == {"a": 1.0, "b": None}
    assert [row.rollout_id for row in found.rows] == ["a"]
    assert found.rows[0].group_id == "g"
    assert found.dropped == {"infra:sandbox_lost": 1}
    assert found.without_rows == {"b": "infra:sandbox_lost: the box died"}


OVER = {
    "a": [call("a", [1, 2, 3], [4])],
    "b": [call("b", [1], [2, 3, 4, 5])],
    "c": [call("c", [1, 2], [3, 4, 5])],
    "d": [call("d", [1], [2]), call("d", [7, 8, 9], [6], sequence=1)],
}


def test_limits_cut_what_does_not_fit_and_say_what_and_whose() -> None:
    recipe = recipe_with("training.prompt_limit=2", "training.response_limit=3")
    found = collect(OVER, [ended(r, Outcome(reward=0.0)) for r in OVER], recipe)
    assert [(row.rollout_id, row.ids.tolist()) for row in found.rows] == [
        ("b", [1, 2, 3, 4]),
        ("c", [1, 2, 3, 4, 5]),
        ("d", [1, 2]),
    ]
    assert found.dropped == {"row:prompt_too_long": 2, "rollout:over_limit": 1}
    assert found.report.lost_tokens == {"row:prompt_too_long": 2, "row:response_cut": 1}
    assert found.report.partial == ["b", "d"]
    record = found.summary()
    assert record["lost_tokens"] == {"row:prompt_too_long": 2, "row:response_cut": 1}
    assert (record["rows"], record["rows_kept"], record["rows_cut"], record["rollouts_partial"]) == (5, 3, 1, 2)
    assert (record["trained_tokens"], record["tokens_kept"]) == (10, 7)
    assert record["rollouts"] == 4  # the one without rows keeps its reward in its group's statistics


def test_over_limit_drop_rollout_leaves_none_half_in() -> None:
    recipe = recipe_with("training.prompt_limit=2", "training.response_limit=3", "training.over_limit=drop_rollout")
    found = collect(OVER, [ended(r, Outcome(reward=0.0)) for r in OVER], recipe)
    assert [row.rollout_id for row in found.rows] == ["c"]
    assert found.report.partial == []
    assert found.dropped == {"row:prompt_too_long": 2, "row:rollout_over_limit": 2, "rollout:over_limit": 3}
    assert found.report.lost_tokens.total() == 7


def test_duplicate_calls_is_a_switch_of_the_recipe() -> None:
    retried = {
        "a": [
            call("a", [1], [2], started_at=0.5, ended_at=1.0),
            call("a", [1], [3], sequence=1, started_at=2.0, ended_at=3.0),
        ]
    }
    rollouts = [ended("a", Outcome(reward=1.0))]
    left_out = collect(retried, rollouts, recipe_with())
    assert [row.ids.tolist() for row in left_out.rows] == [[1, 3]]
    assert left_out.dropped == {"call:superseded": 1}
    kept = collect(retried, rollouts, recipe_with("algorithm.duplicate_calls=keep"))
    assert [row.ids.tolist() for row in kept.rows] == [[1, 2], [1, 3]]
    assert not kept.dropped


def test_u1_a_step_without_rows_is_an_error_that_counts_every_reason(tmp_path: Path) -> None:
    bad = {"trainable": False, "reason": "no_response_ids"}
    table = {"a": [call("a", [1], [], **bad)]}
    lost = Outcome(infra_reason=InfraReason.UPSTREAM_ERROR, message="connection refused by the model server")
    rollouts = [ended("a", Outcome(reward=0.0)), ended("b", lost), ended("c", lost)]
    with pytest.raises(NoTrainingRows) as caught:
        collect(table, rollouts, recipe_with())
    message = str(caught.value)
    assert message.startswith("no training rows from 3 rollouts, mostly infra:upstream_error: 2 x infra:upstream_error")
    assert "1 x call:no_response_ids" in message
    assert caught.value.exit_code == 1
    text = io.StringIO()
    with Reporter(RunDir(tmp_path), recipe_with(), Console(file=text, width=120)) as reporter:
        reporter.losses(3, caught.value.by_rollout)
    lines = text.getvalue().splitlines()
    assert any("b" in line and "connection refused" in line for line in lines)
    assert any("a" in line and "1 x call:no_response_ids" in line for line in lines)


def test_a_long_table_of_losses_ends_with_how_many_more(tmp_path: Path) -> None:
    text = io.StringIO()
    with Reporter(RunDir(tmp_path), recipe_with(), Console(file=text, width=120)) as reporter:
        reporter.losses(0, {f"r{i:03d}": "infra:sandbox_lost [red]" for i in range(100)})
    assert "and 80 more" in text.getvalue()
    assert "[red]" in text.getvalue()


def versioned(name: str, version: int) -> list[ModelCall]:
    return [call(name, [1], [2, 3], version_start=version)]


@pytest.mark.parametrize(("lag", "requeued"), [(2, []), (1, ["g"])])
def test_w10_a_group_beyond_the_lag_is_sampled_again_whole(lag: int, requeued: list[str]) -> None:
    recipe = recipe_with("rollout.schedule=async", "algorithm.off_policy.kind=tis", f"rollout.max_staleness={lag}")
    # one old token makes the whole group old: half a group would bias its mean
    table = {"a": versioned("a", 5), "b": versioned("b", 3), "c": versioned("c", 5)}
    table |= {"a-stale1": versioned("a-stale1", 5), "b-stale1": versioned("b-stale1", 5)}
    planned = [ended("a", Outcome(reward=1.0)), ended("b", Outcome(reward=0.0)), ended("c", Outcome(reward=1.0), "h")]
    rounds: list[list[str]] = []

    def run(wanted: Sequence[Rollout]) -> list[Rollout]:
        rounds.append([r.rollout_id for r in wanted])
        return list(wanted)

    collector = Collector(Calls(table), recipe)
    found = gather(run, collector, planned, version=5)
    again = ["a-stale1", "b-stale1"]
    assert rounds == ([["a", "b", "c"], again] if requeued else [["a", "b", "c"]])
    assert sorted(found.rewards) == sorted(["c", *again] if requeued else ["a", "b", "c"])
    assert list(collector.gate.requeues) == requeued
    assert found.dropped["rollout:stale"] == 2 * len(requeued)
    assert len(found.rows) == 3


def test_a_group_that_stays_stale_is_an_error_and_no_endless_loop() -> None:
    class Old(Calls):
        def calls(self, rollout_id: str, attempt: int | None = None, *, deltas: bool = False) -> list[ModelCall]:
            return versioned(rollout_id, 3)

    collector = Collector(Old({}), recipe_with())
    with pytest.raises(SwelError, match="do not hold the current weights"):
        gather(lambda wanted: list(wanted), collector, [ended("a", Outcome(reward=1.0))], version=5)
    assert collector.gate.requeues == {"g": 3}


def test_every_round_of_a_stale_group_is_in_the_ledger() -> None:
    table = {"a": versioned("a", 3), "a-stale1": versioned("a-stale1", 4), "a-stale2": versioned("a-stale2", 5)}
    planned = [ended("a", Outcome(reward=1.0))]
    found = gather(lambda wanted: list(wanted), Collector(Calls(table), recipe_with()), planned, version=5)
    assert found.stale == {"g": ["a", "a-stale1"]}
    assert found.dropped["rollout:stale"] == 2
    assert list(found.rewards) == ["a-stale2"]


def test_the_shuffled_control_draws_anew_for_every_step_and_seed() -> None:
    names = [f"r{i}" for i in range(12)]
    rollouts = [ended(name, Outcome(reward=float(i % 2)), f"g{i // 4}") for i, name in enumerate(names)]
    table = {name: [call(name, [1], [2])] for name in names}

    def drawn(step: int, seed: int) -> dict[str, float | None]:
        recipe = recipe_with("algorithm.shuffle_rewards=true", f"training.seed={seed}")
        return batch_of(collect(table, rollouts, recipe), recipe, step).rewards

    assert drawn(0, 0) == drawn(0, 0)
    assert drawn(0, 0) != drawn(1, 0) != drawn(2, 0)
    assert drawn(0, 0) != drawn(0, 1)
    assert sorted(drawn(3, 7).values()) == [0.0] * 6 + [1.0] * 6
