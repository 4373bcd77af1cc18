"""What may still be trained on: groups that are fresh enough, and results that are not a second time.

Invariant: nothing disappears silently: a refused group is requeued and counted, a late result is ignored and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from swe_lightning.records import Row


def fresh(start: int, current: int, max_lag: int) -> bool:
    """True iff current - start <= max_lag; all in weight updates."""
    return current - start <= max_lag


def oldest_version(rows: Iterable[Row], default: int) -> int:
    """Oldest weight version that sampled any token of the rows; `default` if none did."""
    return min((version for row in rows for _, _, version in row.spans), default=default)


class StalenessGate:
    """Decides per group: used, or requeued whole (half a group would bias its mean)."""

    def __init__(self, max_lag: int) -> None:
        self.max_lag = max_lag
        self.requeues: Counter[str] = Counter()
        self.accepted = 0
        self.lag_max = 0

    def admit(self, group_id: str, start: int, current: int) -> bool:
        """`start`: weight version at the group's first token. False: sample the group again."""
        if not fresh(start, current, self.max_lag):
            self.requeues[group_id] += 1
            return False
        self.accepted += 1
        self.lag_max = max(self.lag_max, current - start)
        return True

    @property
    def stats(self) -> dict[str, float]:
        return {
            "groups_accepted": float(self.accepted),
            "groups_requeued": float(self.requeues.total()),
            "staleness_max": float(self.lag_max),
        }


class Arrivals:
    """Results by rollout: the first that arrives counts, whatever its attempt; all later ones are late."""

    def __init__(self) -> None:
        self._attempt: dict[str, int] = {}
        self.late = 0

    def take(self, rollout_id: str, attempt: int) -> bool:
        """True: use this result. False: the rollout already has one; counted, never an error."""
        if rollout_id in self._attempt:
            self.late += 1
            return False
        self._attempt[rollout_id] = attempt
        return True

    def __len__(self) -> int:
        return len(self._attempt)
