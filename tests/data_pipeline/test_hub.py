"""Hub data sets through the real `datasets`: downloaded directories, streaming, a small hub on this machine, no hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs

import pytest

from data_pipeline.files import open_file
from data_pipeline.hub import ALIASES, is_hub_name
from data_pipeline.sources import open_sources, read_rows
from swe_lightning.errors import DataError

datasets = pytest.importorskip("datasets")
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

Make = Callable[..., dict[str, Any]]
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def rows(make_row: Make) -> list[dict[str, Any]]:
    return [
        make_row(n, FAIL_TO_PASS=json.dumps(["t.py::a"]), PASS_TO_PASS=[f"t.py::b{k}" for k in range(n)], own=n)
        for n in range(300)
    ]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


@pytest.mark.parametrize("stream", [False, True])
def test_a_downloaded_directory(tmp_path: Path, rows: list[dict[str, Any]], stream: bool) -> None:
    (tmp_path / "set" / "data").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows[:200]), tmp_path / "set" / "data" / "train-00000-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(rows[200:]), tmp_path / "set" / "data" / "train-00001-of-00002.parquet")
    (source,) = open_sources([str(tmp_path / "set")], stream=stream)
    found = list(source.read())
    assert [(raw.number, raw.row["own"]) for raw in found] == [(n + 1, n) for n in range(300)]
    assert found[299].row["PASS_TO_PASS"] == rows[299]["PASS_TO_PASS"]
    assert found[0].row["PASS_TO_PASS"] == []
    with pytest.raises(DataError, match="has no split nosuch; say which with --hub-split"):
        open_sources([str(tmp_path / "set")], "nosuch", stream=stream)


def test_a_directory_of_save_to_disk(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "set"))
    found = read_rows([str(tmp_path / "set")])
    assert [row["own"] for row in found] == list(range(300))
    assert found[7]["FAIL_TO_PASS"] == ["t.py::a"]


def test_null_lists_and_nested_columns_survive_arrow(tmp_path: Path, make_row: Make) -> None:
    rows = [make_row(0, PASS_TO_PASS=None, own={"a": [1]}), make_row(1, own={"a": []})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    found = [raw.row for raw in open_file(tmp_path / "t.parquet").read()]
    assert [row["PASS_TO_PASS"] for row in found] == [None, ["t.py::test_b"]]
    assert [row["own"] for row in found] == [{"a": [1]}, {"a": []}]


@pytest.mark.parametrize(
    ("name", "is_one"),
    [*((alias, True) for alias in ALIASES), ("SWE-bench/SWE-smith", True), ("a/b@v1.0", True), ("alone", False)],
)
def test_names(name: str, is_one: bool) -> None:
    assert is_hub_name(name) is is_one


class Hub(BaseHTTPRequestHandler):
    """What loading a parquet data set asks for: revision, tree, which paths are there, a file's head, the file."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        name = path.rsplit(f"/{REVISION}/", 1)[-1]
        if "/resolve/" in path and name in self.files:
            return self._reply(self.files[name], head=self.command == "HEAD")
        if "/tree/" in path:
            below = path.split(REVISION, 1)[1].strip("/")
            return self._reply(
                json.dumps([_entry(n, d) for n, d in self.files.items() if n.startswith(below)]).encode()
            )
        if path.startswith("/api/datasets/SWE-bench/SWE-bench_Verified"):
            names = [{"rfilename": n} for n in self.files]
            info = {"id": "SWE-bench/SWE-bench_Verified", "sha": REVISION, "siblings": names, "tags": []}
            return self._reply(json.dumps({**info, "private": False, "downloads": 0}).encode())
        self.send_response(404)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Which of these paths are there?"""
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode()).get("paths", [])
        self._reply(json.dumps([_entry(name, self.files[name]) for name in asked if name in self.files]).encode())

    def _reply(self, data: bytes, head: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json" if data[:1] in (b"{", b"[") else "application/octet-stream")
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if not head:
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


def _entry(name: str, data: bytes) -> dict[str, Any]:
    return {
        "type": "file",
        "path": name,
        "size": len(data),
        "oid": hashlib.sha1(data, usedforsecurity=False).hexdigest(),
    }


@pytest.fixture
def hub(rows: list[dict[str, Any]], tmp_path: Path) -> Iterator[str]:
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    Hub.files = {"data/test-00000-of-00001.parquet": (tmp_path / "x.parquet").read_bytes()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def swel(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    environment = {**clean, "HF_HOME": str(tmp_path / "hf"), "SWEL_HOME": str(tmp_path / "home"), **environment}
    command = [sys.executable, "-m", "cli", "data", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_a_hub_on_this_machine_then_none(hub: str, tmp_path: Path) -> None:
    """By alias from the hub, with its revision in the report; then offline from the cache; then offline without."""
    arguments = ("filter", "--input", "verified", "--val-size", "1", "--json", "--out")
    first = swel(tmp_path, *arguments, str(tmp_path / "one"), HF_ENDPOINT=hub)
    assert first.returncode == 0, first.stderr
    report = json.loads(first.stdout)
    assert report["source"]["hub"] == [
        {"data_set": "SWE-bench/SWE-bench_Verified", "split": "test", "revision": REVISION}
    ]
    assert report["rows_in"] == 300
    cached = swel(tmp_path, *arguments, str(tmp_path / "two"), HF_HUB_OFFLINE="1")
    assert cached.returncode == 0, cached.stderr
    assert json.loads(cached.stdout)["train"] == report["train"]
    none = swel(tmp_path, *arguments, str(tmp_path / "three"), HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "empty"))
    assert none.returncode == 2
    assert none.stdout == ""
    (sentence,) = none.stderr.strip().splitlines()
    assert sentence.startswith("swel: cannot load verified (split test): it is neither reachable nor cached here (")
    assert sentence.endswith("give the file or directory with --input")
    assert not (tmp_path / "three").exists()


def test_a_stream_is_pinned_to_a_commit_and_the_card_names_it(hub: str, tmp_path: Path) -> None:
    """A branch moves, also while its rows are read; the same command must read the same rows later."""
    name, out = "SWE-bench/SWE-bench_Verified", str(tmp_path / "one")
    arguments = ("filter", "--input", f"{name}@main", "--stream", "--val-size", "1", "--json", "--out", out)
    done = swel(tmp_path, *arguments, "--hub-split", "test", HF_ENDPOINT=hub)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["source"]["hub"] == [{"data_set": name, "split": "test", "revision": REVISION}]
    assert report["rows_in"] == 300
    assert f"--input {name}@{REVISION}" in (tmp_path / "one" / "card.md").read_text()
    gone = swel(tmp_path, *arguments[:-1], str(tmp_path / "two"), HF_HUB_OFFLINE="1")
    assert gone.returncode == 2
    assert "neither reachable nor cached" in gone.stderr
