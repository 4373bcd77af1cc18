"""`swel data validate`: the validation stage alone, over rows as they are.

OUT/tasks.jsonl are the rows that keep their word, OUT/dropped.jsonl the others with reason and evidence, and
OUT/validation.jsonl every grading; the first two are replaced together when all rows are decided. The same command
goes on after an interruption.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipeline import outputs
from data_pipeline.files import Source
from data_pipeline.ledger import Ledger
from data_pipeline.scan import Rules, scan
from data_pipeline.stage_work import VALIDATION_FILE
from data_pipeline.store import RowStore
from data_pipeline.validate import GradeOnce, validate
from swe_lightning.paths import want_directory


def run_validation(
    sources: Sequence[Source], out: Path, grade: GradeOnce, *, repeats: int, workers: int, settings: str
) -> dict[str, Any]:
    """Counts by reason. Rows lost to machines are counted apart, and tried anew by the next run."""
    want_directory(out, "--out")
    with RowStore(sources) as store:
        rows = scan(sources, Rules((), 0), store)
        with outputs.owned(out):
            file = out / VALIDATION_FILE
            rejected = validate(rows, store.row, grade, repeats=repeats, workers=workers, file=file, settings=settings)
            ledger = Ledger(len(rows))
            kept = ledger.apply("validation", rows, rejected)
            ledger.close(kept)

            def move(row: dict[str, Any]) -> dict[str, Any]:
                return {**row, "repo_path": os.path.relpath(row["repo_path"], out.absolute())}

            outputs.replace_files(
                out,
                {
                    "dropped.jsonl": [outputs.encode(drop.as_json()) for drop in ledger.drops],
                    "tasks.jsonl": (store.line(row, move if row.get("repo_path") else None) for row in kept),
                },
            )
    return {
        "rows": len(rows),
        "kept": len(kept),
        "yield": round(len(kept) / len(rows), 4),
        "dropped": ledger.reasons(),
        "repeats": repeats,
        "file": str(out / "tasks.jsonl"),
    }
