"""Which rank computes which rows, in which forward pass: speed only, never the result.

Weights already hold every denominator, so rows may go anywhere within their optimizer step. Invariants: every row
appears exactly once; all ranks run the same number of micro-batches (collectives would hang otherwise), filled up with
zero-weight padding rows; nothing is dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

PAD = -1
"""Stands for a padding row (batch.pad_row) in a plan."""


def balance(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices per rank, ascending, with nearly equal cost: longest first, each to the least loaded rank."""
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    heap = [(0.0, 0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, count, rank = heapq.heappop(heap)
        shares[rank].append(index)
        heapq.heappush(heap, (load + costs[index], count + 1, rank))
    return [sorted(share) for share in shares]


def micro_batches(lengths: Sequence[int], max_tokens: int, *, padded: bool = True) -> list[list[int]]:
    """Indices per forward pass, at most `max_tokens` tokens each (padding included if `padded`).

    A row longer than the budget gets a pass of its own. Longest first: out of memory shows in the first pass.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    passes: list[list[int]] = []
    if padded:
        for index in order:
            if passes and (len(passes[-1]) + 1) * lengths[passes[-1][0]] <= max_tokens:
                passes[-1].append(index)
            else:
                passes.append([index])
        return passes
    heap: list[tuple[int, int]] = []
    for index in order:
        if heap and heap[0][0] + lengths[index] <= max_tokens:
            load, which = heapq.heappop(heap)
            passes[which].append(index)
            heapq.heappush(heap, (load + lengths[index], which))
        else:
            heapq.heappush(heap, (lengths[index], len(passes)))
            passes.append([index])
    return passes


def split_to(passes: Sequence[list[int]], count: int) -> list[list[int]]:
    """The same rows in at least `count` passes: the largest is halved until there are as many, or only single rows."""
    passes = [list(one) for one in passes]
    while len(passes) < count:
        largest = max(passes, key=len, default=[])
        if len(largest) < 2:
            break
        half = len(largest) // 2
        passes.append(largest[half:])
        del largest[half:]
    return passes


def plan(lengths: Sequence[int], ranks: int, max_tokens: int, *, padded: bool = True) -> list[list[list[int]]]:
    """Row indices by rank and micro-batch; PAD where a rank has no row left to fill its last passes."""
    shares = balance(lengths, ranks)
    plans = []
    for share in shares:
        passes = micro_batches([lengths[i] for i in share], max_tokens, padded=padded)
        plans.append([[share[i] for i in one] for one in passes])
    steps = max((len(passes) for passes in plans), default=0)
    plans = [split_to(passes, steps) for passes in plans]
    return [passes + [[PAD]] * (steps - len(passes)) for passes in plans]
