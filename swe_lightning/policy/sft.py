"""Warm start: supervised training on rows, through the same worker that later does reinforcement learning."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swe_lightning.errors import DataError

if TYPE_CHECKING:
    from swe_lightning.recipe import Recipe
    from swe_lightning.records import Row


def warm_start(
    recipe: Recipe,
    *,
    model_dir: Path,
    out: Path,
    rows: Sequence[Row],
    progress: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Train the model in `model_dir` on `rows` as recipe.warm_start says and save it as `out`; returns sft's report.

    `progress` is called once per optimizer step.
    """
    if recipe.warm_start is None:
        raise DataError(f"recipe {recipe.name} has no warm_start section")
    from swe_lightning.policy.worker import TrainWorker

    plan = recipe.warm_start
    worker = TrainWorker(model_dir, recipe.training, recipe.algorithm.model_copy(update={"kl_coef": 0.0}))
    report = worker.sft(
        rows,
        steps=plan.steps,
        lr=plan.lr,
        batch_tokens=plan.batch_tokens,
        seed=recipe.training.seed,
        on_step=(lambda step, loss: progress()) if progress else None,
    )
    summary = {key: value for key, value in report.items() if key != "loss"}
    worker.save(out, state={"warm_start": summary})
    return report


def token_batches(rows: Sequence[Row], batch_tokens: int, seed: int) -> Iterator[list[Row]]:
    """Endless batches of whole rows, each as many as fit `batch_tokens` (at least one); reshuffled every epoch.

    Rows without a trained token are left out: they would only dilute a batch.
    """
    usable = [row for row in rows if row.mask[1:].any()]
    if not usable:
        raise DataError("no row holds a trained token (mask 1); supervised training has nothing to learn from")
    rng, total = random.Random(seed), 0
    batch: list[Row] = []
    while True:
        for row in rng.sample(usable, len(usable)):
            if batch and total + len(row.ids) > batch_tokens:
                yield batch
                batch, total = [], 0
            batch.append(row)
            total += len(row.ids)
