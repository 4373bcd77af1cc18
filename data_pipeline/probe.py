"""Difficulty probe: k rollouts of the initial model per task, and what their outcomes say.

all_solved     leaves: nothing to learn
mixed          stays; known as soon as one rollout solved the task and one did not, so no more are run
none_solved    a seeded sample stays
undecided      too few verdicts, because machines failed: leaves, never counted as a failure of the model

Rollouts are run by somebody given from outside (gateway, harness, sandbox, grader in real life), breadth first: every
task gets its first rollout before any gets its second, so few are spent on tasks that are decided already. A rollout is
known by its task and number; every outcome is appended to a JSONL file when it arrives, and an interrupted probe asks
for exactly the numbers that are missing.
"""

from __future__ import annotations

import random
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from data_pipeline.journal import Journal
from data_pipeline.probe_results import Outcome, Results, recorded
from data_pipeline.progress import progress
from swe_lightning.errors import DataError

Row = Mapping[str, Any]
CLASSES = ("all_solved", "mixed", "none_solved", "undecided")
NONE_SOLVED_KEPT = 1000
OUTCOMES_FILE, RUN_NAME, IDENTITY_FILE = "probe.jsonl", "probe", "probe_identity.txt"
"""Beside the outputs: outcomes of the probe, its run directory, and what was probed."""


class Rollouts(Protocol):
    """Who runs rollouts. A rollout asked for again (same task, same number) is not run again."""

    window: int
    """How many may be open at once without waiting for each other."""

    def start(self, wanted: Sequence[tuple[Row, int]]) -> None:
        """Queue these (task, number of the rollout)."""

    def finished(self) -> Sequence[tuple[str, int, Outcome]]:
        """Block until at least one has ended: (instance_id, number, solved or None)."""


def classify(outcomes: Sequence[Outcome], k: int) -> str:
    """Class of one task; None counts for nothing."""
    verdicts = [outcome for outcome in outcomes if outcome is not None]
    if True in verdicts and False in verdicts:
        return "mixed"
    if len(verdicts) < k:
        return "undecided"
    return "all_solved" if True in verdicts else "none_solved"


@dataclass
class _Task:
    """What is known of one task, and what it still needs."""

    row: Row
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    lost: int = 0
    """Rollouts without a verdict in this session; a machine that was mended since deserves new tries."""

    def need(self, k: int, retries: int) -> int:
        """Rollouts to start now, beyond those that are open."""
        return max(0, self.wants(k, retries) - len(self.open))

    def wants(self, k: int, retries: int) -> int:
        """Verdicts it still lacks and may still try for."""
        if classify(list(self.outcomes.values()), k) != "undecided":
            return 0
        verdicts = sum(outcome is not None for outcome in self.outcomes.values())
        return max(0, min(k - verdicts, k * (1 + retries) - self.lost))

    def open_next(self) -> int:
        """The lowest number that has no outcome yet."""
        number = 0
        while number in self.outcomes or number in self.open:
            number += 1
        self.open.add(number)
        return number


def probe(
    tasks: Sequence[Row],
    rollouts: Rollouts,
    *,
    k: int = 4,
    retries: int = 2,
    file: Path,
    load: Callable[[Row], Row] = lambda row: row,
) -> Results:
    """Run rollouts until each task is decided, or has lost so many (`retries` times k beyond k) that it is given up.

    `load` gives the whole row of a task, when one of its rollouts starts.
    """
    running = _Probe(tasks, rollouts, k, retries, load)
    running.resume(recorded(file))
    with Journal(file) as journal, progress("probe", len(running.undecided)) as meter:
        while running.start():
            for name, number, outcome in rollouts.finished():
                decided = running.note(name, number, outcome)
                journal.append({"instance_id": name, "rollout": number, "solved": outcome})
                if decided:
                    meter.advance(f"{name}: {decided}")
    return running.results()


