"""Batches of whole groups; steps counted in prompts; padding that counts nowhere."""

from __future__ import annotations

import numpy as np
import pytest

from swe_lightning.objective import build_batch, mini_batches
from swe_lightning.objective.balance import PAD, balance, micro_batches, plan
from swe_lightning.objective.batch import pad_batch
from swe_lightning.objective.tensors import Packer, packed, padded
from swe_lightning.recipe import Algorithm
from tests.objective.conftest import make_row

NO_STD = Algorithm(advantage="grpo_no_std")


def groups_of(count: int, size: int = 2) -> dict[str, str]:
    return {f"g{g}-{i}": f"g{g}" for g in range(count) for i in range(size)}


def total(batch, name: str) -> float:
    return sum(float(w.sum()) for r, w in zip(batch.rows, batch.weights, strict=True) if r.rollout_id == name)


def test_weights_fold_advantage_and_normalisation() -> None:
    groups = {"a": "g", "b": "g"}
    rows = [make_row("a", 50), make_row("a", 100), make_row("b", 30)]
    batch = build_batch(rows, {"a": 1.0, "b": 0.0}, groups, NO_STD)
    assert batch.advantages == {"a": 0.5, "b": -0.5}
    assert total(batch, "a") == pytest.approx(0.25)
    assert total(batch, "b") == pytest.approx(-0.25)
    assert sum(float(w.sum()) for w in batch.kl_weights) == pytest.approx(1.0)
    assert [row.group_id for row in batch.rows] == ["g"] * 3
    assert batch.stats["rows_per_rollout"] == 1.5
    assert batch.stats["reward_mean"] == 0.5


def test_failures_leave_rows_statistics_and_mean() -> None:
    groups = {n: "g" for n in "abcd"}
    rows = [make_row(n, 10) for n in "abcd"]
    batch = build_batch(rows, {"a": 1, "b": 1, "c": 0, "d": None}, groups, NO_STD)
    assert [row.rollout_id for row in batch.rows] == ["a", "b", "c"]
    assert batch.advantages["c"] == pytest.approx(-2 / 3)
    assert batch.advantages["d"] is None
    assert total(batch, "c") == pytest.approx(-2 / 9)
    stats = batch.stats
    assert (stats["infra_failures"], stats["rows_left_out"], stats["graded"]) == (1, 1, 3)
    assert stats["reward_mean"] == pytest.approx(2 / 3)


def test_zero_variance_groups_are_counted_and_leave_only_on_request() -> None:
    groups = groups_of(2)
    rewards = {"g0-0": 1.0, "g0-1": 1.0, "g1-0": 1.0, "g1-1": 0.0}
    rows = [make_row(name, 4) for name in groups]
    stay = build_batch(rows, rewards, groups, NO_STD)
    assert len(stay.rows) == 4
    assert stay.stats["zero_variance_groups"] == 1
    assert total(stay, "g1-0") == pytest.approx(0.5 / 4)
    skip = build_batch(rows, rewards, groups, NO_STD.model_copy(update={"skip_zero_variance": True}))
    assert [row.rollout_id for row in skip.rows] == ["g1-0", "g1-1"]
    assert (skip.stats["skipped_rollouts"], skip.stats["rows_left_out"]) == (2, 2)
    assert total(skip, "g1-0") == pytest.approx(0.5 / 2)


def test_skipping_takes_every_group_that_teaches_nothing_and_no_other() -> None:
    """Alone after a failure, a rollout has no advantage; under the batch's baseline a group of equal rewards has."""
    groups = {"a": "alone", "x": "alone", "b": "flat", "c": "flat", "d": "mixed", "e": "mixed"}
    rewards = {"a": 1.0, "x": None, "b": 1.0, "c": 1.0, "d": 1.0, "e": 0.0}
    rows = [make_row(name, 4) for name in "abcde"]
    skipping = NO_STD.model_copy(update={"skip_zero_variance": True})
    batch = build_batch(rows, rewards, groups, skipping)
    assert [row.rollout_id for row in batch.rows] == ["d", "e"]
    assert (batch.stats["skipped_rollouts"], batch.stats["infra_failures"]) == (3, 1)
    assert total(batch, "d") == pytest.approx(0.5 / 2)
    baseline = skipping.model_copy(update={"advantage": "reinforce_baseline"})
    whole = build_batch(rows, rewards, groups, baseline)
    assert [row.rollout_id for row in whole.rows] == list("abcde")
    assert total(whole, "b") == pytest.approx(0.2 / 5)


