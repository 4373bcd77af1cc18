"""Where a run's numbers go: metrics.jsonl always, a terminal line or progress bar, wandb if the recipe asks for it."""

from __future__ import annotations

import importlib.util
import uuid
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from swe_lightning.errors import MissingPart
from swe_lightning.recipe import Recipe
from swe_lightning.rundir import RunDir, write_atomic

MANY_ROLLOUTS = 20
"""Rows of the table of losses; the error's sentence has all counts."""


class Reporter:
    """Sinks of one run. On a terminal the rollouts of a step are a progress bar; elsewhere each step is one line."""

    def __init__(self, run: RunDir, recipe: Recipe, console: Console | None = None) -> None:
        self._run, self._recipe = run, recipe
        self.console = console or Console(stderr=True)
        self._wandb: Any = None
        self._progress: Progress | None = None
        self._bar: Any = None

    def __enter__(self) -> Reporter:
        if self._recipe.wandb.enabled:
            self._wandb = self._start_wandb()
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
            self._progress = Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True)
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._progress:
            self._progress.stop()
        if self._wandb:
            self._wandb.finish(exit_code=0 if kind is None else 1)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def begin(self, description: str, total: int) -> None:
        """Open the bar of one stage (rollouts of a step, an evaluation)."""
        if self._progress:
            if self._bar is not None:
                self._progress.remove_task(self._bar)
            self._bar = self._progress.add_task(description, total=total)

    def advance(self, count: int = 1) -> None:
        if self._progress and self._bar is not None:
            self._progress.advance(self._bar, count)

    def step(self, record: dict[str, Any]) -> None:
        """Record one step everywhere; the file first, because it is what resuming and reports read."""
        self._run.append_metrics(record)
        if self._wandb:
            self._wandb.log({k: v for k, v in record.items() if isinstance(v, (int, float))}, step=record["step"])
        self.say(_line(record))

    def losses(self, step: int, by_rollout: Mapping[str, str]) -> None:
        """A table of the rollouts that gave a step no row, and why each; the most common reasons first."""
        counts = Counter(by_rollout.values())
        table = Table("rollout", "why it gave no training row", title=f"step {step}", title_justify="left")
        order = sorted(by_rollout.items(), key=lambda item: (-counts[item[1]], item))
        for name, reason in order[:MANY_ROLLOUTS]:
            table.add_row(name, escape(reason))
        if len(order) > MANY_ROLLOUTS:
            table.add_row("...", f"and {len(order) - MANY_ROLLOUTS} more")
        self.console.print(table)

    def _start_wandb(self) -> Any:
        if importlib.util.find_spec("wandb") is None:
            raise MissingPart("recipe key wandb.enabled needs the package wandb: pip install 'swe-lightning[wandb]'")
        import wandb

        return wandb.init(
            project=self._recipe.wandb.project,
            name=self._recipe.name,
            mode=self._recipe.wandb.mode,
            dir=str(self._run.path),
            id=self._wandb_id(),
            resume="allow",
            config=self._recipe.model_dump(mode="json"),
            settings=wandb.Settings(silent=True),
        )

    def _wandb_id(self) -> str:
        """Chosen once per run directory: two runs never share one, a resumed run keeps its own."""
        file = self._run.path / "wandb-id"
        if not file.exists():
            write_atomic(file, uuid.uuid4().hex[:12])
        return file.read_text()


def _line(record: dict[str, Any]) -> str:
    parts = [f"step {record['step']:>4}"]
    for key, label, form in (
        ("reward_mean", "reward", ".3f"),
        ("loss", "loss", ".4f"),
        ("grad_norm", "grad", ".2f"),
        ("rows", "rows", ".0f"),
        ("trained_tokens", "tokens", ".0f"),
        ("rollout_s", "rollout", ".1f"),
        ("update_s", "update", ".1f"),
        ("val_rate", "val", ".3f"),
    ):
        value = record.get(key)
        if value is not None:
            parts.append(f"{label} {value:{form}}" + ("s" if key.endswith("_s") else ""))
    return "  ".join(parts)
