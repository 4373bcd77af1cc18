"""Rows over data-parallel ranks: who computes which, and how results come back together.

Every rank is handed the whole batch and picks its share by token work, so nothing travels but results. Invariants:
every row has exactly one rank; all ranks hold equally many rows, filled up with padding rows that weigh nothing. With
one rank everything here is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from swe_lightning.objective.balance import PAD, balance
from swe_lightning.objective.batch import pad_row
from swe_lightning.records import Row


class Sharing:
    """This process's place in the training group."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def share(self, rows: Sequence[Row]) -> list[int]:
        """Indices of this rank's rows, PAD where it is filled up."""
        if self.ranks == 1:
            return list(range(len(rows)))
        shares = balance([len(row.ids) for row in rows], self.ranks)
        mine = shares[self.rank]
        return mine + [PAD] * (max(map(len, shares)) - len(mine))

    def take(
        self, rows: Sequence[Row], columns: Mapping[str, Sequence[np.ndarray]]
    ) -> tuple[list[Row], dict[str, list[np.ndarray]]]:
        """This rank's rows and their columns."""
        mine = self.share(rows)
        nothing = np.zeros(2, np.float32)
        return (
            [pad_row() if i == PAD else rows[i] for i in mine],
            {name: [nothing if i == PAD else values[i] for i in mine] for name, values in columns.items()},
        )

    def together(self, rows: Sequence[Row], compute: Callable[[list[Row]], Sequence[np.ndarray]]) -> list[np.ndarray]:
        """`compute` on each rank's share; the results of all rows, on every rank."""
        import torch.distributed as dist

        if self.ranks == 1 or not rows:
            return list(compute(list(rows)))
        mine = self.share(rows)
        found = compute(self.take(rows, {})[0])
        pairs = [(i, values) for i, values in zip(mine, found, strict=True) if i != PAD]
        parts: list[Any] = [None] * self.ranks
        dist.all_gather_object(parts, pairs)
        by_row = {i: values for part in parts for i, values in part}
        return [by_row[i] for i in range(len(rows))]
