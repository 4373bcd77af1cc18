"""Rows of a given shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swe_lightning.records import Row


def make_row(rollout_id: str, trained: int, *, prompt: int = 2, group: str = "", logprob: float = -1.0) -> Row:
    """`prompt` untrained tokens, then `trained` sampled ones."""
    n = prompt + trained
    mask = np.array([0] * prompt + [1] * trained, dtype=np.int8)
    return Row(
        np.arange(n, dtype=np.int32),
        mask,
        (logprob * mask).astype(np.float32),
        rollout_id,
        group,
        spans=[(prompt, n, 0)] if trained else [],
    )


def masked_row(rollout_id: str, mask: Sequence[int]) -> Row:
    m = np.array(mask, dtype=np.int8)
    return Row(np.arange(len(m), dtype=np.int32), m, np.where(m, -1.0, 0.0).astype(np.float32), rollout_id)
