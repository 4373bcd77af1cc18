"""Model calls -> rows, best effort: a call continues the longest open row whose ids are an exact prefix of its prompt.

Any row of the rollout may be continued, not only the last; a call that continues none opens a row of its own. Each
sampled token is trained in exactly one row, where branches share it too: what a row repeats of others has mask 0.
Refuses text, re-tokenisation, and to raise: a break in the history costs a row, never the rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from swe_lightning.records import ModelCall, Row, Untrainable
from swe_lightning.trajectory.calls import by_attempt, logprob_array, reason_against
from swe_lightning.trajectory.prefix_tree import ID, Node, Place, as_bytes, path_ids, place_calls


@dataclass(slots=True)
class Break:
    """A call that could not continue any row. `position`: first prompt token that differs from row `against`."""

    call: int
    row: int
    against: int
    position: int


@dataclass(slots=True)
class Assembly:
    """Rows of one rollout's attempt and how they came about."""

    rows: list[Row] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    history: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """Per row: (start, end, position of the call) of what the policy sampled, also before the row branched off."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """Calls that are in no row, by reason."""
    unique_tokens: int = 0
    """Distinct (prefix, token) pairs over all rows: what one pass with perfect sharing would compute."""


def merge(calls: Iterable[ModelCall]) -> list[Row]:
    """Rows of any number of rollouts, in order of their first call. Calls that may not be trained on yield nothing."""
    rows: list[Row] = []
    for part in by_attempt(calls).values():
        rows += assemble(part, place_calls(part)).rows
    return rows


def assemble(calls: Sequence[ModelCall], places: Sequence[Place | None]) -> Assembly:
    """Rows of the placed calls of one attempt, in the given order.

    A call that may not be trained on is passed over: what follows it joins the row before it, its tokens with mask 0.
    """
    out = Assembly()
    open_rows: list[_OpenRow] = []
    for i, place in enumerate(places):
        reason = reason_against(calls[i])
        if reason is None and place is None:
            reason = Untrainable.NO_PROMPT_IDS.value
        if place is None or reason is not None:
            out.passed_over[str(reason)] += 1
            continue
        row, known = _longest_open_row(place.prompt)
        if row is None:
            row = len(open_rows)
            open_rows.append(_OpenRow(calls[i].rollout_id))
            if row:
                against = _row_through(known)
                out.breaks.append(Break(i, row, against, known.depth))
                open_rows[row].history = [s for s in open_rows[against].history if s[1] <= known.depth]
        open_rows[row].bridge(path_ids(place.prompt, open_rows[row].length))
        open_rows[row].sample(i, calls[i])
        place.end.rows.append(row)
        out.unique_tokens += _claim(place.end, row)
    out.rows = [row.close() for row in open_rows]
    out.history = [row.history for row in open_rows]
    return out


def _longest_open_row(prompt: Node) -> tuple[int | None, Node]:
    """(row whose end is deepest on the way to `prompt`, deepest node there that any row holds).

    Takes the row's end away. Of rows with equal ids the one opened first is meant.
    """
    node, known = prompt, None
    while True:
        if known is None and node.owner is not None:
            known = node
        if node.rows:
            first = min(node.rows)
            node.rows.remove(first)
            return first, node
        if node.parent is None:
            return None, known or node
        node = node.parent


def _row_through(node: Node) -> int:
    """The newest row that goes on beyond `node`: what the new prompt left when it took another way."""
    onward = [child.owner for child in node.children.values() if child.owner is not None]
    return max(onward) if onward else node.owner or 0


def _claim(node: Node, row: int) -> int:
    """Mark the way to `node` as held by a row; the number of tokens no row held before."""
    fresh = 0
    while node.owner is None and node.parent is not None:
        node.owner = row
        fresh += node.depth - node.parent.depth
        node = node.parent
    return fresh


class _OpenRow:
    """A row under construction: pieces are joined once, when it is closed."""

    __slots__ = ("calls", "history", "length", "logprobs", "pieces", "rollout_id", "spans")

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self.pieces: list[bytes] = []
        self.length = 0
        self.logprobs: list[np.ndarray] = []
        self.spans: list[tuple[int, int, int]] = []
        self.calls: list[int] = []
        self.history: list[tuple[int, int, int]] = []

    def bridge(self, ids: bytes) -> None:
        """Append what stands before and between replies (prompt, observations, template): never trained."""
        self.pieces.append(ids)
        self.length += len(ids) // ID.itemsize

    def sample(self, index: int, call: ModelCall) -> None:
        """Append the call's reply: trained where the engine gave a log-probability."""
        ids = as_bytes(call.response_ids)
        start = self.length
        self.bridge(ids)
        self.logprobs.append(logprob_array(call))
        self.spans.append((start, self.length, call.version_start))
        self.history.append((start, self.length, index))
        self.calls.append(call.sequence)

    def close(self) -> Row:
        ids = np.frombuffer(bytearray().join(self.pieces), ID)
        mask = np.zeros(len(ids), dtype=np.int8)
        logprobs = np.zeros(len(ids), dtype=np.float32)
        for (start, end, _), values in zip(self.spans, self.logprobs, strict=True):
            reported = np.isfinite(values)
            mask[start:end] = reported
            logprobs[start:end] = np.where(reported, values, 0.0)
        return Row(ids, mask, logprobs, self.rollout_id, spans=self.spans, calls=self.calls)
