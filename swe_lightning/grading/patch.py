"""What a model may change: the filter that keeps its hands off whatever the grader restores.

Dropped before grading, and named in the verdict: tests, their configuration, interpreter hooks, generated files, and
new modules that would stand in for the test runner. What is kept can neither reach a test through a symlink nor
replace a directory that holds tests. `to_patch` and `from_patch` (bytes exact) are in git_patch.py, apply_patch.py.
"""

from __future__ import annotations

import os
import posixpath
import sys
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

from swe_lightning.grading.apply_patch import PatchError, from_patch, is_unsafe, parents, touched_paths
from swe_lightning.grading.eval_command import commands_of, runner_files
from swe_lightning.grading.git_patch import changes_only, to_patch
from swe_lightning.records import Task
from swe_lightning.sandbox import FileState, TreeDiff

__all__ = ["PatchError", "changes_only", "filter_diff", "filter_patch", "from_patch", "to_patch", "why_protected"]

TEST_CONFIG = {
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "tox.toml", "setup.cfg",
}  # fmt: skip
INTERPRETER_HOOKS = ("sitecustomize.py", "usercustomize.py", "*.pth", "*.egg-link", "pyvenv.cfg")
GENERATED = ("*.pyc", "*.pyo", "*.orig", "*.rej")
GENERATED_DIRS = {"__pycache__", ".pytest_cache", ".git", ".hypothesis", ".mypy_cache", ".ruff_cache"}
TEST, LEFT_BEHIND, HARNESS_FILE = "test", "generated", "harness file"
METADATA_DIRS = ("*.dist-info", "*.egg-info", "EGG-INFO")
RUNNER = {
    "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "pkg_resources", "setuptools", "tox",
    "exceptiongroup", "tomli", "toml", "typing_extensions", "attr", "attrs", "six", "more_itertools", "atomicwrites",
    "importlib_metadata", "zipp", "wcwidth", "colorama", "argcomplete", "coverage", "xdist", "execnet", "nose",
    "hypothesis", "_hypothesis_pytestplugin", "_hypothesis_globals", "mock", "parameterized", "numpy", "pandas",
}  # fmt: skip
"""What pytest, its plugins and the assertions of many suites import; a repository that holds one is not concerned."""


def why_protected(path: str, task: Task, base: Path | None = None) -> str | None:
    """Why a model may not change `path` (relative to the tree), or None if it may.

    What lies beneath a protected name is protected too: a directory `conftest.py` would replace the file.
    """
    if is_unsafe(path):
        return "unsafe path"
    reasons = (_why(place, task, base) for place in (*parents(path), path))
    return next((reason for reason in reasons if reason), None)


def _why(path: str, task: Task, base: Path | None) -> str | None:
    parts = path.split("/")
    name = parts[-1]
    if name in TEST_CONFIG:
        return "test configuration"
    if any(fnmatch(name, pattern) for pattern in INTERPRETER_HOOKS):
        return "interpreter hook"
    if name in GENERATED_DIRS or any(fnmatch(name, pattern) for pattern in GENERATED):
        return LEFT_BEHIND
    if any(fnmatch(part, pattern) for part in parts[-2:-1] for pattern in METADATA_DIRS):
        return "plugin registration" if name == "entry_points.txt" else LEFT_BEHIND
    if _is_test(path, parts, task):
        return TEST
    if path in runner_files(commands_of(task)):
        return "test runner"
    if _stands_in(parts, task, base):
        return "stands in for the test runner"
    return None


def _is_test(path: str, parts: list[str], task: Task) -> bool:
    name = parts[-1]
    if "tests" in parts or parts[0] == "test" or path in _task_test_files(task):
        return True
    if name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py") or name == "tests.py"):
        return True
    return any(path == root or path.startswith(root + "/") for root in _test_roots(task))


def _task_test_files(task: Task) -> frozenset[str]:
    return _files_of((*task.FAIL_TO_PASS, *task.PASS_TO_PASS), task.test_patch or "")


@lru_cache(maxsize=64)
def _files_of(test_ids: tuple[str, ...], test_patch: str) -> frozenset[str]:
    ids = {posixpath.normpath(i.split("::", 1)[0].strip()) for i in test_ids if "::" in i}
    return frozenset(ids | set(touched_paths(test_patch.encode("utf-8", "surrogateescape"))))


def _test_roots(task: Task) -> frozenset[str]:
    return _roots_of(_task_test_files(task))


