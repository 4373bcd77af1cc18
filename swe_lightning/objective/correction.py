"""Off-policy correction: the sampler's log-probabilities are not the trainer's (other kernels, older weights).

Per token or per rollout, the importance ratio trainer/sampler weighs the loss: truncated at `cap` (tis), or set to 0
outside [1/cap, cap] (mask). A sequence is the whole rollout, over all its rows, so cutting it differently changes
nothing. Invariants: corrections are constants (no gradient) and never enter a denominator; mask-0 tokens and padding
rows are in no statistic.

`truncate`, `masked` and `in_band` take numpy arrays and torch tensors alike; `correct` works on rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from swe_lightning.recipe import OffPolicy
from swe_lightning.records import Row

_LIMIT = 20.0


def ratio(log_ratio: Any) -> Any:
    """exp(log_ratio) with |log_ratio| cut at 20: finite whatever a broken engine reports."""
    clipped = log_ratio.clip(-_LIMIT, _LIMIT)
    return clipped.exp() if hasattr(clipped, "exp") else np.exp(clipped)


def truncate(log_ratio: Any, cap: float) -> Any:
    """min(ratio, cap): truncated importance sampling."""
    return ratio(log_ratio).clip(max=cap)


def in_band(log_ratio: Any, cap: float) -> Any:
    """True where the ratio lies within [1/cap, cap]."""
    bound = float(np.log(cap)) + 1e-9
    return (log_ratio >= -bound) & (log_ratio <= bound)


def masked(log_ratio: Any, cap: float) -> Any:
    """The ratio within the band, 0 outside: masked importance sampling."""
    return ratio(log_ratio) * in_band(log_ratio, cap)


def correct(
    rows: Sequence[Row], trainer_logprobs: Sequence[np.ndarray], settings: OffPolicy
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Factors per token for policy_loss(is_weights=...), float32 aligned to each row's ids, and what to log.

    `trainer_logprobs`: (tokens,) per row under the weights the update starts from. Hand over all rows of a rollout.
    Statistics are over trained tokens: off_policy_ratio_mean / _max / _min, off_policy_kl (sampler to trainer, k3),
    off_policy_clipped and off_policy_masked (shares), off_policy_tokens.
    """
    masks = [np.asarray(row.mask) != 0 for row in rows]
    deltas = [
        np.where(mask, np.asarray(new, dtype=np.float64) - row.logprobs, 0.0)
        for row, new, mask in zip(rows, trainer_logprobs, masks, strict=True)
    ]
    measured = deltas if settings.level == "token" else _per_rollout(rows, deltas)
    factors = [_factor(delta, mask, settings) for delta, mask in zip(measured, masks, strict=True)]
    return factors, _statistics(deltas, measured, masks, settings)


def _per_rollout(rows: Sequence[Row], deltas: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Every token's log ratio replaced by the sum over its rollout: the ratio of the whole trajectory."""
    sums: dict[str, float] = {}
    for row, delta in zip(rows, deltas, strict=True):
        sums[row.rollout_id] = sums.get(row.rollout_id, 0.0) + float(delta.sum())
    return [np.full(len(row.ids), sums[row.rollout_id]) for row in rows]


def _factor(delta: np.ndarray, mask: np.ndarray, settings: OffPolicy) -> np.ndarray:
    if settings.kind == "none":
        return mask.astype(np.float32)
    value = truncate(delta, settings.cap) if settings.kind == "tis" else masked(delta, settings.cap)
    return np.where(mask, value, 0.0).astype(np.float32)


def _statistics(
    deltas: Sequence[np.ndarray], measured: Sequence[np.ndarray], masks: Sequence[np.ndarray], settings: OffPolicy
) -> dict[str, float]:
    tokens = int(sum(int(mask.sum()) for mask in masks))
    if not tokens:
        return {"off_policy_tokens": 0.0}
    per_token = np.concatenate([d[m] for d, m in zip(deltas, masks, strict=True)])
    judged = np.concatenate([d[m] for d, m in zip(measured, masks, strict=True)])
    ratios = ratio(per_token)
    out = {
        "off_policy_tokens": float(tokens),
        "off_policy_ratio_mean": float(ratios.mean()),
        "off_policy_ratio_max": float(ratios.max()),
        "off_policy_ratio_min": float(ratios.min()),
        "off_policy_kl": float((ratios - 1 - per_token).mean()),
        "off_policy_clipped": 0.0,
        "off_policy_masked": 0.0,
    }
    if settings.kind == "tis":
        out["off_policy_clipped"] = float((judged > np.log(settings.cap)).mean())
    elif settings.kind == "mask":
        out["off_policy_masked"] = float((~in_band(judged, settings.cap)).mean())
    return out
