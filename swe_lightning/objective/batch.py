"""From rows and rewards to batches an engine can sum.

Invariants: all rows of a rollout and all rollouts of a group are in the same optimizer step; the number of optimizer
steps follows from the number of groups (prompts), never from rows; R is counted per optimizer step. Rows are left out
only with a count in `stats`. Refuses to touch tensors.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import numpy as np

from swe_lightning.objective.advantages import advantages, group_counts, shuffled
from swe_lightning.objective.weights import token_weights, uniform_weights
from swe_lightning.recipe import Algorithm
from swe_lightning.records import Batch, Row


def build_batch(
    rows: Sequence[Row],
    rewards: Mapping[str, float | None],
    groups: Mapping[str, str],
    algorithm: Algorithm,
    *,
    seed: int = 0,
) -> Batch:
    """One batch of whole groups. `rewards`: every rollout of the batch, None = infrastructure failure.

    Rows of failed rollouts, and of groups under skip_zero_variance, are left out and counted. `seed` matters for
    algorithm.shuffle_rewards only. ValueError if a row's rollout has no reward entry.
    """
    unknown = {row.rollout_id for row in rows} - rewards.keys()
    if unknown:
        raise ValueError(f"rows of rollouts without a reward entry: {', '.join(sorted(unknown)[:5])}")
    given = shuffled(rewards, seed) if algorithm.shuffle_rewards else dict(rewards)
    ids = list(given)
    keys = [groups[i] for i in ids]
    values = advantages([given[i] for i in ids], keys, algorithm.advantage, algorithm.min_group)
    counts = group_counts([given[i] for i in ids], keys, algorithm.min_group)
    teaching = {key for key, value in zip(keys, values, strict=True) if value}
    silent = {i for i, key, value in zip(ids, keys, values, strict=True) if value is not None and key not in teaching}
    skipped = silent if algorithm.skip_zero_variance else set()
    advantage = {i: None if i in skipped else value for i, value in zip(ids, values, strict=True)}
    kept = [row for row in rows if advantage[row.rollout_id] is not None]
    for row in kept:
        row.group_id = row.group_id or groups[row.rollout_id]
    batch = _weighted(kept, advantage, algorithm)
    batch.rewards = given
    batch.groups = {i: groups[i] for i in ids}
    batch.stats = {
        **{name: float(count) for name, count in counts.items()},
        "skipped_rollouts": float(len(skipped)),
        "rows_left_out": float(len(rows) - len(kept)),
        **_summary(batch),
    }
    return batch


def mini_batches(batch: Batch, algorithm: Algorithm, count: int, *, seed: int = 0) -> list[Batch]:
    """Split into `count` optimizer steps of whole groups, weights normalised within each.

    Always `count` batches, also when one of them holds no row: steps are counted in prompts. The advantages are the
    whole batch's. Groups are dealt in an order drawn from `seed`.
    """
    names = sorted(set(batch.groups.values()))
    if not 1 <= count <= max(1, len(names)):
        raise ValueError(f"{count} mini-batches of whole groups cannot be made of {len(names)} groups")
    if count == 1:
        return [batch]
    random.Random(seed).shuffle(names)
    part_of = {name: i * count // len(names) for i, name in enumerate(names)}
    result = []
    for part in range(count):
        members = [i for i, group in batch.groups.items() if part_of[group] == part]
        inside = set(members)
        piece = _weighted([r for r in batch.rows if r.rollout_id in inside], batch.advantages, algorithm)
        piece.advantages = {i: batch.advantages[i] for i in members}
        piece.rewards = {i: batch.rewards[i] for i in members}
        piece.groups = {i: batch.groups[i] for i in members}
        piece.stats = _summary(piece)
        result.append(piece)
    return result


def pad_row() -> Row:
    """A row that weighs nothing and counts nowhere: shapes get full without dropping anything."""
    return Row(
        np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.int8), np.zeros(2, dtype=np.float32), rollout_id="padding"
    )


def pad_batch(batch: Batch, multiple: int) -> Batch:
    """The batch with zero-weight rows appended until the number of rows is a multiple; statistics stay as they are."""
    missing = -len(batch.rows) % multiple
    nothing = [np.zeros(2, dtype=np.float32)] * missing
    return Batch(
        rows=[*batch.rows, *(pad_row() for _ in range(missing))],
        weights=[*batch.weights, *nothing],
        rewards=batch.rewards,
        advantages=batch.advantages,
        stats=batch.stats,
        kl_weights=[*batch.kl_weights, *nothing],
        groups=batch.groups,
    )


def _weighted(rows: list[Row], advantage: Mapping[str, float | None], algorithm: Algorithm) -> Batch:
    settings = {"normalisation": algorithm.normalisation, "constant_tokens": algorithm.constant_tokens}
    weights = token_weights(rows, advantage, **settings)  # type: ignore[arg-type]
    uniform = uniform_weights(rows, **settings)  # type: ignore[arg-type]
    return Batch(
        rows=rows,
        weights=[w.astype(np.float32) for w in weights],
        kl_weights=[w.astype(np.float32) for w in uniform],
        advantages=dict(advantage),
    )


def _summary(batch: Batch) -> dict[str, float]:
    graded = [r for r in batch.rewards.values() if r is not None]
    mean = math.fsum(graded) / len(graded) if graded else 0.0
    spread = math.sqrt(math.fsum((r - mean) ** 2 for r in graded) / len(graded)) if graded else 0.0
    trained = [row.trained_tokens for row in batch.rows]
    with_rows = {row.rollout_id for row, count in zip(batch.rows, trained, strict=True) if count}
    usable = [a for a in batch.advantages.values() if a is not None]
    return {
        "rollouts": float(len(batch.rewards)),
        "graded": float(len(graded)),
        "rollouts_in_loss": float(len(with_rows)),
        "rows": float(len(batch.rows)),
        "rows_per_rollout": len(batch.rows) / len(with_rows) if with_rows else 0.0,
        "trained_tokens": float(sum(trained)),
        "tokens": float(sum(len(row.ids) for row in batch.rows)),
        "reward_mean": mean,
        "reward_std": spread,
        "advantage_abs_mean": math.fsum(abs(a) for a in usable) / len(usable) if usable else 0.0,
    }
