"""Cases met in the field, by their number: the right value, and the wrong one that others produced.

A15 and W6 (recipe errors), W10 and W11 (staleness, late results) are in test_correction.py; U1 and the requeue of W10
in tests/training/test_collect.py; A12's ranks in test_gradient_invariance.py and tests/policy/test_worker_ranks.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from swe_lightning.objective import advantages, build_batch, mini_batches, token_weights
from swe_lightning.objective.advantages import group_counts
from swe_lightning.recipe import Algorithm
from swe_lightning.records import Row
from tests.objective.conftest import make_row, masked_row

NO_STD = Algorithm(advantage="grpo_no_std")
PAPER = [("A", 50), ("A", 100), ("B", 30), ("B", 30), ("B", 30), ("C", 40)]
ONES = {"A": 1.0, "B": 1.0, "C": 1.0}


def loss(rows: list[Row], weights: list[np.ndarray], per_token: dict[str, float]) -> float:
    """Sum of weight x loss, the loss being a number per rollout."""
    return sum(float(w.sum()) * per_token[r.rollout_id] for r, w in zip(rows, weights, strict=True))


def test_a1_the_divisor_is_rollouts_not_rows() -> None:
    rows = [make_row(name, n) for name, n in PAPER]
    everywhere, only_a = dict.fromkeys("ABC", 1.0), {"A": 1.0, "B": 0.0, "C": 0.0}
    weights = token_weights(rows, ONES)
    assert loss(rows, weights, everywhere) == pytest.approx(1.0)
    assert loss(rows, weights, everywhere) != pytest.approx(0.5)  # six rows in the denominator
    assert loss(rows, weights, only_a) == pytest.approx(1 / 3)
    assert loss(rows, weights, only_a) != pytest.approx(150 / 280)  # token mean
    whole = [make_row("A", 150), *rows[2:]]
    assert loss(whole, token_weights(whole, ONES), only_a) == pytest.approx(1 / 3)


def test_a2_one_reward_per_rollout_however_many_rows() -> None:
    rows = [make_row("A", 4), make_row("A", 6), make_row("B", 5)]
    batch = build_batch(rows, {"A": 1.0, "B": 0.5}, {"A": "g", "B": "g"}, NO_STD)
    by_row = [batch.advantages[row.rollout_id] for row in rows]
    assert by_row == [0.25, 0.25, -0.25]
    assert by_row != pytest.approx([1 - 5 / 6, 1 - 5 / 6, 0.5 - 5 / 6])  # a mean over rows
    assert batch.stats["reward_mean"] == 0.75


def test_a4_a_partial_group_is_centred_on_its_survivors_and_shifts_no_other() -> None:
    found = advantages([1, None, 0, 0, 1, 1, 0, 0], ["a"] * 4 + ["b"] * 4, "grpo_no_std")
    assert [found[0], found[2], found[3]] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert found[4:] == [0.5, 0.5, -0.5, -0.5]
    survivors = [r for r in (1, None, 0, 0, 1, 1, 0, 0) if r is not None]
    strided = [r - sum(survivors[:4]) / 4 for r in survivors[:4]]  # groups cut every four survivors
    assert [found[0], found[2], found[3], found[4]] != pytest.approx(strided)
    assert found[-1] != 0  # and the trailing ones keep no raw reward


def test_a5_the_group_is_the_task() -> None:
    assert advantages([1, 0, 1, 0], ["task"] * 4, "grpo_no_std") == [0.5, -0.5, 0.5, -0.5]
    assert advantages([1, 0, 1, 0], ["task"] * 4) == pytest.approx([0.8660, -0.8660, 0.8660, -0.8660], abs=1e-4)
    alone = advantages([1, 0, 1, 0], ["u1", "u2", "u3", "u4"])  # grouped by rollout: four singletons
    assert alone == [0.0] * 4
    assert alone != [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("estimator", ["grpo", "grpo_no_std", "rloo"])
def test_a6_a_singleton_gets_zero_and_is_counted(estimator: str) -> None:
    assert advantages([1.0], ["g"], estimator) == [0.0]
    assert advantages([1.0], ["g"], estimator) != [1.0]
    assert group_counts([1.0], ["g"])["singleton_groups"] == 1


def test_a9_every_step_of_a_rollout_gets_the_advantage_under_its_own_mask() -> None:
    rows = [masked_row("r", [1, 1, 0, 0]), masked_row("r", [0, 0, 1, 1])]
    per_token = [(w * 4).tolist() for w in token_weights(rows, {"r": 2.0})]
    assert per_token == [[2, 2, 0, 0], [0, 0, 2, 2]]
    assert per_token[0] != [0, 0, 0, 0]  # the last step's masked vector copied to the others


@pytest.mark.parametrize(("count", "in_rows"), [(8, 2), (23, 6)])
def test_a10_steps_are_counted_in_prompts(count: int, in_rows: int) -> None:
    """Eight prompts in mini-batches of four; `in_rows`: the steps that mini-batches of four rows would take."""
    groups = {f"g{i}-{k}": f"g{i}" for i in range(8) for k in range(2)}
    names = list(groups)
    rows = [make_row(names[i % len(names)], 3) for i in range(count)]
    batch = build_batch(rows, {n: float(i % 2) for i, n in enumerate(names)}, groups, NO_STD)
    parts = mini_batches(batch, NO_STD, 8 // 4)
    assert len(parts) == 2
    assert -(-count // 4) == in_rows
    assert count == 8 or len(parts) != in_rows
    assert sum(len(part.rows) for part in parts) == count


def test_a12_denominators_are_global() -> None:
    rows = [make_row("a", 10), make_row("b", 90)]
    weights = token_weights(rows, {"a": 1.0, "b": 1.0}, "token_mean")
    lossy = {"a": 1.0, "b": 0.0}
    assert loss(rows, weights, lossy) == pytest.approx(0.10)
    by_micro_batch = [loss([row], [weight], lossy) for row, weight in zip(rows, weights, strict=True)]
    assert sum(by_micro_batch) == pytest.approx(0.10)
    local = [loss([row], token_weights([row], {"a": 1.0, "b": 1.0}, "token_mean"), lossy) for row in rows]
    assert sum(local) / 2 == pytest.approx(0.5)  # what a denominator of each micro-batch's own gives
    assert sum(by_micro_batch) != pytest.approx(0.5)


def test_a14_a_broken_machine_is_not_a_wrong_answer() -> None:
    found = advantages([1, 1, 0, None], ["g"] * 4, "grpo_no_std")
    assert found[:3] == pytest.approx([0.3333, 0.3333, -0.6667], abs=1e-4)
    assert found[3] is None
    assert found[:3] != pytest.approx([0.5, 0.5, -0.5])
    groups = dict.fromkeys("abcd", "g")
    rewards = {"a": 1.0, "b": 1.0, "c": 0.0, "d": None}
    batch = build_batch([make_row(n, 5) for n in "abcd"], rewards, groups, NO_STD)
    assert [row.rollout_id for row in batch.rows] == ["a", "b", "c"]
    assert (batch.stats["infra_failures"], batch.stats["reward_mean"]) == (1, pytest.approx(2 / 3))
    assert batch.stats["reward_mean"] != 0.5


def test_a16_segments_are_no_hidden_weight() -> None:
    three = [make_row("r", 10), make_row("r", 20), make_row("r", 30), make_row("s", 60)]
    one = [make_row("r", 60), make_row("s", 60)]
    advantage = {"r": 1.0, "s": 1.0}
    only_r = {"r": 1.0, "s": 0.0}
    of_three = loss(three, token_weights(three, advantage), only_r)
    assert of_three == pytest.approx(loss(one, token_weights(one, advantage), only_r)) == pytest.approx(0.5)
    assert of_three != pytest.approx(loss(three, token_weights(three, advantage, "sample_mean"), only_r))
