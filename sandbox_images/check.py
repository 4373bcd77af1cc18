"""Is an image fit for an agent? Asked from inside a real box of it, before a run, not after a week of wrong rewards.

The shell prints nothing by itself; the Python it finds is the one whose tests run; the package imports, and from the
tree, not from an installed copy that holds the fix; the tests can be collected.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swe_lightning.errors import SwelError
from swe_lightning.records import Task
from swe_lightning.sandbox.base import TREE_ROOT, Limits, Sandbox
from swe_lightning.sandbox.docker import DockerBackend
from swe_lightning.sandbox.trees import pristine_tree

LIMITS = Limits(cpu=2, memory_mb=4096, pids=256, disk_mb=1024)
NOT_PACKAGES = {"tests", "test", "docs", "doc", "examples", "benchmarks", "scripts", "tools", "build", "dist"}


@dataclass(frozen=True)
class Finding:
    image: str
    check: str
    ok: bool
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_image(image: str, task: Task | None = None) -> list[Finding]:
    """Findings in the order of the checks; with a task also those about its package and its tests."""
    found: list[Finding] = []

    def note(check: str, ok: bool, detail: str = "") -> None:
        found.append(Finding(image, check, ok, "" if ok else " ".join(detail.split())[-300:]))

    backend = DockerBackend()
    try:
        with tempfile.TemporaryDirectory() as empty:
            tree = pristine_tree(task) if task else Path(empty)
            with backend.create(tree, image=image, limits=LIMITS, label="check") as box:
                note("starts", True)
                silent = _say(box, "bash -c true; true")[1]
                note("a shell prints nothing by itself", silent == "", silent)
                code, where = _say(box, "command -v python && python -c 'import sys; print(sys.version_info[:2])'")
                note("python is found", code == 0, where)
                code, where = _say(box, "git --version")
                note("there is no git", code == 127, where)
                if task:
                    _check_task(box, task, tree, note)
    except SwelError as error:
        note("starts", False, str(error))
    finally:
        backend.close()
    return found


def _check_task(box: Sandbox, task: Task, tree: Path, note: Any) -> None:
    for package in packages(tree):
        source = f"import {package}, sys; print(getattr({package}, '__file__', None) or list({package}.__path__)[0])"
        code, said = _say(box, f'python -c "{source}"')
        last = said.strip().rpartition("\n")[2]
        note(f"{package} imports", code == 0, said)
        if code == 0:
            note(f"{package} is the tree's own", last.startswith(TREE_ROOT + "/"), f"imported from {last}")
    code, said = _say(box, f"{task.test_cmd or 'python -m pytest -q'} --collect-only", 300)
    note("the tests start", code in (0, 2, 5) and "No module named" not in said, said)


def packages(tree: Path) -> list[str]:
    """Top-level packages of a source tree, in `src` or beside it."""
    root = tree / "src" if (tree / "src").is_dir() else tree
    names = sorted(p.parent.name for p in root.glob("*/__init__.py"))
    return [name for name in names if name.isidentifier() and name not in NOT_PACKAGES][:3]


def _say(box: Sandbox, command: str, timeout_s: float = 60) -> tuple[int, str]:
    result = box.run(command, timeout_s=timeout_s)
    return result.exit_code, result.output.decode(errors="replace")
