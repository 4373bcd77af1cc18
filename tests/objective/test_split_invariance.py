"""Thousands of random batches in plain numbers: cuts, order, micro-batches and ranks change no sum.

A loss is any number per sampled token; what an engine would sum is weight x loss over the rows of every pass of every
rank. The gradient through real models is in test_gradient_invariance.py and tests/policy.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swe_lightning.objective import build_batch
from swe_lightning.objective.balance import PAD, plan
from swe_lightning.objective.batch import pad_batch
from swe_lightning.recipe import Algorithm
from swe_lightning.records import Batch, Row

THOUSANDS = settings(max_examples=2000)
INVARIANT = ["rollout_token_mean", "token_mean", "constant"]
ESTIMATORS = ["grpo", "grpo_no_std", "rloo", "reinforce_baseline"]


class World:
    """Rollouts of a batch: rewards, groups, and a loss for every sampled token."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        names = [f"r{i}" for i in range(rng.randint(1, 9))]
        self.rewards = {name: rng.choice([0.0, 0.25, 1.0, None]) for name in names}
        self.groups = {name: f"g{rng.randrange(3)}" for name in names}
        self.losses = {name: [rng.uniform(-2, 2) for _ in range(rng.randint(1, 12))] for name in names}

    def cut(self, rng: random.Random) -> list[Row]:
        """All rollouts cut at random, in random order; logprobs carry each token's loss."""
        rows = []
        for name, losses in self.losses.items():
            at = 0
            while at < len(losses):
                size = rng.randint(1, len(losses) - at)
                prompt = rng.randint(0, 4)
                values = np.array([0.0] * prompt + losses[at : at + size], np.float32)
                mask = np.array([0] * prompt + [1] * size, np.int8)
                rows.append(Row(np.zeros(prompt + size, np.int32), mask, values, name))
                at += size
        rng.shuffle(rows)
        return rows

    def batch(self, rows: list[Row], algorithm: Algorithm) -> Batch:
        return build_batch(rows, self.rewards, self.groups, algorithm)


def summed(batch: Batch, ranks: int, budget: int) -> float:
    """What the ranks add up to."""
    total = []
    for passes in plan([len(row.ids) for row in batch.rows], ranks, budget):
        for one in passes:
            total += [float(batch.weights[i].astype(np.float64) @ batch.rows[i].logprobs) for i in one if i != PAD]
    return math.fsum(total)


def size_of(batch: Batch) -> dict[str, float]:
    """Sum of |weights| by rollout."""
    found: dict[str, float] = defaultdict(float)
    for row, weights in zip(batch.rows, batch.weights, strict=True):
        found[row.rollout_id] += float(np.abs(weights.astype(np.float64)).sum())
    return found


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-6, abs=1e-7)


algorithms = st.builds(
    Algorithm,
    advantage=st.sampled_from(ESTIMATORS),
    normalisation=st.sampled_from(INVARIANT),
    skip_zero_variance=st.booleans(),
    min_group=st.integers(1, 3),
)


@THOUSANDS
@given(st.integers(0, 2**32), algorithms, st.sampled_from([1, 2, 4]), st.integers(1, 60))
def test_cut_order_passes_and_ranks(seed: int, algorithm: Algorithm, ranks: int, budget: int) -> None:
    world = World(random.Random(seed))
    one = world.batch(world.cut(random.Random(seed + 1)), algorithm)
    two = world.batch(world.cut(random.Random(seed + 2)), algorithm)
    assert one.advantages == two.advantages
    assert summed(one, 1, 10_000) == close(summed(two, ranks, budget))
    assert size_of(one) == close(size_of(two))
    if algorithm.normalisation == "rollout_token_mean":
        inside = [n for n, a in one.advantages.items() if a is not None]
        wanted = {n: abs(one.advantages[n] or 0.0) / len(inside) for n in inside}
        assert size_of(two) == close(wanted)


@THOUSANDS
@given(st.integers(0, 2**32), algorithms)
def test_failures_padding_and_repeated_branches(seed: int, algorithm: Algorithm) -> None:
    rng = random.Random(seed)
    world = World(rng)
    rows = world.cut(random.Random(seed + 1))
    before = world.batch(rows, algorithm)
    branch = rng.choice(rows)
    repeated = Row(branch.ids, branch.mask * 0, branch.logprobs * 0, branch.rollout_id)
    dead = Row(np.zeros(5, np.int32), np.ones(5, np.int8), np.full(5, 9.0, np.float32), "dead")
    world.rewards["dead"], world.groups["dead"] = None, rng.choice(["g0", "g1", "g9"])
    after = pad_batch(world.batch([dead, *rows, repeated], algorithm), rng.randint(1, 16))
    assert {n: a for n, a in after.advantages.items() if n != "dead"} == before.advantages
    assert summed(after, rng.choice([1, 2, 4]), rng.randint(1, 60)) == close(summed(before, 1, 10_000))
    assert {n: v for n, v in size_of(after).items() if v} == close({n: v for n, v in size_of(before).items() if v})
    same = ("rollouts_in_loss", "trained_tokens", "reward_mean", "reward_std", "graded")
    assert {k: after.stats[k] for k in same} == {k: before.stats[k] for k in same}


def test_the_sample_mean_is_not_invariant_so_these_tests_can_fail() -> None:
    algorithm, different = Algorithm(normalisation="sample_mean"), 0
    for seed in range(50):
        world = World(random.Random(seed))
        one, two = (world.batch(world.cut(random.Random(k)), algorithm) for k in (1, 2))
        different += summed(one, 1, 10_000) != close(summed(two, 1, 10_000))
    assert different > 10
