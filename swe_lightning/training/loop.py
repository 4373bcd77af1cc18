"""The synchronous loop: plan, roll out, build the batch, update, sync the weights, record; then again.

Everything a step needs is a function of (recipe, step) and of what the gateway stored, and every effect is idempotent
by id. So a run that dies anywhere starts again from its last checkpoint: rollouts that had finished are found, not
sampled again, and the updates after the checkpoint are replayed from them.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from data_pipeline.sources import load_tasks
from swe_lightning.controller.stack import Stack, complete_model_dir
from swe_lightning.errors import DataError, Interrupted, NoTrainingRows
from swe_lightning.evaluation.runner import evaluate
from swe_lightning.gateway.probe import probe_engine
from swe_lightning.recipe import Recipe
from swe_lightning.records import Rollout, Task
from swe_lightning.rundir import RunDir
from swe_lightning.training.collect import Collector, batch_of, gather
from swe_lightning.training.report import Reporter
from swe_lightning.training.schedule import plan_step
from swe_lightning.training.signals import StopOnSignal
from swe_lightning.training.waiter import Waiter
from swe_lightning.training.warm import initial_model

if TYPE_CHECKING:
    from swe_lightning.policy.worker import TrainWorker

DRAIN_S = 600.0


def train(recipe: Recipe, run_dir: Path, *, console: Console | None = None) -> RunDir:
    """Train until `training.steps`; resumes if `run_dir` holds an unfinished run of the same recipe.

    Raises Interrupted after a Ctrl-C, once the step in progress is finished and saved.
    """
    run = RunDir(run_dir)
    run.lock()
    try:
        resuming = run.open(recipe)
        with ExitStack() as stack:
            stop = stack.enter_context(StopOnSignal())
            reporter = stack.enter_context(Reporter(run, recipe, console))
            train_tasks, val_tasks = load_both(recipe)
            initial = initial_model(recipe, run, reporter, train_tasks, stop)
            loop = Loop(recipe, run, reporter, stop, train_tasks, val_tasks)
            loop.run(initial, resuming=resuming)
    finally:
        run.unlock()
    return run


def load_both(recipe: Recipe) -> tuple[list[Task], list[Task]]:
    """Training and validation tasks; DataError if they share one. Validation order is seeded, not the file's."""
    train_tasks, val_tasks = load_tasks(recipe.tasks.train), load_tasks(recipe.tasks.val)
    shared = {t.instance_id for t in train_tasks} & {t.instance_id for t in val_tasks}
    if shared:
        raise DataError(
            f"{len(shared)} tasks are in both {recipe.tasks.train} and {recipe.tasks.val} (for example {min(shared)}); "
            "a validation task must never be trained on"
        )
    random.Random(recipe.training.seed).shuffle(val_tasks)
    return train_tasks, val_tasks


def warm_up(recipe: Recipe, run_dir: Path, *, console: Console | None = None) -> Path:
    """Only the warm start of `train`; the run goes on from there when it is trained."""
    run = RunDir(run_dir)
    run.lock()
    try:
        run.open(recipe)
        with StopOnSignal() as stop, Reporter(run, recipe, console) as reporter:
            return initial_model(recipe, run, reporter, load_tasks(recipe.tasks.train), stop)
    finally:
        run.unlock()


