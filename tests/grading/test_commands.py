"""`swel grade` as a user calls it: kinds of input, exit codes, JSON, a second call that grades what is missing.

Field cases: U11, E9 and A14 (no verdict is not a wrong answer), E10, S11, H3.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import cli
from swe_lightning import recipe
from swe_lightning.errors import DataError, SandboxLost, SandboxStartError, SwelError
from swe_lightning.grading import Grader, to_patch
from swe_lightning.grading.commands import (
    bounded_workers,
    failed,
    grade_jobs,
    jobs_of,
    jobs_of_patches,
    with_versions,
)  # fmt: skip
from swe_lightning.grading.flaky import KNOWN_FLAKY
from swe_lightning.grading.predictions import read_predictions
from swe_lightning.grading.sheet import GradeRow, Sheet
from swe_lightning.records import InfraReason, Task
from swe_lightning.sandbox import FileState, Limits
from swe_lightning.sandbox.local import LocalBackend
from swe_lightning.sandbox.trees import pristine_tree

from .conftest import FIX

CORE = "calc/core.py"


@pytest.fixture
def place(tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tasks.jsonl (one task), row.json, fix.diff, predictions of a fix."""
    monkeypatch.chdir(tmp_path)
    row = task.model_dump(mode="json")
    Path("tasks.jsonl").write_text(json.dumps(row) + "\n")
    Path("row.json").write_text(json.dumps([row]))
    patch = to_patch(pristine_tree(task), {CORE: FileState(FIX)})
    Path("fix.diff").write_bytes(patch)
    prediction = {"instance_id": task.instance_id, "model_name_or_path": "m", "model_patch": patch.decode()}
    Path("preds.jsonl").write_text(json.dumps(prediction) + "\n")
    return tmp_path


def swel(*arguments: str) -> tuple[int, Any]:
    """(exit code, rows)"""
    done = CliRunner().invoke(cli.app, ["grade", *arguments, "--json"])
    if isinstance(done.exception, SwelError):
        return done.exception.exit_code, str(done.exception)
    return done.exit_code, json.loads(done.stdout) if done.stdout else None


def test_patch_and_predictions_of_a_task(place: Path, task: Task) -> None:
    for arguments in (
        ("tasks.jsonl", "--task", task.instance_id, "--patch", "fix.diff"),
        ("--task", "row.json", "--patch", "fix.diff"),
        ("tasks.jsonl", "--predictions", "preds.jsonl"),
    ):
        code, rows = swel(*arguments)
        assert (code, [row["verdict"]["resolved"] for row in rows]) == (0, [True])
        assert rows[0]["verdict"]["proof"] == "recorder"
    assert swel("tasks.jsonl", "--task", task.instance_id, "--patch", "fix.diff", "--keep", "kept")[0] == 0
    (kept,) = Path("kept").iterdir()
    assert (kept / "tree" / CORE).read_bytes() == FIX


def test_gold_and_null_decide_the_exit_code(place: Path, task: Task) -> None:
    assert swel("tasks.jsonl", "--gold", "--repeat", "3")[0] == 0
    code, rows = swel("tasks.jsonl", "--null")
    assert (code, rows[0]["verdict"]["resolved"]) == (0, False)
    wrong = task.model_copy(update={"PASS_TO_PASS": ["tests/test_mul.py::test_gone"]})
    Path("wrong.jsonl").write_text(wrong.model_dump_json() + "\n")
    assert swel("wrong.jsonl", "--gold")[0] == 1
    trivial = task.model_copy(update={"FAIL_TO_PASS": ["tests/test_mul.py::test_mul"]})
    Path("trivial.jsonl").write_text(trivial.model_dump_json() + "\n")
    assert swel("trivial.jsonl", "--null")[0] == 1


def test_saved_log_runs_nothing(place: Path, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBackend, "create", None)
    log = place / "test.log"
    log.write_text("PASSED tests/test_add.py::test_add\nPASSED tests/test_mul.py::test_mul\n")
    code, rows = swel("--task", "row.json", "--log", "test.log")
    assert (code, rows[0]["verdict"]["resolved"], rows[0]["verdict"]["proof"]) == (0, True, "saved log")
    log.write_text("2 passed in 0.1s\n")
    code, rows = swel("--task", "row.json", "--log", "test.log")
    assert (code, rows[0]["verdict"], rows[0]["infra_reason"]) == (1, None, "parse_error")


