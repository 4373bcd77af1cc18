"""Archives from an index over real HTTP, and archives that try to leave the directory."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from data_pipeline import sdist
from data_pipeline.trees import Entry, read_git, read_tar, tree_digest, write_tree
from swe_lightning.errors import DataError


def archive(members: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, tuple):
                info.type, info.linkname = content
                tar.addfile(info)
            else:
                info.size = len(content)
                info.mode = 0o755 if name.endswith(".sh") else 0o644
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


GOOD = archive({"demo_pkg-1.0/setup.py": b"raise SystemExit('executed')", "demo_pkg-1.0/demo.py": b"x = 1\n"})
SHA = hashlib.sha256(GOOD).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A simple-API index; `state` decides what it serves."""
    state: dict[str, Any] = {"json": True, "sha": SHA, "file": GOOD, "asked": [], "fail": 0}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state["asked"].append(self.path)
            if state["fail"]:
                state["fail"] -= 1
                return self.answer(503, b"busy", "text/plain")
            if self.path == "/simple/demo-pkg/":
                return self.page()
            if self.path == "/files/demo_pkg-1.0.tar.gz":
                return self.answer(200, state["file"], "application/gzip")
            return self.answer(404, b"no", "text/plain")

        def page(self) -> None:
            url = "../../files/demo_pkg-1.0.tar.gz"
            if state["json"]:
                hashes = {"sha256": state["sha"]}
                files = [{"filename": "demo_pkg-1.0-py3-none-any.whl", "url": "x.whl", "hashes": {}}]
                files.append({"filename": "demo_pkg-1.0.tar.gz", "url": url, "hashes": hashes})
                return self.answer(200, json.dumps({"files": files}).encode(), sdist_type)
            return self.answer(200, f'<a href="{url}#sha256={state["sha"]}">x</a>'.encode(), "text/html")

        def answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    sdist_type = "application/vnd.pypi.simple.v1+json"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "empty").as_uri())
    monkeypatch.setenv("SWEL_HOME", str(tmp_path / "home"))
    sdist.index_urls.cache_clear()
    yield state
    server.shutdown()
    server.server_close()
    sdist.index_urls.cache_clear()


@pytest.mark.parametrize("as_json", [True, False])
def test_fetch_checks_caches_and_runs_nothing(index: dict[str, Any], as_json: bool) -> None:
    index["json"] = as_json
    found = sdist.fetch("Demo.Pkg", "1.0")
    assert found.sha256 == SHA
    assert found.tree() == {"setup.py": Entry(b"raise SystemExit('executed')"), "demo.py": Entry(b"x = 1\n")}
    index["asked"].clear()
    assert sdist.fetch("Demo.Pkg", "1.0") == found
    assert sdist.fetch("demo-pkg", "1.0", sha256=SHA).file == found.file
    assert index["asked"] == []


def test_a_busy_index_is_asked_again(index: dict[str, Any]) -> None:
    index["fail"] = 1
    assert sdist.fetch("demo-pkg", "1.0").sha256 == SHA


@pytest.mark.parametrize(
    ("change", "version", "expected", "message"),
    [
        ({"file": GOOD + b"x"}, "1.0", None, "the index says"),
        ({}, "1.0", "0" * 64, "expected 0000"),
        ({}, "2.0", None, r"demo-pkg==2.0 has no source distribution"),
    ],
)
def test_wrong_archives(
    index: dict[str, Any], change: dict[str, Any], version: str, expected: str | None, message: str
) -> None:
    index.update(change)
    with pytest.raises(DataError, match=message):
        sdist.fetch("demo-pkg", version, sha256=expected)


def test_without_a_network_the_place_for_the_file_is_named(
    index: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/simple")
    sdist.index_urls.cache_clear()
    place = tmp_path / "home" / "sdists"
    with pytest.raises(DataError, match=rf"put demo-pkg-1.0.tar.gz into {place}"):
        sdist.fetch("demo-pkg", "1.0")
    (place / "demo-pkg-1.0.tar.gz").write_bytes(GOOD)
    assert sdist.fetch("demo-pkg", "1.0").sha256 == SHA


@pytest.mark.parametrize("text", ["termcolor", "termcolor>=1", "a b==1", "==1", "x==../1"])
def test_requirements_name_an_exact_version(text: str) -> None:
    with pytest.raises(DataError, match="NAME==VERSION"):
        sdist.parse_requirement(text)


EVIL = {
    "absolute": {"/etc/x": b""},
    "parent": {"p/../../x": b""},
    "link out": {"p/l": (tarfile.SYMTYPE, "../../etc/passwd")},
    "absolute link": {"p/l": (tarfile.SYMTYPE, "/etc/passwd")},
    "hard link": {"p/a": b"x", "p/l": (tarfile.LNKTYPE, "p/a")},
    "device": {"p/d": (tarfile.CHRTYPE, "")},
    "backslash": {"p\\..\\x": b""},
    "empty": {},
}


@pytest.mark.parametrize("name", EVIL)
def test_path_tricks_are_refused(name: str) -> None:
    with pytest.raises(DataError):
        read_tar(archive(EVIL[name]), "evil.tar.gz", strip_top=True)


def test_damaged_archives_are_refused() -> None:
    for data in (GOOD[:-40], b"not a tar", b""):
        with pytest.raises(DataError, match=r"evil.tar.gz"):
            read_tar(data, "evil.tar.gz")


def test_links_inside_and_modes_are_kept(tmp_path: Path) -> None:
    tree = read_tar(
        archive({"p/a.py": b"x", "p/b/l": (tarfile.SYMTYPE, "../a.py"), "p/r.sh": b""}), "ok", strip_top=True
    )
    assert {path: entry.mode for path, entry in tree.items()} == {"a.py": "100644", "b/l": "120000", "r.sh": "100755"}
    target = write_tree(tree, tmp_path / "t")
    assert (target / "b/l").read_text() == "x"
    assert (target / "r.sh").stat().st_mode & 0o111
    assert write_tree(tree, target) == target


def test_git_tree_is_the_committed_one(small_repository: Path) -> None:
    before = tree_digest(read_git(small_repository))
    (small_repository / "calc.py").write_text("changed, not committed")
    assert tree_digest(read_git(small_repository)) == before
    with pytest.raises(DataError, match="no readable git commit"):
        read_git(small_repository.parent)
