"""Token limits on rows: what is cut, and saying so.

A row's prompt is what stands before its first sampled token, its response everything after. The tail of a response may
go (what stays was sampled in exactly the context it keeps); a prompt cannot be shortened without training on a context
nobody saw, so such a row leaves whole. Invariant: every lost row and token is counted by kind, and every rollout that
is only partly in is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from swe_lightning.records import Row

PROMPT_TOO_LONG = "row:prompt_too_long"
RESPONSE_CUT = "row:response_cut"
WITH_ROLLOUT = "row:rollout_over_limit"


@dataclass
class Limited:
    """Rows within the limits and what it cost."""

    rows: list[Row] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows that left, by kind."""
    cut: int = 0
    """Rows that stayed with a shorter response."""
    lost_tokens: Counter[str] = field(default_factory=Counter)
    """Trained tokens that left, by kind: with their row, or as the tail of a response."""
    partial: list[str] = field(default_factory=list)
    """Rollouts that are half in."""
    gone: list[str] = field(default_factory=list)
    """Rollouts that had rows and have none left."""


def apply_limits(
    rows: Sequence[Row],
    *,
    prompt_limit: int,
    response_limit: int,
    over: Literal["cut", "drop_rollout"] = "cut",
) -> Limited:
    """Keep `prompt_limit` prompt tokens and the first `response_limit` tokens after them in each row.

    over="drop_rollout" takes the whole rollout out as soon as one of its rows would lose a trained token.
    """
    out = Limited()
    kept: list[tuple[Row, Row | None, str]] = [_limit(row, prompt_limit, response_limit) for row in rows]
    touched = {before.rollout_id for before, after, _ in kept if _trained(after) < before.trained_tokens}
    for before, after, kind in kept:
        if over == "drop_rollout" and before.rollout_id in touched:
            after, kind = None, kind if kind == PROMPT_TOO_LONG else WITH_ROLLOUT
        if kind:
            out.lost_tokens[kind] += before.trained_tokens - _trained(after)
        if after is None:
            out.dropped[kind] += 1
        else:
            out.rows.append(after)
            out.cut += after is not before
    stayed = {row.rollout_id for row in out.rows}
    out.partial, out.gone = sorted(touched & stayed), sorted({row.rollout_id for row in rows} - stayed)
    return out


def _limit(row: Row, prompt_limit: int, response_limit: int) -> tuple[Row, Row | None, str]:
    """(row, what stays of it, kind of loss or "")."""
    prompt = int(np.argmax(row.mask)) if row.mask.any() else len(row.ids)
    if prompt > prompt_limit:
        return row, None, PROMPT_TOO_LONG
    size = prompt + response_limit
    if len(row.ids) <= size:
        return row, row, ""
    spans = [(start, min(end, size), version) for start, end, version in row.spans if start < size]
    calls = row.calls[: len(spans)] if len(row.calls) == len(row.spans) else row.calls
    cut = Row(
        row.ids[:size], row.mask[:size], row.logprobs[:size], row.rollout_id, row.group_id, spans=spans, calls=calls
    )
    return row, cut, RESPONSE_CUT


def _trained(row: Row | None) -> int:
    return row.trained_tokens if row is not None else 0


def truncate_text(text: str, limit_chars: int, side: Literal["left", "right"]) -> str:
    """Keep `limit_chars` characters; `side` is the side that is dropped ("left" keeps the tail)."""
    if len(text) <= limit_chars:
        return text
    if side == "left":
        return text[len(text) - limit_chars :]
    return text[:limit_chars]
