"""Retries: a call whose reply the client threw away and asked for again.

A call is superseded when the same request came again after it had ended and nothing continues its reply. Overlapping
identical calls and replies that are continued are deliberate samples and stay. Without times nothing is proven, so the
call stays; a retry that failed upstream, and so has no ids, is a retry too. Superseded calls are marked and kept in the
record; they are never trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swe_lightning.records import ModelCall
from swe_lightning.trajectory.calls import by_attempt
from swe_lightning.trajectory.prefix_tree import Node, Place, place_calls


def supersede(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """Set `superseded` on every retried call, in place (a mark is never taken back); returns all calls as given."""
    for part in by_attempt(calls).values():
        mark_superseded(part, place_calls(part))
    return list(calls)


def mark_superseded(calls: Sequence[ModelCall], places: Sequence[Place | None]) -> None:
    """The same for one attempt whose calls are already placed in a prefix tree."""
    same_prompt: dict[int, list[int]] = {}
    without_ids = [i for i, place in enumerate(places) if place is None]
    for i, place in enumerate(places):
        if place is not None:
            same_prompt.setdefault(id(place.prompt), []).append(i)
    retried = [
        i
        for members in same_prompt.values()
        for i in members
        if any(_asked_again(calls[i], calls[j]) for j in (*members, *without_ids) if j != i)
    ]
    if not retried:
        return
    continued = _continued(calls, places)
    for i in retried:
        if i not in continued and not any(_quotes(later, calls[i]) for later in calls):
            calls[i].superseded = True


def _quotes(later: ModelCall, earlier: ModelCall) -> bool:
    """A continuation by text: the template may have rewritten its ids."""
    return later.started_at >= earlier.ended_at and returned_unchanged(later, earlier) is True


def _asked_again(earlier: ModelCall, later: ModelCall) -> bool:
    return 0 < earlier.ended_at <= later.started_at and earlier.request == later.request


def _continued(calls: Sequence[ModelCall], places: Sequence[Place | None]) -> set[int]:
    """Calls whose prompt and reply are a prefix of a later call's prompt.

    Equal replies to one prompt cannot be told apart: the one that ended last before the continuation is meant.
    """
    ends: dict[int, list[int]] = {}
    for i, place in enumerate(places):
        if place is not None and place.end is not place.prompt:
            ends.setdefault(id(place.end), []).append(i)
    found: set[int] = set()
    for j, place in enumerate(places):
        node: Node | None = place.prompt if place else None
        while node is not None:
            twins = [i for i in ends.get(id(node), ()) if i != j and calls[i].ended_at <= calls[j].started_at]
            if twins:
                found.add(max(twins, key=lambda i: (calls[i].ended_at, i)))
            node = node.parent
    return found


def returned_unchanged(later: ModelCall, earlier: ModelCall) -> bool | None:
    """Did the later request repeat the earlier messages and then the earlier reply as it was? None: not that shape."""
    before, after = earlier.request.get("messages"), later.request.get("messages")
    reply = _reply_message(earlier.response)
    if not before or not after or reply is None or len(after) <= len(before) or after[: len(before)] != before:
        return None
    answer = after[len(before)]
    if not isinstance(answer, dict) or answer.get("role") != "assistant":
        return None
    return all((answer.get(key) or None) == (reply.get(key) or None) for key in ("content", "tool_calls"))


def _reply_message(response: dict[str, Any]) -> dict[str, Any] | None:
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    message = choices[0].get("message")
    return message if isinstance(message, dict) else None
