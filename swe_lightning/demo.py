"""`swel demo`: the four commands of a whole experiment, run one after the other as a user would type them.

Every stage is an ordinary `swel` command in its own process, printed before it runs; this module adds only the order,
the clock and the final summary. Training and evaluation continue where they stopped, so a broken demo resumes.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from swe_lightning.controller.supervisor import swel_command
from swe_lightning.errors import SwelError
from swe_lightning.recipe import load_recipe
from swe_lightning.rundir import write_atomic

RECIPE = "recipes/tiny_cpu.yaml"
SCRIPTS = ("noop", "random_edit", "enumerate")
LIMITS = ("--train-limit", "48", "--held-out-limit", "70")
"""Tasks of the manifest that fit ten minutes; every package stays represented."""


def run_demo(out: Path, *, control: bool = True) -> dict[str, float]:
    """Run all stages below `out`; returns seconds per stage. Raises SwelError naming the stage that failed."""
    console = Console(stderr=True)
    seconds: dict[str, float] = {}
    for name, arguments in stages(out, control=control):
        console.rule(f"[bold]{name}")
        console.print(f"$ swel {shlex.join(arguments)}", highlight=False)
        start = time.monotonic()
        done = subprocess.run(swel_command(*arguments), check=False)
        seconds[name] = round(time.monotonic() - start, 1)
        if done.returncode:
            raise SwelError(f"demo stage '{name}' failed with exit code {done.returncode}; the same command resumes it")
    write_atomic(out / "demo.json", json.dumps({"seconds": seconds}, indent=2))
    _summary(console, out, seconds)
    return seconds


def stages(out: Path, *, control: bool) -> list[tuple[str, list[str]]]:
    """(name, arguments of swel) of each stage, in order."""
    tasks, data, run, shuffled = out / "tasks", out / "data", out / "train", out / "control"
    steps = load_recipe(RECIPE).training.steps
    where = ["--set", f"tasks.train={data / 'train.jsonl'}", "--set", f"tasks.val={data / 'val.jsonl'}"]
    memo = ["--set", f"sandbox.memo_dir={out / 'memo'}"]
    plan = [
        ("tasks", ["data", "synth", "--manifest", "demo", "--out", str(tasks), *LIMITS]),
        ("filter", ["data", "filter", "--input", f"{tasks}/tasks.jsonl", "--out", str(data), "--split", "held_out"]),
        ("train", ["train", RECIPE, "--run", str(run), *where, *memo]),
    ]
    subjects = [f"initial={run}/checkpoints/step0", f"trained={run}/checkpoints/step{steps}"]
    if control:
        start = ["--set", "warm_start=null", "--set", f"model.path={run}/checkpoints/step0"]
        shuffle = ["--set", "algorithm.shuffle_rewards=true"]
        plan.append(("control", ["train", RECIPE, "--run", str(shuffled), *where, *memo, *start, *shuffle]))
        subjects.append(f"shuffled={shuffled}/checkpoints/step{steps}")
    chosen = [part for subject in subjects for part in ("--ckpt", subject)]
    chosen += [part for script in SCRIPTS for part in ("--script", script)]
    plan.append(("eval", ["eval", RECIPE, "--run", str(run), *where, *chosen, "--out", str(out / "eval")]))
    return plan


def _summary(console: Console, out: Path, seconds: dict[str, float]) -> None:
    console.rule("[bold]what this did")
    report: dict[str, Any] = json.loads((out / "eval" / "report.json").read_text())
    console.print(report["summary"], highlight=False)
    console.print("stages: " + ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items()), highlight=False)
    console.print(
        f"where to look:\n"
        f"  {out / 'data' / 'report.md'}    which tasks left, and why\n"
        f"  {out / 'eval' / 'report.md'}    rates, intervals, controls\n"
        f"  swel runs show {out / 'train'}    steps, outcomes, and how to follow one rollout",
        highlight=False,
    )
