"""Counts of a filtered set by size: tests per task, length of issue texts, share of rollouts that solved a task.

Pure functions on small numbers. Bins are fixed (powers of two, quarters), so that two reports can be compared bin by
bin. Each bin is [label, rows that came in, rows that stayed].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Bins = list[tuple[str, int, int]]
SHARES = ("0", "1-25", "26-50", "51-75", "76-99", "100")
"""Bins of solve rates, in percent."""


def histograms(
    rows: Sequence[Row], kept: Sequence[Row], rates: Mapping[str, tuple[int, int]] | None = None
) -> dict[str, Bins]:
    """`rates`: instance_id -> (rollouts that solved it, rollouts with a verdict); tasks without one are left out."""
    found = {name: by_powers([r[name] for r in rows], [r[name] for r in kept]) for name in ("tests", "issue_chars")}
    rates = {name: rate for name, rate in (rates or {}).items() if rate[1]}
    if rates:
        chosen = [rates[row["instance_id"]] for row in kept if row["instance_id"] in rates]
        found["solve_rate"] = _bins(SHARES, list(rates.values()), chosen, lambda rate: share(*rate))
    return found


def by_powers(before: Sequence[int], after: Sequence[int]) -> Bins:
    """Bins 0, 1, 2-3, 4-7, 8-15, ... from the first to the last that holds a value; 0 apart, where there is one."""
    used = {value.bit_length() for value in before}
    filled = used - {0}
    labels = ["0"] * (0 in used) + [_label(bits) for bits in range(min(filled, default=0), max(filled, default=-1) + 1)]
    return _bins(labels, before, after, lambda value: _label(value.bit_length()))


def _label(bits: int) -> str:
    low, high = (1 << bits) >> 1, max((1 << bits) - 1, 0)
    return str(low) if low == high else f"{low}-{high}"


def share(solved: int, graded: int) -> str:
    """The bin of a rate; none and all stand apart, however many rollouts there were."""
    if solved in (0, graded):
        return SHARES[0] if not solved else SHARES[-1]
    quarter = -(-4 * solved // graded)
    return SHARES[min(quarter, 4)]


def _bins(labels: Sequence[str], before: Sequence[Any], after: Sequence[Any], label: Callable[[Any], str]) -> Bins:
    came, stayed = _labelled(before, label), _labelled(after, label)
    return [(name, came[name], stayed[name]) for name in labels]


def _labelled(values: Sequence[Any], label: Callable[[Any], str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for value, count in Counter(values).items():  # far fewer values than rows
        found[label(value)] += count
    return found


def quartiles(values: Sequence[int]) -> dict[str, int]:
    """min, q1, median, q3, max of sorted values; empty for none."""
    last = len(values) - 1
    places = (("min", 0), ("q1", 1), ("median", 2), ("q3", 3), ("max", 4))
    return {name: values[last * part // 4] for name, part in places} if values else {}
