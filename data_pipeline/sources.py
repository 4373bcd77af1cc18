"""Task rows from files and from the Hugging Face hub, normalised once and checked where they enter.

Lists that arrive as strings (JSON or Python spelling) become lists, the three spellings of the image column become
`image_name`, a relative `repo_path` becomes absolute; unknown columns stay. Ids that cannot name a branch and a
directory are refused, and so is everything else that would fail hours later. Faults name file, line and column.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_pipeline import hub
from data_pipeline.files import Source, open_file
from swe_lightning.errors import DataError
from swe_lightning.records import Task

REQUIRED = ("instance_id", "repo")
LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
MAX_ISSUE_CHARS = 1_000_000
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")
_REPO = re.compile(r"[\w@+-][\w.@+-]*(/[\w@+-][\w.@+-]*)*")
_CHECKED = frozenset(Task.model_fields) - set(LISTS)
_NULLABLE = frozenset(name for name in _CHECKED if Task.model_fields[name].annotation == str | None)
_OTHERS = frozenset(name for name in _CHECKED - _NULLABLE if Task.model_fields[name].annotation is not str)
Row = dict[str, Any]


class Fault(ValueError):
    """What is wrong with one row; whoever knows the row's place makes a DataError of it."""


def load_tasks(path: Path) -> list[Task]:
    """Validated tasks of one file, `repo_path` absolute. What training and evaluation read."""
    return [Task.model_validate(row) for row in read_rows([str(path)])]


def read_rows(inputs: Sequence[str], *, split: str | None = None) -> list[Row]:
    """Rows of all inputs in order. DataError on the first unusable row, on duplicate ids and on an empty result."""
    return list(iterate_rows(open_sources(inputs, split)))


def iterate_rows(sources: Sequence[Source]) -> Iterator[Row]:
    """The same, one at a time."""
    seen = Seen()
    for source in sources:
        for raw in source.read():
            try:
                normalise(raw.row, source.folder)
                distinct(raw.row)
            except Fault as fault:
                raise DataError(f"{source.place(raw.number)}: {fault}") from fault
            seen.add(raw.row["instance_id"], source, raw.number)
            yield raw.row
    seen.close(sources)


