"""Exports of a task's branch: exact, without history, made once, whole or absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swe_lightning import paths
from swe_lightning.errors import DataError, MissingPart
from swe_lightning.records import Task
from swe_lightning.sandbox.trees import agent_tree, pristine_tree


def git(repository: Path, *arguments: str) -> str:
    argv = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(repository), *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A branch as the synthesiser leaves it, with every trap an export could fall into."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    (root / ".gitattributes").write_text("tests export-ignore\nversion export-subst\n*.txt text eol=crlf\n")
    (root / "version").write_text("$Format:%H$\n")
    (root / "crlf.txt").write_text("a\nb\n")
    (root / "m.py").write_text("fixed\n")
    (root / "bin").mkdir()
    (root / "bin/run").write_text("#!/bin/sh\n")
    (root / "bin/run").chmod(0o755)
    (root / "link").symlink_to("m.py")
    (root / "dangling").symlink_to("/nowhere/at/all")
    (root / "tests").mkdir()
    (root / "tests/test_m.py").write_text("hidden\n")
    (root / "new\nline").write_bytes(b"\xff\x00")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "Initial")
    git(root, "checkout", "-qb", "pkg__1.lm")
    (root / "m.py").write_text("buggy\n")
    git(root, "commit", "-qam", "Bug Patch")
    git(root, "rm", "-q", "tests/test_m.py")
    git(root, "commit", "-qm", "Remove F2P Tests")
    git(root, "checkout", "-q", "main")
    git(root, "tag", "pkg__1.lm")  # a tag of the same name must not be taken for the branch
    return root


@pytest.fixture
def task(repository: Path) -> Task:
    return Task(instance_id="pkg__1.lm", repo="pkg", repo_path=str(repository))


def test_the_agents_tree_lacks_the_tests_and_pristine_has_them(task: Task) -> None:
    hidden, shown, pristine = agent_tree(task, show_tests=False), agent_tree(task, show_tests=True), pristine_tree(task)
    assert (hidden / "m.py").read_text() == (pristine / "m.py").read_text() == "buggy\n"
    assert not (hidden / "tests").exists()
    assert (pristine / "tests/test_m.py").read_text() == "hidden\n"
    assert shown == pristine


def test_contents_modes_and_links_are_exact(task: Task) -> None:
    tree = pristine_tree(task)
    assert (tree / "version").read_text() == "$Format:%H$\n"
    assert (tree / "crlf.txt").read_bytes() == b"a\nb\n"
    assert (tree / "new\nline").read_bytes() == b"\xff\x00"
    assert [(tree / name).lstat().st_mode & 0o7777 for name in ("bin/run", "m.py", "bin")] == [0o755, 0o644, 0o755]
    assert [os.readlink(tree / name) for name in ("link", "dangling")] == ["m.py", "/nowhere/at/all"]
    assert list(tree.rglob(".git")) == []


def test_equal_trees_are_exported_once(task: Task, repository: Path) -> None:
    first = pristine_tree(task)
    git(repository, "branch", "other", "refs/heads/pkg__1.lm")
    inode = first.stat().st_ino
    same = pristine_tree(task.model_copy(update={"instance_id": "other"}))
    assert (same, same.stat().st_ino) == (first, inode)


def test_a_private_umask_does_not_make_trees_private(task: Task) -> None:
    before = os.umask(0o077)
    try:
        tree = agent_tree(task, show_tests=False)
    finally:
        os.umask(before)
    assert tree.stat().st_mode & 0o777 == 0o755
    assert (tree / "bin").stat().st_mode & 0o777 == 0o755


def test_processes_export_the_same_tree_at_once(task: Task, tmp_path: Path) -> None:
    script = (
        "import sys; from swe_lightning.records import Task; from swe_lightning.sandbox.trees import pristine_tree;"
        "tree = pristine_tree(Task.model_validate_json(sys.argv[1])); print(tree, len(list(tree.rglob('*'))))"
    )
    env = {**os.environ, "SWEL_HOME": str(tmp_path / "home")}
    argv = [sys.executable, "-c", script, task.model_dump_json()]
    running = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) for _ in range(4)]
    answers = {p.communicate(timeout=60)[0] for p in running}
    assert len(answers) == 1
    assert answers.pop().strip().endswith(" 11")
    assert [p.name for p in (tmp_path / "home/trees").iterdir() if p.name.startswith(".")] == []


def test_an_export_that_fails_leaves_nothing(task: Task, repository: Path) -> None:
    (repository / "m.py").write_text("only here\n")
    git(repository, "checkout", "-qf", "refs/heads/pkg__1.lm")
    (repository / "m.py").write_text("a blob of its own\n")
    git(repository, "add", "m.py")
    git(repository, "checkout", "-qb", "broken")
    for subject in ("Bug Patch", "Remove F2P Tests"):
        git(repository, "commit", "-q", "--allow-empty", "-m", subject)
    blob = git(repository, "rev-parse", "broken:m.py").strip()
    (repository / ".git/objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(DataError, match=r"cannot read|does not hold"):
        agent_tree(task.model_copy(update={"instance_id": "broken"}), show_tests=False)
    tree_id = git(repository, "rev-parse", "broken^{tree}").strip()
    assert [
        p.name for p in (paths.home() / "trees").iterdir() if tree_id in p.name and not p.name.endswith("lock")
    ] == []


def test_mistakes_in_a_task_are_one_sentence(task: Task, repository: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"repo_path": None}, MissingPart, "no repo_path"),
        ({"repo_path": str(tmp_path / "none")}, DataError, "no repository"),
        ({"instance_id": "absent"}, DataError, "no branch absent"),
        ({"instance_id": "main"}, DataError, "must end in the commits"),
    ]
    for change, error, words in cases:
        with pytest.raises(error, match=words):
            agent_tree(task.model_copy(update=change), show_tests=False)


def test_a_repository_of_somebody_else_can_be_read(task: Task, repository: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to change an owner")
    for path in [repository, *repository.rglob("*")]:
        os.chown(path, 12345, 12345, follow_symlinks=False)
    assert (agent_tree(task, show_tests=False) / "m.py").exists()
