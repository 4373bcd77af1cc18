"""Rows of finished rollouts together with the account of them: what became of every call, row and token.

Invariant: the ledger adds up. calls = calls in rows + calls passed over by reason; rollouts = rollouts kept + rollouts
without rows by reason; rows = rows kept + rows over a limit; sampled tokens = trained + without log-probability;
trained tokens = kept + lost to limits. Reports add: a step's is the sum of its rollouts', a run's that of its steps'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from swe_lightning.records import ModelCall, Row
from swe_lightning.trajectory.breaks import BreakReport, Decode, explain
from swe_lightning.trajectory.calls import EARLIER_ATTEMPT, by_attempt, last_attempts
from swe_lightning.trajectory.limits import apply_limits
from swe_lightning.trajectory.merge import assemble
from swe_lightning.trajectory.prefix_tree import place_calls
from swe_lightning.trajectory.supersede import mark_superseded

NO_CALLS = "rollout:no_model_calls"
NONE_TRAINABLE = "rollout:no_trainable_calls"
OVER_LIMIT = "rollout:over_limit"


@dataclass
class RowsReport:
    """Rows of some rollouts and their ledger.

    `dropped`: counts by reason: `call:<reason>` for calls, `rollout:<reason>` for rollouts without a row,
    `row:<reason>` for rows over a limit. `lost_tokens`: trained tokens that limits took, by the same kinds. `partial`:
    rollouts that limits left half in. `counts`: plain sums (see `stats`). `breaks`: why rows broke.
    """

    rows: list[Row] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    breaks: list[BreakReport] = field(default_factory=list)
    lost_tokens: Counter[str] = field(default_factory=Counter)
    partial: list[str] = field(default_factory=list)

    def __iadd__(self, other: RowsReport) -> RowsReport:
        self.rows += other.rows
        self.dropped.update(other.dropped)
        self.counts.update(other.counts)
        self.breaks += other.breaks
        self.lost_tokens.update(other.lost_tokens)
        self.partial += other.partial
        return self

    def limit(self, prompt_limit: int, response_limit: int, over: Literal["cut", "drop_rollout"] = "cut") -> RowsReport:
        """Apply token limits to the rows (see limits.py) and enter what they take; call once. Returns itself.

        Numbers about merging (rows, merge rate, breaks, trained and unique tokens) stay those before the limits.
        """
        found = apply_limits(self.rows, prompt_limit=prompt_limit, response_limit=response_limit, over=over)
        self.rows, self.partial = found.rows, found.partial
        self.dropped.update(found.dropped)
        self.lost_tokens.update(found.lost_tokens)
        if found.gone:
            self.dropped[OVER_LIMIT] += len(found.gone)
        self.counts.update(rows_cut=found.cut, rollouts_partial=len(found.partial))
        self.counts["rows_kept"] = len(found.rows)
        self.counts["tokens_kept"] = sum(row.trained_tokens for row in found.rows)
        self.counts["rollouts_kept"] -= len(found.gone)
        return self

    @property
    def stats(self) -> dict[str, float]:
        """Sums and the ratios a person asks for. A merge rate of 1 means one row per rollout."""
        c = self.counts
        with_rows, row_tokens = c["rollouts_with_rows"], c["row_tokens"]
        possible = c["calls_in_rows"] - with_rows
        out: dict[str, float] = {key: float(value) for key, value in sorted(c.items())}
        out["rows_per_rollout"] = c["rows"] / with_rows if with_rows else 0.0
        out["single_row_share"] = c["single_row_rollouts"] / with_rows if with_rows else 0.0
        out["merge_rate"] = (c["calls_in_rows"] - c["rows"]) / possible if possible else 1.0
        out["duplicated_tokens"] = float(row_tokens - c["unique_tokens"])
        out["duplicated_share"] = (row_tokens - c["unique_tokens"]) / row_tokens if row_tokens else 0.0
        for kind, count in sorted(Counter(b.kind.value for b in self.breaks).items()):
            out[f"breaks_{kind}"] = float(count)
        return out

    def check(self) -> None:
        """ValueError when the ledger does not add up."""
        c, lost = self.counts, Counter[str]()
        for reason, count in self.dropped.items():
            lost[reason.split(":", 1)[0]] += count
        for total, kept, kind in (
            (c["calls"], c["calls_in_rows"], "call"),
            (c["rollouts"], c["rollouts_kept"], "rollout"),
            (c["rows"], c["rows_kept"], "row"),
        ):
            if total != kept + lost[kind]:
                raise ValueError(f"{kind}s do not add up: {total} in, {kept} kept, {lost[kind]} dropped")
        if c["sampled_tokens"] != c["trained_tokens"] + c["tokens_without_logprob"]:
            raise ValueError("sampled tokens are neither trained nor accounted for")
        if c["trained_tokens"] != c["tokens_kept"] + self.lost_tokens.total():
            raise ValueError("trained tokens are neither kept nor accounted for")
        if c["rows"] != c["rollouts_with_rows"] + len(self.breaks):
            raise ValueError("a row was opened without a break that explains it")


def rows_of(
    calls: Sequence[ModelCall], *, duplicate_calls: str = "supersede", decode: Decode | None = None
) -> RowsReport:
    """Rows and ledger of the calls of one rollout or of many; no calls at all count as one rollout without any.

    duplicate_calls: "supersede" marks retries and leaves them out, "keep" trains every reply. `decode` (ids -> text)
    sharpens the explanation of breaks. Calls of earlier attempts are left out and counted.
    """
    if duplicate_calls not in ("supersede", "keep"):
        raise ValueError(f"duplicate_calls is supersede or keep, not {duplicate_calls!r}")
    if not calls:
        return RowsReport(dropped=Counter({NO_CALLS: 1}), counts=Counter(rollouts=1))
    kept, late = last_attempts(calls)
    report = RowsReport()
    for part in by_attempt(kept).values():
        report += _rows_of_attempt(part, duplicate_calls == "supersede", decode)
    if late:
        report.dropped[f"call:{EARLIER_ATTEMPT}"] += len(late)
        report.counts["calls"] += len(late)
    return report


def _rows_of_attempt(calls: list[ModelCall], retries_leave: bool, decode: Decode | None) -> RowsReport:
    places = place_calls(calls)
    if retries_leave:
        mark_superseded(calls, places)
    made = assemble(calls, places)
    report = RowsReport(rows=made.rows, breaks=explain(calls, places, made, decode))
    report.dropped.update({f"call:{reason}": count for reason, count in made.passed_over.items()})
    sampled = sum(end - start for row in made.rows for start, end, _ in row.spans)
    trained = sum(row.trained_tokens for row in made.rows)
    report.counts.update(
        calls=len(calls),
        calls_in_rows=len(calls) - made.passed_over.total(),
        rollouts=1,
        rollouts_with_rows=int(bool(made.rows)),
        single_row_rollouts=int(len(made.rows) == 1),
        rows=len(made.rows),
        row_tokens=sum(len(row.ids) for row in made.rows),
        unique_tokens=made.unique_tokens,
        sampled_tokens=sampled,
        trained_tokens=trained,
        tokens_without_logprob=sampled - trained,
        rows_kept=len(made.rows),
        rollouts_kept=int(bool(made.rows)),
        tokens_kept=trained,
    )
    if not made.rows:
        report.dropped[NONE_TRAINABLE] += 1
    return report


def why_no_rows(dropped: Mapping[str, int], rollouts: int = 0) -> str:
    """One sentence for the error of a step that has nothing to train on: the top reason, then every count.

    Where a rollout's reason only repeats that of its calls (no_trainable_calls), the calls' own reason is the top one.
    """
    if not dropped:
        return "no training rows: no rollout was collected"
    order = sorted(dropped.items(), key=lambda item: (-item[1], item[0].startswith("rollout:"), item[0]))
    reasons = ", ".join(f"{count} x {reason}" for reason, count in order)
    source = f" from {rollouts} rollouts" if rollouts else ""
    return f"no training rows{source}, mostly {order[0][0]}: {reasons}"


def table(stats: Mapping[str, float], dropped: Mapping[str, int]) -> str:
    """Stats and drops as aligned lines for a terminal."""
    lines = [
        f"{key:<28} {value:>14,.4g}" if value % 1 else f"{key:<28} {value:>14,.0f}" for key, value in stats.items()
    ]
    lines += [
        f"dropped {reason:<20} {count:>14,}" for reason, count in sorted(dropped.items(), key=lambda item: -item[1])
    ]
    return "\n".join(lines)
