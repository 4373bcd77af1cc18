"""Outcomes of probe rollouts as they lie in files: the probe's own journal, or what somebody measured elsewhere.

JSONL, one rollout per line ({"instance_id", "solved"} and maybe its number as "rollout"), or one JSON object of
instance_id -> [true, false, null]. Every outcome of a task counts, however many. A rollout given twice, a number
below 0 and a verdict of another kind are refused with their place: each would silently move tasks between classes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.journal import Journal
from swe_lightning.errors import DataError

Outcome = bool | None
Results = dict[str, list[Outcome]]
"""instance_id -> outcome of each rollout, by number; None = no verdict (infrastructure failure)."""


def recorded(file: Path) -> dict[str, dict[int, Outcome]]:
    """Outcomes of a JSONL file by task and number of the rollout; lines without a number count upwards."""
    found: dict[str, dict[int, Outcome]] = defaultdict(dict)
    for line, record in Journal.read(file):
        place = f"{file}:{line}"
        if not isinstance(record, dict) or not {"instance_id", "solved"} <= record.keys():
            raise DataError(f"{place}: wants an object with instance_id and solved")
        name = record["instance_id"]
        if not isinstance(name, str):
            raise DataError(f"{place}: instance_id must be text, not {_shown(name)}")
        numbered = found[name]
        number = record.get("rollout", len(numbered))
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise DataError(f"{place}: rollout must be a number from 0 upwards, not {_shown(number)}")
        if number in numbered:
            raise DataError(f"{place}: rollout {number} of {name} was already given; take one of the lines out")
        numbered[number] = _outcome(record["solved"], place)
    return dict(found)


def load_results(file: Path) -> Results:
    """Outcomes measured elsewhere: JSONL, or where the name ends in .json one object."""
    if not file.is_file():
        raise DataError(f"cannot read probe results {file}: no such file")
    if file.suffix != ".json":
        return {name: [numbered[n] for n in sorted(numbered)] for name, numbered in recorded(file).items()}

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in table if names.count(name) > 1)
            raise DataError(f"{file}: {twice} is given twice; take one of its lists out")
        return table

    try:
        table = json.loads(file.read_text(encoding="utf-8-sig"), object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(table, dict) or not all(isinstance(outcomes, list) for outcomes in table.values()):
        raise DataError(f"{file}: must be a JSON object of instance_id -> list of true, false or null")
    return {name: [_outcome(o, f"{file}: {name}") for o in outcomes] for name, outcomes in table.items()}


def refuse_unfit(results: Mapping[str, Sequence[Outcome]], names: Iterable[str], k: int) -> None:
    """DataError where results cannot answer for these tasks: they name none, or were measured with fewer rollouts.

    Single tasks may be missing or short of verdicts; they are undecided.
    """
    of = [results[name] for name in names if results.get(name)]
    if not of:
        raise DataError("the probe results name none of the tasks that are left; are they of another data set?")
    most = max(map(len, of))
    if most < k and not all(True in outcomes and False in outcomes for outcomes in of):
        raise DataError(
            f"the probe results have at most {most} rollouts of a task, fewer than --k {k}; give --k {most}, "
            "or run the probe to its end"
        )


def _outcome(value: Any, place: str) -> Outcome:
    if value is None or isinstance(value, bool):
        return value
    raise DataError(f"{place}: a probe outcome is true, false or null, not {_shown(value)}")


def _shown(value: Any) -> str:
    return f"{value!r:.60}"
