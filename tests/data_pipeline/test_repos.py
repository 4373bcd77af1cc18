"""Branches of a task repository, read back with git itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from data_pipeline.repos import (
    Branch,
    branch_names,
    bug_patches,
    build_repository,
    clean_commit_of,
    git,
    without_tests,
)
from data_pipeline.trees import Entry, Tree
from swe_lightning.errors import DataError

TREE: Tree = {
    "pkg/core.py": Entry(b"def f(a):\n    return a == 1\n"),
    "pkg-extra": Entry(b"sorts between pkg and pkg/\n"),
    "run.sh": Entry(b"#!/bin/sh\n", "100755"),
    "link": Entry(b"pkg/core.py", "120000"),
    "tests/test_core.py": Entry(b"def test_a():\n    pass\n\n\ndef test_b():\n    pass\n"),
    'odd "name" \xe9\n.txt': Entry(b"\x00\xff"),
}
BUG = {"pkg/core.py": b"def f(a):\n    return a != 1\n"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    target = tmp_path / "repos" / "r.git"
    removed = without_tests(TREE, ["tests/test_core.py::test_a"])
    build_repository(TREE, [Branch("o__n.12345678.equality__aa", BUG, removed), Branch("other", BUG)], target)
    return target


def test_commits_of_a_branch(repository: Path) -> None:
    subjects = git("log", "--format=%s", "o__n.12345678.equality__aa", cwd=repository).splitlines()
    assert subjects == ["Remove F2P Tests", "Bug Patch", "Clean tree"]
    changed = git("diff", "--name-only", "main", "o__n.12345678.equality__aa~1", cwd=repository).split()
    assert changed == ["pkg/core.py"]
    tip = git("show", "o__n.12345678.equality__aa:tests/test_core.py", cwd=repository)
    assert "test_a" not in tip
    assert "def test_b" in tip
    assert branch_names(repository) == {"main", "o__n.12345678.equality__aa", "other"}


def test_hashes_are_the_same_everywhere_and_known_beforehand(repository: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.git"
    removed = without_tests(TREE, ["tests/test_core.py::test_a"])
    build_repository(TREE, [Branch("o__n.12345678.equality__aa", BUG, removed)], again)
    for name in ("main", "o__n.12345678.equality__aa"):
        assert git("rev-parse", name, cwd=again) == git("rev-parse", name, cwd=repository)
    assert git("rev-parse", "main", cwd=repository).strip() == clean_commit_of(TREE)


def test_modes_links_and_odd_names_survive(repository: Path) -> None:
    listing = subprocess.run(
        ["git", "ls-tree", "-r", "-z", "main"], cwd=repository, capture_output=True, check=True
    ).stdout.split(b"\0")
    modes = {line.split(b"\t")[1].decode(): line.split()[0].decode() for line in listing if line}
    assert modes == {path: entry.mode for path, entry in TREE.items()}
    assert subprocess.run(["git", "fsck", "--strict"], cwd=repository, check=False, capture_output=True).returncode == 0


def test_patch_introduces_the_bug(repository: Path) -> None:
    patches = bug_patches(repository, ["other", "o__n.12345678.equality__aa"])
    assert patches["other"] == patches["o__n.12345678.equality__aa"]
    assert patches["other"].endswith("-    return a == 1\n+    return a != 1\n")


def test_an_unchanged_repository_is_left_alone(repository: Path) -> None:
    before = (repository / "HEAD").stat().st_mtime_ns
    removed = without_tests(TREE, ["tests/test_core.py::test_a"])
    build_repository(TREE, [Branch("o__n.12345678.equality__aa", BUG, removed), Branch("other", BUG)], repository)
    assert (repository / "HEAD").stat().st_mtime_ns == before
    build_repository(TREE, [Branch("new", BUG)], repository)
    assert branch_names(repository) == {"main", "new"}


def test_hundreds_of_branches_in_seconds(tmp_path: Path) -> None:
    branches = [Branch(f"b{n}", {"pkg/core.py": b"x = %d\n" % n}) for n in range(500)]
    build_repository(TREE, branches, tmp_path / "big.git")
    assert len(branch_names(tmp_path / "big.git")) == 501


def test_no_repository_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a git repository"):
        branch_names(tmp_path / "absent")


REMOVALS = [
    ("plain", b"def test_a():\n    x\n\ndef test_b():\n    y\n", ["t.py::test_a"], b"\ndef test_b():\n    y\n"),
    ("decorated", b"@d\n@e(\n 1)\ndef test_a():\n    x\nK = 1\n", ["t.py::test_a[1-2]"], b"K = 1\n"),
    ("method", b"class T:\n    def test_a(self): pass\n    z = 1\n", ["t.py::T::test_a"], b"class T:\n    z = 1\n"),
    ("last method", b"class T:\n    def test_a(self):\n        pass\n", ["t.py::T::test_a"], b"class T:\n    pass\n"),
    ("same name elsewhere", b"def test_a():\n    x\nclass T:\n    def test_a(self): y\n", ["t.py::T::test_a"],
     b"def test_a():\n    x\nclass T:\n    pass\n"),
    ("async under if", b"if A:\n    async def test_a(): x\nelse:\n    z = 1\n", ["t.py::test_a"],
     b"if A:\n    pass\nelse:\n    z = 1\n"),
    ("twice", b"def test_a(): x\ndef test_a(): y\nz = 1\n", ["t.py::test_a"], b"z = 1\n"),
]  # fmt: skip


@pytest.mark.parametrize(("_", "source", "ids", "expected"), REMOVALS, ids=[r[0] for r in REMOVALS])
def test_removal_of_failing_tests(_: str, source: bytes, ids: list[str], expected: bytes) -> None:
    assert without_tests({"t.py": Entry(source)}, ids) == {"t.py": expected}


@pytest.mark.parametrize("ids", [["t.py::test_inherited"], ["absent.py::test_a"], ["t.py"], []])
def test_what_is_not_written_there_is_not_touched(ids: list[str]) -> None:
    assert without_tests({"t.py": Entry(b"def test_a():\n    pass\n")}, ids) == {}
