"""Where the time of `swel demo` goes: seconds per stage, throughput, and CPU seconds per kind of process.

    python benchmarks/demo.py [--out runs/demo-benchmark] [--write docs/performance.md]

Runs the demo in a fresh directory (installation apart) and samples the CPU times of its processes twice a second, so a
process that lives shorter than that is counted with its parent's children only as far as the kernel reports them. With
`--write`, the table replaces the part of the file between the markers `<!-- demo -->` and `<!-- /demo -->`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import psutil

KINDS = {
    "serve gateway": "gateway",
    "gateway.server": "gateway",
    "serve model": "model server",
    "serve script": "model server",
    "controller.worker": "harness and grading workers",
    "serve controller": "controller",
    "data synth": "task synthesis",
    " train ": "trainer",
}


class CpuSampler(threading.Thread):
    """Highest CPU seconds seen of every descendant, by kind. Children include those that were reaped."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(root)
        self._seen: dict[tuple[int, float], tuple[str, float]] = {}
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.5):
            for process in self._root.children(recursive=True):
                try:
                    times = process.cpu_times()
                    kind = kind_of(" ".join(process.cmdline()))
                    self._seen[process.pid, process.create_time()] = (kind, times.user + times.system)
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue

    def seconds(self) -> dict[str, float]:
        total: dict[str, float] = defaultdict(float)
        for kind, value in self._seen.values():
            total[kind] += value
        return dict(sorted(total.items(), key=lambda item: -item[1]))


def kind_of(command: str) -> str:
    for words, kind in KINDS.items():
        if words in f"{command} ":
            return kind
    return "tests in sandboxes" if "pytest" in command or "/testbed" in command else "other"


def measure(out: Path) -> dict[str, object]:
    start, load = time.monotonic(), os.getloadavg()
    with subprocess.Popen([sys.executable, "-m", "cli", "demo", "--out", str(out)]) as demo:
        sampler = CpuSampler(demo.pid)
        sampler.start()
        code = demo.wait()
        sampler.done.set()
    if code:
        sys.exit(f"swel demo failed with exit code {code}")
    stages = json.loads((out / "demo.json").read_text())["seconds"]
    metrics = [json.loads(line) for line in (out / "train" / "metrics.jsonl").read_text().splitlines()]
    rollout_s = sum(m["rollout_s"] for m in metrics)
    update_s = sum(m["update_s"] for m in metrics)
    return {
        "total_s": time.monotonic() - start,
        "load_before": load[0],
        "stages_s": stages,
        "steps": len(metrics),
        "rollouts_per_minute": 60 * sum(m["rollouts"] for m in metrics) / rollout_s,
        "sampled_tokens_per_rollout_second": sum(m["trained_tokens"] for m in metrics) / rollout_s,
        "update_tokens_per_second": sum(m["tokens"] for m in metrics) / update_s,
        "rollout_s_per_step": rollout_s / len(metrics),
        "update_s_per_step": update_s / len(metrics),
        "cpu_s": sampler.seconds(),
    }


def markdown(result: dict[str, object]) -> str:
    stages, cpu = result["stages_s"], result["cpu_s"]
    assert isinstance(stages, dict)
    assert isinstance(cpu, dict)
    lines = [
        f"`python benchmarks/demo.py`, {time.strftime('%Y-%m-%d')}: {os.cpu_count()} cores "
        f"({platform.machine()}, Python {platform.python_version()}), "
        f"load {result['load_before']:.1f} before the start.",
        "",
        "| stage | seconds |",
        "|---|---|",
        *(f"| {name} | {value:.0f} |" for name, value in stages.items()),
        f"| **all** | **{result['total_s']:.0f}** |",
        "",
        "| | |",
        "|---|---|",
        f"| rollouts per minute (training, {result['steps']} steps) | {result['rollouts_per_minute']:.0f} |",
        f"| sampled tokens per second of the rollout phase | {result['sampled_tokens_per_rollout_second']:.0f} |",
        f"| tokens per second of the update (padding apart) | {result['update_tokens_per_second']:.0f} |",
        f"| seconds per step: rollouts | {result['rollout_s_per_step']:.1f} |",
        f"| seconds per step: update | {result['update_s_per_step']:.1f} |",
        "",
        "| CPU seconds of | |",
        "|---|---|",
        *(f"| {kind} | {value:.0f} |" for kind, value in cpu.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-benchmark"))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    if options.out.exists():
        sys.exit(f"{options.out} exists; a measurement starts from nothing, so choose another --out or remove it")
    text = markdown(measure(options.out))
    print(text)
    if options.write:
        page = options.write.read_text()
        head, _, rest = page.partition("<!-- demo -->")
        _, marker, tail = rest.partition("<!-- /demo -->")
        if not marker:
            sys.exit(f"{options.write} has no part between <!-- demo --> and <!-- /demo -->")
        options.write.write_text(f"{head}<!-- demo -->\n{text}<!-- /demo -->{tail}")


if __name__ == "__main__":
    main()
