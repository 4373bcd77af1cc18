"""One weight per token: advantage and normalisation folded together, so that an engine only sums.

Over the R rollouts that have a trained token and an advantage, with T trained tokens each (paper Eq. 14-16):

    rollout_token_mean  A / (R T)          every rollout counts the same (Eq. 16, default)
    token_mean          A / (sum of T)     long rollouts count more (Eq. 14)
    sample_mean         A / (S T_row)      S rows: rollouts cut into many rows count more (Eq. 15)
    constant            A / (R L)          fixed L for every rollout (Dr. GRPO)

Invariant: rows without a trained token, padding and infrastructure failures change no denominator. Refuses to see part
of a rollout: hand over all rows of an optimizer step at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from swe_lightning.records import Row

Normalisation = Literal["rollout_token_mean", "token_mean", "sample_mean", "constant"]
CONSTANT_TOKENS = 4096


def token_weights(
    rows: Sequence[Row],
    advantage_by_rollout: Mapping[str, float | None],
    normalisation: str = "rollout_token_mean",
    *,
    constant_tokens: int = CONSTANT_TOKENS,
) -> list[np.ndarray]:
    """Float64 weights (tokens of the row,) per row; 0 where mask is 0; over a rollout they sum to A / R by default.

    A rollout whose advantage is None weighs nothing and is not among the R. ValueError if a rollout with trained
    tokens is missing from `advantage_by_rollout`.
    """
    if normalisation not in get_args(Normalisation):
        raise ValueError(f"unknown normalisation {normalisation!r}: use one of {', '.join(get_args(Normalisation))}")
    trained = [row.trained_tokens for row in rows]
    tokens: Counter[str] = Counter()
    samples = 0
    for row, count in zip(rows, trained, strict=True):
        if not count:
            continue
        if row.rollout_id not in advantage_by_rollout:
            raise ValueError(f"rollout {row.rollout_id} has trained tokens but no advantage (None = failed)")
        if advantage_by_rollout[row.rollout_id] is not None:
            tokens[row.rollout_id] += count
            samples += 1
    result = []
    for row, count in zip(rows, trained, strict=True):
        advantage = advantage_by_rollout.get(row.rollout_id) if count else None
        weight = np.zeros(len(row.ids), dtype=np.float64)
        if advantage is not None:
            denominator = {
                "rollout_token_mean": len(tokens) * tokens[row.rollout_id],
                "token_mean": tokens.total(),
                "sample_mean": samples * count,
                "constant": len(tokens) * constant_tokens,
            }[normalisation]
            weight[np.asarray(row.mask) != 0] = advantage / denominator
        result.append(weight)
    return result


def uniform_weights(
    rows: Sequence[Row], normalisation: str = "rollout_token_mean", *, constant_tokens: int = CONSTANT_TOKENS
) -> list[np.ndarray]:
    """Weights of terms without an advantage (KL, entropy): the same normalisation with advantage 1 everywhere."""
    ones = {row.rollout_id: 1.0 for row in rows}
    return token_weights(rows, ones, normalisation, constant_tokens=constant_tokens)
