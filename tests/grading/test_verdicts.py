"""Verdicts on honest patches, and what a session that does not end means."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from swe_lightning import recipe
from swe_lightning.errors import DataError, GradingError
from swe_lightning.grading import Grader, to_patch
from swe_lightning.grading.commands import grade_jobs, jobs_of, jobs_of_patches
from swe_lightning.grading.predictions import read_predictions
from swe_lightning.records import InfraReason, Task
from swe_lightning.sandbox import FileState, Limits, TreeDiff
from swe_lightning.sandbox.local import LocalBackend
from swe_lightning.sandbox.trees import pristine_tree

from .conftest import BUG, CLEAN, FIX, make_task

CORE = "calc/core.py"


def test_fix_resolves(grader: Grader, task: Task) -> None:
    verdict = grader.grade(task, {CORE: FileState(FIX)})
    assert verdict.resolved
    assert verdict.reward == 1.0
    assert verdict.f2p == {"tests/test_add.py::test_add": True}
    assert (verdict.p2p_failed, verdict.dropped_paths, verdict.why) == ([], [], "")


def test_null_and_comment_only_patches_do_not(grader: Grader, task: Task) -> None:
    comment = b"# looks busy\n" + BUG[CORE].encode()
    for patch in ({}, b"", {CORE: FileState(comment)}, {"junk.txt": FileState(b"junk\n")}):
        verdict = grader.grade(task, patch)
        assert (verdict.resolved, verdict.reward) == (False, 0.0)
        assert "1 of 1 FAIL_TO_PASS fail" in verdict.why
        assert verdict.p2p_failed == []


def test_a_fix_that_breaks_another_test_does_not_resolve(grader: Grader, task: Task) -> None:
    verdict = grader.grade(task, {CORE: FileState(FIX.replace(b"a * b", b"a * b + 1"))})
    assert not verdict.resolved
    assert verdict.f2p == {"tests/test_add.py::test_add": True}
    assert verdict.p2p_failed == ["tests/test_mul.py::test_mul"]


def test_missing_test_is_a_failed_test(grader: Grader, task: Task) -> None:
    for column in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        ids = [*getattr(task, column), "tests/test_mul.py::test_that_does_not_exist", "tests/gone.py::test_x"]
        verdict = grader.grade(task.model_copy(update={column: ids}), {CORE: FileState(FIX)})
        assert not verdict.resolved
        assert "did not run" in verdict.why


def test_white_space_around_an_id_does_not_matter(grader: Grader, task: Task) -> None:
    padded = task.model_copy(update={"FAIL_TO_PASS": ["tests/test_add.py::test_add "]})
    assert grader.grade(padded, {CORE: FileState(FIX)}).resolved


def test_patch_text_as_in_a_predictions_file(grader: Grader, task: Task, tmp_path: Path) -> None:
    patch = to_patch(pristine_tree(task), {CORE: FileState(FIX)})
    verdict = grader.grade(task, patch)
    assert verdict.resolved
    assert verdict.apply == "git-apply"
    file = tmp_path / "predictions.jsonl"
    row = {"instance_id": task.instance_id, "model_name_or_path": "m", "model_patch": patch.decode()}
    for text in (json.dumps(row) + "\n", json.dumps([row]), json.dumps({task.instance_id: row})):
        file.write_text(text)
        assert read_predictions(file) == {task.instance_id: patch}
    (graded,) = grade_jobs(grader, jobs_of_patches([task], read_predictions(file)))
    assert graded.verdict is not None
    assert graded.verdict.resolved
    with pytest.raises(DataError, match="not in the task file"):
        jobs_of_patches([task], {"unknown": b""})


def test_patch_that_does_not_apply_is_unresolved_and_says_so(grader: Grader, task: Task) -> None:
    recreate = b"diff --git a/calc/core.py b/calc/core.py\nnew file mode 100644\n"
    recreate += b"--- /dev/null\n+++ b/calc/core.py\n@@ -0,0 +1 @@\n+x\n"
    for patch in (b"this is no patch\n", recreate):
        verdict = grader.grade(task, patch)
        assert (verdict.resolved, verdict.apply) == (False, "failed")
        assert "does not apply" in verdict.why


def test_gold_resolves_and_null_does_not(grader: Grader, task: Task) -> None:
    ticks: list[int] = []
    gold = grade_jobs(grader, jobs_of([task], "gold", repeat=3), progress=lambda: ticks.append(1))
    null = grade_jobs(grader, jobs_of([task], "null"))
    assert [r.resolved for r in gold + null] == [True, True, True, False]
    assert [r.run for r in gold] == [0, 1, 2]
    assert len(ticks) == 3


def test_hanging_patch_is_a_wrong_answer(backend: LocalBackend, task: Task) -> None:
    grader = Grader(backend, recipe.Grading(timeout_s=4))
    hang = FIX + b"\n\ndef add(a, b):\n    while True:\n        pass\n"
    verdict = grader.grade(task, {CORE: FileState(hang)})
    assert not verdict.resolved
    assert verdict.why == "tests timed out after 4 s"


def test_hang_without_the_patch_is_a_broken_machine(backend: LocalBackend, task: Task) -> None:
    grader = Grader(backend, recipe.Grading(timeout_s=1))
    slow = task.model_copy(update={"test_cmd": "sleep 60; python -m pytest -q"})
    with pytest.raises(GradingError) as caught:
        grader.grade(slow, {CORE: FileState(FIX)})
    assert caught.value.reason == InfraReason.GRADING_TIMEOUT


def test_runner_that_is_not_pytest_is_a_parse_error(grader: Grader, task: Task) -> None:
    with pytest.raises(GradingError) as caught:
        grader.grade(task.model_copy(update={"test_cmd": "echo 41 passed; true"}), {CORE: FileState(FIX)})
    assert caught.value.reason == InfraReason.PARSE_ERROR


def test_runner_that_never_starts_is_a_grading_error(grader: Grader, task: Task) -> None:
    with pytest.raises(GradingError) as caught:
        grader.grade(task.model_copy(update={"test_cmd": "no-such-runner"}), {CORE: FileState(FIX)})
    assert caught.value.reason == InfraReason.GRADING_ERROR


def test_patch_that_keeps_the_runner_from_starting_is_a_wrong_answer(grader: Grader, task: Task) -> None:
    # pyproject.toml that cannot be read stops pytest before it loads anything; it is dropped, so the fix counts ...
    verdict = grader.grade(task, {CORE: FileState(FIX), "pyproject.toml": FileState(b"[[[")})
    assert verdict.resolved
    assert verdict.dropped_paths == ["pyproject.toml"]
    # ... and where the command itself depends on the patch, the control run tells whose fault it is.
    needs = task.model_copy(update={"test_cmd": "grep -q two notes.txt && python -m pytest -q"})
    verdict = grader.grade(needs, {CORE: FileState(FIX), "notes.txt": FileState(b"one\n")})
    assert not verdict.resolved
    assert "did not start" in verdict.why


def test_lost_sandbox_is_a_typed_infrastructure_failure(task: Task, backend: LocalBackend) -> None:
    class Dying:
        def create(self, *args: object, **options: object) -> object:
            box = backend.create(*args, **options)  # type: ignore[arg-type]
            box.destroy()
            return box

    with pytest.raises(GradingError) as caught:
        Grader(Dying(), recipe.Grading()).grade(task, {CORE: FileState(FIX)})  # type: ignore[arg-type]
    assert caught.value.reason == InfraReason.SANDBOX_LOST


def test_patch_that_kills_its_box_is_a_wrong_answer(task: Task, backend: LocalBackend) -> None:
    """Every box that holds the patch dies, boxes without it live."""

    class Fragile:
        def create(self, *args: object, **options: object) -> object:
            box = backend.create(*args, **options)  # type: ignore[arg-type]
            write = box.write

            def write_or_die(changes: TreeDiff) -> None:
                write(changes)
                if "calc/core.py" in changes:
                    box.destroy()

            box.write = write_or_die  # type: ignore[method-assign]
            return box

    verdict = Grader(Fragile(), recipe.Grading()).grade(task, {CORE: FileState(FIX)})  # type: ignore[arg-type]
    assert not verdict.resolved
    assert "the sandbox died" in verdict.why


def test_files_that_cannot_be_written_are_a_wrong_answer(backend: LocalBackend, task: Task) -> None:
    small = Grader(backend, recipe.Grading(), limits=Limits(disk_mb=16))
    verdict = small.grade(task, {CORE: FileState(FIX), "huge": FileState(bytes(24 << 20))})
    assert (verdict.resolved, verdict.apply) == (False, "failed")
    assert "cannot be written" in verdict.why


def test_names_no_file_system_takes_are_dropped(grader: Grader, task: Task) -> None:
    verdict = grader.grade(task, {CORE: FileState(FIX), "x" * 300: FileState(b"x")})
    assert verdict.resolved
    assert verdict.dropped_paths == ["x" * 300]


def test_verdicts_are_remembered_only_on_request(task: Task, backend: LocalBackend, tmp_path: Path) -> None:
    class Counting:
        made = 0

        def create(self, *args: object, **options: object) -> object:
            self.made += 1
            return backend.create(*args, **options)  # type: ignore[arg-type]

    counting = Counting()
    section = recipe.Grading(remember_verdicts=True)
    first = Grader(counting, section, memo=tmp_path).grade(task, {CORE: FileState(FIX)})  # type: ignore[arg-type]
    again = Grader(counting, section, memo=tmp_path)  # type: ignore[arg-type]
    # The same filtered patch, reached another way: a text, and with a file that the filter drops.
    text = to_patch(pristine_tree(task), {CORE: FileState(FIX)})
    second = again.grade(task, text)
    third = again.grade(task, {CORE: FileState(FIX), "conftest.py": FileState(b"")})
    assert counting.made == 1
    assert dataclasses.replace(second, seconds=0, apply="") == dataclasses.replace(first, seconds=0, apply="")
    assert third.dropped_paths == ["conftest.py"]
    again.grade(task, {CORE: FileState(FIX + b"\n")})
    again.grade(task.model_copy(update={"PASS_TO_PASS": []}), {CORE: FileState(FIX)})
    assert counting.made == 3
    Grader(counting, recipe.Grading(), memo=tmp_path).grade(task, {CORE: FileState(FIX)})  # type: ignore[arg-type]
    assert counting.made == 4


def test_expected_failures_by_the_table(backend: LocalBackend, tmp_path: Path) -> None:
    tests = (
        "import pytest\nfrom calc import add, give_up\n\n\n"
        "@pytest.mark.xfail\ndef test_marked():\n    assert add(1, 1) == 3\n\n\n"
        "@pytest.mark.xfail\ndef test_xpass():\n    assert True\n\n\n"
        "@pytest.mark.xfail(strict=True)\ndef test_strict():\n    assert True\n\n\n"
        "def test_calls_xfail():\n    pytest.xfail('known')\n\n\n"
        "def test_excused_by_the_code():\n    give_up()\n\n\n"
        "def test_skip():\n    pytest.skip('no')\n\n\n"
        "@pytest.fixture\ndef broken():\n    yield\n    assert False\n\n\n"
        "def test_tear_down(broken):\n    pass\n"
    )
    clean = {**CLEAN, "tests/test_add.py": tests}
    clean["calc/core.py"] += "\n\ndef give_up():\n    import pytest\n    pytest.xfail('excuse')\n"
    clean["calc/__init__.py"] = "from calc.core import add, give_up, mul\n"
    names = ("marked", "xpass", "strict", "calls_xfail", "excused_by_the_code", "skip", "tear_down")
    ids = [f"tests/test_add.py::test_{n}" for n in names]
    verdict = Grader(backend, recipe.Grading()).grade(make_task(tmp_path, clean=clean, bug={}, FAIL_TO_PASS=ids), {})
    passed = {i.split("test_", 2)[-1]: ok for i, ok in verdict.f2p.items()}
    assert passed == {
        "marked": True,
        "xpass": True,
        "strict": False,
        "calls_xfail": True,
        "excused_by_the_code": False,
        "skip": False,
        "tear_down": False,
    }
