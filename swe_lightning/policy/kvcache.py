"""Key-value memory of the embedded server: one row per sequence, ragged lengths, exact prefix reuse.

Layout: `kv` (2 * layers, rows, context, kv heads, head dim). Rows [0, decoding) belong to sequences that sample,
[decoding, active) to sequences whose prompt is still read, the rest are retained for later turns or empty; a block of
rows is therefore always a view and never gathered. `tokens[r, :length[r]]` are the ids whose keys and values row r
holds, behind them the rest of a prompt that is still read, then -1. Reuse is decided by these ids alone; what was
computed under other weights is forgotten by `reset`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


class KVCache:
    """Rows of keys and values and the ids they stand for. Knows nothing about requests."""

    def __init__(self, *, layers: int, rows: int, context: int, kv_heads: int, head_dim: int) -> None:
        self.rows, self.context = rows, context
        self.kv = torch.zeros(2 * layers, rows, context, kv_heads, head_dim)
        self.flat = self.kv.view(2 * layers, rows * context, kv_heads, head_dim)
        self.tokens = np.full((rows, context), -1, np.int32)
        self.length = np.zeros(rows, np.int64)
        self._used = np.zeros(rows, np.int64)
        self._clock = 0
        self.generation = 0
        """Incremented by every reset; replies of different generations never share keys or values."""

    def reset(self) -> None:
        """Forget everything. Only legal while no row is active."""
        self.tokens.fill(-1)
        self.length.fill(0)
        self._used.fill(0)
        self.generation += 1

    def open(self, row: int, prompt: np.ndarray, active: int) -> int:
        """Make `row` (== active, the first row that is not active) ready for `prompt`; returns the tokens reused.

        The longest exact prefix held anywhere is used: moved if the prompt extends a retained row, copied otherwise.
        At least one prompt token is left to compute, for its logits.
        """
        best, reuse = self.longest_prefix(prompt)
        if best >= active and reuse >= self.length[best] - 1 and reuse:
            self.swap(best, row)
        else:
            victim = self._victim(active, keep=best if reuse else -1)
            if victim == best:
                reuse = min(reuse, int(self.length[best]))
                self.swap(best, row)
            else:
                self.length[victim] = 0
                self.swap(victim, row)
                best = victim if best == row else best
                if reuse:
                    self.kv[:, row, :reuse] = self.kv[:, best, :reuse]
        self.tokens[row, : len(prompt)] = prompt
        self.tokens[row, len(prompt) :] = -1
        self.length[row] = reuse
        return reuse

    def longest_prefix(self, prompt: np.ndarray) -> tuple[int, int]:
        """(row, tokens) of the longest prefix of `prompt[:-1]` whose keys and values exist."""
        shared = np.minimum(self._shared(prompt, 0, self.rows), self.length)
        best = int(shared.argmax())
        return best, int(shared[best])

    def promised(self, prompt: np.ndarray, first: int, end: int) -> int:
        """Tokens of `prompt[:-1]` that rows `first..end` are about to compute beyond what is present anywhere."""
        if first == end:
            return 0
        return int(self._shared(prompt, first, end).max()) - self.longest_prefix(prompt)[1]

    def _shared(self, prompt: np.ndarray, first: int, end: int) -> np.ndarray:
        """Length of the common prefix of `prompt[:-1]` with each of the rows' ids, computed or announced."""
        differs = self.tokens[first:end, : len(prompt)] != prompt
        differs[:, -1] = True
        return differs.argmax(axis=1)

    def append(self, row: int, ids: np.ndarray) -> None:
        """Record that keys and values of `ids` are (about to be) stored behind the present ones."""
        n = int(self.length[row])
        self.tokens[row, n : n + len(ids)] = ids
        self.length[row] = n + len(ids)

    def touch(self, row: int) -> None:
        self._clock += 1
        self._used[row] = self._clock

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows, copying no more than they hold."""
        if a == b:
            return
        n, m = int(self.length[a]), int(self.length[b])
        if n and m:
            held = self.kv[:, a, :n].clone()
            self.kv[:, a, :m] = self.kv[:, b, :m]
            self.kv[:, b, :n] = held
        elif n:
            self.kv[:, b, :n] = self.kv[:, a, :n]
        elif m:
            self.kv[:, a, :m] = self.kv[:, b, :m]
        for array in (self.tokens, self.length, self._used):
            array[[a, b]] = array[[b, a]]

    def _victim(self, active: int, keep: int) -> int:
        """An empty row if there is one, else the least recently used retained row (not `keep` unless it is alone)."""
        used = np.where(self.length[active:] == 0, -1, self._used[active:])
        if keep >= active and len(used) > 1:
            used = used.copy()
            used[keep - active] = np.iinfo(np.int64).max
        return active + int(used.argmin())


@dataclass(slots=True)
class Block:
    """Consecutive rows that attend together. `where` (rows, width): positions of their queries in the packed input."""

    first: int
    rows: int
    width: int
    total: int
    where: torch.Tensor | None
    back: torch.Tensor | None
    mask: torch.Tensor
    offset: int
    tokens: int


@dataclass(slots=True)
class Plan:
    """Where the tokens of one packed forward pass live, shared by all layers."""

    cache: KVCache
    blocks: list[Block]
    slots: torch.Tensor
    """(tokens,) flat index row * context + position of each input token."""


def make_block(first: int, starts: np.ndarray, counts: np.ndarray, offset: int, groups: int) -> Block:
    """Queries of rows `first..`: row i feeds `counts[i]` tokens behind `starts[i]` present ones.

    `offset` is the block's first token in the packed input; `groups` query heads share one key head and are folded
    into the query axis, so keys and values are never repeated.
    """
    width, total = int(counts.max()), int((starts + counts).max())
    columns = np.arange(width)
    inside = columns < counts[:, None]
    limit = starts[:, None] + np.where(inside, columns, 0)
    allowed = np.arange(total) <= limit[:, :, None]
    mask = np.where(allowed, np.float32(0), np.float32(-np.inf))
    mask = np.repeat(mask[:, None], groups, axis=1).reshape(len(starts), 1, groups * width, total)
    where = back = None
    if not inside.all():
        where = torch.from_numpy(np.where(inside, offset + np.cumsum(counts)[:, None] - counts[:, None] + columns, 0))
        back = torch.from_numpy(np.flatnonzero(inside))
    return Block(first, len(starts), width, total, where, back, torch.from_numpy(mask), offset, int(counts.sum()))


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    ragged_plan: Plan,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention of a packed input (1, heads, tokens, head dim) against the cache; registered with transformers."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    cache = ragged_plan.cache
    kv_heads, head_dim = key.shape[1], key.shape[3]
    keys, values = cache.flat[2 * layer], cache.flat[2 * layer + 1]
    keys.index_copy_(0, ragged_plan.slots, key[0].transpose(0, 1))
    values.index_copy_(0, ragged_plan.slots, value[0].transpose(0, 1))
    packed = query[0].transpose(0, 1)
    heads = packed.shape[1]
    groups = heads // kv_heads
    parts = []
    for b in ragged_plan.blocks:
        q = packed[b.offset : b.offset + b.tokens] if b.where is None else packed[b.where]
        q = q.reshape(b.rows, b.width, kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(b.rows, kv_heads, groups * b.width, head_dim)
        k = cache.kv[2 * layer, b.first : b.first + b.rows, : b.total].transpose(1, 2)
        v = cache.kv[2 * layer + 1, b.first : b.first + b.rows, : b.total].transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=b.mask, scale=scaling)
        out = out.view(b.rows, kv_heads, groups, b.width, head_dim).permute(0, 3, 1, 2, 4)
        out = out.reshape(b.rows * b.width, heads, head_dim)
        parts.append(out if b.back is None else out[b.back])
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None
