"""Rows -> the arrays an engine reads, padded or packed; numpy, and shared with torch without a copy.

Invariant: the arrays hold the rows and nothing else: padding has mask 0 and weight 0.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, ClassVar

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

    Each column is a private memory map: growing remaps its pages and copies nothing, pages not yet written cost
    nothing, and what a step used goes back to the system with the last view of it, which a heap does not promise.
    """

    CHUNK = 1 << 17
    """Tokens the columns start with; they grow by doubling."""
    COLUMNS: ClassVar[dict[str, Any]] = {"ids": np.int32, "mask": np.int8, "logprobs": np.float32}

    def __init__(self) -> None:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._room = self.CHUNK
        self._maps = {
            name: mmap.mmap(-1, self._room * np.dtype(kind).itemsize, flags=private)
            for name, kind in self.COLUMNS.items()
        }
        self._ends = [0]

    def add(self, rows: Sequence[Row]) -> None:
        """Append the rows' ids, mask and log-probs; the rows may go afterwards."""
        needed = self._ends[-1] + sum(len(row.ids) for row in rows)
        if needed > self._room:
            self._room = max(needed, 2 * self._room)
            for name, kind in self.COLUMNS.items():
                self._maps[name].resize(self._room * np.dtype(kind).itemsize)
        columns = self._columns()
        for row in rows:
            start, end = self._ends[-1], self._ends[-1] + len(row.ids)
            for name, column in columns.items():
                column[start:end] = getattr(row, name)
            self._ends.append(end)

    def arrays(self) -> dict[str, np.ndarray]:
        """ids, mask, logprobs (all tokens,), and cu_seqlens (rows + 1,); nothing can be added while one is in use."""
        tokens = self._ends[-1]
        columns = {name: column[:tokens] for name, column in self._columns().items()}
        return {**columns, "cu_seqlens": np.array(self._ends, dtype=np.int32)}

    def _columns(self) -> dict[str, np.ndarray]:
        return {name: np.frombuffer(self._maps[name], kind) for name, kind in self.COLUMNS.items()}


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
