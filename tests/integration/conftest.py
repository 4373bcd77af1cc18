"""A repository with one bug, in the layout of `swel data synth`, and task files that point to it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

RIGHT = "def total(a, b):\n    return a + b\n"
TEST = "from shop import total\n\n\ndef test_total():\n    assert total(2, 3) == 5\n"
OTHER = "from shop import total\n\n\ndef test_nothing():\n    assert total(0, 0) == 0\n"
INSTANCE = "shop.plus_minus"


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, then `Bug Patch`, then `Remove F2P Tests`, on a branch named like the instance."""
    path = tmp_path_factory.mktemp("shop")

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=path, check=True, capture_output=True)

    (path / "tests").mkdir()
    for name, text in {"shop.py": RIGHT, "tests/test_total.py": TEST, "tests/test_other.py": OTHER}.items():
        (path / name).write_text(text)
    git("init", "-q", "-b", INSTANCE)
    git("add", "-A")
    git("commit", "-q", "-m", "base")
    (path / "shop.py").write_text(RIGHT.replace("+", "-"))
    git("commit", "-q", "-am", "Bug Patch")
    git("rm", "-q", "tests/test_total.py")
    git("commit", "-q", "-m", "Remove F2P Tests")
    git("branch", "shop.held_out")
    return path


@pytest.fixture(scope="session")
def task(repository: Path) -> dict[str, Any]:
    return {
        "instance_id": INSTANCE,
        "repo": "shop",
        "repo_path": str(repository),
        "problem_statement": "Totals are wrong.",
        "FAIL_TO_PASS": ["tests/test_total.py::test_total"],
        "PASS_TO_PASS": ["tests/test_other.py::test_nothing"],
        "test_cmd": "python -m pytest -q",
        "test_env": {"PYTHONPATH": "."},
        "bug_file": "shop.py",
        "bug_line": 2,
        "bug_func": "total",
    }


@pytest.fixture(scope="session")
def task_file(task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One training task; `val.jsonl` beside it holds one held-out task."""
    file = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    file.write_text(json.dumps(task) + "\n")
    (file.parent / "val.jsonl").write_text(json.dumps({**task, "instance_id": "shop.held_out"}) + "\n")
    return file
