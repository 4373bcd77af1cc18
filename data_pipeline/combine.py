"""Several bugs at once: tasks that no single repair resolves.

Bugs that were validated one by one are put together, two or three of one function, one file or one directory. As in
SWE-smith the kind is `combine_file` or `combine_module`. A combination counts only if tests of each of its bugs fail
with it: where one bug hides another one's failures it is refused as `masked`, because repairing the one that shows
would resolve the task. Pure functions; who runs the tests is synth.py.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Sequence
from itertools import combinations, zip_longest
from posixpath import dirname
from typing import TypeVar

from data_pipeline.mutations import Mutation
from data_pipeline.trees import Tree

IN_FILE, IN_MODULE = "combine_file", "combine_module"
KINDS = frozenset({IN_FILE, IN_MODULE})
THIRD = 1 / 3
"""Share of combinations with a third bug, where there is one."""
T = TypeVar("T")


def kind_of(parts: Sequence[Mutation]) -> str:
    """The kind of a single bug, or how many bugs lie together."""
    if len(parts) == 1:
        return parts[0].kind
    return IN_FILE if len({part.path for part in parts}) == 1 else IN_MODULE


def key_of(parts: Sequence[Mutation]) -> str:
    """Short stable name; of several bugs, whatever their order."""
    if len(parts) == 1:
        return parts[0].key
    return hashlib.sha256("\0".join(sorted(part.key for part in parts)).encode()).hexdigest()[:8]


def changed_files(tree: Tree, parts: Sequence[Mutation]) -> dict[str, bytes]:
    """Path -> content with all the bugs. ValueError if two of them share a line, or the tree is another one."""
    files: dict[str, bytes] = {}
    for part in sorted(parts, key=lambda part: (part.path, -part.start)):  # from the end: places before stay true
        files[part.path] = part.apply(files.get(part.path, tree[part.path].data))
    return files


def apart(first: Mutation, second: Mutation) -> bool:
    """No line in common."""
    if first.path != second.path:
        return True
    (a, b), (c, d) = _lines(first), _lines(second)
    return b < c or d < a


def _lines(mutation: Mutation) -> tuple[int, int]:
    return mutation.line, mutation.line + mutation.before.count("\n")


def drawn(parts: Sequence[Mutation], seed: str) -> list[tuple[int, ...]]:
    """Combinations as indices, in a seeded order; those of one function, one file and one directory take turns."""
    rng = random.Random(f"{seed}:combine")
    groups: list[list[tuple[int, ...]]] = [[], [], []]
    for first, second in combinations(range(len(parts)), 2):
        near = _nearness(parts[first], parts[second])
        if near is not None:
            groups[near].append((first, second))
    for group in groups:
        rng.shuffle(group)
    pairs = [pair for turn in zip_longest(*groups) for pair in turn if pair is not None]
    return [_with_third(pair, parts, rng) if rng.random() < THIRD else pair for pair in pairs]


def _nearness(first: Mutation, second: Mutation) -> int | None:
    if not apart(first, second):
        return None
    if first.path == second.path:
        return 0 if first.def_line == second.def_line else 1
    return 2 if dirname(first.path) == dirname(second.path) else None


def _with_third(pair: tuple[int, ...], parts: Sequence[Mutation], rng: random.Random) -> tuple[int, ...]:
    others = [
        index
        for index in range(len(parts))
        if index not in pair and all(_nearness(parts[index], parts[other]) is not None for other in pair)
    ]
    return tuple(sorted((*pair, rng.choice(others)))) if others else pair


def is_masked(together: Collection[str], alone: Sequence[Collection[str]]) -> bool:
    """True if some bug's own failing tests all pass, or do not count, when the bugs are together."""
    failing = set(together)
    return any(failing.isdisjoint(tests) for tests in alone)
