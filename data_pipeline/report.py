"""The data card of a filtered set: what came in, what left and why, what is in each side, and how to make it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def markdown(report: Mapping[str, Any]) -> str:
    parts = [
        "# Training set",
        f"{report['rows_in']} rows in, {report['train']} for training, {report['val']} for validation "
        f"(split: {report['split']}).",
        "## Funnel",
        _table(("stage", "rows in", "rows out", "left"), [_stage(stage) for stage in report["funnel"]]),
        "## Why rows left",
        _table(("reason", "rows"), list(report["dropped"].items())) if report["dropped"] else "No row left.",
        "Each of them is in `dropped.jsonl` with its evidence.",
    ]
    if report["branches_unchecked"]:
        parts.append(
            f"The branch of {report['branches_unchecked']} rows could not be checked: they name no local repository "
            "and no list of branches was given."
        )
    if report["difficulty"]:
        parts += ["## Difficulty", _table(("class", "tasks"), list(report["difficulty"].items()))]
        for column, table in report["solve_rates"].items():
            rows = [(name or "-", solved, graded, f"{solved / graded:.2f}") for name, (solved, graded) in table.items()]
            parts.append(_table((column, "solved", "rollouts", "rate"), rows))
    repositories = [(repo, sides["train"], sides["val"]) for repo, sides in report["repositories"].items()]
    parts += ["## Repositories", _table(("repository", "train", "validation"), repositories)]
    source = {"swe_lightning": report["swe_lightning"], **report.get("source", {"settings": report["settings"]})}
    parts += ["## To make it again", "```json\n" + json.dumps(source, indent=2, default=list) + "\n```"]
    return "\n\n".join(parts) + "\n"


def _stage(stage: Mapping[str, Any]) -> tuple[Any, ...]:
    return stage["stage"], stage["in"], stage["out"], stage["in"] - stage["out"]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
