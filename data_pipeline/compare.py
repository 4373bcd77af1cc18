"""Two task sets side by side: which tasks came, left or changed sides, whose columns differ, and at which stage.

Of each row only a digest per column is kept, so that sets of any size can be compared. `repo_path` is a place, not
content, and is left out; columns that are absent or null are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import orjson

from data_pipeline.look import Row, TaskSet

PLACES = frozenset({"repo_path"})
NOT_THERE = "not in the input"
Columns = dict[str, int]


def compare(before: TaskSet, after: TaskSet) -> dict[str, Any]:
    """Plain data; `same` is True if no task differs. Order of the rows does not count."""
    a, b = _read(before), _read(after)
    added = [name for name in b if name not in a]
    removed = [name for name in a if name not in b]
    both = [name for name in a if name in b]
    moved = [
        {"instance_id": name, "from": a[name][0], "to": b[name][0]}
        for name in both
        if a[name][0] != b[name][0] and "rows" not in (a[name][0], b[name][0])
    ]
    changed = [{"instance_id": n, "columns": columns} for n in both if (columns := _differ(a[n][1], b[n][1]))]
    sides = [dict(Counter(side for side, _ in rows.values())) for rows in (a, b)]
    return {
        "same": not (added or removed or moved or changed),
        "a": {"name": before.name, "rows": len(a), "sides": sides[0]},
        "b": {"name": after.name, "rows": len(b), "sides": sides[1]},
        "added": _with_reasons(added, before),
        "removed": _with_reasons(removed, after),
        "moved": moved,
        "changed": changed,
        "columns": dict(Counter(column for one in changed for column in one["columns"]).most_common()),
        **_reports(before.report(), after.report()),
    }


def _read(one: TaskSet) -> dict[str, tuple[str, Columns]]:
    return {row["instance_id"]: (side, _digests(row)) for side, row in one.rows()}


def _digests(row: Row) -> Columns:
    return {
        column: hash(orjson.dumps(value, default=repr, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))
        for column, value in row.items()
        if value is not None and column not in PLACES
    }


def _differ(a: Columns, b: Columns) -> list[str]:
    return [column for column in {**a, **b} if a.get(column) != b.get(column)]


def _with_reasons(names: list[str], other: TaskSet) -> list[dict[str, str]]:
    """Why the other set has not got these tasks: its ledger's reason, where it has a ledger."""
    if other.folder is None or not names:
        return [{"instance_id": name} for name in names]
    left = {drop["instance_id"]: str(drop["reason"]) for drop in other.drops()}
    if not left and other.report() is None:
        return [{"instance_id": name} for name in names]
    return [{"instance_id": name, "reason": left.get(name, NOT_THERE)} for name in names]


def _reports(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the two reports count differently; nothing where one side is no output of the filter."""
    if a is None or b is None:
        return {}
    lost = [{step["stage"]: step["in"] - step["out"] for step in report["funnel"]} for report in (a, b)]
    stages = [
        {"stage": stage, "a": lost[0].get(stage), "b": lost[1].get(stage)}
        for stage in {**lost[0], **lost[1]}
        if lost[0].get(stage) != lost[1].get(stage)
    ]
    settings = {
        key: [a["settings"].get(key), b["settings"].get(key)]
        for key in {**a["settings"], **b["settings"]}
        if a["settings"].get(key) != b["settings"].get(key)
    }
    return {"rows_in": [a["rows_in"], b["rows_in"]], "stages": stages, "settings": settings}
