"""The rows of `swel grade`: in memory, in a file that a second call continues from, and as a table.

A row with a verdict is kept, as long as patch, tests and grader are the same; one without (a broken machine) is graded
again. The file is JSON lines, appended to as verdicts come, so that a killed call loses only what was under way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from rich.table import Table

from swe_lightning.errors import DataError
from swe_lightning.grading.flaky import why_flaky
from swe_lightning.grading.rules import Verdict

BAD_TASK = "bad_task"
"""No verdict because the row itself cannot be graded: its patch does not fit its tree, its repository is missing."""


@dataclass
class GradeRow:
    """One graded task: a verdict, or the reason why there is none."""

    instance_id: str
    verdict: Verdict | None = None
    infra_reason: str | None = None
    """A machine's reason, or bad_task."""
    message: str = ""
    run: int = 0
    """Of --repeat, from 0."""
    key: str = ""
    """Digest of what the verdict depends on."""

    @property
    def resolved(self) -> bool:
        return self.verdict is not None and self.verdict.resolved

    @property
    def flaky(self) -> str | None:
        return why_flaky(self.instance_id)

    def as_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {**vars(self), "verdict": self.verdict.as_dict() if self.verdict else None}
        return {**row, "flaky": self.flaky} if self.flaky else row

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> GradeRow:
        fields = {name: row[name] for name in ("instance_id", "infra_reason", "message", "run", "key")}
        return cls(verdict=Verdict(**row["verdict"]) if row["verdict"] else None, **fields)


class Sheet:
    """Rows by (task, run). Thread-safe. Without a path nothing is kept."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._lock = path, Lock()
        self._known: dict[tuple[str, int], GradeRow] = {}
        if path is not None and path.is_file():
            for row in _read(path):
                self._known[row.instance_id, row.run] = row

    def known(self, instance_id: str, run: int, key: str) -> GradeRow | None:
        """The row of an earlier call, if it has a verdict on the same patch and tests."""
        row = self._known.get((instance_id, run))
        return row if row is not None and row.verdict is not None and row.key == key else None

    def add(self, row: GradeRow) -> None:
        if self._path is None:
            return
        line = json.dumps(row.as_dict(), ensure_ascii=True) + "\n"
        with self._lock, self._path.open("a", encoding="ascii") as f:
            f.write(line)


def _read(path: Path) -> list[GradeRow]:
    """All rows. What a kill left of a last one is cut off; DataError if the file is something else."""
    data, rows = path.read_bytes(), []
    whole = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append(GradeRow.from_dict(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _foreign(path, number) from error
    if data != whole:
        if not data[len(whole) :].startswith(b'{"instance_id"'[: len(data) - len(whole)]):
            raise _foreign(path, len(rows) + 1)
        with path.open("rb+") as f:
            f.truncate(len(whole))
    return rows


def _foreign(path: Path, line: int) -> DataError:
    return DataError(f"{path} line {line} is no row of swel grade; give another file with --out")


def summary_table(rows: Sequence[GradeRow], title: str) -> Table:
    table = Table(title=title)
    table.add_column("task", no_wrap=True)
    for column in ("resolved", "F2P", "P2P failed", "filtered", "seconds", "why"):
        table.add_column(column)
    for row in rows:
        v, note = row.verdict, f"known to be flaky: {row.flaky}. " if row.flaky else ""
        name = f"{row.instance_id} #{row.run + 1}" if row.run else row.instance_id
        if v is None:
            table.add_row(name, f"no verdict: {row.infra_reason}", "", "", "", "", note + row.message)
            continue
        passed = f"{sum(v.f2p.values())}/{len(v.f2p)}"
        filtered = (
            f"{len(v.dropped_paths)} ({len(v.tampering)} tampering)" if v.tampering else str(len(v.dropped_paths))
        )
        cells = (passed, str(len(v.p2p_failed)), filtered, f"{v.seconds:.2f}", note + v.why)
        table.add_row(name, "yes" if v.resolved else "no", *cells)
    return table
