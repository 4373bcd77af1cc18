"""Validated bugs -> a task file in the SWE-smith schema beside its git repositories.

    OUT/tasks.jsonl            one row per task; `patch` introduces the bug, `repo_path` is relative to this file
    OUT/repos/OWNER__NAME.HASH8.git

The task file is written last and atomically: a directory with `tasks.jsonl` is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from data_pipeline.bugs import Bug
from data_pipeline.issue_text import issue_text
from data_pipeline.packages import Package
from data_pipeline.repos import Branch, bug_patches, build_repository, without_tests
from swe_lightning.errors import DataError
from swe_lightning.rundir import write_atomic

TASK_FILE = "tasks.jsonl"


def write_dataset(out_dir: Path, found: Sequence[tuple[Package, Sequence[Bug]]]) -> Path:
    """Build repositories and rows; returns the task file. DataError if there is no task at all."""
    if not any(bugs for _, bugs in found):
        raise DataError("no bug could be validated, so there is no task to write; give more packages or more tries")
    out_dir.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for package, bugs in found:
        if bugs:
            rows += package_rows(out_dir, package, bugs)
    names = [row["instance_id"] for row in rows]
    if len(set(names)) != len(names):
        raise DataError("two tasks have one instance_id; the same package was given twice")
    file = out_dir / TASK_FILE
    write_atomic(file, b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return file


def package_rows(out_dir: Path, package: Package, bugs: Sequence[Bug]) -> list[dict[str, Any]]:
    relative = f"repos/{package.slug}.git"
    branches = {instance_id(package, bug): _branch(package, bug) for bug in bugs}
    repository = out_dir / relative
    build_repository(package.tree, branches.values(), repository)
    patches = bug_patches(repository, list(branches))
    return [task_row(package, bug, relative, patches[name]) for name, bug in zip(branches, bugs, strict=True)]


def instance_id(package: Package, bug: Bug) -> str:
    """owner__name.hash8.kind__xxxxxxxx, also the branch name."""
    return f"{package.slug}.{bug.kind}__{bug.key}"


def _branch(package: Package, bug: Bug) -> Branch:
    broken, tests = bug.files(package.tree), without_tests(package.tree, bug.fail_to_pass)
    return Branch(instance_id(package, bug), broken, tests)


def task_row(package: Package, bug: Bug, repo_path: str, patch: str) -> dict[str, Any]:
    mutation = bug.mutation
    name = instance_id(package, bug)
    row: dict[str, Any] = {
        "instance_id": name,
        "repo": package.repo,
        "problem_statement": bug.issue or template(package, bug),
        "patch": patch,
        "FAIL_TO_PASS": bug.fail_to_pass,
        "PASS_TO_PASS": bug.pass_to_pass,
        "image_name": None,
        "base_commit": package.base_commit,
        "repo_path": repo_path,
        "test_cmd": package.plan.command,
        "test_env": dict(package.plan.env),
        "bug_file": mutation.path,
        "bug_line": mutation.line,
        "bug_func": mutation.function,
        "strategy": bug.kind,
        "package": package.name,
        "package_version": package.version,
    }
    if bug.others:
        row["bug_sites"] = [
            {"file": part.path, "line": part.line, "func": part.function, "kind": part.kind} for part in bug.parts
        ]
    if package.commit:
        row["source_commit"] = package.commit
    if package.role:
        row["role"] = package.role
    return row


def template(package: Package, bug: Bug) -> str:
    return issue_text(
        instance_id(package, bug),
        package=package.name,
        release=f"commit {package.version}" if package.commit else f"the released version {package.version}",
        functions=[part.function for part in bug.parts],
        files=[part.path for part in bug.parts],
        failing=bug.fail_to_pass,
    )
