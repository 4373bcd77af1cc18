"""A manifest: which packages and which bugs, so that a demonstration does not search for them.

It is JSON with facts only, no line of anybody's code: package, version and digest of the archive, how its tests run,
and per bug a place (path, line, column), the token replaced and its replacement, the first digits of the mutated
file's SHA-256, and the FAIL_TO_PASS ids. PASS_TO_PASS follows from a rule (`synth.pass_to_pass`) and a real run.
Synthesis from a manifest still validates every bug by running tests; what no longer holds is left out with a reason.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data_pipeline.bugs import Bug, Limits, file_of, judge
from data_pipeline.dataset import write_dataset
from data_pipeline.mutations import Mutation
from data_pipeline.packages import TEST_COMMAND, Package, from_sdist
from data_pipeline.progress import progress
from data_pipeline.sdist import fetch
from data_pipeline.testbed import Memory, Testbed, Trial
from swe_lightning.errors import DataError
from swe_lightning.rundir import write_atomic

DEMO_MANIFEST = Path(__file__).with_name("demo_manifest.json")
TIMEOUT_S = 60.0
Role = Literal["train", "held_out"]
MAX_TOKEN = 12
"""Characters of a replaced or new text in a manifest: an operator or a word, never an expression of the package."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class BugEntry(_Strict):
    kind: str
    path: str
    line: int
    column: int
    """Byte column of `old` on its line."""
    function: str
    def_line: int
    old: str
    new: str
    digest: str
    """First 16 hex digits of the mutated file's SHA-256: the archive and the place are the ones meant."""
    fail_to_pass: list[str]


class PackageEntry(_Strict):
    package: str
    version: str
    sha256: str
    role: Role
    test_cmd: str = TEST_COMMAND
    test_env: dict[str, str]
    bugs: list[BugEntry]


class Manifest(_Strict):
    version: Literal[1] = 1
    packages: list[PackageEntry] = Field(min_length=1)


