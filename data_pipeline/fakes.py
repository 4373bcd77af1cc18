"""A made-up SWE-smith in the published proportions, for tests and benchmarks: every count of the funnel is known.

59,136 rows over 128 repositories; 18,033 without issue text, 1,265 (of the others) without their branch, then made-up
counts for what the recipe's text leaves open (rows over the test cap, and what four rollouts say), so that 6,400 rows
are left. The kinds are spread over the set by a seeded shuffle. It holds no text of any real task.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

REPOSITORIES = 128
PLAN = {
    "empty_issue": 18_033,
    "missing_branch": 1_265,
    "test_cap": 11_838,
    "all_solved": 13_000,
    "none_solved": 9_600,
    "mixed": 5_400,
}
"""Kind of row -> how many. All together 59,136; with 1,000 of none_solved kept, 6,400 stay."""
OUTCOMES = {"all_solved": [True] * 4, "none_solved": [False] * 4, "mixed": [True, False]}
_WORDS = [f"word{n}" for n in range(4000)]
_KINDS = ("func_basic", "func_pm_ctrl_shuffle", "lm_rewrite", "combine_file", "pr")


@dataclass(frozen=True)
class Sizes:
    """How large rows are. The default is small; REAL is about what published rows are."""

    issue_words: int = 12
    patch_lines: int = 3
    tests: int = 4
    """Median of FAIL_TO_PASS + PASS_TO_PASS of a row under the cap."""
    name_chars: int = 12
    over_cap: int = 201
    """Median of a row over the cap."""


REAL = Sizes(issue_words=160, patch_lines=24, tests=70, name_chars=64, over_cap=420)


class SmithLike:
    """Rows, branches and probe outcomes of one seed; `scale` divides every count."""

    def __init__(self, seed: int = 0, *, scale: int = 1, sizes: Sizes | None = None) -> None:
        self.counts = {kind: count // scale for kind, count in PLAN.items()}
        self.kinds = [kind for kind, count in self.counts.items() for _ in range(count)]
        random.Random(seed).shuffle(self.kinds)
        self._seed, self._sizes = seed, sizes or Sizes()
        self._tests: dict[int, list[str]] = {}

    def lines(self) -> Iterator[bytes]:
        for number, kind in enumerate(self.kinds):
            yield orjson.dumps(self.row(number, kind)) + b"\n"

    def row(self, number: int, kind: str) -> dict[str, Any]:
        """Seeded by its number alone, so that any row can be made without the others."""
        rng, sizes, repository = random.Random(self._seed * 1_000_003 + number), self._sizes, number % REPOSITORIES
        slug = f"owner{repository}__name{repository}.{repository:08x}"
        over = kind == "test_cap"
        median = sizes.over_cap if over else sizes.tests
        # Long right tail, as in real sets; rows under the cap stay under it and rows over it over it.
        count = int(median * rng.lognormvariate(0, 0.5))
        count = max(count, 201) if over else min(max(count, 2), 200)
        tests = self._names(repository, count)
        words = " ".join(rng.choices(_WORDS, k=sizes.issue_words))
        return {
            "instance_id": self.name(number),
            "repo": f"swesmith/{slug}",
            "patch": _patch(rng, repository, sizes.patch_lines),
            "FAIL_TO_PASS": tests[:1],
            "PASS_TO_PASS": tests[1:],
            "image_name": self.image(repository),
            "base_commit": f"{repository:040x}",
            "problem_statement": rng.choice(["", "\n", " \t"]) if kind == "empty_issue" else f"# {number}\n\n{words}",
        }

    def _names(self, repository: int, count: int) -> list[str]:
        known = self._tests.setdefault(repository, [])
        while len(known) < count:
            known.append(f"tests/test_{repository}.py::test_{len(known):0{self._sizes.name_chars}d}")
        return known[:count]

    def name(self, number: int) -> str:
        repository = number % REPOSITORIES
        kind = _KINDS[number % len(_KINDS)]
        return f"owner{repository}__name{repository}.{repository:08x}.{kind}__{number:08d}"

    @staticmethod
    def image(repository: int) -> str:
        return f"swebench/swesmith.x86_64.owner{repository}_1776_name{repository}.{repository:08x}"

    def branches(self) -> dict[str, list[str]]:
        """Image -> branches, those of `missing_branch` rows left out."""
        table: dict[str, list[str]] = {self.image(n): ["main"] for n in range(REPOSITORIES)}
        for number, kind in enumerate(self.kinds):
            if kind != "missing_branch":
                table[self.image(number % REPOSITORIES)].append(self.name(number))
        return table

    def outcomes(self) -> dict[str, list[bool]]:
        return {self.name(n): OUTCOMES[kind] for n, kind in enumerate(self.kinds) if kind in OUTCOMES}


def _patch(rng: random.Random, repository: int, lines: int) -> str:
    file = f"name{repository}/module_{rng.randrange(40)}.py"
    head = f"diff --git a/{file} b/{file}\n--- a/{file}\n+++ b/{file}\n@@ -1,{lines} +1,{lines} @@\n"
    changed = [
        f"{sign}    value_{n} = compute(argument_{rng.randrange(10**6)})\n" for n in range(lines // 2) for sign in "-+"
    ]
    return head + "".join(changed)
