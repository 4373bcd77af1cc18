"""The validation stage: the table of verdicts, resuming, and real tests in real boxes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline import commands
from data_pipeline.repos import Branch, bug_patches, build_repository
from data_pipeline.trees import Entry
from data_pipeline.validate import Grading, grade_with, judge, next_patch, validate

Make = Callable[..., dict[str, Any]]

NULL, PASS = Grading("null", why="fails"), Grading("gold", resolved=True)
FAIL = Grading("gold", why="1 of 2 PASS_TO_PASS fail")
HANG = Grading("gold", timed_out=True, why="tests timed out after 9 s")
LOST = Grading("gold", lost="sandbox_lost: gone")

VERDICTS = [
    ([NULL, PASS, PASS, PASS], None),
    ([NULL, PASS, PASS, FAIL], "flaky"),
    ([NULL, FAIL, PASS], "flaky"),
    ([NULL, FAIL, FAIL, FAIL], "gold_fails"),
    ([NULL, HANG], "timeout"),
    ([Grading("null", timed_out=True)], "timeout"),
    ([Grading("null", resolved=True, f2p_passed=1)], "null_passes"),
    ([Grading("null", f2p_passed=1, why="2 of 3 FAIL_TO_PASS fail")], "null_passes"),
    ([NULL, Grading("gold", unusable=True, why="does not fit")], "gold_unusable"),
    ([NULL, LOST, LOST, LOST], "no_verdict"),
    ([NULL, LOST, LOST, PASS, PASS, PASS], None),
    ([], None),
]


@pytest.mark.parametrize(("gradings", "reason"), VERDICTS)
def test_verdicts(gradings: list[Grading], reason: str | None) -> None:
    found = judge(gradings, 3)
    assert (found[0] if found else None) == reason


def test_the_next_grading_is_the_cheapest_that_may_decide() -> None:
    assert next_patch([], 3) == "null"
    assert next_patch([Grading("null", lost="x")], 3) == "null"
    assert next_patch([NULL, PASS], 3) == "gold"
    assert next_patch([NULL, PASS, PASS, PASS], 3) is None
    assert next_patch([NULL, FAIL, PASS], 3) is None, "flaky already: no third run"
    assert next_patch([NULL, FAIL], 3) == "gold", "failing and flaky are different reasons"


class WrittenGradings:
    """Verdicts of the fix written down beforehand, P, F, H (hangs) and L (lost), one after another; counts them."""

    def __init__(self, verdicts: dict[str, str], stop_after: int | None = None) -> None:
        self.left = {name: list(text) for name, text in verdicts.items()}
        self.stop_after = stop_after
        self.count = 0

    def __call__(self, row: Any, patch: str) -> Grading:
        if self.stop_after is not None and self.count >= self.stop_after:
            raise KeyboardInterrupt
        self.count += 1
        if patch == "null":
            return NULL
        return {"P": PASS, "F": FAIL, "H": HANG, "L": LOST}[self.left[row["instance_id"]].pop(0)]


def test_every_row_is_kept_or_has_a_reason(make_row: Make, tmp_path: Path) -> None:
    """D7: ten rows, kept and left add up; D5: PPF, PPP and a hang."""
    texts = ["PPP", "PPF", "H", "FFF", "PPP", "LLL", "LPPP", "PPP", "PF", "PPP"]
    rows = [make_row(n) for n in range(10)]
    grade = WrittenGradings({row["instance_id"]: text for row, text in zip(rows, texts, strict=True)})
    found = validate(rows, lambda row: row, grade, repeats=3, workers=4, file=tmp_path / "v.jsonl")
    assert {n: reason for n, (reason, _) in found.items()} == {
        1: "flaky",
        2: "timeout",
        3: "gold_fails",
        5: "no_verdict",
        8: "flaky",
    }


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_an_interrupted_validation_repeats_no_grading(make_row: Make, tmp_path: Path, stop: int) -> None:
    rows, file = [make_row(n) for n in range(4)], tmp_path / "v.jsonl"
    first = WrittenGradings({row["instance_id"]: "PPP" for row in rows}, stop_after=stop)
    with pytest.raises(KeyboardInterrupt):
        validate(rows, lambda row: row, first, repeats=3, workers=1, file=file)
    with file.open("a") as stream:
        stream.write('{"key": "torn')
    second = WrittenGradings({row["instance_id"]: "PPP" for row in rows})
    assert validate(rows, lambda row: row, second, repeats=3, file=file) == {}
    assert first.count + second.count == 4 * 4
    changed = [{**rows[0], "PASS_TO_PASS": ["t.py::other"]}, *rows[1:]]
    third = WrittenGradings({row["instance_id"]: "PPPPPP" for row in rows})
    validate(changed, lambda row: row, third, repeats=3, file=file)
    assert third.count == 4, "a row that says something else is graded anew"
    assert validate(rows, lambda row: row, third, repeats=3, file=file, settings="9 s") == {}
    assert third.count == 4 + 16, "and so are all when the time limit changed"


CLEAN = "def double(value):\n    return value * 2\n"
BUG = "def double(value):\n    return value + 2\n"
TESTS = """\
import time

from calc import double


def test_double():
    assert double(3) == 6


def test_two():
    assert double(2) == 4


def test_broken_anyway():
    assert False


def test_hangs():
    time.sleep(60)
