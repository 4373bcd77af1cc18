"""The report of a filtered set: what came in, what left and why, and what is in each side. How to make it: card.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from data_pipeline.card import versions
from data_pipeline.ledger import Ledger
from data_pipeline.probe import CLASSES
from data_pipeline.stages import BY_NAME
from data_pipeline.tables import table as _table

Row = Mapping[str, Any]


def bug_kind(row: Row) -> str:
    """Bug type: the column of `swel data synth`, else the part of a SWE-smith id before `__`."""
    if row.get("strategy"):
        return str(row["strategy"])
    tail = str(row["instance_id"]).rsplit(".", 1)[-1]
    return tail.rsplit("__", 1)[0] if "__" in tail else tail.split("_", 1)[0]


def build_report(
    ledger: Ledger,
    train: Sequence[Row],
    val: Sequence[Row],
    settings: Mapping[str, Any],
    split: str,
    unchecked: int,
    classes: Mapping[str, str],
    solve_rates: Mapping[str, Any],
    sizes: Mapping[str, Any],
) -> dict[str, Any]:
    """The numbers of one filtered set, as plain data."""
    sides = {"train": Counter(r["repo"] for r in train), "val": Counter(r["repo"] for r in val)}
    return {
        "rows_in": ledger.total,
        "funnel": [{"stage": name, "in": before, "out": after} for name, before, after in ledger.funnel],
        "dropped": ledger.reasons(),
        "train": len(train),
        "val": len(val),
        "split": split,
        "branches_unchecked": unchecked,
        "repositories": {
            repo: {"train": sides["train"][repo], "val": sides["val"][repo]}
            for repo in sorted({*sides["train"], *sides["val"]})
        },
        "difficulty": {name: sum(c == name for c in classes.values()) for name in CLASSES} if classes else {},
        "solve_rates": dict(solve_rates),
        "histograms": dict(sizes),
        "settings": dict(settings),
        "seed": settings["seed"],
        "versions": versions(),
    }


def markdown(report: Mapping[str, Any]) -> str:
    parts = [
        "# Training set",
        f"{report['rows_in']} rows in, {report['train']} for training, {report['val']} for validation "
        f"(split: {report['split']}).",
        "How to make it again, with digests and versions: [card.md](card.md).",
        "## Funnel",
        "![Rows that are left after each stage](funnel.png)",
        _table(("stage", "rows in", "rows out", "left", "what leaves"), [_stage(s) for s in report["funnel"]]),
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
            parts.append(_table((column, "solved", "tasks", "rate of first verdicts"), rows))
    if report.get("probe_results", {}).get("unknown"):
        of = report["probe_results"]
        parts.append(f"{of['unknown']} of the {of['tasks']} tasks of the probe results are in no input.")
    repositories = [(repo, sides["train"], sides["val"]) for repo, sides in report["repositories"].items()]
    parts += ["## Sizes", "![Tests per task, issue texts, solve rates, repositories](histograms.png)"]
    parts += ["## Repositories", _table(("repository", "train", "validation"), repositories)]
    return "\n\n".join(parts) + "\n"


def _stage(stage: Mapping[str, Any]) -> tuple[Any, ...]:
    says = BY_NAME[stage["stage"]].says if stage["stage"] in BY_NAME else "held out, but beyond the size asked for"
    return stage["stage"], stage["in"], stage["out"], stage["in"] - stage["out"], says