def load_manifest(file: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(file.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read manifest {file}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{file} is not a manifest of this version: {where or 'file'}: {first['msg']}") from error


def save_manifest(manifest: Manifest, file: Path) -> None:
    """One bug per line: small, and its history is readable."""
    head = json.dumps({"version": manifest.version})[:-1]
    blocks = []
    for entry in manifest.packages:
        fields = entry.model_dump(exclude={"bugs"}, exclude_defaults=True)
        bugs = ",\n  ".join(json.dumps(bug.model_dump(), separators=(",", ":")) for bug in entry.bugs)
        blocks.append(json.dumps(fields)[:-1] + ', "bugs": [\n  ' + bugs + "]}")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, head + ', "packages": [\n' + ",\n".join(blocks) + "]}\n")


def entry_of(package: Package, bugs: Sequence[Bug], *, role: Role) -> PackageEntry:
    if package.sha256 is None:
        raise DataError(f"{package.name} is not from a source distribution; a manifest needs one to be reproducible")
    return PackageEntry(
        package=package.name,
        version=package.version,
        sha256=package.sha256,
        role=role,
        test_cmd=package.plan.command,
        test_env=dict(package.plan.env),
        bugs=[_bug_entry(package, bug) for bug in bugs if _is_token_change(bug)],
    )


def _is_token_change(bug: Bug) -> bool:
    short = max(len(bug.mutation.old), len(bug.mutation.new)) <= MAX_TOKEN
    return short and bug.mutation.single_line and not bug.others


def _bug_entry(package: Package, bug: Bug) -> BugEntry:
    m = bug.mutation
    mutated = m.apply(package.tree[m.path].data)
    return BugEntry(
        kind=m.kind,
        path=m.path,
        line=m.line,
        column=m.column,
        function=m.function,
        def_line=m.def_line,
        old=m.old,
        new=m.new,
        digest=_digest(mutated),
        fail_to_pass=bug.fail_to_pass,
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def locate(package: Package, entry: BugEntry) -> Mutation | str:
    """The mutation an entry means, or why it is not there."""
    if entry.path not in package.tree:
        return "no_such_file"
    source = package.tree[entry.path].data
    lines = source.splitlines(keepends=True)
    if entry.line > len(lines):
        return "other_source"
    begin = sum(len(line) for line in lines[: entry.line - 1])
    start = begin + entry.column
    end = start + len(entry.old.encode())
    if source[start:end] != entry.old.encode():
        return "other_source"
    finish = source.find(b"\n", end)
    finish = len(source) if finish < 0 else finish
    mutated = source[:start] + entry.new.encode() + source[end:]
    if _digest(mutated) != entry.digest:
        return "other_source"
    return Mutation(
        entry.kind,
        entry.path,
        entry.line,
        entry.column,
        entry.function,
        entry.def_line,
        start,
        end,
        entry.old,
        entry.new,
        source[begin:finish].decode(),
        (source[begin:start] + entry.new.encode() + source[end:finish]).decode(),
    )


def synthesise_manifest(
    manifest: Manifest | Path,
    out_dir: Path,
    *,
    backend: Any = None,
    workers: int = 2,
    train_limit: int | None = None,
    held_out_limit: int | None = None,
) -> tuple[Path, Counter[str]]:
    """Fetch, validate, write; returns the task file and the reasons of bugs left out."""
    if isinstance(manifest, Path):
        manifest = load_manifest(manifest)
    found, rejected = validate_manifest(
        manifest, backend=backend, workers=workers, train_limit=train_limit, held_out_limit=held_out_limit
    )
    return write_dataset(out_dir, found), rejected


def validate_manifest(
    manifest: Manifest,
    *,
    backend: Any = None,
    workers: int = 2,
    train_limit: int | None = None,
    held_out_limit: int | None = None,
    limits: Limits | None = None,
) -> tuple[list[tuple[Package, list[Bug]]], Counter[str]]:
    """Fetch the packages and run the tests of every bug.

    The numbers keep the first bugs of each package in turn, so every package stays represented. DataError if more
    than a tenth of the bugs does not hold here: then something is wrong with this machine, not with a bug.
    """
    roles = {"train": train_limit, "held_out": held_out_limit}
    chosen = {role: _take(manifest.packages, role, limit) for role, limit in roles.items()}
    wanted = [(e, bugs) for e in manifest.packages if (bugs := [b for b in e.bugs if id(b) in chosen[e.role]])]
    packages = _fetch_all([entry for entry, _ in wanted], workers)
    jobs = [(package, bugs) for package, (_, bugs) in zip(packages, wanted, strict=True)]
    with closing(Memory()) as memory:
        found, rejected = _validate_all(backend or local_backend(), memory, jobs, workers, limits or Limits())
    total = sum(len(bugs) for _, bugs in jobs)
    if (rejected.total() - rejected["slow"]) * 10 > total:
        reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.most_common())
        raise DataError(f"{rejected.total()} of {total} bugs of the manifest do not hold on this machine ({reasons})")
    return found, rejected


def _fetch_all(entries: Sequence[PackageEntry], workers: int) -> list[Package]:
    with progress("fetch", len(entries)) as meter, ThreadPoolExecutor(workers) as executor:
        packages = []
        for package in executor.map(_package, entries):
            packages.append(package)
            meter.advance(package.name)
    return packages


def _validate_all(
    backend: Any, memory: Memory, jobs: Sequence[tuple[Package, Sequence[BugEntry]]], workers: int, limits: Limits
) -> tuple[list[tuple[Package, list[Bug]]], Counter[str]]:
    """Runs of all packages share the workers; a package's boxes go as soon as its last bug is judged."""
    found: list[tuple[Package, list[Bug]]] = []
    rejected: Counter[str] = Counter()
    # The executor is left first: it waits for runs in flight, and only then are their boxes destroyed.
    with ExitStack() as beds, progress("validate", sum(len(b) for _, b in jobs)) as meter:
        with ThreadPoolExecutor(workers) as executor:
            running = []
            for package, entries in jobs:
                bed = beds.enter_context(Testbed(backend, package.tree, package.plan, memory))
                clean = _clean_run(executor, bed, entries)
                work = partial(_validate, package, bed, clean, limits)
                running.append((bed, [executor.submit(work, entry) for entry in entries]))
            try:
                for (package, _), (bed, futures) in zip(jobs, running, strict=True):
                    outcomes = []
                    for future in futures:
                        outcomes.append(future.result())
                        meter.advance(package.name)
                    bed.close()
                    found.append((package, [o for o in outcomes if isinstance(o, Bug)]))
                    rejected.update(o for o in outcomes if isinstance(o, str))
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                raise
    return found, rejected


def _take(entries: Sequence[PackageEntry], role: str, limit: int | None) -> set[int]:
    """Identities of the bugs kept: packages take turns until the limit is reached."""
    of_role = [entry.bugs for entry in entries if entry.role == role]
    turns = [bugs[i] for i in range(max(map(len, of_role), default=0)) for bugs in of_role if i < len(bugs)]
    return {id(bug) for bug in (turns if limit is None else turns[:limit])}


def _package(entry: PackageEntry) -> Package:
    sdist = fetch(entry.package, entry.version, sha256=entry.sha256)
    return replace(from_sdist(sdist, command=entry.test_cmd, env=entry.test_env), role=entry.role)


def local_backend() -> Any:
    from swe_lightning.recipe import SandboxSection
    from swe_lightning.sandbox import make_backend

    return make_backend(SandboxSection(memory_mb=2048, pids=256, disk_mb=256))


def _clean_run(executor: ThreadPoolExecutor, bed: Testbed, bugs: Sequence[BugEntry]) -> Future[Trial]:
    """One clean run over all test files that any bug of the package needs."""
    files = sorted({file_of(test) for bug in bugs for test in bug.fail_to_pass})
    return executor.submit(bed.trial, {}, files, timeout_s=TIMEOUT_S)


def _validate(package: Package, bed: Testbed, clean: Future[Trial], limits: Limits, entry: BugEntry) -> Bug | str:
    mutation = locate(package, entry)
    if isinstance(mutation, str):
        return mutation
    passing = clean.result().passed
    if not set(entry.fail_to_pass) <= passing:
        return "fails_clean"
    targets = sorted({file_of(test) for test in entry.fail_to_pass})
    mutated = mutation.apply(package.tree[mutation.path].data)
    trial = bed.trial({mutation.path: mutated}, targets, timeout_s=TIMEOUT_S)
    bug = judge(passing, targets, mutation, trial, limits)
    if isinstance(bug, Bug) and bug.fail_to_pass != sorted(entry.fail_to_pass):
        return "other_tests_fail"
    return bug
