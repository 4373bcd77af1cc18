"""Statistics of an evaluation, in numpy alone: rates, pass@k, paired differences with honest intervals.

Tasks of one package resemble each other (one policy habit decides many of them), so a difference is not worth as many
observations as there are tasks. Differences are taken per task and their uncertainty per package: a jackknife over
packages (the CV3 variance) with a t quantile whose degrees of freedom are matched by Satterthwaite's rule: G - 1 for G
packages of equal size, fewer where some packages dominate (Bell and McCaffrey 2002, Imbens and Kolesar 2016). With the
8 to 10 packages of a small benchmark a percentile bootstrap over packages covers well below its nominal 95 %, because
it has only G draws to imitate (a test measures both). It is available for comparison, never as the headline.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks with its interval. `low`, `high`, `p_value` are nan where fewer than two clusters exist."""

    mean: float
    low: float
    high: float
    p_value: float
    tasks: int
    clusters: int
    method: str

    @property
    def significant(self) -> bool:
        """The interval excludes zero."""
        return self.low > 0 or self.high < 0


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion; (0, 1) without observations. Treats observations as independent."""
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p, shrink = successes / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink
    return max(centre - half, 0.0), min(centre + half, 1.0)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that at least one of k samples passes, from c passes among n (Chen et al. 2021, eq. 1)."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} graded samples, got {n}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def student_quantile(p: float, dof: float) -> float:
    """Quantile of Student's t. With t = sqrt(dof) tan(u) the density becomes cos(u) ** (dof - 1), bounded, smooth."""
    grid, cumulative = _student(dof)
    return float(math.sqrt(dof) * math.tan(np.interp(p, cumulative, grid)))


def student_cdf(t: float, dof: float) -> float:
    grid, cumulative = _student(dof)
    return float(np.interp(math.atan(t / math.sqrt(dof)), grid, cumulative))


@lru_cache(maxsize=64)
def _student(dof: float) -> tuple[np.ndarray, np.ndarray]:
    grid = np.linspace(-math.pi / 2, math.pi / 2, 100_001)
    density = np.cos(grid) ** (dof - 1) if dof > 1 else np.ones_like(grid)
    cumulative = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return grid, cumulative / cumulative[-1]


def clustered_mean(values: Sequence[float], clusters: Sequence[Hashable], confidence: float = 0.95) -> Estimate:
    """Mean of `values` (one per task) with a cluster-jackknife t interval; every task weighs the same."""
    x, groups = _arrays(values, clusters)
    n, g = len(x), len(groups)
    mean = float(x.mean()) if n else math.nan
    if g < 2:
        return Estimate(mean, math.nan, math.nan, math.nan, n, g, "none: fewer than two clusters")
    total = x.sum()
    left_out = np.array([(total - x[i].sum()) / (n - len(i)) for i in groups])
    error = math.sqrt((g - 1) / g * float(((left_out - mean) ** 2).sum()))
    dof = _effective_dof(np.array([len(i) for i in groups], dtype=float))
    half = student_quantile(0.5 + confidence / 2, dof) * error
    t = abs(mean) / error if error > 0 else (math.inf if mean else 0.0)
    p_value = 2 * (1 - student_cdf(t, dof))
    method = f"cluster jackknife (CV3), t with {dof:.3g} degrees of freedom"
    return Estimate(mean, mean - half, mean + half, p_value, n, g, method)


def _effective_dof(sizes: np.ndarray) -> float:
    """Degrees of freedom of the CV3 variance if cluster means vary alike, the case where sizes hurt most.

    The variance is a quadratic form m' A' A m of the cluster means; Satterthwaite: trace squared over trace of square.
    """
    n, g = sizes.sum(), len(sizes)
    a = (sizes / (n - sizes))[:, None] * (np.eye(g) - (sizes / n)[None, :])
    form = a @ a.T
    return float(max(np.trace(form) ** 2 / np.trace(form @ form), 1.0))


def cluster_bootstrap(
    values: Sequence[float],
    clusters: Sequence[Hashable],
    *,
    confidence: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """Percentile interval from resampling whole clusters. Too narrow for few clusters; for comparison only."""
    x, groups = _arrays(values, clusters)
    n, g = len(x), len(groups)
    mean = float(x.mean()) if n else math.nan
    if g < 2:
        return Estimate(mean, math.nan, math.nan, math.nan, n, g, "none: fewer than two clusters")
    sums, sizes = np.array([x[i].sum() for i in groups]), np.array([len(i) for i in groups])
    chosen = np.random.default_rng(seed).integers(0, g, size=(draws, g))
    means = sums[chosen].sum(1) / sizes[chosen].sum(1)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    p_value = min(1.0, 2 * min(float((means <= 0).mean()), float((means >= 0).mean())))
    return Estimate(mean, float(low), float(high), p_value, n, g, "cluster bootstrap, percentile")


def paired_difference(
    before: Mapping[str, float],
    after: Mapping[str, float],
    cluster_of: Mapping[str, Hashable],
    confidence: float = 0.95,
) -> Estimate:
    """Mean of after - before over the tasks that both have (task -> mean reward), clustered."""
    shared = [t for t in before if t in after]
    return clustered_mean([after[t] - before[t] for t in shared], [cluster_of[t] for t in shared], confidence)


@dataclass(frozen=True)
class McNemar:
    """Pairs by who solved them, with the exact two-sided p of the discordant ones (pairs taken as independent)."""

    both: int
    only_first: int
    only_second: int
    neither: int
    p_value: float


def mcnemar(pairs: Sequence[tuple[bool, bool]]) -> McNemar:
    both = sum(a and b for a, b in pairs)
    first = sum(a and not b for a, b in pairs)
    second = sum(b and not a for a, b in pairs)
    n = first + second
    tail = sum(math.comb(n, i) for i in range(min(first, second) + 1)) / 2**n
    return McNemar(both, first, second, len(pairs) - both - n, min(1.0, 2 * tail))


def _arrays(values: Sequence[float], clusters: Sequence[Hashable]) -> tuple[np.ndarray, list[np.ndarray]]:
    if len(values) != len(clusters):
        raise ValueError(f"{len(values)} values but {len(clusters)} clusters")
    positions: dict[Hashable, list[int]] = {}
    for i, cluster in enumerate(clusters):
        positions.setdefault(cluster, []).append(i)
    return np.asarray(values, dtype=float), [np.array(p) for p in positions.values()]
