"""Search for validated bugs in one package.

A bug counts if tests that pass on the clean tree fail with it and others still pass, the same in two runs. Candidates
are drawn in an order that depends on the seed and the package alone, tried in parallel and accepted strictly in that
order: the result is the same whatever the machine's timing. Every rejected candidate leaves with a reason. Bugs that
were found are then tried together (combine.py), under the same rules.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TypeVar

from data_pipeline import combine
from data_pipeline.affected import tests_by_function
from data_pipeline.bugs import Bug, Limits, judge
from data_pipeline.mutations import Mutation, changes_meaning, find_mutations
from data_pipeline.packages import Package
from data_pipeline.progress import Progress
from data_pipeline.testbed import Testbed
from swe_lightning.errors import DataError

T = TypeVar("T")
Outcome = TypeVar("Outcome")
BY_MACHINE = ("hangs", "no_session")
"""What a machine that is busy for a moment says too: a bug leaves for it only when it says so twice."""
MAX_COMBINED = 2
"""Combinations that one bug may be part of."""


@dataclass(frozen=True)
class Baseline:
    """The clean tree: tests that passed in both runs, those that did not agree, and how long a run takes."""

    passing: frozenset[str]
    flaky: frozenset[str]
    seconds: float
    affected: dict[tuple[str, int], frozenset[str]] = field(default_factory=dict)
    """(source file, line of `def`) -> test files that run it; empty = unknown, run everything."""


@dataclass
class Found:
    package: Package
    bugs: list[Bug]
    rejected: Counter[str]
    baseline: Baseline


def take_baseline(bed: Testbed, package: Package, *, timeout_s: float) -> Baseline:
    """Two clean runs. DataError if no test passes: such a package gives no tasks."""
    runs = [bed.trial({}, [], timeout_s=timeout_s, repeat=n) for n in range(2)]
    where = f"{package.name} {package.version}"
    if any(run.timed_out for run in runs):
        raise DataError(
            f"{where}: its tests take more than {timeout_s:g} s; raise --timeout-s or choose another package"
        )
    if not all(run.finished for run in runs):
        raise DataError(f"{where}: its test command does not finish a session ({bed.plan.command})")
    passing = runs[0].passed & runs[1].passed
    if not passing:
        raise DataError(f"{where}: no test passes on the clean tree with `{bed.plan.command}`; give --test-cmd")
    everything = runs[0].passed | runs[1].passed | runs[0].failed | runs[1].failed
    flaky = frozenset(t for t in everything if (t in runs[0].passed) != (t in runs[1].passed))
    seconds = max(run.seconds for run in runs)
    return Baseline(passing, flaky, seconds, tests_by_function(bed, package, timeout_s=timeout_s))


def candidates(package: Package, seed: int, accept: Callable[[Mutation], bool]) -> list[Mutation]:
    """Possible bugs, shuffled, kinds taking turns so that rare kinds are tried as early as common ones."""
    by_kind: dict[str, list[Mutation]] = defaultdict(list)
    for path in package.sources():
        for mutation in find_mutations(package.tree[path].data, path):
            if accept(mutation):
                by_kind[mutation.kind].append(mutation)
    rng = random.Random(f"{seed}:{package.name}:{package.version}")
    kinds = sorted(by_kind)
    rng.shuffle(kinds)
    for kind in kinds:
        rng.shuffle(by_kind[kind])
    turns = zip_longest(*(by_kind[kind] for kind in kinds))
    return [mutation for turn in turns for mutation in turn if mutation is not None]


def search(
    package: Package, bed: Testbed, limits: Limits, *, seed: int, workers: int, meter: Progress | None = None
) -> Found:
    """Find up to `limits.tasks` bugs, at most one per line and `kind_cap` per kind."""
    baseline = take_baseline(bed, package, timeout_s=limits.timeout_s)
    pool = candidates(package, seed, limits.accept)
    bugs: list[Bug] = []
    rejected: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    lines: set[tuple[str, int]] = set()
    tries = limits.max_tries if limits.max_tries is not None else 8 * limits.tasks

    def wanted(mutation: Mutation) -> bool:
        return kinds[mutation.kind] < limits.kind_cap and (mutation.path, mutation.line) not in lines

    def examine(mutation: Mutation) -> Bug | str:
        return validate(package, bed, baseline, mutation, limits)

    with ThreadPoolExecutor(workers) as executor:
        for mutation, outcome in _in_order(executor, workers + 1, filter(wanted, pool), examine):
            if not wanted(mutation):
                continue
            if isinstance(outcome, str):
                rejected[outcome] += 1
            else:
                bugs.append(outcome)
                kinds[mutation.kind] += 1
                lines.add((mutation.path, mutation.line))
                if meter:
                    meter.advance()
            if meter:
                meter.note(f"{rejected.total()} tried in vain")
            if len(bugs) >= limits.tasks or len(bugs) + _runs(rejected) >= tries:
                break
        found = Found(package, bugs, rejected, baseline)
        together = search_combinations(found, bed, limits, seed=seed, executor=executor, ahead=workers + 1, meter=meter)
    bugs += together
    return found


def search_combinations(
    found: Found,
    bed: Testbed,
    limits: Limits,
    *,
    seed: int,
    executor: ThreadPoolExecutor,
    ahead: int,
    meter: Progress | None = None,
) -> list[Bug]:
    """Up to `limits.combinations` tasks of bugs that were found, each in at most MAX_COMBINED of them."""
    if not limits.combinations:
        return []
    package, singles, accepted = found.package, found.bugs, list[Bug]()
    used: Counter[int] = Counter()
    tried = 0

    def wanted(indices: tuple[int, ...]) -> bool:
        return all(used[index] < MAX_COMBINED for index in indices)

    def examine(indices: tuple[int, ...]) -> Bug | str:
        chosen = [singles[index] for index in indices]
        first, *others = (bug.mutation for bug in chosen)
        outcome = validate(package, bed, found.baseline, first, limits, tuple(others))
        if isinstance(outcome, Bug) and combine.is_masked(outcome.fail_to_pass, [bug.fail_to_pass for bug in chosen]):
            return "masked"
        return outcome

    pool = combine.drawn([bug.mutation for bug in singles], f"{seed}:{package.name}:{package.version}")
    for indices, outcome in _in_order(executor, ahead, filter(wanted, pool), examine):
        if not wanted(indices):
            continue
        tried += 1
        if isinstance(outcome, str):
            found.rejected[outcome] += 1
        else:
            accepted.append(outcome)
            used.update(indices)
            if meter:
                meter.advance("combined")
        if len(accepted) >= limits.combinations or tried >= 4 * limits.combinations:
            break
    return accepted


def _runs(rejected: Counter[str]) -> int:
    """Rejections that cost a test run."""
    return rejected.total() - rejected["not_covered"] - rejected["same_meaning"]


def _in_order(
    executor: ThreadPoolExecutor,
    ahead: int,
    items: Iterable[T],
    work: Callable[[T], Outcome],
) -> Iterator[tuple[T, Outcome]]:
    """Results in the order of the items, at most `ahead` in flight; the rest is cancelled when the reader stops."""
    source = iter(items)
    flying: list[tuple[T, Future[Outcome]]] = []
    try:
        while True:
            while len(flying) < ahead and (item := next(source, None)) is not None:
                flying.append((item, executor.submit(work, item)))
            if not flying:
                return
            item, future = flying.pop(0)
            yield item, future.result()
    finally:
        for _, future in flying:
            future.cancel()


def validate(
    package: Package,
    bed: Testbed,
    baseline: Baseline,
    mutation: Mutation,
    limits: Limits,
    others: tuple[Mutation, ...] = (),
) -> Bug | str:
    """The bug (of all these mutations at once), or one word why it makes no task."""
    parts = (mutation, *others)
    broken = combine.changed_files(package.tree, parts)
    if not all(changes_meaning(package.tree[path].data, data) for path, data in broken.items()):
        return "same_meaning"
    known = (baseline.affected.get((part.path, part.def_line), frozenset()) for part in parts)
    targets = sorted(frozenset().union(*known))
    if baseline.affected and not targets:
        return "not_covered"
    timeout_s = min(limits.timeout_s, 4 * baseline.seconds + 10)

    def judged(repeat: int) -> Bug | str:
        trial = bed.trial(broken, targets, timeout_s=timeout_s, repeat=repeat)
        return judge(baseline.passing, targets, mutation, trial, limits)

    first = judged(0)
    if first in BY_MACHINE:
        first = judged(2)
    if isinstance(first, str):
        return first
    second = judged(1)
    if second in BY_MACHINE:
        second = judged(3)
    if not (isinstance(first, Bug) and isinstance(second, Bug) and first.fail_to_pass == second.fail_to_pass):
        return "flaky"
    return replace(first, others=others)
