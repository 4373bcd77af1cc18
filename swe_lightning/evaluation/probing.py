"""The difficulty probe's rollouts: ordinary gateway, harness, sandbox and grader, with the initial model behind them.

`data_pipeline` decides how many rollouts each task needs and what they mean; this module only runs them and says
solved, not solved, or no verdict. Outcomes come when the whole wave has ended, in the order asked for. Rollout ids
count upwards per task from what was already reported: after an interruption the gateway's store still has what had
finished, and nothing runs twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.pipeline import PROBE_OUTCOMES, PROBE_RUN
from data_pipeline.probe import load_results
from swe_lightning.controller.stack import Stack
from swe_lightning.errors import UserError
from swe_lightning.policy.scripted import make_strategy
from swe_lightning.recipe import Recipe, load_recipe
from swe_lightning.records import Rollout, Task, is_resolved
from swe_lightning.rundir import RunDir
from swe_lightning.training.schedule import rollout_config
from swe_lightning.training.waiter import Waiter

Wanted = Sequence[tuple[Mapping[str, Any], int]]


class Prober:
    """Callable of `data_pipeline.probe`: (task row, number) pairs -> (instance_id, solved | None), wave by wave."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        *,
        results_file: Path,
        identity: str = "",
        model_dir: Path | None = None,
        script: str | None = None,
    ) -> None:
        self._recipe, self._run = recipe, RunDir(run_dir)
        self._model_dir, self._script = model_dir, script
        self.identity = identity
        """Which model is probed and how, as text: the same text means that outcomes may be put together."""
        self._results_file = results_file
        self._asked: dict[str, int] | None = None

    def __call__(self, wanted: Wanted) -> Iterator[tuple[str, bool | None]]:
        recipe = self._recipe
        if self._asked is None:
            # Read this late because results of another model are dropped before the first wave.
            earlier = load_results(self._results_file) if self._results_file.exists() else {}
            self._asked = {name: len(outcomes) for name, outcomes in earlier.items()}
        self._run.path.mkdir(parents=True, exist_ok=True)
        with Stack(
            self._run,
            workers=recipe.rollout.workers,
            concurrency=recipe.rollout.concurrency,
            max_context=recipe.model.max_context,
        ) as stack:
            if self._model_dir is not None:
                stack.serve_policy(self._model_dir, version=0, threads=recipe.training.threads)
            else:
                stack.serve_script(self._script or "noop", None)
            stack.gateway.resume()
            stack.start_controller()
            yield from self._run_rollouts(stack, wanted)

    def _run_rollouts(self, stack: Stack, wanted: Wanted) -> Iterator[tuple[str, bool | None]]:
        planned = [r for row, count in wanted for r in self._plan(Task.model_validate(row), count)]
        for rollout in Waiter(stack.gateway).run(planned, check=stack.supervisor.check):
            outcome = rollout.outcome
            reward = outcome.reward if outcome else None
            yield str(rollout.task["instance_id"]), None if reward is None else is_resolved(reward)

    def _plan(self, task: Task, count: int) -> list[Rollout]:
        assert self._asked is not None
        first = self._asked.get(task.instance_id, 0)
        self._asked[task.instance_id] = first + count
        config = rollout_config(self._recipe, temperature=self._recipe.rollout.temperature)
        return [
            Rollout(
                rollout_id=f"probe-{task.instance_id}-{k}",
                group_id=f"probe-{task.instance_id}",
                mode="val",
                task=task.model_dump(mode="json"),
                config=config,
                timeout_s=self._recipe.rollout.timeout_s,
                max_attempts=self._recipe.rollout.max_attempts,
            )
            for k in range(first, first + count)
        ]


def make_prober(recipe_name: str, overrides: list[str], model: str, out: Path) -> Prober:
    """`model`: a model directory, or `script:NAME`. UserError if it is neither."""
    recipe = load_recipe(recipe_name, overrides)
    run, results = out / PROBE_RUN, out / PROBE_OUTCOMES
    if model.startswith("script:"):
        script = model.removeprefix("script:")
        try:
            make_strategy(script)
        except UserError as error:
            raise UserError(f"--probe-model {model}: {error}") from error
        return Prober(recipe, run, results_file=results, identity=_identity(recipe, model), script=script)
    directory = Path(model)
    if not (directory / "config.json").is_file():
        raise UserError(f"--probe-model {model}: give a model directory (with config.json) or script:NAME")
    directory = directory.absolute()
    identity = _identity(recipe, str(directory), sorted(directory.glob("*.safetensors")))
    return Prober(recipe, run, results_file=results, identity=identity, model_dir=directory)


def _identity(recipe: Recipe, model: str, weights: Sequence[Path] = ()) -> str:
    digests = {}
    for file in weights:
        with file.open("rb") as f:
            digests[file.name] = hashlib.file_digest(f, "sha256").hexdigest()
    document = {"model": model, "weights": digests, "recipe": recipe.model_dump(mode="json")}
    return json.dumps(document, sort_keys=True)
