"""Rows -> the arrays an engine reads, padded or packed; numpy, and shared with torch without a copy.

Invariant: the arrays hold the rows and nothing else: padding has mask 0 and weight 0.
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
        values = {"ids": row.ids, "mask": row.mask, "logprobs": row.logprobs}
        for name, value in (values | ({"weights": weights[i]} if weights is not None else {})).items():
            out[name][i, : len(row.ids)] = value
    return {**out, "lengths": lengths}


class Packer:
    """Packed arrays that grow rollout by rollout, so that a step's rows never lie beside the arrays made of them.

    Growing is realloc, which moves large blocks by remapping their pages and copies nothing.
    """

    CHUNK = 1 << 17
    """Tokens the arrays grow by at least."""

    def __init__(self) -> None:
        self._arrays = _empty((0,), 0)
        del self._arrays["weights"]
        self._ends = [0]

    def add(self, rows: Sequence[Row]) -> None:
        """Append the rows' ids, mask and log-probs; the rows may go afterwards."""
        for row in rows:
            start, end = self._ends[-1], self._ends[-1] + len(row.ids)
            if end > len(self._arrays["ids"]):
                self._resize(max(end, start + self.CHUNK))
            for name, array in self._arrays.items():
                array[start:end] = getattr(row, name)
            self._ends.append(end)

    def arrays(self) -> dict[str, np.ndarray]:
        """ids, mask, logprobs (all tokens,), and cu_seqlens (rows + 1,); ends the packing."""
        self._resize(self._ends[-1])
        return {**self._arrays, "cu_seqlens": np.array(self._ends, dtype=np.int32)}

    def _resize(self, tokens: int) -> None:
        for array in self._arrays.values():
            array.resize(tokens, refcheck=False)


def packed(rows: Sequence[Row], weights: Sequence[np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """ids, mask, logprobs, weights, positions of shape (all tokens,), and cu_seqlens (rows + 1,)."""
    packer = Packer()
    packer.add(rows)
    out = packer.arrays()
    ends = out["cu_seqlens"]
    out["weights"] = np.zeros(int(ends[-1]), dtype=np.float32)
    for start, weight in zip(ends[:-1].tolist(), weights if weights is not None else (), strict=False):
        out["weights"][start : start + len(weight)] = weight
    out["positions"] = np.arange(int(ends[-1]), dtype=np.int32) - np.repeat(ends[:-1], np.diff(ends))
    return out


def _empty(shape: tuple[int, ...], pad_id: int) -> dict[str, np.ndarray]:
    return {
        "ids": np.full(shape, pad_id, dtype=np.int32),
        "mask": np.zeros(shape, dtype=np.int8),
        "logprobs": np.zeros(shape, dtype=np.float32),
        "weights": np.zeros(shape, dtype=np.float32),
    }


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