SENTENCES: list[tuple[tuple[str, ...], str]] = [
    (("tasks.jsonl",), "say what to grade"),
    (("tasks.jsonl", "--gold", "--null"), "say what to grade"),
    (("--gold",), "give a task file"),
    (("tasks.jsonl", "--task", "nobody", "--gold"), "no task nobody in tasks.jsonl"),
    (("tasks.jsonl", "--patch", "gone.diff"), "no patch file gone.diff"),
    (("tasks.jsonl", "--gold", "--tests", "some"), "--tests some"),
    (("tasks.jsonl", "--gold", "--backend", "jail"), "--backend jail"),
    (("tasks.jsonl", "--gold", "--versions", "gone.json"), "cannot read versions from gone.json"),
    (("tasks.jsonl", "--gold", "--out", "fix.diff"), "fix.diff line 1 is no row of swel grade"),
]


@pytest.mark.parametrize(("arguments", "sentence"), SENTENCES)
def test_a_mistake_is_one_sentence(place: Path, arguments: tuple[str, ...], sentence: str) -> None:
    code, said = swel(*arguments)
    assert code == 2
    assert sentence in said


class Faulty:
    """A backend some of whose boxes fail as `fault` says; counts what it was asked for."""

    def __init__(self, backend: LocalBackend, fault: Callable[[int], Exception | None]) -> None:
        self._backend, self._fault, self.made = backend, fault, 0

    def create(self, *args: Any, **options: Any) -> Any:
        self.made += 1
        error = self._fault(self.made)
        if error is not None:
            raise error
        return self._backend.create(*args, **options)


def copies(task: Task, count: int) -> list[Task]:
    """Tasks that differ by name alone (the branch is named after the first)."""
    return [task.model_copy(update={"problem_statement": str(n)}) for n in range(count)]


def test_u11_a_second_call_grades_only_what_has_no_verdict(backend: LocalBackend, task: Task, tmp_path: Path) -> None:
    """3 scored, 1 infrastructure failure: 1 rerun. The broken one is never a wrong answer in between (A14, E9)."""
    jobs = [job for n, t in enumerate(copies(task, 4)) for job in jobs_of([t], "gold", repeat=1)]
    for n, job in enumerate(jobs):
        job.run = n
    sheet = tmp_path / "rows.jsonl"

    def fault(made: int) -> Exception | None:
        return SandboxLost("the daemon went away") if made == 2 else None

    first = Faulty(backend, fault)
    rows = grade_jobs(Grader(first, recipe.Grading()), jobs, workers=1, sheet=Sheet(sheet))  # type: ignore[arg-type]
    lost = [row for row in rows if row.verdict is None]
    # A box lost once is tried again within the same grading: make it fail for good.
    assert (len(lost), first.made) == (0, 5)
    sheet.unlink()

    def broken(made: int) -> Exception | None:
        return SandboxStartError("no space left") if made == 2 else None

    second = Faulty(backend, broken)
    rows = grade_jobs(Grader(second, recipe.Grading()), jobs, workers=1, sheet=Sheet(sheet))  # type: ignore[arg-type]
    assert [row.infra_reason for row in rows] == [None, "sandbox_start", None, None]
    assert "have no verdict" in failed(rows, "")
    third = Faulty(backend, lambda _: None)
    rows = grade_jobs(Grader(third, recipe.Grading()), jobs, workers=1, sheet=Sheet(sheet))  # type: ignore[arg-type]
    assert (third.made, [row.resolved for row in rows]) == (1, [True] * 4)


def test_a_sheet_survives_a_kill_and_forgets_other_patches(task: Task, tmp_path: Path, grader: Grader) -> None:
    sheet = tmp_path / "rows.jsonl"
    (row,) = grade_jobs(grader, jobs_of_patches([task], {task.instance_id: b""}), sheet=Sheet(sheet))
    sheet.write_bytes(sheet.read_bytes() + b'{"instance_id": "cut')
    again = Sheet(sheet)
    assert again.known(task.instance_id, 0, row.key) is not None
    (other,) = jobs_of_patches([task], {task.instance_id: b"another"})
    assert again.known(task.instance_id, 0, other.key) is None
    again.add(row)
    assert Sheet(sheet).known(task.instance_id, 0, row.key) is not None
    foreign = tmp_path / "notes.txt"
    foreign.write_bytes(b"one line of somebody's")
    with pytest.raises(DataError, match="line 1 is no row"):
        Sheet(foreign)
    assert foreign.read_bytes() == b"one line of somebody's"


