"""What `swel trajectory show` and `swel trajectory stats` print: data first, text from the data.

The caller brings the calls (from a run's store or a gateway); nothing here does I/O.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from swe_lightning.records import ModelCall, Row
from swe_lightning.trajectory.breaks import Decode
from swe_lightning.trajectory.report import RowsReport, rows_of, table

MANY_IDS = 12
MANY_NAMES = 5


@dataclass(frozen=True)
class Rules:
    """What a recipe says about rows."""

    duplicate_calls: str = "supersede"
    prompt_limit: int | None = None
    response_limit: int | None = None
    over_limit: Literal["cut", "drop_rollout"] = "cut"

    def report(self, calls: Sequence[ModelCall], decode: Decode | None = None) -> RowsReport:
        report = rows_of(calls, duplicate_calls=self.duplicate_calls, decode=decode)
        if self.prompt_limit is None or self.response_limit is None:
            return report
        return report.limit(self.prompt_limit, self.response_limit, self.over_limit)


DEFAULT_RULES = Rules()


def show(calls: Sequence[ModelCall], rules: Rules = DEFAULT_RULES, *, decode: Decode | None = None) -> dict[str, Any]:
    """One rollout as JSON-ready data: rows with their segments, breaks, drops, stats."""
    report = rules.report(calls, decode)
    return {
        "rows": [_row(row, decode) for row in report.rows],
        "breaks": [dataclasses.asdict(found) for found in report.breaks],
        "dropped": dict(report.dropped),
        "lost_tokens": dict(report.lost_tokens),
        "stats": report.stats,
    }


def stats(
    rollouts: Iterable[Sequence[ModelCall]],
    rules: Rules = DEFAULT_RULES,
    infra: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """A run's (or step's) ledger from the calls of each of its rollouts, one after the other; rows are not kept.

    `infra`: rollouts without a reward, by reason; they are in the ledger and in no other number.
    """
    total = RowsReport()
    for calls in rollouts:
        report = rules.report(calls)
        report.rows = []
        total += report
    total.check()
    return {
        "stats": total.stats,
        "dropped": {**total.dropped, **(infra or {})},
        "lost_tokens": dict(total.lost_tokens),
        "rollouts_half_in": total.partial,
    }


def show_text(data: dict[str, Any]) -> str:
    """`show` for a person: one line per segment, `+` before what is trained."""
    lines = []
    for number, row in enumerate(data["rows"]):
        lines.append(f"row {number}: {row['tokens']} tokens, {row['trained']} trained, calls {row['calls']}")
        for part in row["segments"]:
            sign = "+" if part["trained"] else " "
            logprob = f"  logprob mean {part['logprob_mean']:.3f}" if part["trained"] else ""
            lines.append(f"  {sign} [{part['start']}:{part['end']}]{logprob}  {part['text'] or _ids(part['ids'])}")
    for found in data["breaks"]:
        lines.append(
            f"break: call {found['call']} opened row {found['row']}, {found['kind']} of row {found['against']} "
            f"at token {found['position']}"
        )
        lines.append(f"    row    {found['row_text'] or _ids(found['row_ids'])!r}")
        lines.append(f"    prompt {found['prompt_text'] or _ids(found['prompt_ids'])!r}")
    lines += [f"dropped: {count} x {reason}" for reason, count in data["dropped"].items()]
    lines += [f"lost to a limit: {count} trained tokens, {reason}" for reason, count in data["lost_tokens"].items()]
    return "\n".join(lines)


def stats_text(data: dict[str, Any]) -> str:
    """`stats` for a person."""
    lines = [table(data["stats"], data["dropped"])]
    lines += [f"lost    {reason:<20} {count:>14,} tokens" for reason, count in data["lost_tokens"].items()]
    half = data["rollouts_half_in"]
    if half:
        more = f" and {len(half) - MANY_NAMES} more" if len(half) > MANY_NAMES else ""
        lines.append(f"half in: {', '.join(half[:MANY_NAMES])}{more}")
    return "\n".join(lines)


def _row(row: Row, decode: Decode | None) -> dict[str, Any]:
    edges = np.flatnonzero(np.diff(row.mask)) + 1
    bounds = [0, *edges.tolist(), len(row.ids)]
    segments = []
    for start, end in itertools.pairwise(bounds):
        ids = row.ids[start:end].tolist()
        segments.append(
            {
                "start": start,
                "end": end,
                "trained": bool(row.mask[start]),
                "logprob_mean": float(row.logprobs[start:end].mean()),
                "ids": ids,
                "text": decode(ids) if decode else "",
            }
        )
    return {
        "rollout_id": row.rollout_id,
        "tokens": len(row.ids),
        "trained": row.trained_tokens,
        "calls": list(row.calls),
        "spans": [list(span) for span in row.spans],
        "segments": segments,
    }


def _ids(ids: Sequence[int]) -> str:
    shown = " ".join(map(str, ids[:MANY_IDS]))
    return f"{shown} ... ({len(ids)} ids)" if len(ids) > MANY_IDS else shown
