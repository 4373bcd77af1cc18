"""Broken input at the command line: one sentence that says what, where and what to do; exit 2; nothing written."""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import cli
from data_pipeline import commands
from data_pipeline.files import open_file

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(file: Path, *arguments: str, command: str = "filter") -> str:
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        with pytest.raises(SystemExit) as ended:
            cli.main(["data", command, "--input", str(file), "--out", str(tmp_path / "out"), *arguments])
        said = capsys.readouterr()
        assert ended.value.code == 2
        assert said.out == ""
        assert not (tmp_path / "out").exists()
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
        (sentence,) = (line for line in said.err.strip().splitlines() if line.startswith("swel: "))
        assert len(sentence) < 700, "no dump of the row"
        return sentence

    return run


TESTS = ["t.py::a"]
LINES: list[tuple[Any, str]] = [
    ('{"instance_id": "a", "repo": ', "tasks.jsonl:3: not valid JSON"),
    ("\x00\x01", "tasks.jsonl:3: not valid JSON"),
    ("[1, 2]", "tasks.jsonl:3: a row must be a JSON object, not list"),
    ({"problem_statement": "x"}, "tasks.jsonl:3: column instance_id and repo is missing or not text"),
    ({"instance_id": 7, "repo": "a/b"}, "tasks.jsonl:3: column instance_id is missing or not text"),
    ({"instance_id": "../../../etc/cron.d/x", "repo": "a/b"}, "tasks.jsonl:3: instance_id '../../../etc/cron.d/x'"),
    ({"instance_id": "-rf", "repo": "a/b"}, "cannot name a branch and a directory"),
    ({"instance_id": "a\nb", "repo": "a/b"}, "cannot name a branch and a directory"),
    ({"instance_id": "a", "repo": "../../home"}, "repo '../../home' is no name of a repository"),
    ({"instance_id": "a", "repo": "/etc"}, "repo '/etc' is no name of a repository"),
    ({"instance_id": "a", "repo": "a/b", "FAIL_TO_PASS": [TESTS]}, "FAIL_TO_PASS must be a list of test ids"),
    ({"instance_id": "a", "repo": "a/b", "FAIL_TO_PASS": ["a", 1]}, "FAIL_TO_PASS must be a list of test ids"),
    ({"instance_id": "a", "repo": "a/b", "PASS_TO_PASS": 3}, "PASS_TO_PASS must be a list of test ids"),
    ({"instance_id": "a", "repo": "a/b", "problem_statement": ["x"]}, "problem_statement must be text, not list"),
    ({"instance_id": "a", "repo": "a/b", "problem_statement": "x" * 10_000_000}, "has 10000000 characters"),
    ({"instance_id": "a", "repo": "a/b", "patch": 5}, "tasks.jsonl:3: column patch"),
    ({"instance_id": "a", "repo": "a/b", "repo_path": 5}, "repo_path must be text"),
    ({"instance_id": "a", "repo": "a/b", "test_env": {"A": 1}}, "tasks.jsonl:3: column test_env.A"),
    ({"instance_id": "a", "repo": "a/b", "PASS_TO_PASS": "[" * 20_000}, "PASS_TO_PASS is text but neither a JSON nor"),
    ({"instance_id": "a", "repo": "a/b", "PASS_TO_PASS": "9" * 6_000}, "PASS_TO_PASS is text but neither a JSON nor"),
    ({"instance_id": "a", "repo": "a/b", "PASS_TO_PASS": "null"}, "PASS_TO_PASS must be a list of test ids"),
    ({"instance_id": "a", "repo": "a/b", "patch": None}, "tasks.jsonl:3: column patch: Input should be a valid string"),
    ('{"instance_id": "a", "repo": "a/b", "own": NaN}', "tasks.jsonl:3: not valid JSON"),
    ("again", "tasks.jsonl:3: instance_id 'owner__name.0123abcd.func_basic__00000000' was already given at"),
]


@pytest.mark.parametrize(("line", "message"), LINES, ids=range(len(LINES)))
def test_a_bad_line(make_row: Make, tmp_path: Path, refused: Any, line: Any, message: str) -> None:
    rows = [json.dumps(make_row(n)) for n in (0, 1)]
    rows.append(rows[0] if line == "again" else line if isinstance(line, str) else json.dumps(line))
    (tmp_path / "tasks.jsonl").write_text("\n".join([*rows, json.dumps(make_row(2))]))
    assert message in refused(tmp_path / "tasks.jsonl")


