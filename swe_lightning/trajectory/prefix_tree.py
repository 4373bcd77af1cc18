"""Where each call's tokens lie in one radix tree: the exact and linear answer to "which sequence is a prefix of which".

Invariant: two calls share a node if and only if their token ids are equal up to it. Every token of a prompt is compared
once, by memcmp, however many rows are open; tokens given as a Delta (what an earlier call already holds) are not read
at all. Refuses hashes and text: equality of ids is the only evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swe_lightning.records import ModelCall

ID = np.dtype("<i4")
_STEP = 4096


@dataclass(frozen=True, slots=True)
class Delta:
    """Prompt ids as a difference: the first `shared` tokens of (prompt + response) of call `base`, then `tail`.

    May stand in `ModelCall.prompt_ids`. `base` is the position of an earlier call in the same list of calls, -1 = none;
    `tail` holds little-endian int32.
    """

    base: int
    shared: int
    tail: bytes

    def __len__(self) -> int:
        return self.shared + len(self.tail) // ID.itemsize


class Node:
    """The end of an edge: `edge` holds the int32 ids since the parent, `depth` counts tokens from the root."""

    __slots__ = ("children", "depth", "edge", "owner", "parent", "rows")

    def __init__(self, edge: bytes, depth: int, parent: Node | None) -> None:
        self.edge = edge
        self.depth = depth
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.owner: int | None = None
        self.rows: list[int] = []


@dataclass(slots=True)
class Place:
    """Where a call lies: the node its prompt ends at and the node its response ends at."""

    prompt: Node
    end: Node


def as_bytes(ids: Any) -> bytes:
    """Token ids as little-endian int32 bytes; accepts a list, an array, bytes of that form, None (empty)."""
    if ids is None:
        return b""
    if isinstance(ids, bytes):
        return ids
    return np.asarray(ids, dtype=ID).tobytes()


def place_calls(calls: Sequence[ModelCall]) -> list[Place | None]:
    """One tree over the calls of one attempt; None for a call without prompt ids or whose ids are not numbers."""
    root = Node(b"", 0, None)
    places: list[Place | None] = []
    for call in calls:
        place = None
        try:
            prompt = walk(*_start(root, call.prompt_ids, places))
            if prompt is not root:
                place = Place(prompt, walk(prompt, as_bytes(call.response_ids)))
        except (TypeError, ValueError, OverflowError):
            place = None
        places.append(place)
    return places


def _start(root: Node, prompt: Any, places: Sequence[Place | None]) -> tuple[Node, bytes]:
    """The node a prompt hangs on and the ids that follow it."""
    if not isinstance(prompt, Delta):
        return root, as_bytes(prompt)
    if prompt.base < 0:
        return root, prompt.tail
    base = places[prompt.base] if prompt.base < len(places) else None
    if base is None:
        raise ValueError(f"the prompt builds on call {prompt.base}, whose ids are unknown")
    return _at_depth(base.end, prompt.shared), prompt.tail


def walk(node: Node, ids: bytes) -> Node:
    """Follow `ids` down from `node`, adding what is missing; returns the node they end at."""
    position, size = 0, len(ids)
    while position < size:
        key = ids[position : position + ID.itemsize]
        child = node.children.get(key)
        if child is None:
            rest = ids[position:] if position else ids
            leaf = Node(rest, node.depth + len(rest) // ID.itemsize, node)
            node.children[key] = leaf
            return leaf
        if not ids.startswith(child.edge, position):
            child = _split(child, _common(child.edge, ids, position))
        node = child
        position += len(child.edge)
    return node


def path_ids(node: Node, start: int = 0) -> bytes:
    """The ids from depth `start` down to `node`."""
    parts: list[bytes] = []
    while node.depth > start and node.parent is not None:
        skip = start - node.parent.depth
        parts.append(node.edge[skip * ID.itemsize :] if skip > 0 else node.edge)
        node = node.parent
    return b"".join(reversed(parts))


def _at_depth(node: Node, depth: int) -> Node:
    """The node `depth` tokens from the root on the way to `node`."""
    if not 0 <= depth <= node.depth:
        raise ValueError(f"a prompt claims to share {depth} tokens of a call that holds {node.depth}")
    while node.parent is not None and node.parent.depth >= depth:
        node = node.parent
    if node.depth == depth or node.parent is None:
        return node
    return _split(node, (depth - node.parent.depth) * ID.itemsize)


def _split(child: Node, size: int) -> Node:
    """Cut `child`'s edge after `size` bytes; the new upper part is returned, `child` keeps its end."""
    parent = child.parent
    assert parent is not None
    upper = Node(child.edge[:size], parent.depth + size // ID.itemsize, parent)
    parent.children[upper.edge[: ID.itemsize]] = upper
    upper.owner = child.owner
    child.edge, child.parent = child.edge[size:], upper
    upper.children[child.edge[: ID.itemsize]] = child
    return upper


def _common(edge: bytes, ids: bytes, position: int) -> int:
    """Bytes of whole ids that `edge` shares with `ids` from `position`; stops at the first difference."""
    size = min(len(edge), len(ids) - position)
    for start in range(0, size, _STEP):
        stop = min(start + _STEP, size)
        if edge[start:stop] != ids[position + start : position + stop]:
            a = np.frombuffer(edge, ID, (stop - start) // ID.itemsize, start)
            b = np.frombuffer(ids, ID, (stop - start) // ID.itemsize, position + start)
            return start + int((a != b).argmax()) * ID.itemsize
    return size
