"""One evaluation of several subjects (checkpoints, scripted strategies) on the same tasks, with the paired comparison.

The subjects share gateway, harness, sandbox and grader; only the model server behind the gateway changes. Each subject
is stored under its label, so an interrupted session continues with what is missing. The first subject is what the
others are compared with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from swe_lightning.controller.stack import Stack
from swe_lightning.errors import UserError
from swe_lightning.evaluation.compare import Comparison, compare, markdown
from swe_lightning.evaluation.runner import EvalResult, evaluate
from swe_lightning.policy.scripted import make_strategy
from swe_lightning.recipe import Recipe
from swe_lightning.records import Task
from swe_lightning.rundir import RunDir, write_atomic


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a checkpoint directory, or a scripted strategy."""

    label: str
    checkpoint: Path | None = None
    script: str | None = None

    def identity(self) -> str:
        """What would change the numbers: the weights, or the script and the file it replays."""
        if self.checkpoint is not None:
            return model_digest(self.checkpoint)
        name, _, file = str(self.script).partition(":")
        return f"{name}:{hashlib.sha256(Path(file).read_bytes()).hexdigest()}" if file else name


def model_digest(directory: Path) -> str:
    """SHA-256 over the weight files of a model directory."""
    hashed = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        if not file.name.startswith("optimizer"):
            hashed.update(file.name.encode() + b"\0" + file.read_bytes())
    return hashed.hexdigest()


def parse_subjects(checkpoints: Sequence[str], scripts: Sequence[str], run: Path | None) -> list[Subject]:
    """`step20`, a directory, or `label=directory`; raises UserError for one that does not exist.

    A label has no slash: `/data/lr=3/step4` is a directory.
    """
    subjects = []
    for text in checkpoints:
        label, eq, place = text.partition("=")
        if not eq or "/" in label:
            label, place = "", text
        path = Path(place)
        if not path.is_dir() and run is not None:
            path = run / "checkpoints" / place
        if not (path / "config.json").is_file():
            known = ", ".join(f"step{s}" for s in RunDir(run).saved_steps()) if run else "give --run"
            raise UserError(f"--ckpt {text}: no model directory there (checkpoints of the run: {known or 'none'})")
        subjects.append(Subject(label or path.name, checkpoint=path.absolute()))
    for name in scripts:
        try:
            make_strategy(name)
        except UserError as error:
            raise UserError(f"--script {name}: {error}") from error
    subjects += [Subject(f"script-{name.replace(':', '-').replace('/', '-')}", script=name) for name in scripts]
    if not subjects:
        raise UserError("nothing to evaluate: give --ckpt stepN, --ckpt DIRECTORY or --script NAME")
    if len({s.label for s in subjects}) < len(subjects):
        raise UserError("two subjects have the same label; write --ckpt label=directory")
    return subjects


def run_session(
    recipe: Recipe,
    tasks: Sequence[Task],
    subjects: Sequence[Subject],
    out: Path,
    *,
    samples: int,
    temperature: float,
    console: Console,
) -> dict[str, EvalResult]:
    """Evaluate every subject; results by label in the order given."""
    run = RunDir(out)
    run.path.mkdir(parents=True, exist_ok=True)
    run.lock()
    results: dict[str, EvalResult] = {}
    # Scripts speak with the tokenizer of the first checkpoint, so that limits in tokens mean the same for all subjects.
    tokenizer = next((s.checkpoint for s in subjects if s.checkpoint is not None), None)
    try:
        with _stack(run, recipe) as stack:
            stack.gateway.resume()
            for subject in subjects:
                _serve(stack, subject, recipe, tokenizer)
                results[subject.label] = evaluate(
                    gateway=stack.gateway,
                    tasks=tasks,
                    recipe=recipe,
                    samples=samples,
                    temperature=temperature,
                    label=subject.label,
                    run_dir=run.path,
                    progress=lambda _: stack.supervisor.check(),
                    # Only now: what an interrupted session left queued was meant for another subject's model.
                    on_open=stack.start_controller,
                    identity=subject.identity(),
                )
                console.print(results[subject.label].line(), highlight=False)
    finally:
        run.unlock()
    return results


def write_report(out: Path, results: dict[str, EvalResult]) -> str:
    """Write report.json and report.md below `out`; returns the markdown."""
    first, *others = list(results)
    comparisons = [compare(results[first], results[label]) for label in others]
    # The second subject is what was trained: it is also held against controls and baselines.
    comparisons += [compare(results[label], results[others[0]]) for label in others[1:]]
    text = markdown(list(results.values()), comparisons)
    document = {
        "results": {label: result.summary() for label, result in results.items()},
        "comparisons": [c.as_dict() for c in comparisons],
        "summary": text,
    }
    write_atomic(out / "report.json", json.dumps(document, indent=2))
    write_atomic(out / "report.md", text)
    return text


def _stack(run: RunDir, recipe: Recipe) -> Stack:
    r = recipe.rollout
    return Stack(run, workers=r.workers, concurrency=r.concurrency, max_context=recipe.model.max_context)


def _serve(stack: Stack, subject: Subject, recipe: Recipe, tokenizer: Path | None) -> None:
    if subject.checkpoint is not None:
        stack.serve_policy(subject.checkpoint, version=0, threads=recipe.training.threads)
    else:
        assert subject.script is not None
        stack.serve_script(subject.script, tokenizer)


__all__ = ["Comparison", "Subject", "parse_subjects", "run_session", "write_report"]