"""


def test_real_rows_in_real_boxes(make_row: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swe_lightning.grading.grade import Grader
    from swe_lightning.recipe import Grading as Section
    from swe_lightning.recipe import SandboxSection
    from swe_lightning.sandbox import make_backend

    monkeypatch.setenv("SWEL_HOME", str(tmp_path / "home"))
    tree = {"calc.py": Entry(CLEAN.encode()), "test_calc.py": Entry(TESTS.encode())}
    kinds: dict[str, tuple[list[str], list[str]]] = {
        "good": (["test_double"], ["test_two"]),
        "null_passes": (["test_double", "test_two"], []),
        "gold_fails": (["test_double"], ["test_broken_anyway"]),
        "not_there": (["test_double"], ["test_that_nobody_wrote"]),
        "timeout": (["test_double"], ["test_hangs"]),
        "gold_unusable": (["test_double"], []),
    }
    repository = tmp_path / "r.git"
    build_repository(tree, [Branch(name, {"calc.py": BUG.encode()}) for name in kinds], repository)
    patches = bug_patches(repository, list(kinds))
    patches["gold_unusable"] = patches["good"].replace("value", "other")
    file = tmp_path / "tasks.jsonl"
    with file.open("w") as stream:
        for name, (fail, keep) in kinds.items():
            lists = {
                "FAIL_TO_PASS": [f"test_calc.py::{t}" for t in fail],
                "PASS_TO_PASS": [f"test_calc.py::{t}" for t in keep],
            }
            row = make_row(instance_id=name, repo_path="r.git", patch=patches[name], **lists)
            stream.write(json.dumps(row) + "\n")
    grade = grade_with(Grader(make_backend(SandboxSection()), Section(timeout_s=3)))
    report = commands.validate(inputs=[str(file)], out=tmp_path / "out", grade=grade, repeats=2)
    dropped = {d["instance_id"]: d for d in map(json.loads, (tmp_path / "out" / "dropped.jsonl").open())}
    assert {name: drop["reason"] for name, drop in dropped.items()} == {
        "null_passes": "null_passes",
        "gold_fails": "gold_fails",
        "not_there": "gold_fails",
        "timeout": "timeout",
        "gold_unusable": "gold_unusable",
    }
    assert "did not run" in dropped["not_there"]["evidence"], "a test that is not there failed"
    kept = [json.loads(line) for line in (tmp_path / "out" / "tasks.jsonl").open()]
    assert [row["instance_id"] for row in kept] == ["good"]
    assert kept[0]["repo_path"] == "../r.git"
    assert (report["rows"], report["kept"], report["yield"]) == (6, 1, 0.1667)
    # The stage says the same inside the filter, and finds every grading already there.
    (tmp_path / "filtered").mkdir()
    (tmp_path / "out" / "validation.jsonl").rename(tmp_path / "filtered" / "validation.jsonl")

    def refuse(row: Any, patch: str) -> Grading:
        raise AssertionError("graded twice")

    filtered = commands.filter(
        inputs=[str(file), *_one_more(make_row, tmp_path)],
        out=tmp_path / "filtered",
        validations=2,
        grade=lambda row, patch: PASS if row["instance_id"] == "more" and patch == "gold" else _null(row, refuse),
        val_size=1,
    )
    assert filtered["dropped"] == report["dropped"]


def _one_more(make_row: Make, folder: Path) -> list[str]:
    """A second row that stays, because a split needs two."""
    (folder / "more.jsonl").write_text(json.dumps(make_row(instance_id="more")) + "\n")
    return [str(folder / "more.jsonl")]


def _null(row: Any, otherwise: Any) -> Grading:
    return NULL if row["instance_id"] == "more" else otherwise(row, "null")


def test_gradings_of_another_backend_do_not_count(
    make_row: Make, docker_image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same directory, first in local boxes, then in containers: every verdict is taken anew, and then resumed."""
    import cli

    branch = Branch("good", {"calc.py": BUG.encode()})
    build_repository(
        {"calc.py": Entry(CLEAN.encode()), "test_calc.py": Entry(TESTS.encode())}, [branch], tmp_path / "r.git"
    )
    lists = {"FAIL_TO_PASS": ["test_calc.py::test_double"], "PASS_TO_PASS": ["test_calc.py::test_two"]}
    patch = bug_patches(tmp_path / "r.git", ["good"])["good"]
    command = "python -m pytest -q -rA"
    row = make_row(
        instance_id="good", repo_path="r.git", patch=patch, image_name=docker_image, test_cmd=command, **lists
    )
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")

    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            cli.main(["data", *arguments, "--input", str(tmp_path / "t.jsonl"), "--out", str(tmp_path / "out")])
        assert ended.value.code == 0, capsys.readouterr().err
        return len((tmp_path / "out" / "validation.jsonl").read_text().splitlines())

    once = ("validate", "--repeats", "1")
    assert run(*once) == 2
    assert run(*once, "--backend", "docker") == 4
    assert run(*once, "--backend", "docker") == 4


def test_the_card_says_in_which_boxes_rows_were_validated(
    monkeypatch: pytest.MonkeyPatch, make_row: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The backend belongs to what a result is known by: the same directory refuses it, the card's command names it."""
    import cli
    from swe_lightning.commands import data

    def in_boxes(backend: str, timeout_s: float) -> Any:
        return lambda row, patch: NULL if patch == "null" else PASS

    monkeypatch.setattr(data, "_grade", in_boxes)
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(make_row(n)) + "\n" for n in range(3)))

    def run(*arguments: str) -> Any:
        places = ("--input", str(tmp_path / "t.jsonl"), "--out", str(tmp_path / "out"))
        with pytest.raises(SystemExit) as ended:
            cli.main(["data", "filter", *places, "--val-size", "1", "--validate", "1", *arguments])
        return ended.value.code

    assert run("--backend", "docker") == 0
    assert "--backend docker" in (tmp_path / "out" / "card.md").read_text()
    capsys.readouterr()
    assert run() == 2
    assert "holds a result of other inputs or settings" in capsys.readouterr().err
    assert run("--backend", "docker") == 0
