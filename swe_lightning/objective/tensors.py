"""Rows -> the arrays an engine reads, padded or packed; numpy, and shared with torch without a copy.

Invariant: the arrays hold the rows and nothing else: padding has mask 0 and weight 0. Every array is allocated once at
its final size and filled in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swe_lightning.records import Row


def padded(
    rows: Sequence[Row], weights: Sequence[np.ndarray] | None = None, *, pad_id: int = 0
) -> dict[str, np.ndarray]:
    """ids, mask, logprobs, weights of shape (rows, longest row), right padded, and lengths (rows,)."""
    lengths = np.array([len(row.ids) for row in rows], dtype=np.int32)
    shape = (len(rows), int(lengths.max(initial=0)))
    out = _empty(shape, pad_id)
    for i, row in enumerate(rows):
        _fill(out, (i, slice(0, int(lengths[i]))), row, weights[i] if weights is not None else None)
    return {**out, "lengths": lengths}


def packed(rows: Sequence[Row], weights: Sequence[np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """ids, mask, logprobs, weights, positions of shape (all tokens,), and cu_seqlens (rows + 1,)."""
    lengths = np.array([len(row.ids) for row in rows], dtype=np.int32)
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    out = _empty((int(ends[-1]),), 0)
    out["positions"] = np.empty(int(ends[-1]), dtype=np.int32)
    for i, row in enumerate(rows):
        where = slice(int(ends[i]), int(ends[i + 1]))
        _fill(out, where, row, weights[i] if weights is not None else None)
        out["positions"][where] = np.arange(lengths[i], dtype=np.int32)
    return {**out, "cu_seqlens": ends.astype(np.int32)}


def _empty(shape: tuple[int, ...], pad_id: int) -> dict[str, np.ndarray]:
    return {
        "ids": np.full(shape, pad_id, dtype=np.int32),
        "mask": np.zeros(shape, dtype=np.int8),
        "logprobs": np.zeros(shape, dtype=np.float32),
        "weights": np.zeros(shape, dtype=np.float32),
    }


def _fill(out: dict[str, np.ndarray], where: tuple[int, slice] | slice, row: Row, weight: np.ndarray | None) -> None:
    out["ids"][where] = row.ids
    out["mask"][where] = row.mask
    out["logprobs"][where] = row.logprobs
    if weight is not None:
        out["weights"][where] = weight


def segments(rows: Sequence[Row]) -> list[np.ndarray]:
    """Labels (tokens of the row,) for policy_loss(segments=...): each sampled reply its own number, 0 elsewhere.

    Replies are the row's spans, because two of them may touch without a token between; a row without spans has one
    reply per run of mask 1.
    """
    labels, following = [], 1
    for row in rows:
        label = np.zeros(len(row.ids), dtype=np.int64)
        for start, end in [(start, end) for start, end, _ in row.spans] or _runs(row.mask):
            label[start:end] = following
            following += 1
        labels.append(label)
    return labels


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0])))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
