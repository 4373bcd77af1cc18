"""Looking at task files and at the directories that `swel data filter`, `synth` and `validate` write.

A name stands for one file or hub data set, or for such a directory: then its task files are its sides (train, val, or
tasks), and its ledger says why a row is not there. Rows are read one at a time and not kept.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline import hub
from data_pipeline.histograms import quartiles
from data_pipeline.journal import Journal
from data_pipeline.report import bug_kind
from data_pipeline.sources import iterate_rows, open_sources
from swe_lightning.errors import DataError

Row = dict[str, Any]
SIDES = ("train", "val", "tasks")
DROPPED, REPORT = "dropped.jsonl", "report.json"


@dataclass(frozen=True)
class TaskSet:
    """`files`: side -> name of an input. A file that is no directory of ours has one side, called rows."""

    name: str
    files: Mapping[str, str]
    folder: Path | None = None

    def rows(self) -> Iterator[tuple[str, Row]]:
        for side, file in self.files.items():
            for row in iterate_rows(open_sources([file])):
                yield side, row

    def drops(self) -> Iterator[Mapping[str, Any]]:
        """The ledger: instance_id, stage, reason, evidence."""
        if self.folder is not None:
            yield from (record for _, record in Journal.read(self.folder / DROPPED))

    def report(self) -> dict[str, Any] | None:
        if self.folder is None or not (self.folder / REPORT).is_file():
            return None
        try:
            return json.loads((self.folder / REPORT).read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{self.folder / REPORT} is damaged: {error}") from error


def open_set(name: str) -> TaskSet:
    folder = Path(name)
    if name and folder.is_dir() and not hub.holds_data_set(folder):
        files = {side: str(folder / f"{side}.jsonl") for side in SIDES if (folder / f"{side}.jsonl").is_file()}
        if not files:
            raise DataError(
                f"{name} holds no train.jsonl, val.jsonl or tasks.jsonl; give a task file or an output of swel data"
            )
        return TaskSet(name, files, folder)
    return TaskSet(name, {"rows": name})


def stats(sets: Sequence[TaskSet]) -> dict[str, Any]:
    """Counts over all rows, and of each side where there are several; of an output also its funnel and its ledger."""
    found, by_side = _Counts(), Counter[str]()
    reports = [report for one in sets if (report := one.report()) is not None]
    for one in sets:
        for side, row in one.rows():
            found.add(row)
            by_side[side] += 1
    counts = found.as_json()
    if by_side.keys() - {"rows", "tasks"}:
        counts["sides"] = dict(by_side)
    if len(reports) == 1:
        counts["funnel"] = {step["stage"]: step["out"] for step in reports[0].get("funnel", ())}
        counts["dropped"] = reports[0].get("dropped", {})
    return counts


class _Counts:
    def __init__(self) -> None:
        self.rows = self.empty = 0
        self.repositories, self.kinds, self.roles = Counter[str](), Counter[str](), Counter[str]()
        self.tests, self.lengths = list[int](), list[int]()

    def add(self, row: Row) -> None:
        issue = row.get("problem_statement") or ""
        self.rows += 1
        self.empty += not issue.strip()
        self.repositories[row["repo"]] += 1
        self.kinds[bug_kind(row)] += 1
        if row.get("role"):
            self.roles[str(row["role"])] += 1
        self.tests.append(len(row["FAIL_TO_PASS"]) + len(row["PASS_TO_PASS"]))
        self.lengths.append(len(issue))

    def as_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "empty_issue": self.empty,
            "repositories": dict(self.repositories.most_common()),
            "kinds": dict(self.kinds.most_common()),
            "roles": dict(self.roles),
            "tests_per_task": quartiles(sorted(self.tests)),
            "issue_chars": quartiles(sorted(self.lengths)),
        }


def find(sets: Sequence[TaskSet], instance_id: str) -> tuple[str, Row]:
    """(side, row). DataError that says why the row left, or which ids come close."""
    names: list[str] = []
    for one in sets:
        for side, row in one.rows():
            if row["instance_id"] == instance_id:
                return side, row
            names.append(row["instance_id"])
    where = ", ".join(one.name for one in sets)
    for drop in (drop for one in sets for drop in one.drops()):
        if drop["instance_id"] == instance_id:
            why = f"{drop['reason']} ({drop['evidence']})"
            raise DataError(f"{instance_id} left {where} at stage {drop['stage']}: {why}; look at it in the input")
    close = _close(instance_id, names) or names[:3]
    raise DataError(f"no task {instance_id} in {where}; for example {', '.join(close)}")


def _close(name: str, names: Iterable[str]) -> list[str]:
    """Names that hold this one, else alike ones; looking for alike ones takes long among very many."""
    names = list(names)
    holding = [known for known in names if name in known][:3]
    return holding or difflib.get_close_matches(name, names[:5000], n=3, cutoff=0.4)
