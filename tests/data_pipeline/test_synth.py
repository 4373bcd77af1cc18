"""Synthesis through real sandboxes: a package written by the test becomes tasks that hold."""

from __future__ import annotations

import io
import json
import re
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from data_pipeline import commands
from data_pipeline.bugs import Limits, judge, pass_to_pass
from data_pipeline.manifest import DEMO_MANIFEST, load_manifest, local_backend, locate
from data_pipeline.mutations import Mutation, find_mutations
from data_pipeline.packages import Package, make_plan, refuse_test_environment
from data_pipeline.repos import git
from data_pipeline.sources import load_tasks
from data_pipeline.synth import Baseline, validate
from data_pipeline.testbed import Memory, Testbed, Trial
from data_pipeline.trees import Entry
from swe_lightning.errors import DataError, UserError

from .conftest import CALC, TESTS


@pytest.fixture(scope="module")
def made(session_home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One search over the small package, its task file and its manifest."""
    archive(session_home / "sdists" / "calc-1.0.tar.gz")
    out = tmp_path_factory.mktemp("made")
    result = commands.synth(
        out=out, pypi=["calc==1.0"], tasks_per_package=6, one_edit=True, write_manifest=out / "m.json", seed=3
    )
    return {**result, "out": out, "tasks_list": load_tasks(out / "tasks.jsonl")}


def archive(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as tar:
        for name, text in (("calc.py", CALC), ("tests/test_calc.py", TESTS)):
            info = tarfile.TarInfo(f"calc-1.0/{name}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))


def test_tasks_have_the_published_form(made: dict[str, Any]) -> None:
    tasks = made["tasks_list"]
    assert len(tasks) == made["tasks"] >= 4
    for task in tasks:
        assert re.fullmatch(r"pypi__calc\.[0-9a-f]{8}\.[a-z_]+__[0-9a-f]{8}", task.instance_id)
        assert task.base_commit[:8] in task.instance_id
        assert task.bug_file == "calc.py"
        assert task.bug_func in {"clamp", "total", "is_even"}
        assert task.model_extra["strategy"] in task.instance_id
        assert task.model_extra["package_version"] == "1.0"
        assert not set(task.FAIL_TO_PASS) & set(task.PASS_TO_PASS)
        assert "tests/test_calc.py::test_fails_always" not in task.FAIL_TO_PASS + task.PASS_TO_PASS
        assert "never_called" not in task.patch.split("@@")[-1]


def test_branches_hold_bug_then_removed_tests(made: dict[str, Any]) -> None:
    for task in made["tasks_list"]:
        repository = Path(task.repo_path)
        subjects = git("log", "--format=%s", task.instance_id, cwd=repository).splitlines()
        assert subjects == ["Remove F2P Tests", "Bug Patch", "Clean tree"]
        source = git("show", f"{task.instance_id}~1:calc.py", cwd=repository).splitlines()
        added = [line[1:] for line in task.patch.splitlines() if line.startswith("+") and not line.startswith("+++")]
        assert added == [source[task.bug_line - 1]]
        tests = git("show", f"{task.instance_id}:tests/test_calc.py", cwd=repository)
        for test in task.FAIL_TO_PASS:
            assert f"def {test.split('::')[-1]}(" not in tests


def test_the_issue_tells_where_but_not_what(made: dict[str, Any]) -> None:
    for task in made["tasks_list"]:
        changed = [line[1:].strip() for line in task.patch.splitlines() if re.match(r"[+-](?![+-])", line)]
        assert task.bug_func in task.problem_statement
        assert all(line not in task.problem_statement for line in changed)


def test_synthesis_is_the_same_twice_and_from_the_manifest(made: dict[str, Any], tmp_path: Path) -> None:
    original = (made["out"] / "tasks.jsonl").read_bytes()
    again = tmp_path / "again"
    commands.synth(
        out=again, pypi=["calc==1.0"], tasks_per_package=6, one_edit=True, write_manifest=again / "m", seed=3
    )
    assert (again / "tasks.jsonl").read_bytes() == original
    result = commands.synth(out=tmp_path / "manifest", manifest=made["out"] / "m.json")
    assert result["rejected"] == {}
    assert (tmp_path / "manifest" / "tasks.jsonl").read_bytes() == original


def test_the_manifest_holds_no_line_of_the_package(made: dict[str, Any]) -> None:
    text = (made["out"] / "m.json").read_text()
    for line in CALC.splitlines():
        if len(line.strip()) > 8 and "def " not in line:
            assert line.strip() not in text
    for entry in load_manifest(made["out"] / "m.json").packages:
        assert all(len(bug.old) <= 12 and len(bug.new) <= 12 for bug in entry.bugs)


def test_a_manifest_of_another_archive_is_refused(made: dict[str, Any], tmp_path: Path) -> None:
    manifest = json.loads((made["out"] / "m.json").read_text())
    for bug in manifest["packages"][0]["bugs"]:
        bug["digest"] = "0" * 16
    (tmp_path / "m.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"do not hold on this machine .*other_source"):
        commands.synth(out=tmp_path / "out", manifest=tmp_path / "m.json")
    (tmp_path / "m.json").write_text('{"version": 1, "packages": [{"package": "x"}]}')
    with pytest.raises(DataError, match=r"is not a manifest .*packages.0"):
        commands.synth(out=tmp_path / "out", manifest=tmp_path / "m.json")


def test_local_repository(small_repository: Path, session_home: Path, tmp_path: Path) -> None:
    result = commands.synth(
        out=tmp_path / "out", repo=small_repository, tasks_per_package=2, kinds=["direction", "and_or"]
    )
    tasks = load_tasks(tmp_path / "out" / "tasks.jsonl")
    assert result["tasks"] == len(tasks) == 2
    assert all(task.instance_id.startswith("local__calc-project.") for task in tasks)


def test_a_package_without_passing_tests_says_so(small_repository: Path, session_home: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no test passes on the clean tree"):
        commands.synth(out=tmp_path / "out", repo=small_repository, test_cmd="python -m pytest -q -k nothing_at_all")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["pytest", "iniconfig", "Pluggy"])
def test_the_test_runners_own_parts_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="part of the test environment itself"):
        refuse_test_environment(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "nothing to make tasks from"), ({"manifest": Path("m"), "pypi": ["a==1"]}, "already says which packages")],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        commands.synth(out=tmp_path, **options)


def trial(passed: set[str], *, finished: bool = True, timed_out: bool = False) -> Trial:
    return Trial(frozenset(passed), frozenset(), finished, timed_out, 1.0)


CLEAN = frozenset({"a.py::x", "a.py::y", "b.py::z", "b.py::p[1 2]"})
JUDGED = [
    (trial({"a.py::y", "b.py::z", "b.py::p[1 2]"}), [], (["a.py::x"], ["a.py::y"])),
    (trial({"a.py::y"}), ["a.py"], (["a.py::x"], ["a.py::y"])),
    (trial(set(CLEAN)), [], "not_noticed"),
    (trial({"b.py::z"}), ["a.py"], "breaks_everything"),
    (trial(set(CLEAN) - {"b.py::p[1 2]"}), [], "awkward_ids"),
    (trial(set(), timed_out=True, finished=False), [], "hangs"),
    (trial(set(), finished=False), [], "no_session"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "targets", "expected"), JUDGED)
def test_judgement(run: Trial, targets: list[str], expected: Any) -> None:
    mutation = find_mutations(b"def f(a):\n    return a == 1\n", "m.py")[0]
    outcome = judge(CLEAN, targets, mutation, run, Limits())
    assert (outcome if isinstance(outcome, str) else (outcome.fail_to_pass, outcome.pass_to_pass)) == expected


class Runs:
    """A testbed whose runs are given; asks for the same content come in the order of their `repeat`."""

    def __init__(self, *by_repeat: Trial) -> None:
        self.by_repeat, self.asked = by_repeat, list[int]()

    def trial(self, changes: Any, targets: Any, *, timeout_s: float, repeat: int = 0) -> Trial:
        self.asked.append(repeat)
        return self.by_repeat[repeat]


GOOD, HANGS, ENDED = trial({"a.py::y"}), trial(set(), timed_out=True, finished=False), trial(set(), finished=False)


@pytest.mark.parametrize(
    ("runs", "expected", "asked"),
    [
        ((GOOD, GOOD), "bug", [0, 1]),
        ((HANGS, GOOD, GOOD), "bug", [0, 2, 1]),
        ((GOOD, ENDED, GOOD, GOOD), "bug", [0, 1, 3]),
        ((HANGS, GOOD, HANGS), "hangs", [0, 2]),
        ((ENDED, GOOD, HANGS), "hangs", [0, 2]),
        ((trial(set(CLEAN)), GOOD), "not_noticed", [0]),
        ((GOOD, HANGS, GOOD, HANGS), "flaky", [0, 1, 3]),
        ((GOOD, trial({"a.py::x"})), "flaky", [0, 1]),
    ],
)
def test_a_busy_moment_decides_nothing(runs: tuple[Trial, ...], expected: str, asked: list[int]) -> None:
    """The same seed has to give the same tasks on a machine that does something else meanwhile."""
    tree = {"m.py": Entry(b"def f(a):\n    return a == 1\n")}
    package, bed = Package("p", "1", "pypi", tree, make_plan(tree)), Runs(*runs)
    mutation = find_mutations(tree["m.py"].data, "m.py")[0]
    outcome = validate(package, bed, Baseline(frozenset({"a.py::x", "a.py::y"}), frozenset(), 0.1), mutation, Limits())  # type: ignore[arg-type]
    assert (outcome if isinstance(outcome, str) else "bug") == expected
    assert bed.asked == asked


def test_a_raised_time_limit_runs_again_what_was_cut_off(session_home: Path) -> None:
    """The message says "raise --timeout-s": the remembered timeout must not answer then."""
    tree = {"test_a.py": Entry(b"import time\n\n\ndef test_a():\n    time.sleep(2)\n")}
    memory = Memory()
    with Testbed(local_backend(), tree, make_plan(tree), memory) as bed:
        assert bed.trial({}, [], timeout_s=1).timed_out
        began = time.monotonic()
        assert bed.trial({}, [], timeout_s=1).timed_out
        assert time.monotonic() - began < 0.5, "remembered"
        assert bed.trial({}, [], timeout_s=60).passed == {"test_a.py::test_a"}
        assert bed.trial({}, [], timeout_s=1).passed == {"test_a.py::test_a"}
    memory.close()


def test_kept_tests_are_spread_over_the_affected_files() -> None:
    passed = [f"a.py::t{n:03d}" for n in range(350)] + ["b.py::other"]
    kept = pass_to_pass(["a.py::bug"], passed)
    assert len(kept) == 100
    assert kept[0] == "a.py::t000"
    assert kept[-1] > "a.py::t340"


def test_an_entry_finds_its_place_again() -> None:
    source = "def f(a):\n    é = a == 1\n    return é\n".encode()
    mutation = next(m for m in find_mutations(source, "m.py") if m.kind == "equality")
    tree = {"m.py": Entry(source)}
    package = Package("p", "1", "pypi", tree, make_plan(tree), sha256="0")
    from data_pipeline.bugs import Bug
    from data_pipeline.manifest import _bug_entry

    entry = _bug_entry(package, Bug(mutation, ["t.py::a"], [], 0.1))
    assert locate(package, entry) == mutation
    moved = Package("p", "1", "pypi", {"m.py": Entry(b"\n" + source)}, make_plan(tree))
    assert locate(moved, entry) == "other_source"


@pytest.mark.skipif(not DEMO_MANIFEST.exists(), reason="no demo manifest yet")
def test_demo_manifest_keeps_its_promises() -> None:
    manifest = load_manifest(DEMO_MANIFEST)
    by_role = {role: [e for e in manifest.packages if e.role == role] for role in ("train", "held_out")}
    assert len(by_role["train"]) >= 10
    assert len(by_role["held_out"]) >= 8
    assert {e.package for e in by_role["train"]}.isdisjoint(e.package for e in by_role["held_out"])
    for entry in manifest.packages:
        kinds = [bug.kind for bug in entry.bugs]
        assert all(kinds.count(kind) <= 3 for kind in kinds), entry.package
        assert all(len(bug.old) <= 12 and len(bug.new) <= 12 for bug in entry.bugs), entry.package
    assert all(sum(len(e.bugs) for e in entries) >= 90 for entries in by_role.values())


def test_mutation_is_hashable() -> None:
    assert len({*find_mutations(b"def f(a):\n    return a == 1\n", "m.py")}) >= 2
    assert Mutation.__hash__ is not None
