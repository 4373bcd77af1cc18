"""Tasks from a local git repository: one commit of it, bugs alone and together, issues by a model, made once."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline import commands
from data_pipeline.issue_model import IssueModel
from data_pipeline.manifest import local_backend
from data_pipeline.packages import find_repository
from data_pipeline.repos import git
from data_pipeline.sources import load_tasks
from swe_lightning.errors import DataError, UpstreamError
from swe_lightning.grading.commands import gold_changes
from swe_lightning.grading.grade import Grader
from swe_lightning.recipe import Grading, SandboxSection
from swe_lightning.sandbox import FileState, make_backend

from .conftest import Server

ISSUE = "Results are wrong\n\nAfter an update some calls return values that do not fit what the documentation promises."
SHAPES = '''\
def area(width, height):
    """Of a rectangle."""
    return width * height


def is_square(width, height):
    return width == height
'''
SHAPE_TESTS = """\
from shapes import area, is_square


def test_area():
    assert area(2, 3) == 6


def test_square():
    assert is_square(2, 2)


def test_no_square():
    assert not is_square(2, 3)


def test_types():
    assert isinstance(area(1, 1), int)
"""


@pytest.fixture
def repository(small_repository: Path) -> Path:
    """The small package and a second module, tagged v1; HEAD has no usable test any more."""
    (small_repository / "shapes.py").write_text(SHAPES)
    (small_repository / "tests" / "test_shapes.py").write_text(SHAPE_TESTS)
    commit(small_repository, "second module")
    subprocess.run(["git", "tag", "v1"], cwd=small_repository, check=True)
    for file in (small_repository / "tests").iterdir():
        file.unlink()
    commit(small_repository, "tests go")
    return small_repository


def commit(directory: Path, message: str) -> None:
    subprocess.run(["git", "add", "-A"], cwd=directory, check=True)
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    subprocess.run(["git", *identity, "commit", "-q", "-m", message], cwd=directory, check=True)


class Counting:
    """The local backend; counts what runs in its boxes: two commands for each run of tests."""

    def __init__(self) -> None:
        self.commands, self._backend = 0, local_backend()

    def create(self, *arguments: Any, **options: Any) -> Any:
        box = self._backend.create(*arguments, **options)
        run = box.run

        def counted(*arguments: Any, **options: Any) -> Any:
            self.commands += 1
            return run(*arguments, **options)

        box.run = counted
        return box


def test_a_commit_becomes_tasks_once(
    repository: Path,
    session_home: Path,
    serve: Callable[..., Server],
    tmp_path: Path,
) -> None:
    server, boxes = serve(ISSUE), Counting()
    order: dict[str, Any] = {
        "out": tmp_path / "out",
        "repo": f"{repository}@v1",
        "tasks_per_package": 5,
        "combinations": 2,
        "seed": 2,
        "issue_model": IssueModel(server.url, "a-model"),
        "backend": boxes,
    }
    result = commands.synth(**order)
    assert boxes.commands >= 2 * 2 * 7
    tasks = load_tasks(tmp_path / "out" / "tasks.jsonl")
    together = [task for task in tasks if task.model_extra and task.model_extra["strategy"].startswith("combine_")]
    assert (result["tasks"], result["reused"], len(tasks), len(together)) == (7, False, 7, 2)
    head = git("rev-parse", "v1", cwd=repository).strip()
    assert all(task.model_extra["source_commit"] == head for task in tasks)
    assert {task.problem_statement for task in tasks} == {ISSUE + "\n"}
    assert len(server.asked) == 7
    for task in tasks:
        check_branch(task)
    for task in together:
        check_every_repair_is_needed(task)

    before, boxes.commands = (tmp_path / "out" / "tasks.jsonl").read_bytes(), 0
    again = commands.synth(**order)
    assert (again["reused"], again["tasks"], boxes.commands, len(server.asked)) == (True, 7, 0, 7)
    # Broken off just before its end: what ran and what was written is remembered, so that it comes out the same.
    (tmp_path / "out" / "synth.json").unlink()
    (tmp_path / "out" / "tasks.jsonl").unlink()
    assert commands.synth(**{**order, "workers": 1})["reused"] is False
    assert ((tmp_path / "out" / "tasks.jsonl").read_bytes(), len(server.asked)) == (before, 7)
    assert boxes.commands <= 8, "only what was tried ahead, and given up when there was enough, may run"
    # Damaged: made anew.
    (tmp_path / "out" / "tasks.jsonl").write_bytes(before[:-40])
    assert commands.synth(**order)["reused"] is False
    assert (tmp_path / "out" / "tasks.jsonl").read_bytes() == before
    with pytest.raises(DataError, match=r"made with other options \(options\.seed\)"):
        commands.synth(**{**order, "seed": 3})
    assert (tmp_path / "out" / "tasks.jsonl").read_bytes() == before


def check_branch(task: Any) -> None:
    subjects = git("log", "--format=%s", task.instance_id, cwd=Path(task.repo_path)).splitlines()
    assert subjects == ["Remove F2P Tests", "Bug Patch", "Clean tree"]
    changed = git("diff", "--name-only", f"{task.instance_id}~2", f"{task.instance_id}~1", cwd=Path(task.repo_path))
    sites = (task.model_extra or {}).get("bug_sites") or [{"file": task.bug_file}]
    assert set(changed.split()) == {site["file"] for site in sites}
    tests = git("diff", "--name-only", f"{task.instance_id}~1", task.instance_id, cwd=Path(task.repo_path)).split()
    assert set(tests) == {test.split("::")[0] for test in task.FAIL_TO_PASS}


def check_every_repair_is_needed(task: Any) -> None:
    """The whole fix resolves the task; the fix of one line alone does not."""
    grader = Grader(make_backend(SandboxSection(memory_mb=1024)), Grading(timeout_s=60))
    assert grader.grade(task, gold_changes(task)).resolved
    clean = {
        s["file"]: git("show", f"main:{s['file']}", cwd=Path(task.repo_path)) for s in task.model_extra["bug_sites"]
    }
    for site in task.model_extra["bug_sites"]:
        broken = git("show", f"{task.instance_id}:{site['file']}", cwd=Path(task.repo_path)).splitlines(keepends=True)
        broken[site["line"] - 1] = clean[site["file"]].splitlines(keepends=True)[site["line"] - 1]
        verdict = grader.grade(task, {site["file"]: FileState("".join(broken).encode(), 0o644)})
        assert not verdict.resolved, site


def test_a_model_that_leaks_costs_the_task_and_one_that_is_away_stops_the_command(
    repository: Path, session_home: Path, serve: Callable[..., Server], tmp_path: Path
) -> None:
    order: dict[str, Any] = {"repo": f"{repository}@v1", "tasks_per_package": 2, "combinations": 0, "workers": 1}
    server = serve(*["It broke."] * 3, ISSUE)
    result = commands.synth(**order, out=tmp_path / "a", issue_model=IssueModel(server.url, "m"))
    assert (result["tasks"], result["rejected"]["issue_empty"]) == (1, 1)
    with pytest.raises(UpstreamError, match="cannot be reached"):
        commands.synth(**order, out=tmp_path / "b", issue_model=IssueModel("http://127.0.0.1:9/v1", "m", pauses_s=()))
    assert not (tmp_path / "b").exists()


def test_revisions(repository: Path, tmp_path: Path) -> None:
    head, first = (git("rev-parse", name, cwd=repository).strip() for name in ("HEAD", "v1"))
    assert find_repository(str(repository)) == (repository, head)
    assert find_repository(f"{repository}@v1") == (repository, first)
    assert find_repository(f"{repository}@{first[:10]}") == (repository, first)
    odd = repository.rename(tmp_path / "odd@name")
    assert find_repository(str(odd)) == (odd, head)
    assert find_repository(f"{odd}@v1") == (odd, first)
    with pytest.raises(DataError, match="no readable git commit v9"):
        find_repository(f"{odd}@v9")
    with pytest.raises(DataError, match="is not a directory; --repo wants"):
        find_repository(f"{tmp_path}/nothing@v1")
    with pytest.raises(DataError, match="no readable git commit --help"):
        find_repository(f"{odd}@--help")


def test_the_record_is_plain_json_without_the_key(
    repository: Path, session_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEL_ISSUE_MODEL_KEY", "sk-very-secret")
    out = tmp_path / "out"
    commands.synth(out=out, repo=f"{repository}@v1", tasks_per_package=1, combinations=0)
    record = json.loads((out / "synth.json").read_text())
    assert record["asked"]["repo"] == [str(repository), git("rev-parse", "v1", cwd=repository).strip()]
    assert all(b"sk-very-secret" not in file.read_bytes() for file in out.rglob("*") if file.is_file())
