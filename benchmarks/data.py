"""Filtering a set of SWE-smith's size, beside `datasets`; branches of 128 repositories; synthesis in tasks per minute.

    python benchmarks/data.py                       everything, some minutes
    python benchmarks/data.py --only filter --rows 59136

Rows are made up in the published proportions (data_pipeline/fakes.py) at about their real sizes. Both sides start from
one file (.jsonl, or parquet as on the hub) and end with .jsonl. Ours runs as `swel data filter` does: checks, ledger,
digests, report, pictures and all. The other is `load_dataset`, one `filter` with one lambda per rule, and `to_json`.
Each trial is a process of its own; memory is the highest sum over it and its children, sampled every 20 ms: resident,
and the private part of it (a mapped file counts as resident, but can be taken away). Not covered: hub downloads, images
(their branches come from a table), validation and probe, whose cost is that of tests and rollouts. Prints a Markdown
table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import orjson
import psutil

from data_pipeline.fakes import REAL, REPOSITORIES, SmithLike

OURS = """
import sys
from pathlib import Path
from data_pipeline import commands
source, out, branches = map(Path, sys.argv[1:4])
commands.filter(inputs=[str(source)], out=out, branches=branches, preset=sys.argv[4], val_size=400)
"""
THEIRS = """
import json, sys
import datasets
datasets.disable_progress_bars()
branches = {image: set(names) for image, names in json.load(open(sys.argv[3])).items()}
kind = "parquet" if sys.argv[1].endswith(".parquet") else "json"
rows = datasets.load_dataset(kind, data_files=sys.argv[1], split="train", cache_dir=sys.argv[2])
rows = rows.filter(lambda row: bool((row["problem_statement"] or "").strip()))
rows = rows.filter(lambda row: row["instance_id"] in branches[row["image_name"]])
rows = rows.filter(lambda row: len(row["FAIL_TO_PASS"]) + len(row["PASS_TO_PASS"]) <= 200)
rows.to_json(sys.argv[2] + "/train.jsonl")
"""
BRANCHES = """
import sys, time
from data_pipeline.stages.branches import BranchIndex, missing_branch
from pathlib import Path
rows = [{"instance_id": f"i{n}", "repo": "r", "repo_path": str(p)}
        for n, p in enumerate(sorted(Path(sys.argv[1]).iterdir()) * int(sys.argv[2]))]
started = time.perf_counter()
rejected = missing_branch(rows, BranchIndex())
print(len(rows), len(rejected), time.perf_counter() - started)
"""


@dataclass
class Trial:
    """One process: seconds, and the most memory it and its children had, in MB."""

    wall_s: float
    cpu_s: float
    resident_mb: float
    private_mb: float
    output: str

    def cells(self) -> tuple[str, str, str]:
        return f"{self.wall_s:.1f} s", f"{self.cpu_s:.1f} s", f"{self.resident_mb:.0f} / {self.private_mb:.0f} MB"


def trial(script: str, *arguments: str) -> Trial:
    started, before = time.perf_counter(), os.times()
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    peak = [0.0, 0.0]
    watcher = threading.Thread(target=_watch, args=(psutil.Process(process.pid), peak))
    watcher.start()
    output, _ = process.communicate()
    watcher.join()
    assert process.returncode == 0, output
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Trial(time.perf_counter() - started, cpu, *peak, output)


def _watch(process: psutil.Process, peak: list[float]) -> None:
    try:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            family = [_memory(p) for p in (process, *process.children(recursive=True))]
            for kind in (0, 1):
                peak[kind] = max(peak[kind], sum(member[kind] for member in family) / 1e6)
            time.sleep(0.02)
    except psutil.NoSuchProcess:
        pass


def _memory(process: psutil.Process) -> tuple[float, float]:
    try:
        info = process.memory_info()
        return float(info.rss), float(info.rss - info.shared)
    except psutil.NoSuchProcess:
        return 0.0, 0.0


def compare_filters(folder: Path, rows: int) -> list[tuple[str, ...]]:
    made = SmithLike(scale=max(round(59_136 / rows), 1), sizes=REAL)
    source, branches = folder / "tasks.jsonl", folder / "branches.json"
    with source.open("wb") as stream:
        stream.writelines(made.lines())
    branches.write_text(json.dumps(made.branches()))
    expected = len(made.kinds) - sum(made.counts[k] for k in ("empty_issue", "missing_branch", "test_cap"))
    size = f"{len(made.kinds):,} rows, {source.stat().st_size >> 20} MiB"
    packed = folder / "tasks.parquet"
    _pack(source, packed)
    return [
        *_beside(folder, source, branches, expected, f"JSONL, {size}", ("paper", "strict")),
        *_beside(folder, packed, branches, expected, "the same as parquet", ("paper",)),
    ]


def _beside(
    folder: Path, source: Path, branches: Path, expected: int, size: str, presets: tuple[str, ...]
) -> list[tuple[str, ...]]:
    """Both twice, the faster run of each; what a run leaves behind is removed before the next."""
    best: dict[str, Trial] = {}
    for name in ("datasets", *presets, *presets, "datasets"):
        out = folder / "out"
        done = trial(THEIRS if name == "datasets" else OURS, str(source), str(out), str(branches), name)
        left = sum(_lines(out / f"{side}.jsonl") for side in ("train", "val") if (out / f"{side}.jsonl").exists())
        assert left == expected or name == "strict", (name, left, expected)
        best[name] = min(done, best.get(name, done), key=lambda t: t.wall_s)
        shutil.rmtree(out)
    theirs = best.pop("datasets")
    return [
        (f"`datasets`: load, 3 x filter, to_json ({size})", *theirs.cells(), "1"),
        *(
            (f"`swel data filter`, {name} preset", *ours.cells(), f"{theirs.wall_s / ours.wall_s:.1f} x")
            for name, ours in best.items()
        ),
    ]


def _pack(source: Path, packed: Path) -> None:
    """Row groups of 1,000 rows, as published sets have them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with source.open("rb") as lines:
        writer = None
        while rows := [orjson.loads(line) for line in islice(lines, 1000)]:
            table = pa.Table.from_pylist(rows)
            writer = writer or pq.ParquetWriter(packed, table.schema)
            writer.write_table(table)
        assert writer is not None
        writer.close()


