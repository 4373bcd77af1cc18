"""A small package with a bug, in a git repository laid out like the ones `swel data synth` writes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from swe_lightning import recipe
from swe_lightning.grading import Grader
from swe_lightning.records import Task
from swe_lightning.sandbox.local import LocalBackend

CLEAN = {
    "calc/__init__.py": "from calc.core import add, mul\n",
    "calc/core.py": "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n",
    "tests/__init__.py": "",
    "tests/test_add.py": "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n",
    "tests/test_mul.py": "from calc import mul\n\n\ndef test_mul():\n    assert mul(2, 3) == 6\n",
    "pyproject.toml": "[project]\nname = 'calc'\nversion = '1'\n",
    "notes.txt": "one\ntwo\n",
}
BUG = {"calc/core.py": CLEAN["calc/core.py"].replace("a + b", "a - b")}
FIX = BUG["calc/core.py"].replace("a - b", "a + b").encode()


def git(repository: Path, *arguments: str, **options: str) -> str:
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{who}_NAME": "t", f"GIT_{who}_EMAIL": "t@t"}
    argv = ["git", "-C", str(repository), *arguments]
    return subprocess.run(argv, env=env, check=True, capture_output=True, text=True, input=options.get("feed")).stdout


def make_task(place: Path, *, clean: dict[str, str] = CLEAN, bug: dict[str, str] = BUG, **columns: object) -> Task:
    """Commits [clean] <- Bug Patch <- Remove F2P Tests on a branch named after the instance."""
    name = "calc__calc.1.bug0"
    place.mkdir(parents=True, exist_ok=True)
    git(place, "init", "-q", "-b", "main")

    def commit(files: dict[str, str | None], subject: str) -> None:
        for path, text in files.items():
            file = place / path
            if text is None:
                file.unlink()
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode())
        git(place, "add", "-A")
        git(place, "commit", "-q", "--allow-empty", "-m", subject)

    commit(dict(clean), "base")
    git(place, "checkout", "-q", "-b", name)
    commit(dict(bug), "Bug Patch")
    patch = git(place, "diff", "HEAD~1", "HEAD")
    commit({"tests/test_add.py": None}, "Remove F2P Tests")
    values = {
        "instance_id": name,
        "repo": "calc",
        "patch": patch,
        "FAIL_TO_PASS": ["tests/test_add.py::test_add"],
        "PASS_TO_PASS": ["tests/test_mul.py::test_mul"],
        "repo_path": str(place),
        "test_cmd": "python -m pytest -q",
    }
    return Task.model_validate({**values, **columns})


@pytest.fixture(scope="session")
def backend() -> LocalBackend:
    return LocalBackend()


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(tmp_path_factory.mktemp("repositories") / "calc")


@pytest.fixture(scope="session")
def grader(backend: LocalBackend) -> Grader:
    return Grader(backend, recipe.Grading(timeout_s=60))