class _Probe:
    """Whose turn is next, and who is still undecided."""

    def __init__(
        self, tasks: Sequence[Row], rollouts: Rollouts, k: int, retries: int, load: Callable[[Row], Row]
    ) -> None:
        self._tasks = {task["instance_id"]: _Task(task) for task in tasks}
        self._rollouts, self._k, self._retries, self._load = rollouts, k, retries, load
        self._queue: deque[str] = deque(self._tasks)
        self._open = self._awaited = 0
        """Open rollouts, and those among them of undecided tasks."""
        self.undecided = set(self._tasks)

    def resume(self, earlier: Mapping[str, dict[int, Outcome]]) -> None:
        for name in self._tasks.keys() & earlier.keys():
            self._tasks[name].outcomes = earlier[name]
            if not self._tasks[name].wants(self._k, self._retries):
                self.undecided.discard(name)

    def start(self) -> bool:
        """Start rollouts up to the window, each task's turn giving it one; False when there is nothing to wait for.

        Nobody waits for what is still open of a task that was decided meanwhile.
        """
        wanted: list[tuple[Row, int]] = []
        while self._queue and self._open < self._rollouts.window:
            name = self._queue.popleft()
            task = self._tasks[name]
            if task.need(self._k, self._retries):
                wanted.append((self._load(task.row), task.open_next()))
                self._open += 1
                self._awaited += 1
                self._queue.append(name)
        if wanted:
            self._rollouts.start(wanted)
        return self._awaited > 0

    def note(self, name: str, number: int, outcome: Outcome) -> str | None:
        """Take one outcome; the task's class if that decided it."""
        task = self._tasks.get(name)
        if task is None or number not in task.open:
            raise DataError(f"the probe got a result for {name} (rollout {number}), which was not asked for")
        task.open.discard(number)
        task.outcomes[number] = outcome
        task.lost += outcome is None
        self._open -= 1
        if name not in self.undecided:
            return None
        self._awaited -= 1
        if task.wants(self._k, self._retries):
            self._queue.append(name)
            return None
        self._awaited -= len(task.open)
        self.undecided.discard(name)
        return classify(list(task.outcomes.values()), self._k)

    def results(self) -> Results:
        return {name: [task.outcomes[n] for n in sorted(task.outcomes)] for name, task in self._tasks.items()}


def reject_by_difficulty(
    rows: Sequence[Row], results: Mapping[str, Sequence[Outcome]], *, k: int = 4, keep_none: int, seed: int
) -> tuple[dict[int, tuple[str, str]], dict[str, str]]:
    """What leaves ({index: (reason, evidence)}) and the class of every row."""
    classes = {row["instance_id"]: classify(results.get(row["instance_id"], ()), k) for row in rows}
    unsolved = sorted(name for name, kind in classes.items() if kind == "none_solved")  # whatever order rows came in
    kept = set(random.Random(seed).sample(unsolved, min(keep_none, len(unsolved))))
    rejected = {}
    for index, row in enumerate(rows):
        kind = classes[row["instance_id"]]
        if kind in ("all_solved", "undecided") or (kind == "none_solved" and row["instance_id"] not in kept):
            outcomes = results.get(row["instance_id"], ())
            solved, graded = sum(o is True for o in outcomes), sum(o is not None for o in outcomes)
            rejected[index] = (kind, f"{solved} of {graded} graded rollouts solved it ({len(outcomes)} run)")
    return rejected, classes


def verdict_counts(rows: Sequence[Row], results: Mapping[str, Sequence[Outcome]]) -> dict[str, tuple[int, int]]:
    """instance_id -> (rollouts that solved it, rollouts with a verdict)."""
    outcomes = {row["instance_id"]: results.get(row["instance_id"], ()) for row in rows}
    return {name: (sum(o is True for o in of), sum(o is not None for o in of)) for name, of in outcomes.items()}


def solve_table(
    rows: Sequence[Row], results: Mapping[str, Sequence[Outcome]], group: Callable[[Row], str]
) -> dict[str, list[int]]:
    """Group -> [tasks whose first verdict is solved, tasks with a verdict].

    First verdicts only: a mixed task stops early, so counting all rollouts would draw every rate towards one half.
    """
    table: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        first = next((o for o in results.get(row["instance_id"], ()) if o is not None), None)
        if first is not None:
            table[group(row)][0] += first
            table[group(row)][1] += 1
    return dict(sorted(table.items()))


def holds_other(out: Path, identity: str | None) -> bool:
    """True if outcomes or rollouts of a probe are there that is not known to be this one."""
    if not any((out / name).exists() for name in (OUTCOMES_FILE, RUN_NAME)):
        return False
    try:
        before: str | None = (out / IDENTITY_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        before = None
    return before != identity


def claim(out: Path, identity: str | None, *, fresh: bool) -> None:
    """Note whose probe `out` holds; `fresh` drops another one's.

    The identity stays until a new one replaces it: broken off in between, the rest still counts as another probe.
    """
    if fresh:
        (out / OUTCOMES_FILE).unlink(missing_ok=True)
        if (out / RUN_NAME).exists():
            shutil.rmtree(out / RUN_NAME)
    if identity is not None:
        from swe_lightning.rundir import write_atomic  # brings the recipe with it, which most filters do without

        write_atomic(out / IDENTITY_FILE, identity)
