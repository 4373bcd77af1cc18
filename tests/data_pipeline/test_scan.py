"""One pass over the input: the same facts however it is read, rows copied as published, and nothing half-written."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_pipeline import commands, outputs
from data_pipeline.files import PARALLEL_BYTES, cut
from data_pipeline.processes import no_interrupts
from data_pipeline.scan import Rules, scan
from data_pipeline.sources import open_sources
from data_pipeline.store import RowStore
from swe_lightning.errors import BusyError, DataError

Make = Callable[..., dict[str, Any]]
Write = Callable[..., str]
RULES = Rules(("empty_issue", "test_cap"), 200)


def scanned(file: str, **options: Any) -> tuple[list[dict[str, Any]], list[bytes]]:
    sources = open_sources([file])
    with RowStore(sources) as store:
        rows = scan(sources, RULES, store, **options)
        return rows, [store.line(row) for row in rows if "rejected" not in row]


@pytest.fixture
def mixed_rows(make_row: Make) -> list[dict[str, Any]]:
    """Rows that need normalising and rows that do not, rows that leave and rows that stay."""
    tests = [f"t.py::t{n}" for n in range(300)]
    kinds: list[dict[str, Any]] = [
        {"image_name": "i", "own": {"deep": [1, None]}},
        {"problem_statement": ""},
        {"image": "spelled/otherwise"},
        {"FAIL_TO_PASS": '["t.py::a", "t.py::b"]'},
        {"PASS_TO_PASS": tests},
        {"PASS_TO_PASS": ["t.py::a"] * 300},
        {"repo_path": "repos/x.git"},
    ]
    return [make_row(n, **kinds[n % len(kinds)]) for n in range(70)]


def test_several_processes_find_what_one_finds(mixed_rows: list[dict[str, Any]], write_rows: Write) -> None:
    file = write_rows(mixed_rows)
    alone = scanned(file, parallel_bytes=1 << 40)
    together = scanned(file, workers=3, parallel_bytes=0)
    assert alone == together
    assert [row["instance_id"] for row in alone[0]] == [row["instance_id"] for row in mixed_rows]


def test_rows_are_copied_unless_they_had_to_change(
    mixed_rows: list[dict[str, Any]], write_rows: Write, tmp_path: Path
) -> None:
    file = write_rows(mixed_rows)
    rows, lines = scanned(file)
    published = Path(file).read_bytes().splitlines(keepends=True)
    assert lines[0] == published[0], "not a byte changed"
    by_id = {row["instance_id"]: row for row in map(json.loads, lines)}
    assert by_id[mixed_rows[2]["instance_id"]]["image_name"] == "spelled/otherwise"
    assert by_id[mixed_rows[3]["instance_id"]]["FAIL_TO_PASS"] == ["t.py::a", "t.py::b"]
    assert by_id[mixed_rows[5]["instance_id"]]["PASS_TO_PASS"] == ["t.py::a"], "300 times one test is one test"
    assert by_id[mixed_rows[6]["instance_id"]]["repo_path"] == str(tmp_path / "repos" / "x.git")
    packed = tmp_path / "same.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(file).read_bytes()))
    again, from_packed = scanned(str(packed))
    assert [json.loads(line) for line in from_packed] == [json.loads(line) for line in lines]
    assert [row.get("rejected") for row in again] == [row.get("rejected") for row in rows]


def test_parquet_says_the_same(mixed_rows: list[dict[str, Any]], write_rows: Write, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = {"repo_path": None, "image": None, "image_name": None}
    plain = [{**columns, **{k: v for k, v in row.items() if k != "own"}} for row in mixed_rows]
    for row in plain:
        if isinstance(row["FAIL_TO_PASS"], str):
            row["FAIL_TO_PASS"] = json.loads(row["FAIL_TO_PASS"])
    pq.write_table(pa.Table.from_pylist(plain), tmp_path / "t.parquet", row_group_size=32)
    rows, _ = scanned(str(tmp_path / "t.parquet"))
    expected, _ = scanned(write_rows(plain))
    assert [{k: v for k, v in r.items() if k != "ref"} for r in rows] == [
        {k: v for k, v in r.items() if k != "ref"} for r in expected
    ]


@pytest.mark.parametrize("parts", [1, 2, 7, 500])
def test_stretches_are_whole_lines(tmp_path: Path, parts: int) -> None:
    lines = [b"x" * (n % 97) + b"\n" for n in range(100)] + [b"no end"]
    (tmp_path / "f").write_bytes(b"".join(lines))
    data = (tmp_path / "f").read_bytes()
    pieces = [data[start:end] for start, end in cut(tmp_path / "f", parts)]
    assert b"".join(pieces) == data
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"tasks.jsonl:58: not valid JSON"),
        (json.dumps({"instance_id": "a"}), r"tasks.jsonl:58: column repo is missing"),
        ("again", r"tasks.jsonl:58: instance_id .* was already given at .*tasks.jsonl:1$"),
    ],
)
def test_faults_name_the_line_however_the_file_is_read(
    make_row: Make, write_rows: Write, line: str, message: str
) -> None:
    rows = [json.dumps(make_row(n)) for n in range(70)]
    rows[57] = rows[0] if line == "again" else line
    file = write_rows([])
    Path(file).write_text("\n".join(rows))
    for options in ({"parallel_bytes": 1 << 40}, {"workers": 2, "parallel_bytes": 0}):
        with pytest.raises(DataError, match=message):
            scanned(file, **options)


def test_an_input_that_changes_meanwhile_is_noticed(make_row: Make, write_rows: Write) -> None:
    file = write_rows([make_row(0), make_row(1)])
    sources = open_sources([file])
    with RowStore(sources) as store:
        rows = scan(sources, RULES, store)
        write_rows([make_row(2), make_row(3)])
        with pytest.raises(DataError, match="changed while it was read"):
            store.line(rows[0])


def test_a_kill_while_writing_leaves_no_report(tmp_path: Path) -> None:
    """An old result, a new one that dies between two files: the directory does not call itself whole."""
    for name in outputs.OUTPUTS:
        (tmp_path / name).write_text("old")

    def lines() -> Any:
        yield b"new\n"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        outputs.replace_files(tmp_path, {"train.jsonl": lines(), "report.json": [b"{}"]})
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == dict.fromkeys(outputs.OUTPUTS, "old")
    (tmp_path / "val.jsonl").unlink()
    (tmp_path / "val.jsonl").mkdir()  # cannot be replaced by a file: as good as a kill between two renames
    with pytest.raises(OSError, match=r"val.jsonl"):
        outputs.replace_files(tmp_path, {"train.jsonl": [b"new"], "val.jsonl": [b"new"], "report.json": [b"{}"]})
    assert not (tmp_path / "report.json").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_one_command_at_a_time_per_directory(make_row: Make, write_rows: Write, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    fd = os.open(out, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(BusyError, match="being written to by another command"):
        commands.filter(inputs=[write_rows([make_row(n) for n in range(3)])], out=out)
    os.close(fd)


def test_ctrl_c_while_several_processes_read(make_row: Make, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    line = json.dumps(make_row(PASS_TO_PASS=[f"t.py::test_{n:050d}" for n in range(199)]))
    name = make_row()["instance_id"]
    with file.open("w") as stream:
        stream.writelines(line.replace(name, f"a-{n}") + "\n" for n in range(6000))
    assert file.stat().st_size > PARALLEL_BYTES, "large enough for several processes"
    command = [sys.executable, "-m", "cli", "data", "filter", "--input", str(file), "--out", str(tmp_path / "out")]
    process = psutil.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while len(process.children()) < 2 and process.poll() is None:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "swel: interrupted; run the same command to go on" in said
    assert not (tmp_path / "out").exists()


def test_row_groups_are_read_by_several_processes(make_row: Make, write_rows: Write, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [make_row(n, problem_statement="" if n % 3 == 0 else f"text {n}") for n in range(300)]
    file = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=7)

    def plain(facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k != "ref"} for row in facts]

    facts, lines = scanned(str(file), parallel_bytes=1 << 40)
    together, same_lines = scanned(str(file), workers=3, parallel_bytes=0)
    assert (plain(together), same_lines) == (plain(facts), lines)
    assert len(lines) == 200
    rows[222]["repo"] = "../x"
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=7)
    for options in ({"parallel_bytes": 1 << 40}, {"workers": 3, "parallel_bytes": 0}):
        with pytest.raises(DataError, match=r"t.parquet: row 223: repo '../x' is no name"):
            scanned(str(file), **options)


def test_blank_lines_count_however_the_file_is_read(make_row: Make, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    lines = [json.dumps(make_row(n)) for n in range(40)]
    file.write_text("\n\n \r\n".join(lines) + "\r\n\n\n[1]\n")
    for options in ({"parallel_bytes": 1 << 40}, {"workers": 2, "parallel_bytes": 0}):
        with pytest.raises(DataError, match=r"tasks.jsonl:121: a row must be a JSON object, not list"):
            scanned(str(file), **options)


def test_ctrl_c_that_another_thread_takes_is_held_back_too() -> None:
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()  # blocks no signal, so the kernel may give it this one
    held = False

    def interrupted() -> None:
        nonlocal held
        with no_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            held = True

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    done.set()
    assert held
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