def test_shuffled_rewards_are_a_control() -> None:
    groups = groups_of(8, 4)
    rewards = {name: float(i % 2) for i, name in enumerate(groups)}
    rows = [make_row(name, 4) for name in groups]
    control = NO_STD.model_copy(update={"shuffle_rewards": True})
    batch = build_batch(rows, rewards, groups, control, seed=1)
    assert batch.stats["reward_mean"] == 0.5
    assert batch.advantages != build_batch(rows, rewards, groups, NO_STD).advantages
    assert batch.advantages == build_batch(rows, rewards, groups, control, seed=1).advantages
    assert batch.advantages != build_batch(rows, rewards, groups, control, seed=2).advantages


@pytest.mark.parametrize("rows_per_rollout", [1, 3])
def test_optimizer_steps_depend_on_prompts_not_rows(rows_per_rollout: int) -> None:
    groups = groups_of(8)
    rewards = {name: float(i % 2) for i, name in enumerate(groups)}
    rows = [make_row(name, 6 // rows_per_rollout) for name in groups for _ in range(rows_per_rollout)]
    batch = build_batch(rows, rewards, groups, NO_STD)
    parts = mini_batches(batch, NO_STD, 2)
    assert len(parts) == 2
    for part in parts:
        assert len(set(part.groups.values())) == 4
        assert len(part.rows) == 8 * rows_per_rollout
        assert sum(float(np.abs(w).sum()) for w in part.weights) == pytest.approx(0.5)  # R of the part, not the batch
    inside = [{row.rollout_id for row in part.rows} for part in parts]
    assert not inside[0] & inside[1]
    assert inside[0] | inside[1] == set(groups)


def test_min_group_of_the_recipe_reaches_the_batch() -> None:
    groups = {n: "g" for n in "abc"}
    rows = [make_row(n, 4) for n in "abc"]
    rewards = {"a": 1.0, "b": 0.0, "c": None}
    two = build_batch(rows, rewards, groups, NO_STD)
    assert (two.advantages["a"], two.stats["small_groups"]) == (0.5, 0)
    three = build_batch(rows, rewards, groups, NO_STD.model_copy(update={"min_group": 3}))
    assert (three.advantages, three.stats["small_groups"]) == ({"a": 0.0, "b": 0.0, "c": None}, 1)
    assert not any(w.any() for w in three.weights)


def test_the_seed_decides_which_groups_share_an_optimizer_step() -> None:
    groups = groups_of(8)
    batch = build_batch([make_row(n, 2) for n in groups], dict.fromkeys(groups, 1.0), groups, NO_STD)

    def dealt(seed: int) -> list[list[str]]:
        return [sorted(set(part.groups.values())) for part in mini_batches(batch, NO_STD, 4, seed=seed)]

    assert dealt(1) == dealt(1)
    assert len({str(dealt(seed)) for seed in range(6)}) == 6


def test_every_row_and_group_stays_whole() -> None:
    groups = groups_of(5, 3)
    rewards = {name: float(i % 2) for i, name in enumerate(groups)}
    rows = [make_row(name, 3) for name in groups for _ in range(2)]
    batch = build_batch(rows, rewards, groups, NO_STD)
    parts = mini_batches(batch, NO_STD, 3, seed=7)
    assert sorted(len(set(p.groups.values())) for p in parts) == [1, 2, 2]
    assert sum(len(p.rows) for p in parts) == len(rows)
    for part in parts:
        for name in {row.rollout_id for row in part.rows}:
            assert sum(row.rollout_id == name for row in part.rows) == 2


def test_a_step_without_rows_is_still_a_step() -> None:
    groups = groups_of(2)
    batch = build_batch([make_row("g0-0", 3)], {n: 1.0 for n in groups} | {"g0-1": 0.0}, groups, NO_STD)
    assert sorted(len(p.rows) for p in mini_batches(batch, NO_STD, 2)) == [0, 1]


def test_impossible_split_is_refused() -> None:
    batch = build_batch([], {"a": 1.0}, {"a": "g"}, NO_STD)
    with pytest.raises(ValueError, match="1 groups"):
        mini_batches(batch, NO_STD, 2)
    with pytest.raises(ValueError, match="without a reward"):
        build_batch([make_row("zz", 1)], {"a": 1.0}, {"a": "g"}, NO_STD)


@pytest.mark.parametrize("rows", [1, 23])
def test_odd_batches_are_padded_not_dropped(rows: int) -> None:
    groups = {f"r{i}": "g" for i in range(rows)}
    batch = build_batch(
        [make_row(n, 5) for n in groups], {n: float(i % 2) for i, n in enumerate(groups)}, groups, NO_STD
    )
    full = pad_batch(batch, 8)
    assert len(full.rows) == len(full.weights) == len(full.kl_weights) == -(-rows // 8) * 8
    assert full.stats == batch.stats
    assert sum(float(np.abs(w).sum()) for w in full.weights) == sum(float(np.abs(w).sum()) for w in batch.weights)
    assert sum(r.trained_tokens for r in full.rows) == 5 * rows
    assert len(pad_batch(full, 8).rows) == len(full.rows)


@pytest.mark.parametrize(("rows", "ranks"), [(1, 4), (3, 2), (100, 4), (10_000, 8)])
@pytest.mark.parametrize("is_padded", [True, False])
def test_plans_hold_every_row_once(rows: int, ranks: int, is_padded: bool) -> None:
    lengths = np.random.default_rng(0).integers(10, 3000, rows).tolist()
    plans = plan(lengths, ranks, 4096, padded=is_padded)
    assert len({len(passes) for passes in plans}) == 1
    used = [i for passes in plans for one in passes for i in one if i != PAD]
    assert sorted(used) == list(range(rows))
    for passes in plans:
        for one in passes:
            if PAD not in one and len(one) > 1:
                size = max(lengths[i] for i in one) * len(one) if is_padded else sum(lengths[i] for i in one)
                assert size <= 4096
    if rows >= 100:
        loads = [sum(lengths[i] for one in passes for i in one if i != PAD) for passes in plans]
        assert max(loads) <= min(loads) * 1.05


def test_row_over_the_budget_gets_a_pass_of_its_own() -> None:
    assert micro_batches([10, 5000, 10], 100) == [[1], [0, 2]]
    assert micro_batches([10, 5000, 10], 100, padded=False) == [[1], [0, 2]]


def test_balance_is_even_and_deterministic() -> None:
    assert balance([5, 5, 5, 5], 2) == [[0, 2], [1, 3]]
    assert balance([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert balance([], 2) == [[], []]


def test_tensors_hold_the_rows_and_nothing_else() -> None:
    rows = [make_row("a", 2, prompt=1), make_row("b", 1, prompt=1)]
    weights = [np.array([0, 0.5, 0.5]), np.array([0, -1.0])]
    square = padded(rows, weights, pad_id=9)
    assert square["ids"].tolist() == [[0, 1, 2], [0, 1, 9]]
    assert square["mask"].tolist() == [[0, 1, 1], [0, 1, 0]]
    assert square["weights"].tolist() == [[0, 0.5, 0.5], [0, -1, 0]]
    assert square["lengths"].tolist() == [3, 2]
    flat = packed(rows, weights)
    assert flat["ids"].tolist() == [0, 1, 2, 0, 1]
    assert flat["positions"].tolist() == [0, 1, 2, 0, 1]
    assert flat["cu_seqlens"].tolist() == [0, 3, 5]
    assert flat["logprobs"].tolist() == [0, -1, -1, 0, -1]
    assert padded([])["ids"].shape == (0, 0)
    assert packed([])["cu_seqlens"].tolist() == [0]


def test_packing_rollout_by_rollout_gives_what_packing_at_once_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Packer, "CHUNK", 7)
    rng = np.random.default_rng(3)
    rows = [make_row(f"r{i}", int(rng.integers(1, 30)), prompt=int(rng.integers(0, 9))) for i in range(40)]
    packer = Packer()
    for i in range(0, 40, 4):
        packer.add(rows[i : i + 4])
    found = packer.arrays()
    assert found["cu_seqlens"].tolist() == np.cumsum([0, *(len(row.ids) for row in rows)]).tolist()
    for name in ("ids", "mask", "logprobs"):
        assert np.array_equal(found[name], np.concatenate([getattr(row, name) for row in rows]))