def test_damaged_files(make_row: Make, tmp_path: Path, refused: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    file = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist([make_row(n) for n in range(2000)]), file, compression="none")
    whole = file.read_bytes()
    for cut in (len(whole) // 2, len(whole) - 3, 0):
        file.write_bytes(whole[:cut])
        assert "t.parquet is not a readable parquet file" in refused(file)
    pq.write_table(pa.table({"unrelated": [1, 2]}), file)
    assert "t.parquet: row 1: column instance_id and repo is missing" in refused(file)
    (tmp_path / "t.jsonl.gz").write_bytes(b"\x1f\x8b\x08 not really")
    assert "damaged or truncated" in refused(tmp_path / "t.jsonl.gz")
    (tmp_path / "t.jsonl").write_bytes(b"")
    assert "no rows in" in refused(tmp_path / "t.jsonl")


PARQUET: list[tuple[dict[str, Any], str]] = [
    ({"own": b"\xff\xd8"}, "0001: column own: Type is not JSON serializable: bytes; leave it out"),
    ({"own": Decimal("1.5")}, "0001: column own: Type is not JSON serializable: decimal.Decimal; leave it out"),
    ({"FAIL_TO_PASS": [1, 2]}, "t.parquet: row 1: FAIL_TO_PASS must be a list of test ids"),
    ({"FAIL_TO_PASS": ["a", None]}, "t.parquet: row 1: FAIL_TO_PASS must be a list of test ids"),
    ({"instance_id": None}, "t.parquet: row 1: column instance_id is missing or not text"),
]


@pytest.mark.parametrize(("changes", "message"), PARQUET, ids=range(len(PARQUET)))
def test_columns_that_no_row_can_have(
    make_row: Make, tmp_path: Path, refused: Any, changes: dict[str, Any], message: str
) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([make_row(1, **changes)]), tmp_path / "t.parquet")
    assert message in refused(tmp_path / "t.parquet")


def test_the_bytes_of_a_marked_file_are_copied_without_its_mark(make_row: Make, tmp_path: Path) -> None:
    lines = [json.dumps(make_row(n, image_name="owner/image:1")).encode() + b"\n" for n in range(3)]
    (tmp_path / "t.jsonl").write_bytes(codecs.BOM_UTF8 + b"".join(lines))
    first = next(open_file(tmp_path / "t.jsonl").read())
    assert first.span == (3, len(lines[0]))
    commands.filter(inputs=[str(tmp_path / "t.jsonl")], out=tmp_path / "out", val_size=1)
    copied = [line for side in ("train", "val") for line in (tmp_path / "out" / f"{side}.jsonl").open("rb")]
    assert sorted(copied) == lines


def test_rows_as_other_systems_write_them(make_row: Make, tmp_path: Path) -> None:
    """A byte order mark, CRLF, test lists as text: read as what they say. Rows are copied without the mark."""
    rows = [make_row(n, FAIL_TO_PASS="['t.py::a']", PASS_TO_PASS=json.dumps(["t.py::b"])) for n in range(3)]
    text = "\r\n".join(map(json.dumps, rows))
    (tmp_path / "bom.jsonl").write_bytes(codecs.BOM_UTF8 + text.encode())
    (tmp_path / "bom.json").write_bytes(codecs.BOM_UTF8 + json.dumps(rows).encode())
    (tmp_path / "bom.jsonl.gz").write_bytes(gzip.compress(codecs.BOM_UTF8 + text.encode()))
    for name in ("bom.jsonl", "bom.json", "bom.jsonl.gz"):
        out = tmp_path / f"out-{name}"
        with pytest.raises(SystemExit) as ended:
            cli.main(["data", "filter", "--input", str(tmp_path / name), "--out", str(out), "--val-size", "1"])
        assert ended.value.code == 0
        found = [json.loads(line) for side in ("train", "val") for line in (out / f"{side}.jsonl").open()]
        assert sorted(row["instance_id"] for row in found) == [row["instance_id"] for row in rows]
        assert all((row["FAIL_TO_PASS"], row["PASS_TO_PASS"]) == (["t.py::a"], ["t.py::b"]) for row in found)


def test_an_empty_result_names_the_reasons(make_row: Make, tmp_path: Path, refused: Any) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(make_row(n, problem_statement=" ")) + "\n" for n in range(3)))
    assert "no row is left of 3: 3 empty_issue" in refused(file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "loose"), "--preset loose: choose one of paper, strict"),
        (("--stage", "nosuch"), "--stage nosuch: no such stage; choose among empty_issue"),
        (("--skip", "nosuch"), "--skip nosuch: no such stage"),
        (("--validate", "1", "--backend", "podman"), "--backend podman: Input should be 'local', 'docker' or"),
        (("--backend", "podman"), "--backend podman: Input should be 'local', 'docker' or"),
        (("--eval-set", "absent.jsonl"), "no file absent.jsonl"),
        (("--branches", "absent.json"), "no file absent.json; --branches takes a JSON file"),
        (("--probe-results", "absent.json"), "cannot read probe results absent.json"),
        (("--held-out-repo", "nowhere"), "held-out repository nowhere is not among the rows"),
    ],
)
def test_bad_options(make_row: Make, tmp_path: Path, refused: Any, arguments: tuple[str, ...], message: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(make_row(n)) + "\n" for n in range(3)))
    assert message in refused(file, *arguments)


def test_a_row_that_has_no_repository_cannot_be_validated(make_row: Make, tmp_path: Path, refused: Any) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(make_row()) + "\n")
    assert "has no repo_path" in refused(file, command="validate")
