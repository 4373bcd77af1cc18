"""The static stages: rules over rows alone. Each returns what it rejects as {index: (reason, evidence)}.

`missing_branch` looks at git, once per repository: a task whose branch is not there can never be set up. The branch is
always named after the instance (commit hashes in image names go stale), and nothing is ever fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.repos import branch_names
from swe_lightning.errors import DataError

TEST_CAP = 200
"""FAIL_TO_PASS + PASS_TO_PASS of one task, as in the paper's recipe."""

Rejected = dict[int, tuple[str, str]]
Row = Mapping[str, Any]


def empty_issue(rows: Sequence[Row]) -> Rejected:
    """No problem statement, or only white space: nothing to tell the agent."""
    return {
        index: ("empty_issue", f"problem_statement is {row.get('problem_statement')!r}")
        for index, row in enumerate(rows)
        if not (row.get("problem_statement") or "").strip()
    }


def too_many_tests(rows: Sequence[Row], cap: int = TEST_CAP) -> Rejected:
    """More tests than a verdict should cost."""
    rejected: Rejected = {}
    for index, row in enumerate(rows):
        fail, keep = len(row["FAIL_TO_PASS"]), len(row["PASS_TO_PASS"])
        if fail + keep > cap:
            rejected[index] = ("test_cap", f"{fail} FAIL_TO_PASS + {keep} PASS_TO_PASS > {cap}")
    return rejected


Branches = Callable[[Row], Collection[str] | None]
"""Branches of a row's repository; None = cannot be told from here."""


def missing_branch(rows: Sequence[Row], branches: Branches) -> Rejected:
    """The repository (or image) does not hold the branch named after the instance."""
    rejected: Rejected = {}
    for index, row in enumerate(rows):
        known = branches(row)
        if known is not None and row["instance_id"] not in known:
            place = row.get("repo_path") or row.get("image_name") or row["repo"]
            rejected[index] = ("missing_branch", f"{place} has {len(known)} branches, none of that name")
    return rejected


class BranchIndex:
    """Where branches are known from: a row's local repository, else a table {repository or image: [branches]}.

    Each repository is asked once. `unchecked` counts rows for which neither is there.
    """

    def __init__(self, table: Mapping[str, Collection[str]] | None = None) -> None:
        self.table = {name: frozenset(names) for name, names in (table or {}).items()}
        self.unchecked = 0
        self._known: dict[str, Collection[str]] = {}

    def __call__(self, row: Row) -> Collection[str] | None:
        path = row.get("repo_path")
        if path:
            if path not in self._known:
                self._known[path] = self._read(Path(path), row)
            return self._known[path]
        for column in ("image_name", "repo"):
            if row.get(column) in self.table:
                return self.table[row[column]]
        self.unchecked += 1
        return None

    @staticmethod
    def _read(path: Path, row: Row) -> Collection[str]:
        if not path.is_dir():
            raise DataError(
                f"{row['instance_id']}: repo_path {path} does not exist; make the tasks again or move them back"
            )
        return branch_names(path)