def check_branches(folder: Path, rows: int) -> list[tuple[str, ...]]:
    """128 bare repositories of 460 branches, asked once each, for all rows."""
    repositories = folder / "repositories"
    each = max(rows // REPOSITORIES, 1)
    for number in range(REPOSITORIES):
        place = repositories / f"r{number}.git"
        subprocess.run(["git", "init", "-q", "--bare", str(place)], check=True)
        feed = "commit refs/heads/main\ncommitter a <a> 0 +0000\ndata 1\nx\n" + "".join(
            f"reset refs/heads/i{number + n * REPOSITORIES}\nfrom refs/heads/main\n\n" for n in range(each)
        )
        subprocess.run(["git", "fast-import", "--quiet"], cwd=place, input=feed.encode(), check=True)
    done = trial(BRANCHES, str(repositories), str(each))
    asked, _, seconds = done.output.split()
    what = f"branches of {REPOSITORIES} repositories for {int(asked):,} rows (imports apart: {float(seconds):.2f} s)"
    return [(what, *done.cells(), "")]


def synthesise(folder: Path, packages: list[str]) -> list[tuple[str, ...]]:
    """Search for bugs in real packages, every one validated by its tests, with an empty memory of trials."""
    script = """
import sys
from pathlib import Path
from data_pipeline import commands
print(commands.synth(out=Path(sys.argv[1]), pypi=sys.argv[2:], tasks_per_package=20, workers=2)["tasks"])
"""
    os.environ["SWEL_HOME"] = str(folder / "home")
    done = trial(script, str(folder / "synth"), *packages)
    count = int(done.output.split()[-1])
    rate = f"{60 * count / done.wall_s:.0f} tasks/min"
    return [(f"`swel data synth`: {count} validated tasks, download included", *done.cells(), rate)]


def _lines(file: Path) -> int:
    with file.open("rb") as stream:
        return sum(1 for _ in stream)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["filter", "branches", "synth"], action="append")
    parser.add_argument("--rows", type=int, default=59_136)
    parser.add_argument("--package", action="append", help="NAME==VERSION for the synthesis")
    options = parser.parse_args()
    parts: dict[str, Callable[[Path], list[tuple[str, ...]]]] = {
        "filter": lambda folder: compare_filters(folder, options.rows),
        "branches": lambda folder: check_branches(folder, options.rows),
        "synth": lambda folder: synthesise(folder, options.package or ["inflection==0.5.1"]),
    }
    load = os.getloadavg()[0]
    rows = []
    for name, part in parts.items():
        if not options.only or name in options.only:
            with tempfile.TemporaryDirectory() as folder:
                rows += part(Path(folder))
    print(f"`python benchmarks/data.py`, {os.cpu_count()} cores, load {load:.1f} before the start\n")
    print("| what | wall | CPU | resident / private | faster |\n|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