@lru_cache(maxsize=64)
def _roots_of(files: frozenset[str]) -> frozenset[str]:
    """Directories named test, tests or testing that hold a test of the task, outermost first component."""
    roots = set()
    for file in files:
        folders = file.split("/")[:-1]
        for depth, folder in enumerate(folders):
            if folder in ("test", "tests", "testing"):
                roots.add("/".join(folders[: depth + 1]))
                break
    return frozenset(roots)


def _stands_in(parts: list[str], task: Task, base: Path | None) -> bool:
    """A new top-level module with the name of a standard or runner module would be imported in its place."""
    sources = [p for p in task.test_env.get("PYTHONPATH", "").split(":") if p]
    for source in {".", "src", *(posixpath.normpath(s) for s in sources)}:
        inside = parts if source == "." else parts[len(source.split("/")) :]
        if not inside or (source != "." and "/".join(parts[: len(parts) - len(inside)]) != source):
            continue
        module = inside[0].split(".", 1)[0]
        if module not in RUNNER and module not in sys.stdlib_module_names:
            continue
        is_module = len(inside) > 1 or inside[0].endswith((".py", ".so", ".pyd"))
        top = "/".join(parts[: len(parts) - len(inside) + 1])
        if is_module and not (base is not None and os.path.lexists(base / top)):
            return True
    return False


def filter_diff(
    diff: TreeDiff, task: Task, base: Path | None = None, drop: Sequence[str] = ()
) -> tuple[TreeDiff, list[str]]:
    """Split into (what may be applied, sorted paths that may not). `drop` names further paths, for example the
    harness's own files. Without `base`, pyproject.toml is dropped unseen."""
    kept, dropped = sort_out(diff, task, base, drop)
    return kept, sorted(dropped)


def sort_out(
    diff: TreeDiff, task: Task, base: Path | None = None, drop: Sequence[str] = ()
) -> tuple[TreeDiff, dict[str, str]]:
    """Like `filter_diff`, with the reason of each path that may not be applied."""
    kept: TreeDiff = {}
    dropped: dict[str, str] = {}
    for path, state in diff.items():
        reason = HARNESS_FILE if path in drop else why_protected(path, task, base)
        if reason is None and _hides(path, state, diff, task, base):
            reason = "hides protected files"
        project = "pyproject.toml" in path.split("/")
        if reason is None and project and not _same_test_settings(path, state, base):
            reason = "test configuration"
        if reason is None:
            kept[path] = state
        else:
            dropped[path] = f"{reason} {_change(path, state, base)}" if reason == TEST else reason
    return kept, dict(sorted(dropped.items()))


def tampering(dropped: Mapping[str, str]) -> dict[str, str]:
    """What an audit lists: all that was filtered, save the harness's own files and what tools leave behind."""
    return {path: reason for path, reason in dropped.items() if reason not in (HARNESS_FILE, LEFT_BEHIND)}


def _change(path: str, state: FileState | None, base: Path | None) -> str:
    if state is None:
        return "deleted"
    return "changed" if base is not None and os.path.lexists(base / path) else "added"


def _hides(path: str, state: FileState | None, diff: TreeDiff, task: Task, base: Path | None) -> bool:
    """Beneath a symlink, or a file put where the tree has a directory with tests in it."""
    for parent in parents(path):
        above = diff.get(parent)
        if (above is not None and above.symlink) or (
            base is not None and parent not in diff and (base / parent).is_symlink()
        ):
            return True
    if state is None or base is None or not (base / path).is_dir() or (base / path).is_symlink():
        return False
    below = (p.relative_to(base).as_posix() for p in (base / path).rglob("*") if not p.is_dir())
    return any(why_protected(p, task, base) for p in below)


def _same_test_settings(path: str, state: FileState | None, base: Path | None) -> bool:
    if base is None or state is None or state.symlink or not path.endswith("pyproject.toml"):
        return False
    file = base / path
    before = file.read_bytes() if file.is_file() else b""
    try:
        return _test_settings(before) == _test_settings(state.data)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, AttributeError, RecursionError):
        return False


def _test_settings(data: bytes) -> Any:
    """What pytest and tox read of a pyproject.toml, wherever it lies, and the plugins that it registers."""
    table = tomllib.loads(data.decode())
    tools, project = table.get("tool", {}), table.get("project", {})
    plugins = project.get("entry-points", {}).get("pytest11")
    return [tools.get("pytest"), tools.get("tox"), plugins, tools.get("poetry", {}).get("plugins", {}).get("pytest11")]


def filter_patch(patch: bytes, task: Task, base: Path) -> tuple[bytes, list[str]]:
    """`filter_diff` for a patch text. PatchError if it does not apply to `base`."""
    diff, _ = from_patch(base, patch)
    kept, dropped = filter_diff(diff, task, base)
    return to_patch(base, kept), dropped
