"""Why a call could not continue any row: a typed guess from ids, better with a tokenizer, with the evidence beside it.

Ids tell deletion, insertion and replacement apart; only text tells re-tokenisation from rewriting, and only the
client's request tells who rewrote. What cannot be told is `unknown`, never a plausible label.
Refuses to influence rows: a label explains a break, it does not mend one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from swe_lightning.records import ModelCall
from swe_lightning.trajectory.merge import Assembly, Break
from swe_lightning.trajectory.prefix_tree import ID, Place, path_ids
from swe_lightning.trajectory.supersede import returned_unchanged

Decode = Callable[[Sequence[int]], str]
Span = tuple[int, int, int]
BEFORE, AFTER = 12, 24
"""Tokens shown around the first difference."""
_NEAR = 64
"""A replaced stretch is looked for within so many tokens."""


class BreakKind(StrEnum):
    TEMPLATE = "template_rewrote_history"
    """The chat template dropped from, or put into, what the policy had sampled (thinking blocks, most often)."""
    RETOKENISED = "retokenised"
    """Same text, other ids."""
    REWRITTEN = "text_rewritten"
    """The history came back with other text."""
    NEW_CONTEXT = "new_context"
    """A conversation without the earlier replies: a sub-agent, or a compacted history."""
    BRANCH = "branch"
    """An earlier point continued in another way: rollback, or another sample of one prompt."""
    UNKNOWN = "unknown"


@dataclass(slots=True)
class BreakReport:
    """One break. `position`: first prompt token that differs; the windows start at `window_start`."""

    rollout_id: str
    kind: BreakKind
    call: int
    row: int
    against: int
    position: int
    window_start: int
    row_ids: list[int]
    prompt_ids: list[int]
    row_text: str = ""
    prompt_text: str = ""


def explain(
    calls: Sequence[ModelCall], places: Sequence[Place | None], assembly: Assembly, decode: Decode | None = None
) -> list[BreakReport]:
    """A report per break of one assembled attempt; `call` is the sequence number, `row` counts within the attempt."""
    return [_explain_one(calls, places, assembly, found, decode) for found in assembly.breaks]


def _explain_one(
    calls: Sequence[ModelCall],
    places: Sequence[Place | None],
    assembly: Assembly,
    found: Break,
    decode: Decode | None,
) -> BreakReport:
    place = places[found.call]
    assert place is not None
    prompt = np.frombuffer(path_ids(place.prompt), ID)
    row, history = assembly.rows[found.against].ids, assembly.history[found.against]
    touched = next((span for span in history if span[1] > found.position), None)
    unchanged = returned_unchanged(calls[found.call], calls[touched[2]]) if touched else None
    start = max(0, found.position - BEFORE)
    row_ids = row[start : found.position + AFTER].tolist()
    prompt_ids = prompt[start : found.position + AFTER].tolist()
    return BreakReport(
        rollout_id=calls[found.call].rollout_id,
        kind=classify(row, history, prompt, found.position, decode=decode, unchanged=unchanged),
        call=calls[found.call].sequence,
        row=found.row,
        against=found.against,
        position=found.position,
        window_start=start,
        row_ids=row_ids,
        prompt_ids=prompt_ids,
        row_text=decode(row_ids) if decode else "",
        prompt_text=decode(prompt_ids) if decode else "",
    )


def classify(
    row: np.ndarray,
    history: Sequence[Span],
    prompt: np.ndarray,
    position: int,
    *,
    decode: Decode | None = None,
    unchanged: bool | None = None,
) -> BreakKind:
    """Kind of the first difference between a row and a prompt, both (tokens,).

    `history`: what the policy sampled in the row. `unchanged`: the client sent the touched reply back as it got it.
    """
    touched = next((span for span in history if span[1] > position), None)
    if position >= len(prompt):
        return BreakKind.BRANCH
    if touched is None:
        return BreakKind.UNKNOWN
    start, end, _ = touched
    if position < start:
        return _outside_replies(row, history, prompt, position, start, end)
    rest, after = row[position:end], prompt[position:]
    edit = _edit(rest, after)
    if edit is not None:
        removed, added = edit
        if removed == 0 or added == 0:
            return BreakKind.REWRITTEN if unchanged is False else BreakKind.TEMPLATE
        return _replaced(rest[:removed], after[:added], row[max(0, position - BEFORE) : position], decode, unchanged)
    if unchanged is not None:
        return BreakKind.TEMPLATE if unchanged else BreakKind.REWRITTEN
    if any(_find(after, row[s:e]) >= 0 for s, e, _ in history if s >= end):
        return BreakKind.REWRITTEN
    if position > start:
        return BreakKind.UNKNOWN
    return BreakKind.BRANCH if start > history[0][0] else BreakKind.NEW_CONTEXT


def _outside_replies(
    row: np.ndarray, history: Sequence[Span], prompt: np.ndarray, position: int, start: int, end: int
) -> BreakKind:
    """The difference begins in tokens nobody sampled, before the reply [start, end)."""
    rest, after = row[position:end], prompt[position:]
    removed = _removed(rest, after)
    kept = len(rest) - removed
    if removed >= start - position and kept >= min(4, end - start):
        return BreakKind.TEMPLATE  # the generation header went, perhaps with the start of the reply behind it
    if removed or _find(after, row[start:end]) >= 0:
        return BreakKind.REWRITTEN
    return BreakKind.BRANCH if position >= history[0][1] else BreakKind.NEW_CONTEXT


def _edit(rest: np.ndarray, after: np.ndarray) -> tuple[int, int] | None:
    """(tokens removed, tokens added) before the rest of a reply goes on; None when it does not go on."""
    removed = _removed(rest, after)
    if removed:
        return removed, 0
    added = _find(after, rest)
    if added > 0:
        return 0, added
    for total in range(2, 2 * _NEAR):
        for removed in range(max(1, total - _NEAR), min(total, len(rest) - 1, _NEAR + 1)):
            width = min(4, len(rest) - removed)
            if np.array_equal(rest[removed : removed + width], after[total - removed : total - removed + width]):
                return removed, total - removed
    return None


def _removed(rest: np.ndarray, after: np.ndarray) -> int:
    """Fewest tokens whose removal from the front of `rest` makes it the start of `after`; 0 = none do."""
    for cut in np.flatnonzero(rest == after[0]).tolist():
        if np.array_equal(rest[cut:], after[: len(rest) - cut]):
            return cut
    return 0


def _replaced(
    removed: np.ndarray, added: np.ndarray, before: np.ndarray, decode: Decode | None, unchanged: bool | None
) -> BreakKind:
    if decode is not None:
        # common ids in front, so that characters spread over several tokens decode whole
        old = decode([*before.tolist(), *removed.tolist()])
        new = decode([*before.tolist(), *added.tolist()])
        if old == new:
            return BreakKind.RETOKENISED
        return BreakKind.TEMPLATE if unchanged else BreakKind.REWRITTEN
    return BreakKind.REWRITTEN if unchanged is False else BreakKind.UNKNOWN


def _find(ids: np.ndarray, part: np.ndarray) -> int:
    """Position of `part` in `ids`, -1 if absent; both (tokens,)."""
    haystack, needle = ids.tobytes(), part.tobytes()
    at = haystack.find(needle)
    while at >= 0 and at % ID.itemsize:
        at = haystack.find(needle, at + 1)
    return at // ID.itemsize if at >= 0 else -1