def test_s11_an_image_that_cannot_be_had_is_never_a_score(backend: LocalBackend, task: Task) -> None:
    def fault(_: int) -> Exception:
        return SandboxStartError("429 Too Many Requests", InfraReason.IMAGE_UNAVAILABLE)

    grader = Grader(Faulty(backend, fault), recipe.Grading())  # type: ignore[arg-type]
    for row in grade_jobs(grader, [*jobs_of([task], "gold"), *jobs_of([task], "null")]):
        assert (row.verdict, row.infra_reason) == (None, "image_unavailable")


def test_a_task_that_cannot_be_graded_stops_no_other(grader: Grader, task: Task) -> None:
    bad = task.model_copy(update={"patch": "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"})
    nowhere = task.model_copy(update={"repo_path": "/nowhere"})
    rows = grade_jobs(grader, jobs_of([bad, nowhere, task], "gold"))
    assert [(row.infra_reason, row.resolved) for row in rows] == [
        ("bad_task", False),
        ("bad_task", False),
        (None, True),
    ]


def test_e10_known_flaky_tasks_are_marked_and_do_not_fail_a_gold_run() -> None:
    assert "psf__requests-2317" in KNOWN_FLAKY
    from swe_lightning.grading.rules import Verdict

    flaky = GradeRow("psf__requests-2317", Verdict(False, 0.0))
    assert "httpbin" in flaky.as_dict()["flaky"]
    assert failed([flaky], "gold") == ""
    assert failed([GradeRow("x", Verdict(False, 0.0))], "gold") != ""
    assert failed([GradeRow("psf__requests-2317", Verdict(True, 1.0))], "null") != ""


def test_h3_a_patch_keeps_its_bytes_from_the_predictions_file_to_the_tree(grader: Grader, task: Task) -> None:
    """A last context line of one space: stripped, no tool applies it."""
    base = pristine_tree(task)
    text = (base / "notes.txt").read_bytes()
    patch = to_patch(base, {CORE: FileState(FIX), "notes.txt": FileState(text + b" \n")})
    assert patch.endswith(b"+ \n")
    (row,) = grade_jobs(grader, jobs_of_patches([task], {task.instance_id: patch}))
    assert row.verdict is not None
    assert (row.verdict.apply, row.resolved) == ("git-apply", True)
    (cut,) = grade_jobs(grader, jobs_of_patches([task], {task.instance_id: patch.rstrip()[:-1]}))
    assert cut.verdict is not None
    assert cut.verdict.apply == "failed", "what was cut is refused, not repaired into another patch"


def test_workers_are_bounded_by_what_the_machine_holds() -> None:
    assert bounded_workers(1, Limits()) == 1
    assert bounded_workers(None, Limits(cpu=1e9)) == 1
    assert bounded_workers(1000, Limits(memory_mb=1 << 40)) == 1
    assert 1 <= bounded_workers(10_000, Limits(memory_mb=1)) < 10_000


def test_versions_come_from_a_file_where_the_row_has_none(task: Task, tmp_path: Path) -> None:
    file = tmp_path / "versions.json"
    file.write_text(json.dumps({task.instance_id: 1.9}))
    (with_it,) = with_versions([task], file)
    assert with_it.model_dump()["version"] == "1.9"
    (kept,) = with_versions([with_it.model_copy(update={"version": "3.0"})], file)
    assert kept.model_dump()["version"] == "3.0"


@pytest.mark.parametrize("entry", [{"model_patch": "p"}, "p", {"instance_id": "a", "model_patch": "p"}])
def test_predictions_by_instance_id(tmp_path: Path, entry: object) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"a": entry}))
    assert read_predictions(file) == {"a": b"p"}


@pytest.mark.parametrize("text", ["", "[]", "{}", "\n"])
def test_a_predictions_file_without_predictions_is_a_mistake(tmp_path: Path, text: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(text)
    with pytest.raises(DataError, match="no predictions"):
        read_predictions(file)
