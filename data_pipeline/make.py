"""Task synthesis from end to end: packages in, a task file (and perhaps a manifest) out."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.bugs import Bug, Limits
from data_pipeline.dataset import instance_id, write_dataset
from data_pipeline.edits import repair
from data_pipeline.issue_model import IssueWriter, Wanted
from data_pipeline.manifest import (
    Manifest,
    PackageEntry,
    Role,
    entry_of,
    load_manifest,
    local_backend,
    save_manifest,
    validate_manifest,
)
from data_pipeline.mutations import Mutation
from data_pipeline.packages import Package, from_pypi, from_repository
from data_pipeline.progress import progress
from data_pipeline.synth import Found, search
from data_pipeline.testbed import Memory, Testbed
from data_pipeline.trees import Tree
from swe_lightning.errors import DataError

MAX_LINE = 100
"""Characters of a line that the small policy can look at."""


@dataclass(frozen=True)
class SearchOptions:
    tasks_per_package: int = 20
    kinds: tuple[str, ...] = ()
    one_edit: bool = False
    seed: int = 0
    workers: int = 2
    timeout_s: float = 60.0
    max_seconds: float | None = None
    combinations: int | None = None
    """Tasks of several bugs per package; None: a quarter of `tasks_per_package`, none with `one_edit`."""

    def limits(self) -> Limits:
        limits = Limits(
            tasks=self.tasks_per_package, timeout_s=self.timeout_s, accept=self._accept, max_seconds=self.max_seconds
        )
        limits.combinations = self._combinations()
        if self.one_edit:
            limits.per_kind, limits.max_fail_to_pass, limits.plain_ids = 3, 8, True
        return limits

    def _combinations(self) -> int:
        if self.combinations is not None:
            return self.combinations
        return 0 if self.one_edit else self.tasks_per_package // 4

    def _accept(self, mutation: Mutation) -> bool:
        if self.kinds and mutation.kind not in self.kinds:
            return False
        return not self.one_edit or one_edit_repairs(mutation)


def one_edit_repairs(mutation: Mutation) -> bool:
    """True if the bug stays on one line of moderate length and the closed set holds its repair."""
    return (
        mutation.single_line
        and len(mutation.after) <= MAX_LINE
        and mutation.after.isascii()
        and repair(mutation.after, mutation.before) is not None
    )


def from_manifest(
    manifest: Path,
    out: Path,
    *,
    backend: Any,
    workers: int,
    train_limit: int | None,
    held_out_limit: int | None,
    write_manifest: Path | None,
    max_seconds: float | None,
) -> dict[str, Any]:
    """`write_manifest` saves what held here: how a manifest made elsewhere or long ago is brought up to date."""
    found, rejected = validate_manifest(
        load_manifest(manifest),
        backend=backend,
        workers=workers,
        train_limit=train_limit,
        held_out_limit=held_out_limit,
        limits=Limits(max_seconds=max_seconds),
    )
    file = write_dataset(out, found)
    if write_manifest is not None:
        save_manifest(Manifest(packages=[_entry(package, bugs) for package, bugs in found if bugs]), write_manifest)
    return {"tasks": sum(len(bugs) for _, bugs in found), "file": str(file), "rejected": dict(rejected)}


def from_packages(
    out: Path,
    *,
    pypi: Sequence[str],
    held_out: Sequence[str],
    repo: tuple[Path, str] | None,
    write_manifest: Path | None,
    search: SearchOptions,
    test_cmd: str | None,
    test_env: dict[str, str] | None,
    backend: Any,
    writer: IssueWriter | None = None,
) -> dict[str, Any]:
    """Search package by package; one that cannot give tasks leaves with its reason and the others go on.

    `repo`: directory and commit of a local repository. `writer` writes the issue texts; None: the template.
    """
    loaders: list[tuple[str, Role | None, Callable[[], Package]]] = []
    role: Role | None = "train" if held_out or write_manifest else None
    for requirement in pypi:
        loaders.append((requirement, role, _pypi(requirement, test_cmd, test_env)))
    for requirement in held_out:
        loaders.append((requirement, "held_out", _pypi(requirement, test_cmd, test_env)))
    if repo is not None:
        loaders.append((str(repo[0]), role, lambda: from_repository(*repo, command=test_cmd, env=test_env)))
    backend = backend or local_backend()
    found: list[Found] = []
    failed: dict[str, str] = {}
    memory = Memory()
    try:
        for name, its_role, load in loaders:
            try:
                package = replace(load(), role=its_role)
                found.append(_search_one(package, backend, memory, search, writer))
            except DataError as error:
                if len(loaders) == 1:
                    raise
                failed[name] = str(error)
    finally:
        memory.close()
    if failed and not any(f.bugs for f in found):
        raise DataError("no package gives tasks: " + "; ".join(failed.values()))
    file = write_dataset(out, [(f.package, f.bugs) for f in found])
    if write_manifest is not None:
        entries = [entry for f in found if (entry := _entry(f.package, f.bugs)).bugs]
        save_manifest(Manifest(packages=entries), write_manifest)
    return {
        "tasks": sum(len(f.bugs) for f in found),
        "file": str(file),
        "packages": {f"{f.package.name}=={f.package.version}": _summary(f) for f in found},
        "failed": failed,
        "rejected": dict(sum((f.rejected for f in found), Counter[str]())),
    }


def _pypi(requirement: str, test_cmd: str | None, test_env: dict[str, str] | None) -> Callable[[], Package]:
    return lambda: from_pypi(requirement, command=test_cmd, env=test_env)


def _search_one(
    package: Package, backend: Any, memory: Memory, options: SearchOptions, writer: IssueWriter | None
) -> Found:
    limits = options.limits()
    with Testbed(backend, package.tree, package.plan, memory) as bed:
        with progress(f"{package.name} {package.version}", limits.tasks + limits.combinations) as meter:
            found = search(package, bed, limits, seed=options.seed, workers=options.workers, meter=meter)
        return found if writer is None else with_issues(found, bed, limits, writer, options.workers)


def with_issues(found: Found, bed: Testbed, limits: Limits, writer: IssueWriter, workers: int) -> Found:
    """The bugs that a model wrote a usable issue text for; the others leave with the reason."""
    package = found.package

    def wanted(bug: Bug) -> Wanted:
        files = bug.files(package.tree)

        def output() -> str:
            return bed.output(files, bug.fail_to_pass[:3], timeout_s=limits.timeout_s)

        name, patch = instance_id(package, bug), difference(package.tree, files)
        return Wanted(name, package.name, package.version, patch, bug.fail_to_pass, output)

    bugs, rejected = [], Counter(found.rejected)
    with progress(f"{package.name} issues", len(found.bugs)) as meter, ThreadPoolExecutor(workers) as executor:
        futures = [executor.submit(writer.write, wanted(bug)) for bug in found.bugs]
        try:
            for bug, future in zip(found.bugs, futures, strict=True):
                text, reason = future.result()
                if text:
                    bugs.append(replace(bug, issue=text))
                else:
                    rejected[reason] += 1
                meter.advance(reason)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    return replace(found, bugs=bugs, rejected=rejected)


def difference(tree: Tree, files: Mapping[str, bytes]) -> str:
    """Unified diff of the broken files, for people and models; the task's own patch comes from git."""
    parts: list[str] = []
    for path, data in files.items():
        before, after = [content.decode(errors="replace").splitlines() for content in (tree[path].data, data)]
        parts += difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", lineterm="", n=0)
    return "\n".join(parts)


def _entry(package: Package, bugs: Sequence[Bug]) -> PackageEntry:
    return entry_of(package, bugs, role=package.role or "train")


def _summary(found: Found) -> dict[str, Any]:
    kinds = Counter(bug.kind for bug in found.bugs)
    return {
        "tasks": len(found.bugs),
        "kinds": dict(kinds),
        "rejected": dict(found.rejected),
        "flaky": len(found.baseline.flaky),
    }
