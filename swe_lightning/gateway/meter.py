"""Numbers the hot path keeps: plain integers, since the start of the process; Prometheus reads them when asked.

A histogram here costs a binary search and two additions. Counts that must outlive the process are in the store.
"""

from __future__ import annotations

from bisect import bisect_left

COMMIT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
CALL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Histogram:
    """Observations by upper bound (seconds), and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus buckets: how many were at most each bound, +Inf last."""
        shown, sofar = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            sofar += count
            shown.append(("+Inf" if bound == float("inf") else repr(bound), float(sofar)))
        return shown
