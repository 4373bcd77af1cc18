"""What a box costs, beside what it replaces: a copied directory with a subprocess, and stock `docker run`.

    python benchmarks/sandbox.py                                   # local, and docker where a daemon answers
    python benchmarks/sandbox.py --image my-image:tag              # the image docker boxes are made from
    python benchmarks/sandbox.py --cycles 5000                     # soak: create, run, diff, destroy; what is left?

Every row is the median of its trials on a tree of 500 files, the ways taken in turns, so that other load on the machine
falls on all of them alike. The table is Markdown. What it does not cover: images that must be pulled, cold caches, and
rollouts (a harness spends seconds between two commands).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from swe_lightning import paths
from swe_lightning.errors import SwelError
from swe_lightning.sandbox import Backend, Limits, cgroups
from swe_lightning.sandbox.local import LocalBackend

LIMITS = Limits(cpu=1, memory_mb=256, pids=64, disk_mb=64)
TARGETS = {("local", "create"): 60.0, ("local", "run"): 8.0, ("docker", "create"): 400.0}
"""Milliseconds."""
STEPS = ("create", "run", "diff", "destroy")
PATIENCE_S = 10.0
DOCKER_AT_ONCE = 8
"""Containers: what a daemon takes without refusing."""
EDIT = "echo changed >>pkg/m007.py; rm pkg/m008.py"


def make_tree(place: Path, files: int = 500) -> Path:
    for number in range(files):
        file = (
            place / "pkg" / f"d{number // 50}" / f"m{number:03}.py"
            if number > 20
            else place / "pkg" / f"m{number:03}.py"
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"value = {number}\n" * 40)
    return place


@dataclass
class Way:
    """One way to run commands on a copy of a tree: seconds of each step of one trial."""

    name: str
    trial: Callable[[], dict[str, float]]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {step: [] for step in STEPS})
    together: int = 0
    at_once: float = 0.0

    def median_ms(self, step: str) -> float | None:
        values = self.seconds[step]
        return statistics.median(values) * 1e3 if values else None


@contextlib.contextmanager
def timed(into: dict[str, float], step: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    into[step] = time.perf_counter() - began


def box_trial(backend: Backend, tree: Path) -> dict[str, float]:
    taken: dict[str, float] = {}
    with timed(taken, "create"):
        box = backend.create(tree, limits=LIMITS, label="bench")
    try:
        box.run(EDIT, timeout_s=60)
        with timed(taken, "run"):
            box.run("true", timeout_s=60)
        with timed(taken, "diff"):
            assert len(box.diff()) == 2
    finally:
        with timed(taken, "destroy"):
            box.destroy()
    return taken


def copy_trial(tree: Path) -> dict[str, float]:
    """`cp -r`, subprocess, `diff -r`, `rm -r`: no walls at all."""
    taken: dict[str, float] = {}
    place = Path(tempfile.mkdtemp())
    copy = place / "tree"
    with timed(taken, "create"):
        subprocess.run(["cp", "-r", str(tree), str(copy)], check=True)
    subprocess.run(["bash", "-c", EDIT], cwd=copy, check=True)
    with timed(taken, "run"):
        subprocess.run(["bash", "-c", "true"], cwd=copy, check=True)
    with timed(taken, "diff"):
        assert subprocess.run(["diff", "-rq", str(tree), str(copy)], capture_output=True).stdout.count(b"\n") == 2
    with timed(taken, "destroy"):
        subprocess.run(["rm", "-r", str(place)], check=True)
    return taken


def docker_cli_trial(tree: Path, image: str) -> dict[str, float]:
    """What a script would do: docker run -d, docker cp, docker exec, docker diff, docker rm -f."""
    taken: dict[str, float] = {}

    def docker(*arguments: str) -> str:
        return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout.strip()

    with timed(taken, "create"):
        name = docker("run", "-d", "--network", "none", "--entrypoint", "sleep", image, "600")
        docker("cp", f"{tree}/.", f"{name}:/work")
    try:
        docker("exec", "-w", "/work", name, "bash", "-c", EDIT)
        with timed(taken, "run"):
            docker("exec", name, "bash", "-c", "true")
        with timed(taken, "diff"):
            docker("diff", name)
    finally:
        with timed(taken, "destroy"):
            docker("rm", "-f", name)
    return taken


def at_once(trial: Callable[[], dict[str, float]], count: int) -> float:
    """Seconds until `count` boxes, started together, have done their work and are gone."""
    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(trial) for _ in range(count)]:
            done.result()
    return time.perf_counter() - began


def docker_ways(tree: Path, image: str) -> list[Way]:
    """Nothing where no daemon answers, with the reason."""
    from swe_lightning.sandbox.docker import DockerBackend

    try:
        backend = DockerBackend(image=image)
        backend.create(tree, limits=LIMITS).destroy()
    except SwelError as error:
        print(f"docker left out: {error}", file=sys.stderr)
        return []
    ways = [Way("docker", lambda: box_trial(backend, tree))]
    if shutil.which("docker"):
        ways.append(Way("docker run + docker exec", lambda: docker_cli_trial(tree, image)))
    return ways


def compare(tree: Path, image: str, trials: int, together: int, budget_s: float) -> list[Way]:
    backend = LocalBackend()
    ways = [Way("local", lambda: box_trial(backend, tree)), Way("cp -r + subprocess", lambda: copy_trial(tree))]
    ways += docker_ways(tree, image)
    for way in ways:
        way.trial()  # launcher, caches, hardened image
    ends = time.monotonic() + budget_s / 2
    for number in range(trials):
        for way in ways:
            if number < 5 or time.monotonic() < ends:
                for step, seconds in way.trial().items():
                    way.seconds[step].append(seconds)
    for way in ways:
        way.together = together if way.name in ("local", "cp -r + subprocess") else min(together, DOCKER_AT_ONCE)
        way.at_once = at_once(way.trial, way.together)
    backend.close()
    return ways


def table(ways: list[Way]) -> str:
    lines = [f"| | {' | '.join(STEPS)} | trials | many at once, all steps |", "|---" * (len(STEPS) + 3) + "|"]
    for way in ways:
        cells = [cell(way.median_ms(step), TARGETS.get((way.name, step))) for step in STEPS]
        many = f"{way.together} in {way.at_once:.2f} s"
        lines.append(f"| {way.name} | {' | '.join(cells)} | {len(way.seconds['run'])} | {many} |")
    return "\n".join(lines)


def cell(value: float | None, target: float | None) -> str:
    if value is None:
        return "-"
    missed = ", missed" if target is not None and value > target else ""
    return f"{value:.1f} ms" + (f" (target {target:g}{missed})" if target is not None else "")


# -- soak


def traces() -> dict[str, int]:
    """Everything that boxes of this process could leave behind, counted."""
    temporary = Path(tempfile.gettempdir())
    processes = [p for p in Path("/proc").glob("[0-9]*") if _parent_chain_has(p, os.getpid())]
    return {
        "processes": len(processes),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "cgroups": sum(1 for parent in cgroups._parents(os.geteuid()) for _ in parent.glob(f"{os.getpid()}-*")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "temporary files": len(list(temporary.iterdir())),
        "records": len(list((paths.home() / "boxes").glob("*.json"))) if (paths.home() / "boxes").exists() else 0,
        "threads": len(os.listdir("/proc/self/task")),
    }


def _parent_chain_has(process: Path, ancestor: int) -> bool:
    pid = int(process.name)
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            pid = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return False
    return False


def memory_mb() -> float:
    """Of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def soak(backend: Backend, tree: Path, cycles: int, workers: int, say: Callable[[str], None] = print) -> dict[str, int]:
    """What `cycles` boxes left behind: the difference of every trace, after minus before."""
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(box_trial, backend, tree) for _ in range(2 * workers)]:
            done.result()
        before, memory, began = traces(), memory_mb(), time.perf_counter()
        for start in range(0, cycles, 500):
            count = min(500, cycles - start)
            for done in [pool.submit(box_trial, backend, tree) for _ in range(count)]:
                done.result()
            say(f"{start + count} cycles, {time.perf_counter() - began:.0f} s, {memory_mb() - memory:+.1f} MiB")
        until = time.monotonic() + PATIENCE_S
        while (after := traces()) != before and time.monotonic() < until:
            time.sleep(0.05)  # the kernel ends namespaces in its own time
    return {name: after[name] - before[name] for name in before}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--image", default=os.environ.get("SWEL_TEST_IMAGE", "swel-test-box:py311"))
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--at-once", type=int, default=200)
    parser.add_argument("--budget-s", type=float, default=120, help="Seconds for the trials, roughly.")
    parser.add_argument("--cycles", type=int, default=0, help="Soak instead: this many boxes, then count what is left.")
    parser.add_argument("--backend", choices=("local", "docker"), default="local", help="Of the soak.")
    parser.add_argument("--workers", type=int, default=4, help="Of the soak.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        tree = make_tree(Path(place) / "tree")
        tempfile.tempdir = place  # nobody else's files are counted
        print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, uid {os.geteuid()}", file=sys.stderr)
        if not options.cycles:
            print(table(compare(tree, options.image, options.trials, options.at_once, options.budget_s)))
            return 0
        backend: Backend = LocalBackend()
        if options.backend == "docker":
            from swe_lightning.sandbox.docker import DockerBackend

            backend = DockerBackend(image=options.image)
        left = soak(backend, tree, options.cycles, options.workers)
    print("| left behind | count |\n|---|---|")
    for name, count in left.items():
        print(f"| {name} | {count} |")
    return 1 if any(count > 0 for count in left.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
