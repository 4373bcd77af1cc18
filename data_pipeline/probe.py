"""Difficulty probe: k rollouts of the initial model per task, and what their outcomes say.

all_solved     leaves: nothing to learn
mixed          stays; known as soon as one rollout solved the task and one did not
none_solved    a seeded sample stays
undecided      too few verdicts, because machines failed: leaves, never counted as a failure of the model

The rollouts themselves are run by a function given from outside (gateway, harness, sandbox, grader in real life).
Every verdict is appended to a JSONL file when it arrives, so an interrupted probe repeats no rollout.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swe_lightning.errors import DataError

Row = Mapping[str, Any]
Results = dict[str, list[bool | None]]
"""instance_id -> outcome of each rollout; None = no verdict (infrastructure failure)."""
RunRollouts = Callable[[Sequence[tuple[Row, int]]], Iterable[tuple[str, bool | None]]]
"""Given (task, number of rollouts) pairs, yields (instance_id, solved or None) as rollouts end."""
CLASSES = ("all_solved", "mixed", "none_solved", "undecided")
NONE_SOLVED_KEPT = 1000


def classify(outcomes: Sequence[bool | None], k: int) -> str:
    """Class of one task; None counts for nothing."""
    verdicts = [outcome for outcome in outcomes if outcome is not None]
    if True in verdicts and False in verdicts:
        return "mixed"
    if len(verdicts) < k:
        return "undecided"
    return "all_solved" if True in verdicts else "none_solved"


def probe(
    tasks: Sequence[Row],
    run_rollouts: RunRollouts,
    *,
    k: int = 4,
    first_wave: int = 2,
    retries: int = 2,
    results_file: Path | None = None,
    on_result: Callable[[str, bool | None], None] | None = None,
) -> Results:
    """Run rollouts in waves until each task is decided or has used its retries.

    The first wave gives every task `first_wave` rollouts; tasks already mixed need no more. Rollouts without a verdict
    are repeated, at most `retries` times k per task.
    """
    names = {task["instance_id"] for task in tasks}
    results: Results = defaultdict(list)
    if results_file and results_file.exists():
        _drop_torn_line(results_file)
    for name, outcomes in (load_results(results_file) if results_file and results_file.exists() else {}).items():
        if name in names:
            results[name] += outcomes
    wave = min(first_wave, k)
    while True:
        wanted = [(task, need) for task in tasks if (need := _missing(results[task["instance_id"]], k, wave, retries))]
        if not wanted and wave >= k:
            return {task["instance_id"]: results[task["instance_id"]] for task in tasks}
        if not wanted:
            wave = k
            continue
        expected = Counter({task["instance_id"]: need for task, need in wanted})
        for name, solved in run_rollouts(wanted):
            if name not in expected:
                raise DataError(f"the probe got a result for {name}, which was not asked for")
            results[name].append(solved)
            expected[name] -= 1
            _append(results_file, name, solved)
            if on_result:
                on_result(name, solved)
        for name, short in expected.items():
            # A rollout that never reported is an infrastructure failure like any other.
            results[name] += [None] * max(short, 0)


def _missing(outcomes: Sequence[bool | None], k: int, wave: int, retries: int) -> int:
    verdicts = [outcome for outcome in outcomes if outcome is not None]
    if classify(outcomes, k) != "undecided":
        return 0
    lost = len(outcomes) - len(verdicts)
    return max(0, min(wave - len(verdicts), k * (1 + retries) - lost))


def _append(file: Path | None, name: str, solved: bool | None) -> None:
    if file is not None:
        with file.open("a", encoding="utf-8") as f:
            f.write(json.dumps({"instance_id": name, "solved": solved}) + "\n")


def _drop_torn_line(file: Path) -> None:
    """A crash while writing leaves a line without its end; what comes next must not be glued to it."""
    data = file.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with file.open("r+b") as f:
            f.truncate(whole)


def load_results(file: Path) -> Results:
    """Outcomes from a JSONL file (one rollout per line) or a JSON object {instance_id: [true, false, null]}."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read probe results {file}: {error}") from error
    results: Results = defaultdict(list)
    if file.suffix == ".json":
        try:
            for name, outcomes in json.loads(text).items():
                results[name] += [_outcome(o, f"{file}: {name}") for o in outcomes]
        except (json.JSONDecodeError, AttributeError, TypeError) as error:
            raise DataError(f"{file}: must be a JSON object of instance_id -> list of true, false or null") from error
        return dict(results)
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            results[record["instance_id"]].append(_outcome(record["solved"], f"{file}:{number}"))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if number == len(lines):
                break  # a line torn by a crash: that rollout is simply repeated
            raise DataError(f"{file}:{number}: wants an object with instance_id and solved") from error
    return dict(results)


def _outcome(value: Any, place: str) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise DataError(f"{place}: a probe outcome is true, false or null, not {value!r}")


def reject_by_difficulty(
    rows: Sequence[Row], results: Mapping[str, Sequence[bool | None]], *, k: int = 4, keep_none: int, seed: int
) -> tuple[dict[int, tuple[str, str]], dict[str, str]]:
    """What leaves ({index: (reason, evidence)}) and the class of every row."""
    classes = {row["instance_id"]: classify(results.get(row["instance_id"], ()), k) for row in rows}
    unsolved = [i for i, row in enumerate(rows) if classes[row["instance_id"]] == "none_solved"]
    kept = set(random.Random(seed).sample(unsolved, min(keep_none, len(unsolved))))
    rejected = {}
    for index, row in enumerate(rows):
        kind = classes[row["instance_id"]]
        if kind in ("all_solved", "undecided") or (kind == "none_solved" and index not in kept):
            outcomes = results.get(row["instance_id"], ())
            solved, graded = sum(o is True for o in outcomes), sum(o is not None for o in outcomes)
            rejected[index] = (kind, f"{solved} of {graded} graded rollouts solved it ({len(outcomes)} run)")
    return rejected, classes


def solve_table(rows: Sequence[Row], results: Mapping[str, Sequence[bool | None]], column: str) -> dict[str, list[int]]:
    """Value of `column` -> [solved, graded] over all probe rollouts."""
    table: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        for outcome in results.get(row["instance_id"], ()):
            if outcome is not None:
                table[str(row.get(column, ""))][0] += outcome
                table[str(row.get(column, ""))][1] += 1
    return dict(sorted(table.items()))
