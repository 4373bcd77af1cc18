"""The initial policy of a run: what the recipe names, or a tiny one warm-started on scripted demonstrations.

The demonstrator does not know the fix. Most demonstrations are played against a fast stand-in for the shell, for
volume; `real_demonstrations` of them go through gateway, harness and sandbox on training tasks and are taken back as
recorded calls, like any rollout. A test checks that both ways give the same token rows.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swe_lightning.controller.stack import Stack
from swe_lightning.errors import RecipeError, SwelError
from swe_lightning.recipe import Recipe, WarmStart
from swe_lightning.records import Rollout, Row, Task
from swe_lightning.rundir import RunDir
from swe_lightning.training.report import Reporter
from swe_lightning.training.schedule import rollout_config
from swe_lightning.training.signals import StopOnSignal
from swe_lightning.training.waiter import Waiter
from swe_lightning.trajectory import rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def initial_model(recipe: Recipe, run: RunDir, reporter: Reporter, tasks: Sequence[Task], stop: StopOnSignal) -> Path:
    """Directory of the policy that training starts from. Idempotent: a finished warm start is used again."""
    if recipe.warm_start is None:
        assert recipe.model.path is not None  # the recipe's own check
        return local_model(recipe.model.path)
    target = run.checkpoint(0)
    if (target / "complete").exists():
        return target
    from swe_lightning.policy.sft import warm_start

    t0 = time.monotonic()
    base = create_policy(recipe.warm_start, run.path / "init", recipe.model.max_context, recipe.training.seed)
    rows = demonstration_rows(recipe, run, base, tasks, reporter, stop)
    reporter.begin("warm start", recipe.warm_start.steps)

    def progress() -> None:
        stop.raise_if_requested()
        reporter.advance()

    history = warm_start(recipe, model_dir=base, out=target, rows=rows, progress=progress)
    reporter.say(
        f"warm start: {len(rows)} rows of demonstrations, {recipe.warm_start.steps} steps, "
        f"loss {history['loss_first']:.3f} -> {history['loss_last']:.3f}, {time.monotonic() - t0:.0f} s"
    )
    return target


def local_model(name: str) -> Path:
    """`name` if it is a local directory, else the hub's snapshot of that name (downloaded or cached)."""
    path = Path(name)
    if (path / "config.json").is_file():
        return path.absolute()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name))
    except (LocalEntryNotFoundError, RepositoryNotFoundError, HFValidationError, OSError) as error:
        raise RecipeError(
            f"model.path {name} is neither a directory with config.json nor a model the hub gave ({error}); "
            "download it first or give a local directory"
        ) from error


def create_policy(shape: WarmStart, out: Path, max_context: int, seed: int) -> Path:
    """A fresh tiny policy and its tokenizer in Hugging Face layout."""
    if not (out / "config.json").exists():
        from swe_lightning.policy.demos import bulk_texts
        from swe_lightning.policy.tiny import create_tiny

        create_tiny(
            out,
            texts=bulk_texts(3000, seed),
            vocab=shape.vocab,
            layers=shape.layers,
            hidden=shape.hidden,
            max_context=max_context,
            seed=seed,
        )
    return out


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def demonstration_rows(
    recipe: Recipe, run: RunDir, base: Path, tasks: Sequence[Task], reporter: Reporter, stop: StopOnSignal
) -> list[Row]:
    """Stand-in demonstrations plus those recorded on the real path."""
    from swe_lightning.policy.demos import standin_rows

    assert recipe.warm_start is not None
    rows = standin_rows(load_tokenizer(base), recipe.warm_start.demonstrations, recipe.training.seed)
    if recipe.warm_start.real_demonstrations:
        rows += real_rows(recipe, run, base, tasks, reporter, stop)
    return rows


def real_rows(
    recipe: Recipe, run: RunDir, base: Path, tasks: Sequence[Task], reporter: Reporter, stop: StopOnSignal
) -> list[Row]:
    """Demonstrations recorded by a gateway of their own, in `run/demonstrations`."""
    assert recipe.warm_start is not None
    count = recipe.warm_start.real_demonstrations
    chosen = random.Random(recipe.training.seed).choices(range(len(tasks)), k=count)
    config = rollout_config(recipe, temperature=1.0)
    planned = [
        Rollout(
            rollout_id=f"demo-{i:05d}",
            group_id=f"demo-{i:05d}",
            task=tasks[index].model_dump(mode="json"),
            config=config,
            timeout_s=recipe.rollout.timeout_s,
        )
        for i, index in enumerate(chosen)
    ]
    reporter.begin("demonstrations through the real path", count)
    own = RunDir(run.path / "demonstrations")
    own.path.mkdir(parents=True, exist_ok=True)
    with Stack(
        own,
        workers=recipe.rollout.workers,
        concurrency=recipe.rollout.concurrency,
        max_context=recipe.model.max_context,
    ) as stack:
        stack.serve_script("demonstrator", base)
        stack.start_controller()

        def check() -> None:
            stack.supervisor.check()
            stop.raise_if_requested()

        done = Waiter(stack.gateway).run(planned, on_finished=lambda _: reporter.advance(), check=check)
        graded = [r for r in done if r.outcome and r.outcome.reward is not None]
        reporter.say(played(done, len(graded)))
        if not graded:
            raise SwelError(f"{played(done, 0)}; see {own.logs}")
        rows: list[Row] = []
        for rollout in graded:
            rows += rows_of(stack.gateway.calls(rollout.rollout_id, rollout.attempt)).rows
    return rows


def played(done: Sequence[Rollout], graded: int) -> str:
    """How many demonstrations came back, and why others did not."""
    lost = Counter(r.outcome.infra_reason for r in done if r.outcome and r.outcome.infra_reason)
    reasons = "".join(f", {count} x {reason}" for reason, count in lost.items())
    solved = sum(bool(r.outcome and r.outcome.reward) for r in done)
    return f"{graded} of {len(done)} demonstrations through the real path{reasons}; {solved} solved their task"