class Seen:
    """Ids so far: each may come once, whichever input it is in."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[Source, int]] = {}

    def add(self, name: str, source: Source, number: int) -> None:
        first = self._first.setdefault(name, (source, number))
        if first != (source, number):
            earlier = first[0].place(first[1])
            raise DataError(f"{source.place(number)}: instance_id {name!r} was already given at {earlier}")

    def close(self, sources: Sequence[Source]) -> None:
        if not self._first:
            raise DataError(f"no rows in {', '.join(s.name for s in sources) or 'no input'}")


def open_sources(inputs: Sequence[str], split: str | None = None, *, stream: bool = False) -> list[Source]:
    """What each name stands for: a file, a directory with a data set, or a data set of the hub."""
    return [_open(name, split, stream) for name in inputs]


def _open(name: str, split: str | None, stream: bool) -> Source:
    path = Path(name)
    if path.is_file():
        return open_file(path)
    if name and path.is_dir():
        if hub.holds_data_set(path):
            return hub.open_directory(path, split, stream=stream)
        raise DataError(f"{name} is a directory; give the task file in it")
    if hub.is_hub_name(name) and path.suffix not in (".jsonl", ".json", ".parquet", ".gz", ".zst"):
        return hub.open_hub(name, split, stream=stream)
    known = ", ".join(hub.ALIASES)
    raise DataError(f"no file {name} (and it is no hub data set: OWNER/NAME or one of {known})")


def normalise_row(raw: Any, place: str, folder: Path | None = None) -> Row:
    """One row in the shape of `records.Task`; `place` (file:line) opens every complaint."""
    row = dict(raw) if isinstance(raw, dict) else raw
    try:
        normalise(row, folder)
        distinct(row)
    except Fault as fault:
        raise DataError(f"{place}: {fault}") from fault
    return row


def normalise(row: Any, folder: Path | None = None) -> bool:
    """Bring `row` into the shape of `records.Task`, in place; True if anything had to change. Fault if it cannot be.

    What is left to `distinct`: test ids that are listed twice.
    """
    if not isinstance(row, dict):
        raise Fault(f"a row must be a JSON object, not {type(row).__name__}")
    if not all(isinstance(row.get(column), str) and row[column] for column in REQUIRED):
        missing = [column for column in REQUIRED if not isinstance(row.get(column), str) or not row[column]]
        raise Fault(f"column {' and '.join(missing)} is missing or not text (has {', '.join(map(str, row))[:300]})")
    _check_names(row)
    changed = _lists(row)
    _check_issue(row.get("problem_statement"))
    if not row.get("image_name"):
        image = row.get("image") or row.get("docker_image")
        changed |= image != row.get("image_name", "")
        row["image_name"] = image
    if row.get("repo_path"):
        if not isinstance(row["repo_path"], str):
            raise Fault(f"repo_path must be text, not {type(row['repo_path']).__name__}")
        row["repo_path"] = os.path.normpath((folder or Path.cwd()) / row["repo_path"])
        changed = True
    _check_columns(row)
    return changed


def _check_columns(row: Row) -> None:
    """By the record's own rules; the long lists were checked before, and rows of plain text need no more."""
    for column, value in row.items():
        if type(value) is str:
            if column in _OTHERS:
                break
        elif column in _CHECKED and (value is not None or column not in _NULLABLE):
            break
    else:
        return
    try:
        Task.model_validate({column: row[column] for column in _CHECKED if column in row})
    except ValueError as error:
        first = error.errors()[0] if hasattr(error, "errors") else {"loc": ("row",), "msg": str(error)}
        raise Fault(f"column {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _check_names(row: Row) -> None:
    """Both become names of branches, directories and containers."""
    name, repo = row["instance_id"], row["repo"]
    if not _ID.fullmatch(name) or ".." in name or len(name) > 250:
        raise Fault(f"instance_id {name[:260]!r} cannot name a branch and a directory")
    if not _names_repository(repo):
        raise Fault(f"repo {repo[:260]!r} is no name of a repository (OWNER/NAME)")


@lru_cache(maxsize=4096)
def _names_repository(repo: str) -> bool:
    return _REPO.fullmatch(repo) is not None and ".." not in repo and len(repo) <= 250


def _check_issue(statement: Any) -> None:
    if statement is not None and not isinstance(statement, str):
        raise Fault(f"problem_statement must be text, not {type(statement).__name__}")
    if statement and len(statement) > MAX_ISSUE_CHARS:
        raise Fault(
            f"problem_statement has {len(statement)} characters; more than {MAX_ISSUE_CHARS} is no issue text, "
            "shorten it or take the row out"
        )


def _lists(row: Row) -> bool:
    changed = False
    for column in LISTS:
        value = row.get(column)
        if type(value) is not list or not _is_text(value):
            row[column] = _as_list(value, column)
            changed = True
    return changed


def distinct(row: Row) -> bool:
    """Each test id once, in place; True if one was there twice. Apart, because it costs as much as reading the row."""
    changed = False
    for column in LISTS:
        if len(set(row[column])) != len(row[column]):
            row[column] = list(dict.fromkeys(row[column]))
            changed = True
    return changed


def _is_text(value: list[Any]) -> bool:
    try:
        "".join(value)  # refuses all but text, ten times as fast as asking each item
    except TypeError:
        return False
    return True


def _as_list(value: Any, column: str) -> list[str]:
    """A list of ids, published as a list, as JSON text or as a Python literal."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        value = _parse_list(value, column)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise Fault(f"{column} must be a list of test ids")
    return list(value)


def _parse_list(text: str, column: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also a number of too many digits
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise Fault(f"{column} is text but neither a JSON nor a Python list") from error
