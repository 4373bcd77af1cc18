"""The ledger of dropped rows: stage, reason and evidence for each, and counts that must add up.

`close` compares what came in with what was kept and what was written down; a difference is a bug of the pipeline and
stops the command, because a training set that lost rows without a reason cannot be explained to anybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swe_lightning.errors import SwelError

Row = Mapping[str, Any]


class LedgerError(SwelError):
    """Counts do not add up: rows were lost or counted twice inside the pipeline."""


@dataclass(frozen=True, slots=True)
class Drop:
    instance_id: str
    repo: str
    stage: str
    reason: str
    evidence: str

    def as_json(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass
class Ledger:
    total: int
    drops: list[Drop] = field(default_factory=list)
    funnel: list[tuple[str, int, int]] = field(default_factory=list)
    """(stage, rows in, rows out) in the order of the stages."""

    def apply(self, stage: str, rows: Sequence[Any], rejected: Mapping[int, tuple[str, str]]) -> list[Any]:
        """Take out the rows at these indices (index -> reason, evidence) and return the others, in order."""
        unknown = [index for index in rejected if not 0 <= index < len(rows)]
        if unknown:
            raise LedgerError(f"stage {stage} rejected rows that it was not given: {unknown[:3]}")
        for index in sorted(rejected):
            reason, evidence = rejected[index]
            row = rows[index]
            self.drops.append(Drop(row["instance_id"], row["repo"], stage, reason, evidence))
        kept = [row for index, row in enumerate(rows) if index not in rejected]
        self.funnel.append((stage, len(rows), len(kept)))
        return kept

    def reasons(self) -> dict[str, int]:
        return dict(Counter(drop.reason for drop in self.drops).most_common())

    def close(self, kept: Sequence[Row]) -> None:
        """LedgerError unless every row that came in is either kept or dropped, exactly once."""
        names = Counter(row["instance_id"] for row in kept)
        names.update(drop.instance_id for drop in self.drops)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise LedgerError(f"{len(twice)} rows are counted twice, for example {twice[0]}")
        if len(kept) + len(self.drops) != self.total:
            raise LedgerError(
                f"{self.total} rows came in, but {len(kept)} kept + {len(self.drops)} dropped do not add up"
            )
        expected = self.total
        for stage, before, after in self.funnel:
            if before != expected:
                raise LedgerError(f"stage {stage} saw {before} rows, but {expected} were left before it")
            expected = after
