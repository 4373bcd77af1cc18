"""The stages that look at all rows which are left: what each needs, and where its outcomes are kept.

`run` gives None where a stage has nothing to work with (no evaluation set, no model to probe): it is then no part of
the funnel. Whole rows are read from the store one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data_pipeline import probe as probing
from data_pipeline.probe_results import Results, refuse_unfit
from data_pipeline.progress import progress
from data_pipeline.report import bug_kind
from data_pipeline.scan import Facts
from data_pipeline.settings import FilterSettings, Tools
from data_pipeline.split import is_held_out
from data_pipeline.stages.branches import BranchIndex, missing_branch, unresolvable_image
from data_pipeline.stages.leaks import EvaluationSet
from data_pipeline.store import RowStore
from data_pipeline.validate import validate

VALIDATION_FILE = "validation.jsonl"
"""Beside the outputs: every grading of the validation stage."""
Rejected = dict[int, tuple[str, str]]


class StageWork:
    """One filter's stages; afterwards it knows classes of difficulty, solve rates and what was unchecked."""

    def __init__(
        self,
        store: RowStore,
        settings: FilterSettings,
        tools: Tools,
        evaluation: EvaluationSet | None,
        out: Path | None,
    ) -> None:
        self._store, self._settings, self._tools, self._out = store, settings, tools, out
        self._evaluation = evaluation
        self.index = BranchIndex(tools.branches, tools.of_image, workers=max(tools.workers, 4))
        self.classes: dict[str, str] = {}
        self.rates: dict[str, dict[str, list[int]]] = {}
        self.solved: dict[str, tuple[int, int]] = {}
        """Probed task -> (rollouts that solved it, rollouts with a verdict)."""

    def run(self, name: str, left: Sequence[Facts]) -> Rejected | None:
        stage: Callable[[Sequence[Facts]], Rejected | None] = getattr(self, f"_{name}")
        return stage(left)

    def _missing_branch(self, left: Sequence[Facts]) -> Rejected:
        return missing_branch(left, self.index)

    def _unresolvable_image(self, left: Sequence[Facts]) -> Rejected:
        return unresolvable_image(left)

    def _eval_overlap(self, left: Sequence[Facts]) -> Rejected | None:
        if self._evaluation is None:
            return None
        return self._evaluation.overlap(left, repositories=self._settings.preset == "strict")

    def _duplicate_issue(self, left: Sequence[Facts]) -> Rejected:
        from data_pipeline.stages.duplicates import duplicate_issues

        with progress("duplicates", len(left)) as meter:
            text = lambda row: self._store.row(row).get("problem_statement") or ""  # noqa: E731
            return duplicate_issues(left, text, meter.advance)

    def _validation(self, left: Sequence[Facts]) -> Rejected | None:
        if self._tools.grade is None or not self._settings.validations:
            return None
        assert self._out is not None
        return validate(
            left,
            self._store.row,
            self._tools.grade,
            repeats=self._settings.validations,
            workers=self._tools.workers,
            file=self._out / VALIDATION_FILE,
            settings=self._tools.grade_identity,
        )

    def _difficulty(self, left: Sequence[Facts]) -> Rejected | None:
        if self._tools.outcomes is None and self._tools.rollouts is None:
            return None
        settings, named = self._settings, set(self._settings.held_out_repos)
        positions = [i for i, row in enumerate(left) if not is_held_out(row, named)]
        candidates = [left[i] for i in positions]
        results = self._probed(candidates)
        rejected, self.classes = probing.reject_by_difficulty(
            candidates, results, k=settings.k, keep_none=settings.keep_none_solved, seed=settings.seed
        )
        groups: dict[str, Callable[[Any], str]] = {"repository": lambda row: str(row["repo"]), "bug": bug_kind}
        self.rates = {name: probing.solve_table(candidates, results, group) for name, group in groups.items()}
        self.solved = probing.verdict_counts(candidates, results)
        return {positions[i]: why for i, why in rejected.items()}

    def _probed(self, candidates: Sequence[Facts]) -> Results:
        if self._tools.outcomes is not None:
            if candidates:
                refuse_unfit(self._tools.outcomes, (row["instance_id"] for row in candidates), self._settings.k)
            return self._tools.outcomes
        assert self._tools.rollouts is not None
        assert self._out is not None
        with self._tools.rollouts as rollouts:
            file = self._out / probing.OUTCOMES_FILE
            return probing.probe(candidates, rollouts, k=self._settings.k, file=file, load=self._store.row)
