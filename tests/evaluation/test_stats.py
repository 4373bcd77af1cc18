"""Known numbers, and a simulation that shows why the interval is made the way it is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from swe_lightning.evaluation import stats


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (3, 10, 0.1078, 0.6032), (8, 10, 0.4902, 0.9433), (10, 10, 0.7225, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson(successes: int, n: int, low: float, high: float) -> None:
    assert stats.wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_pass_at_k() -> None:
    assert stats.pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert stats.pass_at_k(5, 2, 3) == pytest.approx(0.9)
    assert stats.pass_at_k(5, 3, 3) == 1.0
    assert stats.pass_at_k(5, 0, 5) == 0.0
    with pytest.raises(ValueError, match="at least 6"):
        stats.pass_at_k(5, 2, 6)


@pytest.mark.parametrize(("dof", "value"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (9, 2.26216), (30, 2.04227)])
def test_student(dof: int, value: float) -> None:
    assert stats.student_quantile(0.975, dof) == pytest.approx(value, abs=2e-4)
    assert stats.student_cdf(value, dof) == pytest.approx(0.975, abs=1e-6)
    assert stats.student_quantile(0.5, dof) == pytest.approx(0.0, abs=1e-9)


def test_one_task_per_cluster_is_the_ordinary_t_interval() -> None:
    values = [0.5, -0.25, 1.0, 0.0, 0.75]
    found = stats.clustered_mean(values, range(5))
    half = stats.student_quantile(0.975, 4) * np.std(values, ddof=1) / math.sqrt(5)
    assert (found.mean, found.high - found.mean) == pytest.approx((0.4, half))


def test_clusters_count_not_tasks() -> None:
    found = stats.clustered_mean([1, 1, 0, 0, 1, 0], list("AABBCC"))
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5 - 1.24207, 0.5 + 1.24207), abs=1e-4)
    assert (found.tasks, found.clusters, found.significant) == (6, 3, False)
    # Ten copies of every task add no package, hence no information.
    assert stats.clustered_mean([1, 1, 0, 0, 1, 0] * 10, list("AABBCC") * 10).low == pytest.approx(found.low)
    assert found.p_value == pytest.approx(0.2254, abs=1e-3)


def test_degrees_of_freedom_shrink_where_one_package_dominates() -> None:
    even = stats.clustered_mean([0.0, 1.0] * 4, list("AABBCCDD"))
    uneven = stats.clustered_mean([0.0, 1.0] * 6, list("AAAAAAAAABCD"))
    assert "t with 3 degrees" in even.method
    assert float(uneven.method.split("t with ")[1].split()[0]) < 1.5


def test_too_few_clusters_give_no_interval() -> None:
    for values, clusters in (([], []), ([1.0, 0.0], ["A", "A"])):
        found = stats.clustered_mean(values, clusters)
        assert math.isnan(found.low)
        assert not found.significant


def test_all_equal() -> None:
    up = stats.clustered_mean([0.5] * 6, list("AABBCC"))
    assert (up.low, up.high, up.p_value, up.significant) == (0.5, 0.5, 0.0, True)
    none = stats.clustered_mean([0.0] * 6, list("AABBCC"))
    assert none.p_value == pytest.approx(1.0)
    assert not none.significant


def test_paired_difference_uses_shared_tasks_only() -> None:
    before = {"a": 0.0, "b": 0.5, "lost": 1.0}
    after = {"a": 1.0, "b": 1.0, "new": 0.0}
    found = stats.paired_difference(before, after, {"a": "A", "b": "B"})
    assert (found.mean, found.tasks, found.clusters) == (0.75, 2, 2)


def test_mcnemar() -> None:
    pairs = [(True, True)] * 4 + [(True, False)] + [(False, True)] * 9 + [(False, False)] * 2
    found = stats.mcnemar(pairs)
    assert (found.both, found.only_first, found.only_second, found.neither) == (4, 1, 9, 2)
    assert found.p_value == pytest.approx(22 / 1024)
    assert stats.mcnemar([]).p_value == 1.0


def test_interval_covers_with_few_uneven_packages() -> None:
    """Nine packages of very different size, differences that mostly belong to the package: 95 % must mean 95 %."""
    rng = np.random.default_rng(7)
    sizes, runs, covered, bootstrap = [2, 3, 4, 5, 6, 8, 10, 14, 20], 600, 0, 0
    clusters = [g for g, size in enumerate(sizes) for _ in range(size)]
    for run in range(runs):
        effects = np.repeat(0.3 + rng.normal(0, 0.3, len(sizes)), sizes)
        values = effects + rng.normal(0, 0.4, len(clusters))
        found = stats.clustered_mean(list(values), clusters)
        covered += found.low <= 0.3 <= found.high
        percentile = stats.cluster_bootstrap(list(values), clusters, draws=300, seed=run)
        bootstrap += percentile.low <= 0.3 <= percentile.high
    print("covered", covered / runs, "bootstrap", bootstrap / runs)
    assert 0.93 <= covered / runs <= 0.99
    assert bootstrap / runs < 0.91, "if this ever holds, the headline interval could be the bootstrap"
