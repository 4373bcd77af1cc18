"""Two evaluations side by side: the paired difference per task, clustered by package, and who solved what.

Only tasks graded in both count; what is left out is counted. Printing (rich, markdown) and JSON come from one
Comparison, so they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from swe_lightning.evaluation.result import EvalResult
from swe_lightning.evaluation.stats import Estimate, McNemar, mcnemar, paired_difference


@dataclass(frozen=True)
class Comparison:
    before: str
    after: str
    before_rate: float | None
    after_rate: float | None
    difference: Estimate
    """Mean over shared tasks of after - before."""
    pairs: McNemar
    """Rollouts paired by task and sample number."""
    left_out: int
    """Tasks of either side without a graded rollout on the other."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON; what is undefined (fewer than two packages) is null."""
        data = asdict(self)
        data["difference"] = {k: None if v != v else v for k, v in data["difference"].items()}
        return {**data, "significant": self.difference.significant}


def compare(before: EvalResult, after: EvalResult) -> Comparison:
    a, b = before.by_task(), after.by_task()
    clusters = {**before.cluster_of(), **after.cluster_of()}
    tasks = {r.instance_id for r in (*before.records, *after.records)}
    return Comparison(
        before=before.label,
        after=after.label,
        before_rate=before.rate,
        after_rate=after.rate,
        difference=paired_difference(a, b, clusters),
        pairs=mcnemar(_pairs(before, after)),
        left_out=len(tasks) - len(a.keys() & b.keys()),
    )


def _pairs(before: EvalResult, after: EvalResult) -> list[tuple[bool, bool]]:
    first = {(r.instance_id, r.sample): r.resolved for r in before.records if r.reward is not None}
    second = {(r.instance_id, r.sample): r.resolved for r in after.records if r.reward is not None}
    return [(first[key], second[key]) for key in first if key in second]


def results_table(results: Sequence[EvalResult]) -> Table:
    table = Table(title="evaluations")
    for column in _COLUMNS:
        table.add_column(column)
    for row in _result_rows(results):
        table.add_row(*row)
    return table


def markdown(results: Sequence[EvalResult], comparisons: Sequence[Comparison] = ()) -> str:
    """The results, then the paired differences with a sentence on how their interval is made."""
    text = _pipe_table(_COLUMNS, _result_rows(results))
    if comparisons:
        text += "\nPaired differences over tasks; interval and p clustered by package "
        text += f"({comparisons[0].difference.method}).\n\n"
        text += _pipe_table(_DIFFERENCES, [_comparison_row(c) for c in comparisons])
    return text


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    table = Table(title="paired differences over tasks, 95 % interval clustered by package")
    for column in _DIFFERENCES:
        table.add_column(column)
    for c in comparisons:
        table.add_row(*_comparison_row(c))
    return table


_COLUMNS = ("evaluation", "resolved", "rate", "95 % Wilson", "pass@k", "tasks", "no verdict")
_DIFFERENCES = ("difference", "mean", "95 % interval", "p", "tasks / packages", "won / lost pairs", "tasks left out")


def _result_rows(results: Sequence[EvalResult]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for r in results:
        s = r.summary()
        at_k = s[f"pass@{r.samples}"]
        rate = "-" if r.rate is None else f"{r.rate:.3f}"
        best = "-" if at_k is None else f"{at_k:.3f} (k={r.samples})"
        infra = ", ".join(f"{n} {reason}" for reason, n in r.infra.most_common()) or "0"
        interval = f"{s['low']:.3f} to {s['high']:.3f}"
        rows.append((r.label, f"{r.resolved}/{r.graded}", rate, interval, best, str(s["tasks"]), infra))
    return rows


def _comparison_row(c: Comparison) -> tuple[str, ...]:
    d = c.difference
    interval = "undefined" if math.isnan(d.low) else f"{d.low:+.3f} to {d.high:+.3f}"
    p_value = "-" if math.isnan(d.p_value) else f"{d.p_value:.2g}"
    mean = "-" if math.isnan(d.mean) else f"{d.mean:+.3f}"
    pairs = f"{c.pairs.only_second} / {c.pairs.only_first}"
    name = f"{c.after} - {c.before}"
    return (name, mean, interval, p_value, f"{d.tasks} / {d.clusters}", pairs, str(c.left_out))


def _pipe_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"
