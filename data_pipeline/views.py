"""Rich views of a task, of counts and of a comparison. Nothing is computed here, and text of tasks is never markup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

LONG = frozenset({"problem_statement", "patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS"})
SHOWN = 10


def task_view(side: str, row: Mapping[str, Any], limit: int = SHOWN) -> RenderableType:
    """The row's short columns, its issue, its patch, and the names of its tests."""
    issue = _plain(row.get("problem_statement") or "").strip()
    bug = "" if row.get("test_patch") is not None else " (introduces the bug)"
    parts: list[RenderableType] = [
        Text(row["instance_id"], style="bold") + Text(f"  {side}" if side != "rows" else "", style="dim"),
        _pairs({key: value for key, value in row.items() if key not in LONG and value not in (None, "", [], {})}),
        Panel(Text(issue or "no issue text"), title="issue", title_align="left"),
    ]
    for column in ("patch", "test_patch"):
        if row.get(column):
            text = Syntax(_plain(row[column]).rstrip(), "diff", background_color="default", word_wrap=True)
            parts.append(Panel(text, title=column + (bug if column == "patch" else ""), title_align="left"))
    for column in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        tests = row[column]
        parts.append(Text(f"{column} ({len(tests)})", style="bold"))
        parts += [Text(f"  {_plain(test)}") for test in _first(tests, limit)]
    return Group(*parts)


def stats_view(counts: Mapping[str, Any]) -> RenderableType:
    short = {key: value for key, value in counts.items() if not isinstance(value, dict)}
    parts: list[RenderableType] = [_pairs(short)]
    for key in ("sides", "roles", "tests_per_task", "issue_chars", "dropped", "funnel"):
        if counts.get(key):
            parts.append(_pairs({key: ", ".join(f"{name} {value:,}" for name, value in counts[key].items())}))
    for key in ("kinds", "repositories"):
        table = Table("rows", key, box=None, title=f"{key} ({len(counts[key])})", title_justify="left", min_width=30)
        table.columns[0].justify = "right"
        items = list(counts[key].items())
        for name, count in items[:SHOWN]:
            table.add_row(f"{count:,}", Text(str(name)))
        if len(items) > SHOWN:
            table.add_row(f"{sum(count for _, count in items[SHOWN:]):,}", f"in {len(items) - SHOWN} others")
        parts.append(table)
    return Group(*parts)


def diff_view(found: Mapping[str, Any]) -> RenderableType:
    head = Table("", "rows", "sides", "name", box=None)
    for name in ("a", "b"):
        one = found[name]
        sides = ", ".join(f"{side} {count:,}" for side, count in one["sides"].items() if side != "rows")
        head.add_row(name, f"{one['rows']:,}", sides, Text(one["name"]))
    parts: list[RenderableType] = [head]
    if found["same"]:
        parts.append(Text("the tasks are the same"))
    for sign, kind in (("+", "added"), ("-", "removed")):
        reasons = Counter(one["reason"] for one in found[kind] if "reason" in one)
        why = f": {', '.join(f'{count:,} {reason}' for reason, count in reasons.most_common())}" if reasons else ""
        parts += _list(f"{kind} ({len(found[kind]):,}{why})", [f"{sign} {o['instance_id']}" for o in found[kind]])
    moved = [f"{one['instance_id']}  {one['from']} -> {one['to']}" for one in found["moved"]]
    parts += _list(f"moved ({len(moved):,})", moved)
    columns = ", ".join(f"{name} {count:,}" for name, count in found["columns"].items())
    changed = [f"{one['instance_id']}  {', '.join(one['columns'])}" for one in found["changed"]]
    parts += _list(f"changed ({len(changed):,}: {columns})", changed)
    if found.get("stages"):
        table = Table("stage", "left in a", "left in b", box=None)
        for step in found["stages"]:
            table.add_row(step["stage"], *("-" if step[side] is None else f"{step[side]:,}" for side in ("a", "b")))
        parts.append(table)
    if found.get("settings"):
        parts.append(_pairs({key: f"{a} -> {b}" for key, (a, b) in found["settings"].items()}))
    return Group(*parts)


def _list(title: str, lines: Sequence[str]) -> list[RenderableType]:
    if not lines:
        return []
    return [Text(title, style="bold"), *(Text(f"  {line}") for line in _first(lines, SHOWN))]


def _first(lines: Sequence[str], limit: int) -> Iterable[str]:
    return [*lines[:limit], f"... and {len(lines) - limit:,} more"] if len(lines) > limit else lines


def _pairs(values: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in values.items():
        table.add_row(Text(str(key), style="bold"), Text(_plain(str(value))))
    return table


def _plain(text: str) -> str:
    """Without control characters: a task's text may not move the cursor or colour the terminal."""
    return "".join(
        c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text.replace("\r\n", "\n")
    )
