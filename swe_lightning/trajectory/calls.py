"""Which recorded calls may become rows, and why the others may not.

Invariant: a call is either usable or has exactly one typed reason. A malformed record is a reason, never an exception:
one bad call must not take its rollout's other calls along.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from swe_lightning.records import ModelCall, Untrainable
from swe_lightning.trajectory.prefix_tree import ID, Delta

SUPERSEDED = "superseded"
EARLIER_ATTEMPT = "earlier_attempt"


def reason_against(call: ModelCall) -> str | None:
    """Why this call is not trained on, or None. Records' own verdict first, then its shape."""
    if call.superseded:
        return SUPERSEDED
    if not call.trainable:
        return str(call.reason or "untrainable")
    if _size(call.prompt_ids) < 1:
        return Untrainable.NO_PROMPT_IDS.value
    response = _size(call.response_ids)
    if response < 1:
        return Untrainable.NO_RESPONSE_IDS.value
    if _size(call.logprobs) != response:
        return Untrainable.LOGPROB_LEN_MISMATCH.value
    return None


def logprob_array(call: ModelCall) -> np.ndarray:
    """(response tokens,) float32; NaN where the engine reported none (such a token was not sampled by the policy)."""
    if isinstance(call.logprobs, bytes):
        return np.frombuffer(call.logprobs, np.dtype("<f4"))
    try:
        return np.asarray(call.logprobs, dtype=np.float32)
    except (TypeError, ValueError):
        return np.full(len(call.logprobs), np.nan, dtype=np.float32)


def by_attempt(calls: Iterable[ModelCall]) -> dict[tuple[str, int], list[ModelCall]]:
    """Calls of each (rollout, attempt) in order of their sequence number; equal numbers keep the given order."""
    found: dict[tuple[str, int], list[ModelCall]] = {}
    for call in calls:
        found.setdefault((call.rollout_id, call.attempt), []).append(call)
    for part in found.values():
        if any(isinstance(c.prompt_ids, Delta) for c in part):
            continue  # a Delta names its base by position
        part.sort(key=lambda c: c.sequence)
    return found


def last_attempts(calls: Sequence[ModelCall]) -> tuple[list[ModelCall], list[ModelCall]]:
    """(calls of each rollout's last attempt, calls of earlier ones): a lost attempt is not training data."""
    newest: dict[str, int] = {}
    for call in calls:
        newest[call.rollout_id] = max(call.attempt, newest.get(call.rollout_id, call.attempt))
    kept = [c for c in calls if c.attempt == newest[c.rollout_id]]
    late = [c for c in calls if c.attempt != newest[c.rollout_id]]
    return kept, late


def _size(values: object) -> int:
    """Number of items; 0 for None; -1 for what is not a sequence of numbers."""
    if values is None:
        return 0
    if isinstance(values, bytes):
        return len(values) // ID.itemsize
    if isinstance(values, (Delta, np.ndarray)):
        return len(values)
    if not isinstance(values, (list, tuple)):
        return -1
    return len(values)
