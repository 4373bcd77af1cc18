"""A bug that makes a task, what is asked of one, and what one run of the tests says about it.

Compared is a run with the bug and the clean tree's tests; a test that did not run failed. Nothing here runs anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from data_pipeline import combine
from data_pipeline.mutations import Mutation
from data_pipeline.testbed import Trial
from data_pipeline.trees import Tree

MAX_P2P = 100
"""PASS_TO_PASS tests kept per task; the rest of the affected files passes too but makes grading slow."""
_SAFE_ID = re.compile(r"[^\s'\"\\`$]+")


@dataclass(frozen=True)
class Bug:
    """A validated mutation, or several at once."""

    mutation: Mutation
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    seconds: float
    others: tuple[Mutation, ...] = ()
    """What is broken beside `mutation`."""
    issue: str = ""
    """Issue text a model wrote; empty: the template's."""

    @property
    def parts(self) -> tuple[Mutation, ...]:
        return (self.mutation, *self.others)

    @property
    def kind(self) -> str:
        return combine.kind_of(self.parts)

    @property
    def key(self) -> str:
        return combine.key_of(self.parts)

    def files(self, tree: Tree) -> dict[str, bytes]:
        """The broken files."""
        return combine.changed_files(tree, self.parts)


@dataclass
class Limits:
    """What is asked of the bugs of one package."""

    tasks: int = 20
    per_kind: int | None = None
    """Bugs of one kind; None: a sixth of `tasks`, at least 3."""
    max_fail_to_pass: int = 50
    max_tries: int | None = None
    """Candidates run; None: eight times `tasks`."""
    timeout_s: float = 60.0
    """Of one test run; shortened to what the clean run needs, with a margin."""
    accept: Callable[[Mutation], bool] = lambda _: True
    max_seconds: float | None = None
    """Bugs whose test run takes longer leave as `slow`; depends on the machine, so only manifests use it."""
    plain_ids: bool = False
    """Only bugs whose FAIL_TO_PASS ids have no parameters."""
    combinations: int = 0
    """Tasks of several bugs, beside `tasks`."""

    @property
    def kind_cap(self) -> int:
        return self.per_kind if self.per_kind is not None else max(3, self.tasks // 6)


def judge(passing: frozenset[str], targets: list[str], mutation: Mutation, trial: Trial, limits: Limits) -> Bug | str:
    """Compare one run with the clean one. A test that did not run failed."""
    if trial.timed_out:
        return "hangs"
    if not trial.finished:
        return "no_session"
    if limits.max_seconds is not None and trial.seconds > limits.max_seconds:
        return "slow"
    asked = {t for t in passing if not targets or file_of(t) in targets}
    broken = sorted(asked - trial.passed)
    if not broken:
        return "not_noticed"
    usable = [t for t in broken if _SAFE_ID.fullmatch(t)]
    if not usable or (limits.plain_ids and any("[" in t for t in usable)):
        return "awkward_ids"
    if len(usable) > limits.max_fail_to_pass:
        return "breaks_too_much"
    kept = pass_to_pass(usable, asked & trial.passed)
    if not kept:
        return "breaks_everything"
    return Bug(mutation, usable, kept, trial.seconds)


def pass_to_pass(fail_to_pass: Iterable[str], passed: Iterable[str]) -> list[str]:
    """Tests of the affected files that pass with and without the bug, at most MAX_P2P.

    Where there are more, every n-th in sorted order: the rule needs no list to be stored.
    """
    files = {file_of(test) for test in fail_to_pass}
    tests = sorted(t for t in passed if file_of(t) in files and _SAFE_ID.fullmatch(t))
    if len(tests) <= MAX_P2P:
        return tests
    return [tests[i * len(tests) // MAX_P2P] for i in range(MAX_P2P)]


def file_of(test_id: str) -> str:
    return test_id.split("::", 1)[0]
