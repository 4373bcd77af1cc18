"""What comes in: formats, spellings of lists, and faults that name their place."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from data_pipeline import commands
from data_pipeline.sources import load_tasks, normalise_row, read_rows
from swe_lightning.errors import DataError

Make = Callable[..., dict[str, Any]]
Write = Callable[..., str]
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "tasks"


def encoded(rows: list[dict[str, Any]], name: str) -> bytes:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if name.endswith(".jsonl.gz"):
        return gzip.compress(lines)
    if name.endswith(".jsonl.zst"):
        return zstandard.compress(lines)
    return json.dumps(rows).encode() if name.endswith(".json") else lines


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.zst", "t.json"])
def test_formats(tmp_path: Path, make_row: Make, name: str) -> None:
    rows = [make_row(0, extra={"kept": [1]}), make_row(1)]
    (tmp_path / name).write_bytes(encoded(rows, name))
    found = read_rows([str(tmp_path / name)])
    assert [row["instance_id"] for row in found] == [row["instance_id"] for row in rows]
    assert found[0]["extra"] == {"kept": [1]}


def test_parquet(tmp_path: Path, make_row: Make) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([make_row(0), make_row(1)]), tmp_path / "t.parquet")
    assert len(read_rows([str(tmp_path / "t.parquet")])) == 2
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "t.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cut.parquet is not a readable parquet"):
        read_rows([str(tmp_path / "cut.parquet")])


def test_several_inputs_and_a_last_line_without_end(tmp_path: Path, make_row: Make) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(make_row(0)))
    (tmp_path / "b.jsonl").write_text("\n" + json.dumps(make_row(1)) + "\n\n")
    assert len(read_rows([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])) == 2


LISTS = [
    (["a", "b"], ["a", "b"]),
    ('["a", "b"]', ["a", "b"]),
    ("['a', \"it's\"]", ["a", "it's"]),
    (None, []),
    ("", []),
    (["a", "a"], ["a"]),
]


@pytest.mark.parametrize(("published", "expected"), LISTS)
def test_lists_in_every_spelling(make_row: Make, published: Any, expected: list[str]) -> None:
    assert normalise_row(make_row(FAIL_TO_PASS=published), "here")["FAIL_TO_PASS"] == expected


@pytest.mark.parametrize("column", ["image_name", "image", "docker_image"])
def test_three_spellings_of_the_image(make_row: Make, column: str) -> None:
    assert normalise_row(make_row(**{column: "swebench/x"}), "here")["image_name"] == "swebench/x"


BAD = [
    ({"instance_id": None}, "column instance_id is missing"),
    ({"repo": 3}, "column repo is missing or not text"),
    ({"instance_id": "../../etc/passwd"}, "cannot name a branch"),
    ({"instance_id": "a..b"}, "cannot name a branch"),
    ({"instance_id": "x" * 300}, "cannot name a branch"),
    ({"FAIL_TO_PASS": "not a list"}, "neither a JSON nor a Python list"),
    ({"PASS_TO_PASS": [1, 2]}, "must be a list of test ids"),
    ({"PASS_TO_PASS": {"a": 1}}, "must be a list of test ids"),
    ({"problem_statement": 7}, "must be text"),
    ({"problem_statement": "x" * 10_000_000}, "10000000 characters"),
    ({"test_env": [1]}, "column test_env"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_rows_name_file_line_and_column(
    make_row: Make, write_rows: Write, change: dict[str, Any], message: str
) -> None:
    file = write_rows([make_row(0), {**make_row(1), **change}])
    with pytest.raises(DataError, match=message) as caught:
        read_rows([file])
    assert str(caught.value).startswith(f"{file}:2: ")
    assert len(str(caught.value)) < 600


FILES = [
    ("t.jsonl", b'{"instance_id": "a", "repo": "r"}\n{"instance_id": \n', r"t.jsonl:2: not valid JSON"),
    ("t.jsonl", b"[1]\n", r"t.jsonl:1: a row must be a JSON object"),
    ("t.jsonl", b"\n\n", "no rows in"),
    ("t.json", b'"text"', "must hold a list"),
    ("t.json", b"[{]", "not valid JSON"),
    ("t.jsonl.gz", gzip.compress(b"x" * 1000)[:-9], "damaged or truncated"),
    ("t.jsonl.zst", b"not zst", "damaged or truncated"),
    ("t.jsonl.zst", zstandard.compress(b'{"instance_id": "a", "repo": "r"}\n' * 9)[:-4], "damaged or truncated"),
    ("t.csv", b"a,b\n", "unknown format"),
]


@pytest.mark.parametrize(("name", "data", "message"), FILES)
def test_bad_files(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_rows([str(tmp_path / name)])


def test_duplicate_ids_name_both_places(make_row: Make, write_rows: Write) -> None:
    file = write_rows([make_row(0), make_row(1), make_row(0)])
    with pytest.raises(DataError, match=r":3: instance_id .* was already given at .*:1$"):
        read_rows([file])


@pytest.mark.parametrize("name", ["absent.jsonl", "absent", ""])
def test_absent_input(name: str) -> None:
    with pytest.raises(DataError, match="no file"):
        read_rows([name])


def test_a_hub_set_that_cannot_be_loaded_names_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"cannot load nobody/nothing-here .*--input"):
        read_rows(["nobody/nothing-here"])


def test_tasks_have_absolute_repositories(make_row: Make, write_rows: Write) -> None:
    file = Path(write_rows([make_row(repo_path="repos/x.git", own_column=1)]))
    task = load_tasks(file)[0]
    assert task.repo_path == str(file.parent / "repos" / "x.git")
    assert (task.model_extra or {})["own_column"] == 1


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/tasks is not here")
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("swebench_verified_500.jsonl.gz", 500),
        ("swebench_lite_300.jsonl.gz", 300),
        ("swesmith_real_9_on_sdists.jsonl", 9),
        ("swesmith_official_pandas_pr_53652.json", 1),
    ],
)
def test_published_rows(name: str, count: int) -> None:
    rows = read_rows([str(SHARED / name)])
    assert len(rows) == count
    assert all(isinstance(row["PASS_TO_PASS"], list) for row in rows)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz"])
def test_integers_of_any_size_are_written_as_they_came(make_row: Make, tmp_path: Path, name: str) -> None:
    """orjson reads those over 64 bits as floats. Lists as text: the rows of all three are written anew."""
    big = {
        "plain": 2**70 + 1,
        "deep": [{"x": -(2**64) - 1}],
        "fits": 2**64 - 1,
        "real": 1.5,
        "text": "\u00e4 " + "7" * 30,
    }
    rows = [make_row(n, FAIL_TO_PASS='["t.py::a"]', own=big) for n in range(4)]
    text = json.dumps(rows) if name == "a.json" else "".join(json.dumps(row) + "\n" for row in rows)
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    commands.filter(inputs=[str(tmp_path / name)], out=tmp_path / "out", val_size=1)
    found = [json.loads(line) for side in ("train", "val") for line in (tmp_path / f"out/{side}.jsonl").open()]
    assert len(found) == 4
    for row in found:
        assert row["own"] == big
        assert row["FAIL_TO_PASS"] == ["t.py::a"]
        assert type(row["own"]["plain"]) is int
