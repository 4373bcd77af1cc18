"""Does the repository or image of a task hold its branch? Asked in bulk, once per repository or image.

The branch is always named after the instance: commit hashes in image names go stale. Nothing is fetched over a task's
own remotes. Where branches are known from, in this order: a row's local repository; a table {repository or image:
[branches]}; the images themselves, by a function that remembers what an image holds. A row that none of them knows is
counted as unchecked, and stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from data_pipeline.progress import progress
from data_pipeline.repos import branch_names
from swe_lightning.errors import DataError

Row = Mapping[str, Any]
Rejected = dict[int, tuple[str, str]]
Branches = Collection[str] | str
"""Names of branches, or one sentence why the image cannot be had."""
BranchesOfImage = Callable[[str], Branches]
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(rf"(?:[\w.-]+(?::\d+)?/)?{_PART}(?:/{_PART})*(?::[\w][\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?")


class BranchIndex:
    """`look_up(rows)` first, then each row is answered from memory. `unchecked` counts rows nobody could answer for."""

    def __init__(
        self,
        table: Mapping[str, Collection[str]] | None = None,
        of_image: BranchesOfImage | None = None,
        *,
        workers: int = 4,
    ) -> None:
        self.table = {name: frozenset(names) for name, names in (table or {}).items()}
        self.unchecked = 0
        self._of_image, self._workers = of_image, workers
        self._known: dict[tuple[str, str], Branches] = {}

    def look_up(self, rows: Sequence[Row]) -> None:
        """Ask every repository and image of `rows` that was not asked yet, several at once."""
        places: dict[tuple[str, str], Row] = {}
        for row in rows:
            place = self._place(row)
            if place is not None and place[0] != "table" and place not in self._known:
                places.setdefault(place, row)
        if not places:
            return
        with progress("branches", len(places)) as meter, ThreadPoolExecutor(self._workers) as pool:
            for place, found in pool.map(lambda item: (item[0], self._ask(*item)), places.items()):
                self._known[place] = found
                meter.advance(place[1])

    def __call__(self, row: Row) -> Branches | None:
        place = self._place(row)
        if place is None:
            return None
        return self.table[place[1]] if place[0] == "table" else self._known[place]

    def _place(self, row: Row) -> tuple[str, str] | None:
        if row.get("repo_path"):
            return "path", str(row["repo_path"])
        for column in ("image_name", "repo"):
            if row.get(column) in self.table:
                return "table", str(row[column])
        if self._of_image is not None and row.get("image_name"):
            return "image", str(row["image_name"])
        return None

    def _ask(self, place: tuple[str, str], row: Row) -> Branches:
        kind, name = place
        if kind == "image":
            assert self._of_image is not None
            return self._of_image(name)
        if not Path(name).is_dir():
            raise DataError(
                f"{row['instance_id']}: repo_path {name} does not exist; make the tasks again or move them back"
            )
        return branch_names(Path(name))


def missing_branch(rows: Sequence[Row], index: BranchIndex) -> Rejected:
    """The repository (or image) does not hold the branch named after the instance."""
    index.look_up(rows)
    rejected: Rejected = {}
    for position, row in enumerate(rows):
        known = index(row)
        place = row.get("repo_path") or row.get("image_name") or row["repo"]
        if known is None:
            index.unchecked += 1
        elif isinstance(known, str):
            rejected[position] = ("missing_branch", f"{place}: {known}")
        elif row["instance_id"] not in known:
            rejected[position] = ("missing_branch", f"{place} has {len(known)} branches, none of that name")
    return rejected


def unresolvable_image(rows: Sequence[Row]) -> Rejected:
    """Nothing a sandbox could start from. SWE-bench rows (they have a `test_patch`) have an image by convention."""
    rejected: Rejected = {}
    for position, row in enumerate(rows):
        image = row.get("image_name")
        if row.get("repo_path") or (not image and row.get("has_test_patch")):
            continue
        if not image:
            rejected[position] = ("unresolvable_image", "neither image_name nor repo_path is given")
        elif not _IMAGE.fullmatch(image):
            rejected[position] = ("unresolvable_image", f"{image[:120]!r} is not the name of an image")
    return rejected


def read_table(file: Path) -> dict[str, list[str]]:
    """A JSON object {repository or image: [branches]}."""
    if not file.is_file():
        raise DataError(f"no file {file}; --branches takes a JSON file of branch names, or the word images")
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read branches {file}: {error}") from error
    if not isinstance(table, dict) or not all(isinstance(names, list) for names in table.values()):
        raise DataError(f"{file}: must be a JSON object of repository or image -> list of branch names")
    return table
