"""Search for validated bugs in one package.

A bug counts if tests that pass on the clean tree fail with it and others still pass, the same in two runs. Candidates
are drawn in an order that depends on the seed and the package alone, tried in parallel and accepted strictly in that
order: the result is the same whatever the machine's timing. Every rejected candidate leaves with a reason.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest

from data_pipeline.affected import tests_by_function
from data_pipeline.mutations import Mutation, changes_meaning, find_mutations
from data_pipeline.packages import Package
from data_pipeline.progress import Progress
from data_pipeline.testbed import Testbed, Trial
from swe_lightning.errors import DataError

MAX_P2P = 100
"""PASS_TO_PASS tests kept per task; the rest of the affected files passes too but makes grading slow."""
_SAFE_ID = re.compile(r"[^\s'\"\\`$]+")


@dataclass(frozen=True)
class Baseline:
    """The clean tree: tests that passed in both runs, those that did not agree, and how long a run takes."""

    passing: frozenset[str]
    flaky: frozenset[str]
    seconds: float
    affected: dict[tuple[str, int], frozenset[str]] = field(default_factory=dict)
    """(source file, line of `def`) -> test files that run it; empty = unknown, run everything."""


@dataclass(frozen=True)
class Bug:
    """A validated mutation."""

    mutation: Mutation
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    seconds: float


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

    @property
    def kind_cap(self) -> int:
        return self.per_kind if self.per_kind is not None else max(3, self.tasks // 6)


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
        raise DataError(f"{where}: its tests take more than {timeout_s:g} s; raise --timeout or choose another package")
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
                meter.advance(f"{package.name}: {len(bugs)}/{limits.tasks}")
            if len(bugs) >= limits.tasks or len(bugs) + _runs(rejected) >= tries:
                break
    return Found(package, bugs, rejected, baseline)


def _runs(rejected: Counter[str]) -> int:
    """Rejections that cost a test run."""
    return rejected.total() - rejected["not_covered"] - rejected["same_meaning"]


def _in_order(
    executor: ThreadPoolExecutor,
    ahead: int,
    items: Iterable[Mutation],
    work: Callable[[Mutation], Bug | str],
) -> Iterator[tuple[Mutation, Bug | str]]:
    """Results in the order of the items, at most `ahead` in flight; the rest is cancelled when the reader stops."""
    source = iter(items)
    flying: list[tuple[Mutation, Future[Bug | str]]] = []
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


def validate(package: Package, bed: Testbed, baseline: Baseline, mutation: Mutation, limits: Limits) -> Bug | str:
    """The bug, or one word why this mutation makes no task."""
    source = package.tree[mutation.path].data
    mutated = mutation.apply(source)
    if not changes_meaning(source, mutated):
        return "same_meaning"
    targets = sorted(baseline.affected.get((mutation.path, mutation.def_line), ())) if baseline.affected else []
    if baseline.affected and not targets:
        return "not_covered"
    timeout_s = min(limits.timeout_s, 4 * baseline.seconds + 10)
    outcomes = []
    for repeat in range(2):
        trial = bed.trial({mutation.path: mutated}, targets, timeout_s=timeout_s, repeat=repeat)
        outcomes.append(judge(baseline.passing, targets, mutation, trial, limits))
        if isinstance(outcomes[-1], str) and not repeat:
            return outcomes[-1]
    first, second = outcomes
    if not (isinstance(first, Bug) and isinstance(second, Bug) and first.fail_to_pass == second.fail_to_pass):
        return "flaky"
    return first


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
