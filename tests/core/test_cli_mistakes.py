"""What a user can get wrong on the command line, as real processes: one clear sentence, exit code 2, no traceback.

Every case is refused before anything long starts and leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TASKS = json.dumps(
    {"instance_id": "calc__1", "repo": "calc", "problem_statement": "x", "FAIL_TO_PASS": ["t"], "PASS_TO_PASS": []}
)


def swel(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "SWEL_SIGNING_KEY"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=120,
        check=False,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with what the mistakes below are made with."""
    (tmp_path / "afile").write_text("text\n")
    (tmp_path / "binary").write_bytes(b"\x80\x81\xff" * 20)
    (tmp_path / "tasks.jsonl").write_text(TASKS + "\n")
    (tmp_path / "adir").mkdir()
    (tmp_path / "badmodel").mkdir()
    (tmp_path / "badmodel" / "config.json").write_text("{ not JSON")
    return tmp_path


def refused(place: Path, *arguments: str) -> str:
    before = sorted(place.rglob("*"))
    done = swel(*arguments, cwd=place)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert "pydantic" not in done.stderr
    assert done.stdout == ""
    assert sorted(place.rglob("*")) == before, "a refused command leaves nothing behind"
    return done.stderr.strip()


SENTENCES = [
    (("model", "tiny", "afile"), "afile is a file; swel model tiny wants a directory"),
    (("model", "tiny", "afile/x"), "afile is a file; swel model tiny wants a directory"),
    (("demo", "--out", "afile"), "afile is a file; --out wants a directory"),
    (("data", "synth", "--manifest", "demo", "--out", "afile/x"), "afile is a file; --out wants a directory"),
    (
        ("data", "synth", "--pypi", "six==1.17.0", "--out", "new", "--kind", "nokind"),
        "--kind nokind: no such kind of bug; choose among and_or, any_all, arithmetic",
    ),
    (("grade", "tasks.jsonl", "--predictions", "binary"), "binary is not a predictions file: it is not UTF-8 text"),
    (("eval", "tasks.jsonl", "--script", "nosuch"), "--script nosuch: no strategy nosuch; known: demonstrator"),
    (
        ("data", "filter", "--input", "tasks.jsonl", "--out", "new", "--probe-model", "script:nosuch"),
        "--probe-model script:nosuch: no strategy nosuch; known: demonstrator",
    ),
    (("serve", "script", "noop", "--tokenizer", "adir", "--port", "18461"), "cannot read the tokenizer in adir"),
    (("serve", "script", "noop", "--tokenizer", "gpt2", "--port", "18461"), "no directory gpt2; give the local"),
    (("serve", "controller", "adir", "--gateway", "http://127.0.0.1:1"), "adir holds no signing key"),
    (("serve", "controller", "adir", "--gateway", "notaurl"), "--gateway notaurl is not an http(s) URL"),
    (("data", "filter", "--input", "tasks.jsonl", "--out", "afile/x"), "afile is a file; --out wants a directory"),
]


@pytest.mark.parametrize(("arguments", "sentence"), SENTENCES)
def test_one_sentence(place: Path, arguments: tuple[str, ...], sentence: str) -> None:
    said = refused(place, *arguments)
    assert said.startswith("swel: ")
    assert sentence in said
    assert "\n" not in said


@pytest.mark.train
def test_a_damaged_model_is_one_sentence(place: Path) -> None:
    pytest.importorskip("torch")
    said = refused(place, "serve", "model", "badmodel", "--port", "18461")
    assert "in badmodel; check its files" in said
    assert "\n" not in said


FILTER = ("data", "filter", "--input", "tasks.jsonl", "--out", "new")
SYNTH = ("data", "synth", "--manifest", "demo", "--out", "new")
NUMBERS = [
    (("grade", "tasks.jsonl", "--gold"), "--timeout-s", "-1"),
    (FILTER, "--keep-none-solved", "-1"),
    (FILTER, "--k", "0"),
    (FILTER, "--test-cap", "0"),
    (SYNTH, "--train-limit", "-3"),
    (SYNTH, "--held-out-limit", "-1"),
    (SYNTH, "--timeout-s", "0"),
]


@pytest.mark.parametrize(("command", "option", "value"), NUMBERS)
def test_numbers_out_of_range(place: Path, command: tuple[str, ...], option: str, value: str) -> None:
    said = refused(place, *command, option, value)
    assert f"Invalid value for '{option}'" in said
    assert "greater than or equal to" in said


OS_ERRORS = [
    ("open('afile/x')", "swel: afile/x: Not a directory"),
    ("open('adir')", "swel: adir: Is a directory"),
    ("open('nowhere')", "swel: nowhere: No such file or directory"),
    ("os.mkdir('adir')", "swel: adir: File exists"),
    ("(_ for _ in ()).throw(PermissionError(13, 'Permission denied', b'secret'))", "swel: secret: Permission denied"),
]


def run_failing(place: Path, expression: str) -> subprocess.CompletedProcess[str]:
    """`swel fail`, a command that does nothing but fail in this way, through the real main()."""
    program = (
        f"import os, cli\n@cli.app.command()\ndef fail() -> None:\n    next(iter([{expression}]))\ncli.main(['fail'])"
    )
    if "throw" in expression:
        program = program.replace(f"next(iter([{expression}]))", expression)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=place, timeout=60, check=False
    )


@pytest.mark.parametrize(("expression", "sentence"), OS_ERRORS)
def test_a_path_that_the_system_refuses_is_named(place: Path, expression: str, sentence: str) -> None:
    done = run_failing(place, expression)
    assert (done.returncode, done.stderr.strip()) == (2, sentence)


def test_a_system_error_without_a_path_stays_a_bug(place: Path) -> None:
    done = run_failing(place, "(_ for _ in ()).throw(OSError(24, 'Too many open files'))")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_directory_with_an_equals_sign_is_a_path(place: Path) -> None:
    from swe_lightning.errors import UserError
    from swe_lightning.evaluation.session import parse_subjects

    directory = place / "lr=3" / "step4"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    plain, labelled = parse_subjects([str(directory), f"mine={directory}"], [], None)
    assert (plain.label, plain.checkpoint) == ("step4", directory)
    assert (labelled.label, labelled.checkpoint) == ("mine", directory)
    with pytest.raises(UserError, match="known: demonstrator"):
        parse_subjects([], ["nosuch"], None)
