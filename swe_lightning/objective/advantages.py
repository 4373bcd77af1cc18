"""Advantages: one number per rollout, from one reward per rollout.

Invariant: statistics are over the graded rollouts of a group, in float64; how many rows a rollout has never matters. A
reward of None (infrastructure failure) takes part in nothing and stays None. Refuses rewards that are not finite.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, TypeVar, get_args

Estimator = Literal["grpo", "grpo_no_std", "rloo", "reinforce_baseline"]
EPS = 1e-6
K = TypeVar("K", bound=Hashable)


def advantages(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    estimator: str = "grpo",
    min_group: int = 2,
) -> list[float | None]:
    """Advantage of each rollout, in the given order; `groups` holds its group key (any sizes, any order).

    grpo                (r - mean) / (std + 1e-6), std with ddof 1
    grpo_no_std         r - mean (Dr. GRPO)
    rloo                r - mean of the others
    reinforce_baseline  r - mean over the whole batch; groups play no part

    A group with fewer than `min_group` graded members, a single one always, and a group of equal rewards get exactly 0.
    """
    if estimator not in get_args(Estimator):
        raise ValueError(f"unknown advantage estimator {estimator!r}: use one of {', '.join(get_args(Estimator))}")
    if len(rewards) != len(groups):
        raise ValueError(f"{len(rewards)} rewards but {len(groups)} group keys")
    members: dict[Hashable, list[int]] = {}
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if reward is None:
            continue
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward} of rollout {i} is not finite")
        members.setdefault(None if estimator == "reinforce_baseline" else group, []).append(i)
    least = 2 if estimator == "reinforce_baseline" else max(2, min_group)
    result: list[float | None] = [None] * len(rewards)
    for indices in members.values():
        values = [float(rewards[i]) for i in indices]  # type: ignore[arg-type]
        for i, value in zip(indices, _within(values, estimator, least), strict=True):
            result[i] = value
    return result


def _within(values: list[float], estimator: str, least: int) -> list[float]:
    n = len(values)
    if n < least or min(values) == max(values):
        return [0.0] * n
    mean = math.fsum(values) / n
    centred = [v - mean for v in values]
    if estimator == "grpo":
        std = math.sqrt(math.fsum(c * c for c in centred) / (n - 1))
        return [c / (std + EPS) for c in centred]
    if estimator == "rloo":
        return [c * n / (n - 1) for c in centred]
    return centred


def group_counts(rewards: Sequence[float | None], groups: Sequence[Hashable], min_group: int = 2) -> Counter[str]:
    """Groups by kind, and failures.

    groups; singleton_groups (one graded member); small_groups (two or more, but below min_group); zero_variance_groups;
    empty_groups (none graded); infra_failures (rollouts).
    """
    graded: dict[Hashable, list[float]] = {group: [] for group in groups}
    counts: Counter[str] = Counter(
        groups=len(graded), singleton_groups=0, small_groups=0, zero_variance_groups=0, empty_groups=0, infra_failures=0
    )
    for reward, group in zip(rewards, groups, strict=True):
        if reward is None:
            counts["infra_failures"] += 1
        else:
            graded[group].append(reward)
    for values in graded.values():
        if not values:
            counts["empty_groups"] += 1
        elif len(values) == 1:
            counts["singleton_groups"] += 1
        elif len(values) < min_group:
            counts["small_groups"] += 1
        elif min(values) == max(values):
            counts["zero_variance_groups"] += 1
    return counts


def shuffled(rewards: Mapping[K, float | None], seed: int) -> dict[K, float | None]:
    """The control experiment: graded rewards permuted over the batch; failures stay where they are.

    Depends on the seed and the keys, not on their order.
    """
    graded = sorted((key for key, reward in rewards.items() if reward is not None), key=str)
    values = [rewards[key] for key in graded]
    random.Random(seed).shuffle(values)
    return {**rewards, **dict(zip(graded, values, strict=True))}
