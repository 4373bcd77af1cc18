"""The difficulty probe's rollouts: ordinary gateway, harness, sandbox and grader, with the initial model behind them.

`data_pipeline` decides which rollouts each task needs and what they mean; this module only runs them and says solved,
not solved, or no verdict, as each one ends. A rollout's id is a function of its task and number: after an interruption
the gateway's store still has what had finished, and nothing runs twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from data_pipeline.probe import RUN_NAME
from swe_lightning.controller.stack import Stack
from swe_lightning.errors import UserError
from swe_lightning.policy.scripted import make_strategy
from swe_lightning.recipe import Recipe, load_recipe
from swe_lightning.records import Rollout, Task, is_resolved
from swe_lightning.rundir import RunDir
from swe_lightning.training.schedule import rollout_config

Row = Mapping[str, Any]
Ended = tuple[str, int, bool | None]
POLL_S = 5.0


class Prober:
    """`data_pipeline.probe.Rollouts` on a stack of its own, which starts with the first rollout. A context manager."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        *,
        identity: str = "",
        model_dir: Path | None = None,
        script: str | None = None,
    ) -> None:
        self._recipe, self._run = recipe, RunDir(run_dir)
        self._model_dir, self._script = model_dir, script
        self.identity = identity
        """Which model is probed and how, as text: the same text means that outcomes may be put together."""
        self.window = 2 * recipe.rollout.workers * recipe.rollout.concurrency
        """Twice what runs at once: no worker waits, and few are queued for tasks that get decided meanwhile."""
        self._exit = ExitStack()
        self._stack: Stack | None = None
        self._open: dict[str, tuple[str, int]] = {}
        self._ended: list[Ended] = []
        self._cursor = 0

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()
        self._stack = None

    def start(self, wanted: Sequence[tuple[Row, int]]) -> None:
        """Queue rollouts; one that an earlier process finished has ended at once."""
        stack = self._started()
        planned = [self._plan(Task.model_validate(row), number) for row, number in wanted]
        places = [(str(row["instance_id"]), number) for row, number in wanted]
        created, end = stack.gateway.create_to_follow(planned)
        if not self._open:  # whoever is open already is followed from where the log was read to
            self._cursor = max(self._cursor, end)
        for rollout, place in zip(created, places, strict=True):
            self._open[rollout.rollout_id] = place
            if rollout.state.terminal:
                self._end(rollout)

    def finished(self) -> Sequence[Ended]:
        """What ended since the last call; blocks until there is something. Raises if a service cannot be kept alive."""
        stack = self._started()
        while not self._ended:
            stack.supervisor.check()
            batch, self._cursor = stack.gateway.terminal(after=self._cursor, wait_s=POLL_S)
            for rollout in batch:
                self._end(rollout)
        ended, self._ended = self._ended, []
        return ended

    def _end(self, rollout: Rollout) -> None:
        place = self._open.pop(rollout.rollout_id, None)
        if place is not None:  # else of an earlier process, and not asked for in this one
            reward = rollout.outcome.reward if rollout.outcome else None
            self._ended.append((*place, None if reward is None else is_resolved(reward)))

    def _started(self) -> Stack:
        if self._stack is None:
            recipe = self._recipe
            self._run.path.mkdir(parents=True, exist_ok=True)
            stack = self._exit.enter_context(
                Stack(
                    self._run,
                    workers=recipe.rollout.workers,
                    concurrency=recipe.rollout.concurrency,
                    max_context=recipe.model.max_context,
                )
            )
            if self._model_dir is not None:
                stack.serve_policy(self._model_dir, version=0, threads=recipe.training.threads)
            else:
                stack.serve_script(self._script or "noop", None)
            stack.gateway.resume()
            stack.start_controller()
            self._stack = stack
        return self._stack

    def _plan(self, task: Task, number: int) -> Rollout:
        return Rollout(
            rollout_id=f"probe-{task.instance_id}-{number}",
            group_id=f"probe-{task.instance_id}",
            mode="val",
            task=task.model_dump(mode="json"),
            config=rollout_config(self._recipe, temperature=self._recipe.rollout.temperature),
            timeout_s=self._recipe.rollout.timeout_s,
            max_attempts=self._recipe.rollout.max_attempts,
        )


def make_prober(recipe_name: str, overrides: list[str], model: str, out: Path) -> Prober:
    """`model`: a model directory, or `script:NAME`. UserError if it is neither."""
    recipe = load_recipe(recipe_name, overrides)
    run = out / RUN_NAME
    if model.startswith("script:"):
        script = model.removeprefix("script:")
        try:
            make_strategy(script)
        except UserError as error:
            raise UserError(f"--probe-model {model}: {error}") from error
        return Prober(recipe, run, identity=_identity(recipe, model), script=script)
    directory = Path(model)
    if not (directory / "config.json").is_file():
        raise UserError(f"--probe-model {model}: give a model directory (with config.json) or script:NAME")
    directory = directory.absolute()
    identity = _identity(recipe, str(directory), sorted(directory.glob("*.safetensors")))
    return Prober(recipe, run, identity=identity, model_dir=directory)


def _identity(recipe: Recipe, model: str, weights: Sequence[Path] = ()) -> str:
    digests = {}
    for file in weights:
        with file.open("rb") as f:
            digests[file.name] = hashlib.file_digest(f, "sha256").hexdigest()
    document = {"model": model, "weights": digests, "recipe": recipe.model_dump(mode="json")}
    return json.dumps(document, sort_keys=True)
