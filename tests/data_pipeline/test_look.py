"""`swel data show`, `stats` and `diff`: files and outputs, for people and as JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from data_pipeline import commands
from swe_lightning.controller.supervisor import swel_command
from swe_lightning.errors import DataError

Make = Callable[..., dict[str, Any]]
Write = Callable[..., str]


@pytest.fixture
def outputs(make_row: Make, write_rows: Write, tmp_path: Path) -> tuple[str, str, list[dict[str, Any]]]:
    """Two filterings of one set: the second with a lower cap on tests, another seed and one row rewritten."""
    rows = [make_row(n, PASS_TO_PASS=[f"t{i}" for i in range(n)], note={"b": 1, "a": [n]}) for n in range(20)]
    rows[3]["problem_statement"] = " "
    commands.filter(inputs=[write_rows(rows, "a.jsonl")], out=tmp_path / "a", val_size=4)
    other = [dict(row) for row in rows]
    other[5].update(problem_statement="Another text.", extra=1)
    other[6]["note"] = {"a": [6], "b": 1}
    del other[7]
    commands.filter(inputs=[write_rows(other, "b.jsonl")], out=tmp_path / "b", val_size=4, test_cap=15, seed=3)
    return str(tmp_path / "a"), str(tmp_path / "b"), rows


def test_diff_of_outputs_says_what_happened_to_every_task(outputs: tuple[str, str, list[dict[str, Any]]]) -> None:
    a, b, rows = outputs
    name = [row["instance_id"] for row in rows]
    found = commands.diff(before=a, after=b)
    assert found["same"] is False
    assert found["added"] == []
    assert {one["instance_id"]: one["reason"] for one in found["removed"]} == {
        name[7]: "not in the input",
        **{name[n]: "test_cap" for n in range(15, 20)},
    }
    assert found["changed"] == [{"instance_id": name[5], "columns": ["problem_statement", "extra"]}]
    assert found["columns"] == {"problem_statement": 1, "extra": 1}, "the order of keys is no difference"
    for one in found["moved"]:
        assert one["instance_id"] in ids(a, one["from"]) & ids(b, one["to"])
    assert {one["instance_id"] for one in found["moved"]} == (ids(a, "train") & ids(b, "val")) | (
        ids(a, "val") & ids(b, "train")
    )
    assert found["moved"]
    assert found["stages"] == [{"stage": "test_cap", "a": 0, "b": 5}]
    assert found["settings"] == {"seed": [0, 3], "test_cap": [200, 15]}
    back = commands.diff(before=b, after=a)
    assert [one["instance_id"] for one in back["added"]] == [one["instance_id"] for one in found["removed"]]


def test_diff_of_bytes_decimals_and_times(make_row: Make, tmp_path: Path) -> None:
    """What parquet can hold and JSON cannot is compared all the same."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    noon = datetime(2026, 1, 2, 12)
    rows = [make_row(n, blob=b"\xff\x00", price=Decimal("1.10"), at=noon) for n in range(4)]
    other = [dict(row) for row in rows]
    other[1]["blob"] = b"\xff\x01"
    other[2]["price"] = Decimal("1.11")
    other[3]["at"] = noon.replace(hour=13)
    for name, table in (("a", rows), ("b", other)):
        pq.write_table(pa.Table.from_pylist(table), tmp_path / f"{name}.parquet")
    found = commands.diff(before=str(tmp_path / "a.parquet"), after=str(tmp_path / "b.parquet"))
    assert [one["columns"] for one in found["changed"]] == [["blob"], ["price"], ["at"]]
    assert commands.diff(before=str(tmp_path / "a.parquet"), after=str(tmp_path / "a.parquet"))["same"] is True


def ids(out: str, side: str) -> set[str]:
    return {json.loads(line)["instance_id"] for line in (Path(out) / f"{side}.jsonl").open()}


def test_the_same_tasks_in_another_place_and_order_are_the_same(
    make_row: Make, write_rows: Write, tmp_path: Path
) -> None:
    rows = [make_row(n, repo_path=f"r{n}.git", gone=None) for n in range(3)]
    first = write_rows(rows, "a.jsonl")
    (tmp_path / "deep").mkdir()
    second = write_rows([{k: v for k, v in row.items() if k != "gone"} for row in rows[::-1]], "deep/b.jsonl")
    assert commands.diff(before=first, after=second)["same"] is True
    done = subprocess.run(swel_command("data", "diff", first, second), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the tasks are the same" in done.stdout


def test_diff_on_the_command_line(outputs: tuple[str, str, list[dict[str, Any]]]) -> None:
    a, b, _ = outputs
    done = subprocess.run(swel_command("data", "diff", a, b), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "removed (6: 5 test_cap, 1 not in the input)" in done.stdout
    assert "0 -> 3" in done.stdout
    done = subprocess.run(swel_command("data", "diff", a, b, "--json"), capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == commands.diff(before=a, after=b)
    done = subprocess.run(swel_command("data", "diff", a, f"{a}/probe"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_stats_of_an_output_hold_its_sides_and_funnel(outputs: tuple[str, str, list[dict[str, Any]]]) -> None:
    a, _, _ = outputs
    counts = commands.stats(inputs=[a])
    assert (counts["rows"], counts["sides"]) == (19, {"train": 15, "val": 4})
    assert counts["dropped"] == {"empty_issue": 1}
    assert counts["funnel"]["empty_issue"] == 19
    assert counts["tests_per_task"] == {"min": 1, "q1": 6, "median": 11, "q3": 15, "max": 20}
    done = subprocess.run(swel_command("data", "stats", "--input", a), capture_output=True, text=True, check=False)
    assert "train 15, val 4" in done.stdout
    with pytest.raises(DataError, match=r"holds no train\.jsonl"):
        commands.stats(inputs=[str(Path(a).parent)])


def test_show_is_readable_and_safe(make_row: Make, write_rows: Write) -> None:
    patch = "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n"
    tests = [f"t.py::test_{n}[{'x' * 150}]" for n in range(30)]
    row = make_row(
        1, problem_statement="[bold]Not markup[/bold]\x1b[2J and \x07", patch=patch, PASS_TO_PASS=tests, own={"k": [1]}
    )
    file = write_rows([make_row(0), row])
    shown = ("data", "show", row["instance_id"], "--input", file)
    text = subprocess.run(swel_command(*shown), capture_output=True, text=True, check=True).stdout
    for part in (
        row["instance_id"],
        "[bold]Not markup[/bold]",
        "-a = 1",
        "+a = 2",
        "PASS_TO_PASS (30)",
        "20 more",
        "own",
    ):
        assert part in text, part
    assert "\x1b" not in text
    assert "\x07" not in text
    done = subprocess.run(swel_command(*shown, "--json"), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {**row, "image_name": None}


def test_show_says_why_a_task_left(outputs: tuple[str, str, list[dict[str, Any]]]) -> None:
    a, b, rows = outputs
    with pytest.raises(DataError, match=r"left .* at stage empty_issue: empty_issue \("):
        commands.show(inputs=[a], instance_id=rows[3]["instance_id"])
    with pytest.raises(DataError, match=r"at stage test_cap: test_cap \(1 FAIL_TO_PASS"):
        commands.show(inputs=[b], instance_id=rows[19]["instance_id"])
    side, row = commands.find(inputs=[a], instance_id=rows[19]["instance_id"])
    assert row["instance_id"] in ids(a, side)
    with pytest.raises(DataError, match=r"for example owner__name\.0123abcd\.func_basic__0000001\d, owner"):
        commands.show(inputs=[a], instance_id="func_basic__0000001")
