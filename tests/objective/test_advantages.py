"""Statistics over rollouts, never over rows; worked values, and the wrong values others produce."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swe_lightning.objective import advantages
from swe_lightning.objective.advantages import group_counts, shuffled

ESTIMATORS = ["grpo", "grpo_no_std", "rloo", "reinforce_baseline"]


def test_one_reward_per_rollout_not_per_row() -> None:
    # two rollouts with 1.0 and two rows each, one of 0.5 twice ... in rows: mean 0.8333; in rollouts: 0.75
    found = advantages([1.0, 0.5], ["g", "g"], "grpo_no_std")
    assert found == [0.25, -0.25]
    assert found != pytest.approx([1 - 0.8333, 0.5 - 0.8333], abs=1e-3)


def test_success_in_three_rows_against_failure_in_one() -> None:
    found = advantages([1.0, 0.0], ["g", "g"], "grpo_no_std")
    assert found == [0.5, -0.5]
    assert found != [0.25, -0.75]


def test_failures_are_not_zeros() -> None:
    found = advantages([1, 1, 0, None], ["g"] * 4, "grpo_no_std")
    assert found[:3] == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    assert found[3] is None
    assert found[:3] != pytest.approx([0.5, 0.5, -0.5])


def test_group_by_key_not_by_rollout() -> None:
    assert advantages([1, 0, 1, 0], ["task"] * 4, "grpo_no_std") == [0.5, -0.5, 0.5, -0.5]
    with_std = advantages([1, 0, 1, 0], ["task"] * 4, "grpo")
    assert with_std == pytest.approx([0.8660254, -0.8660254] * 2, abs=1e-5)
    assert with_std != pytest.approx([1.0, -1.0] * 2, abs=1e-3)  # ddof 0


@pytest.mark.parametrize("estimator", ["grpo", "grpo_no_std", "rloo"])
@pytest.mark.parametrize("min_group", [1, 2])
def test_singleton_gets_zero_not_its_raw_reward(estimator: str, min_group: int) -> None:
    assert advantages([1.0], ["g"], estimator, min_group) == [0.0]
    assert advantages([1.0, None], ["g", "g"], estimator, min_group) == [0.0, None]
    assert group_counts([1.0], ["g"])["singleton_groups"] == 1


def test_partial_group_is_centred_on_its_survivors() -> None:
    rewards = [1, None, 0, 0, 1, 1, 0, 0]
    found = advantages(rewards, ["a"] * 4 + ["b"] * 4, "grpo_no_std")
    assert found == [pytest.approx(2 / 3), None, pytest.approx(-1 / 3), pytest.approx(-1 / 3), 0.5, 0.5, -0.5, -0.5]


def test_groups_of_any_order_and_size() -> None:
    found = advantages([1, 5, 0, 3, 1], ["a", "b", "a", "b", "c"], "grpo_no_std")
    assert found == [0.5, 1.0, -0.5, -1.0, 0.0]


def test_min_group_needs_graded_members() -> None:
    assert advantages([1, 0, None], ["g"] * 3, "grpo", min_group=3) == [0.0, 0.0, None]
    counts = group_counts([1, 0, None], ["g"] * 3, min_group=3)
    assert counts["small_groups"] == 1
    assert counts["infra_failures"] == 1


def test_rloo_is_the_mean_of_the_others() -> None:
    assert advantages([1, 0, 0, 0.5], ["g"] * 4, "rloo") == pytest.approx([1 - 0.5 / 3, -0.5, -0.5, 0.5 - 1 / 3])


def test_batch_baseline_ignores_groups() -> None:
    assert advantages([1, 0, None, 0.5], ["a", "b", "c", "d"], "reinforce_baseline") == [0.5, -0.5, None, 0.0]


@pytest.mark.parametrize("value", [0.1, 0.3, 1.0, -7.7])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_are_exactly_zero_and_counted(value: float, estimator: str) -> None:
    assert advantages([value] * 7, ["g"] * 7, estimator) == [0.0] * 7
    assert group_counts([value] * 7, ["g"] * 7)["zero_variance_groups"] == 1


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        advantages([math.nan, 1.0], ["g", "g"])
    with pytest.raises(ValueError, match="grpo_no_std"):
        advantages([1.0], ["g"], "grpo_nostd")
    with pytest.raises(ValueError, match="group keys"):
        advantages([1.0], [])


rewards_and_groups = st.lists(
    st.tuples(st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0])), st.sampled_from("abc")), max_size=12
)


@given(rewards_and_groups, st.sampled_from(ESTIMATORS), st.randoms(use_true_random=False))
def test_failures_and_order_change_nothing(pairs, estimator: str, rng) -> None:
    base = advantages([r for r, _ in pairs], [g for _, g in pairs], estimator)
    more = list(enumerate(pairs)) + [(-1, (None, g)) for g in "abc"]
    rng.shuffle(more)
    again = advantages([r for _, (r, _) in more], [g for _, (_, g) in more], estimator)
    by_index = {i: a for (i, _), a in zip(more, again, strict=True)}
    for i, value in enumerate(base):
        assert by_index[i] == (None if value is None else pytest.approx(value, abs=1e-12))


@given(rewards_and_groups, st.sampled_from(["grpo", "grpo_no_std", "rloo"]))
def test_advantages_of_a_group_sum_to_zero(pairs, estimator: str) -> None:
    found = advantages([r for r, _ in pairs], [g for _, g in pairs], estimator)
    for group in "abc":
        assert sum(a for a, (_, g) in zip(found, pairs, strict=True) if g == group and a is not None) == pytest.approx(
            0, abs=1e-9
        )


def test_shuffled_rewards_keep_the_multiset_and_the_failures() -> None:
    rewards = {f"r{i}": float(i % 3) for i in range(20)} | {"x": None}
    found = shuffled(rewards, seed=3)
    assert list(found) == list(rewards)
    assert found["x"] is None
    assert found != rewards
    assert sorted(v for v in found.values() if v is not None) == sorted(v for v in rewards.values() if v is not None)
    assert shuffled(dict(reversed(rewards.items())), seed=3) == found
    assert shuffled(rewards, seed=4) != found