class Loop:
    """One run's loop; owns the training worker and the stack while it runs."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDir,
        reporter: Reporter,
        stop: StopOnSignal,
        train_tasks: Sequence[Task],
        val_tasks: Sequence[Task],
    ) -> None:
        self.recipe, self.run_dir, self.reporter, self.stop = recipe, run, reporter, stop
        self.train_tasks, self.val_tasks = train_tasks, val_tasks

    def run(self, initial: Path, *, resuming: bool) -> None:
        from swe_lightning.policy.worker import TrainWorker

        algorithm, training = self.recipe.algorithm, self.recipe.training
        temperature = self.recipe.rollout.temperature
        self.worker: TrainWorker = TrainWorker(
            initial, training, algorithm, reference=algorithm.kl_coef > 0, temperature=temperature
        )
        step, current = self._restore(initial, resuming)
        rollout = self.recipe.rollout
        with Stack(
            self.run_dir,
            workers=rollout.workers,
            concurrency=rollout.concurrency,
            max_context=self.recipe.model.max_context,
            store=self.recipe.store,
        ) as self.stack:
            self.initial = initial
            self.stack.gateway.resume()
            self.stack.serve_policy(current, version=step, threads=training.threads)
            probe_engine(self.stack.model_url)
            self.waiter = Waiter(self.stack.gateway)
            self.collector = Collector(self.stack.gateway, self.recipe)
            self.recorded = {m["step"] for m in self.run_dir.metrics()}
            while step < training.steps:
                record = self._step(step)
                step += 1
                self._after(step, record)
        self.reporter.say(f"done: {step} steps in {self.run_dir.path}")

    def _restore(self, initial: Path, resuming: bool) -> tuple[int, Path]:
        """The step to start with and the model directory that holds its weights."""
        saved = [s for s in self.run_dir.saved_steps() if s > 0]
        if not saved:
            return 0, initial
        step = saved[-1]
        self.worker.load(self.run_dir.checkpoint(step))
        if resuming:
            self.reporter.say(f"resuming {self.run_dir.path} after step {step}")
        return step, self.run_dir.checkpoint(step)

    def _check(self) -> None:
        self.stack.supervisor.check()
        self.stop.raise_if_forced()

    def _step(self, step: int) -> dict[str, Any]:
        """Roll out and update once; weights of version `step` become `step + 1`."""
        t0 = time.monotonic()
        waited = 0.0

        def roll_out(planned: Sequence[Rollout]) -> list[Rollout]:
            nonlocal waited
            started = time.monotonic()
            done = self._roll_out(step, planned)
            waited += time.monotonic() - started
            return done

        try:
            collected = gather(roll_out, self.collector, plan_step(self.recipe, self.train_tasks, step), step)
        except NoTrainingRows as error:
            self.reporter.losses(step, error.by_rollout)
            raise
        batch = batch_of(collected, self.recipe, step)
        t2 = time.monotonic()
        self.stack.gateway.pause(drain_s=DRAIN_S)
        metrics = self.worker.update(batch)
        t3 = time.monotonic()
        self._sync(step + 1)
        self.stack.gateway.resume()
        t4 = time.monotonic()
        timing = {"rollout_s": waited, "batch_s": t2 - t0 - waited, "update_s": t3 - t2, "sync_s": t4 - t3}
        counted = {**self.collector.gate.stats, "late_results": self.waiter.late}
        return {"step": step, **metrics, **batch.stats, **collected.summary(), **counted, **timing, "time": time.time()}

    def _roll_out(self, step: int, planned: Sequence[Rollout]) -> list[Rollout]:
        self.reporter.begin(f"step {step} rollouts", len(planned))
        return self.waiter.run(
            planned,
            on_finished=lambda _: self.reporter.advance(),
            # The controller starts with the first step that has open rollouts: while finished steps are replayed after
            # a crash, nothing of a later step may be sampled with the weights of an earlier one.
            on_open=self.stack.start_controller,
            check=self._check,
            again=step not in self.recorded,
        )

    def _sync(self, version: int) -> None:
        """Export the weights into a complete model directory and load them into the server; keep the last two."""
        target = self.run_dir.path / "sync" / f"v{version}"
        target.mkdir(parents=True, exist_ok=True)
        self.worker.export_weights(target)
        complete_model_dir(target, self.initial)
        self.stack.sync(target, version)
        for old in (self.run_dir.path / "sync").glob("v*"):
            if old.name[1:].isdigit() and int(old.name[1:]) < version - 1:
                shutil.rmtree(old, ignore_errors=True)

    def _after(self, step: int, record: dict[str, Any]) -> None:
        """Validate, record, save where due; leave after an interrupt.

        Recorded before saved: a crash in between repeats the update and its line, and of two lines of one step the
        later one counts. The other order could lose a line.
        """
        training = self.recipe.training
        last = step == training.steps
        if self.val_tasks and training.eval_every and (step % training.eval_every == 0 or last):
            record |= self._validate(step)
        self.reporter.step(record)
        if last or step % training.save_every == 0 or self.stop.requested:
            self.worker.save(self.run_dir.checkpoint(step), state={"step": step})
            self._prune()
        if self.stop.requested and not last:
            raise Interrupted(f"stopped after step {step - 1}, saved; the same command resumes {self.run_dir.path}")

    def _validate(self, step: int) -> dict[str, Any]:
        tasks = list(self.val_tasks)[: self.recipe.evaluation.limit]
        self.reporter.begin(f"validation after step {step - 1}", len(tasks) * self.recipe.evaluation.samples)
        result = evaluate(
            gateway=self.stack.gateway,
            tasks=tasks,
            recipe=self.recipe,
            samples=self.recipe.evaluation.samples,
            temperature=self.recipe.evaluation.temperature,
            label=f"val-step{step}",
            run_dir=self.run_dir.path,
            progress=self._validation_progress,
            on_open=self.stack.start_controller,
        )
        return {"val_rate": result.rate, "val_graded": result.graded}

    def _validation_progress(self, finished: int) -> None:
        self._check()
        self.reporter.advance(finished)

    def _prune(self) -> None:
        keep = self.recipe.training.keep_checkpoints
        if keep:
            for step in [s for s in self.run_dir.saved_steps() if s > 0][:-keep]:
                shutil.rmtree(self.run_dir.checkpoint(step), ignore_errors=True)
