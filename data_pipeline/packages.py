"""A package to make tasks from: its tree, what it is called, how its tests run, and which files may be broken.

Comes from a source distribution or a local git repository. Refuses packages that the test environment itself contains
(the test runner and what it imports): a fix there would lie in site-packages, not in the tree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from data_pipeline.repos import clean_commit_of
from data_pipeline.sdist import Sdist, fetch, normalise, parse_requirement
from data_pipeline.testbed import TestPlan, installed_in_test_environment
from data_pipeline.trees import Tree, commit_of, read_git, tree_digest
from swe_lightning.errors import DataError

TEST_COMMAND = "python -m pytest -q -p no:cacheprovider -o addopts= --continue-on-collection-errors"
"""`-o addopts=`: options of plugins that are not installed must not stop the run."""

_NOT_SOURCE = re.compile(
    r"(^|/)(tests?|testing|docs?|examples?|benchmarks?|build|scripts|tools|notes|fuzz\w*|vendor|_vendor)(/|$)"
    r"|(^|/)(setup|conftest|noxfile|fabfile|versioneer|tasks|run_?tests?|_version|__main__)\.py$"
    r"|(^|/)(test_[^/]*|[^/]*_tests?)\.py$"
)


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    owner: str
    """`pypi`, or `local` for a repository of the user's."""
    tree: Tree
    plan: TestPlan
    sha256: str | None = None
    commit: str | None = None
    """Of a local repository: the full hash of what was read."""
    role: Literal["train", "held_out"] | None = None
    """Where a manifest or the user says so."""

    @cached_property
    def digest(self) -> str:
        return tree_digest(self.tree)

    @cached_property
    def base_commit(self) -> str:
        return clean_commit_of(self.tree)

    @property
    def slug(self) -> str:
        """First part of instance ids and repository names: owner__name.hash8."""
        return f"{self.owner}__{normalise(self.name)}.{self.base_commit[:8]}"

    @property
    def repo(self) -> str:
        return f"{self.owner}/{normalise(self.name)}"

    def sources(self) -> list[str]:
        """Python files that may be broken: no tests, no packaging, no vendored code."""
        return [
            path
            for path in sorted(self.tree)
            if path.endswith(".py") and self.tree[path].mode != "120000" and not _NOT_SOURCE.search(path)
        ]


def from_sdist(sdist: Sdist, *, command: str | None = None, env: dict[str, str] | None = None) -> Package:
    refuse_test_environment(sdist.package)
    tree = sdist.tree()
    return Package(sdist.package, sdist.version, "pypi", tree, make_plan(tree, command, env), sha256=sdist.sha256)


def from_pypi(requirement: str, *, command: str | None = None, env: dict[str, str] | None = None) -> Package:
    """`NAME==VERSION`"""
    name, version = parse_requirement(requirement)
    refuse_test_environment(name)
    return from_sdist(fetch(name, version), command=command, env=env)


def find_repository(name: str) -> tuple[Path, str]:
    """`PATH` or `PATH@REVISION` -> directory and full commit hash; without a revision, HEAD."""
    directory, revision = Path(name), "HEAD"
    if not directory.is_dir() and "@" in name:
        path, _, revision = name.rpartition("@")
        directory = Path(path)
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory; --repo wants a local git repository, PATH or PATH@REVISION")
    return directory, commit_of(directory, revision)


def from_repository(
    directory: Path, commit: str = "HEAD", *, command: str | None = None, env: dict[str, str] | None = None
) -> Package:
    """One commit of a local git repository; what is not committed stays out."""
    commit = commit_of(directory, commit)
    tree = read_git(directory, commit)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", directory.resolve().name).strip("-.") or "repository"
    refuse_test_environment(name)
    return Package(name, commit[:12], "local", tree, make_plan(tree, command, env), commit=commit)


def make_plan(tree: Tree, command: str | None = None, env: dict[str, str] | None = None) -> TestPlan:
    """The command and environment given, else pytest on a `src` layout or on the root."""
    source_layout = any(path.startswith("src/") and path.endswith(".py") for path in tree)
    return TestPlan(command or TEST_COMMAND, env or {"PYTHONPATH": "src" if source_layout else "."})


def refuse_test_environment(name: str) -> None:
    installed = installed_in_test_environment()
    if normalise(name) in installed:
        raise DataError(
            f"{name} is part of the test environment itself (version {installed[normalise(name)]} is what the test "
            "runner imports), so a bug in its tree would not be the one the tests see; choose another package"
        )
