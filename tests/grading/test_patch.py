"""Patches are exact: what git applies gives the same bytes, and what a person may not change is found by its path."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swe_lightning.grading.apply_patch import PatchError, from_patch, put
from swe_lightning.grading.git_patch import changes_only, read_state, same, to_patch
from swe_lightning.grading.patch import filter_diff, filter_patch, why_protected
from swe_lightning.records import Task
from swe_lightning.sandbox import FileState, TreeDiff

from .conftest import git

TASK = Task(
    instance_id="i",
    repo="r",
    FAIL_TO_PASS=["pkg/testing/test_a.py::test_x", "checks.py::test_y"],
    PASS_TO_PASS=["sub/test/case.py::test_z"],
    test_env={"PYTHONPATH": "lib:src"},
)
NASTY = {
    "crlf.txt": (b"a\r\nb\r\n", b"a\r\nc\r\n"),
    "no_newline.txt": (b"a\nb", b"a\nc"),
    "gains_newline.txt": (b"a", b"a\n"),
    "trailing context.txt": (b"a\nb\n \n", b"x\nb\n \n"),
    "latin1.py": ("# ä\nx = 1\n".encode("latin-1"), "# ä\nx = 2\n".encode("latin-1")),
    "binary.bin": (bytes(range(256)) * 5, bytes(reversed(range(256))) * 7),
    "new\nline.txt": (b"1\n", b"2\n"),
    'quote".txt': (b"1\n", b"2\n"),
    "looks_like_a_patch.txt": (b"-- a\n--- a/x\n+++ b/x\n", b"--- a/x\n-- b\n"),
    os.fsdecode(b"\xff\xfe.txt"): (b"1\n", b"2\n"),
    "empty_to_full": (b"", b"x\n"),
    "full_to_empty": (b"x\n", b""),
}  # fmt: skip


def tree(place: Path, files: dict[str, FileState]) -> Path:
    for path, state in files.items():
        put(place, path, state)
    return place


def assert_git_applies(base: Path, diff: TreeDiff, place: Path) -> bytes:
    """Plain `git apply` on a copy of the whole tree gives exactly the wanted files."""
    patch = to_patch(base, diff)
    patch.decode()
    shutil.copytree(base, place, symlinks=True)
    subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"], cwd=place, input=patch, check=True, capture_output=True
    )
    for path, state in diff.items():
        assert same(read_state(place, path), state), path
    return patch


def test_nasty_files_survive_git(tmp_path: Path) -> None:
    base = tree(tmp_path / "base", {p: FileState(old) for p, (old, _) in NASTY.items()})
    assert_git_applies(base, {p: FileState(new) for p, (_, new) in NASTY.items()}, tmp_path / "copy")


def test_mode_symlink_rename_delete_create(tmp_path: Path) -> None:
    files = {"run.sh": FileState(b"x\n"), "link": FileState(b"run.sh", 0o777, True), "old.py": FileState(b"1\n2\n3\n")}
    base = tree(tmp_path / "base", {**files, "becomes_link": FileState(b"text\n"), "gone": FileState(b"")})
    diff: TreeDiff = {
        "run.sh": FileState(b"x\n", 0o755),
        "link": FileState(b"old.py", 0o777, True),
        "old.py": None,
        "deep/new.py": FileState(b"1\n2\n3\n"),
        "becomes_link": FileState(b"run.sh", 0o777, True),
        "gone": None,
        "empty": FileState(b""),
    }
    patch = assert_git_applies(base, diff, tmp_path / "copy")
    assert b"old mode 100644\nnew mode 100755\n" in patch
    got, method = from_patch(base, patch)
    assert method == "git-apply"
    assert got == changes_only(base, diff)


def test_gits_own_patches_are_understood(tmp_path: Path) -> None:
    base = tree(
        tmp_path / "base", {"a b/ä.py": FileState(b"1\n2\n3\n4\n"), "bin": FileState(b"\0" * 9), "m": FileState(b"m")}
    )
    git(base, "init", "-q")
    git(base, "add", "-A")
    git(base, "commit", "-q", "-m", "x")
    (base / "c").mkdir()
    git(base, "mv", "a b/ä.py", "c/ü.py")
    (base / "bin").write_bytes(b"\0\1" * 9)
    (base / "m").chmod(0o755)
    git(base, "add", "-A")
    patch = git(base, "diff", "--cached", "--binary", "-M").encode()
    assert b"rename from" in patch
    git(base, "reset", "-q", "--hard")
    diff, _ = from_patch(base, patch)
    want: TreeDiff = {"a b/ä.py": None, "c/ü.py": FileState(b"1\n2\n3\n4\n"), "bin": FileState(b"\0\1" * 9)}
    assert diff == {**want, "m": FileState(b"m", 0o755)}
    tree(base, {p: s for p, s in diff.items() if s})
    undone, _ = from_patch(base, git(base, "diff", "--binary").encode(), reverse=True)
    assert undone == {"bin": FileState(b"\0" * 9), "m": FileState(b"m")}


def test_fuzz_is_the_fallback(tmp_path: Path) -> None:
    base = tree(tmp_path, {"f.py": FileState(b"zero\none\nTWO\nthree\nfour\n")})
    patch = b"--- a/f.py\n+++ b/f.py\n@@ -1,5 +1,5 @@\n zero\n one\n-TWO\n+2\n tree\n four\n"
    diff, method = from_patch(base, patch)
    assert method == "patch-fuzz"
    assert diff == {"f.py": FileState(b"zero\none\n2\nthree\nfour\n")}


@pytest.mark.parametrize("name", ["../out.txt", "/tmp/out-of-tree.txt", ".git/hooks/x"])
def test_patch_cannot_leave_the_tree(tmp_path: Path, name: str) -> None:
    base = tree(tmp_path / "in", {"f": FileState(b"1\n")})
    patch = f"--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+x\n".encode()
    try:
        kept, _ = filter_diff(from_patch(base, patch)[0], TASK, base)
    except PatchError:
        kept = {}
    assert set(kept) <= {"tmp/out-of-tree.txt"}, "inside the tree, or nothing"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
    assert not Path("/tmp/out-of-tree.txt").exists()


def test_stripped_patch_does_not_apply(tmp_path: Path) -> None:
    """The single-space context line at the end is part of the patch; nothing here may strip it."""
    base = tree(tmp_path, {"f": FileState(b"a\nb\n\n")})
    patch = to_patch(base, {"f": FileState(b"x\nb\n\n")})
    assert patch.endswith(b"\n \n")
    assert from_patch(base, patch)[0] == {"f": FileState(b"x\nb\n\n")}


names = st.sampled_from(["a.py", "d/b.txt", "sp ace", "new\nline", "tab\t.x", "b/ x", "ünï", os.fsdecode(b"\xff")])
pieces = st.sampled_from([b"x\n", b"y\r\n", b"--- a/a.py\n", b"\x0c\n", b"last", b"\xff\n", b" \n", b"\n"])
contents = st.one_of(st.binary(max_size=200), st.lists(pieces, max_size=30).map(b"".join))
states = st.one_of(
    st.builds(FileState, contents, st.sampled_from([0o644, 0o755])), st.just(FileState(b"some/target", 0o777, True))
)


@settings(max_examples=60)
@given(st.dictionaries(names, states, max_size=5), st.dictionaries(names, st.none() | states, max_size=5))
def test_any_change_survives_the_round_trip(files: dict[str, FileState], diff: TreeDiff) -> None:
    with tempfile.TemporaryDirectory() as place:
        base = tree(Path(place), files)
        wanted = changes_only(base, diff)
        got, _ = from_patch(base, to_patch(base, diff))
        assert got == wanted


PROTECTED = [
    "conftest.py", "deep/down/conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "sitecustomize.py", "lib/x.pth",
    "tests/anything.txt", "pkg/tests/data.json", "pkg/testing/helper.py", "sub/test/x.py", "checks.py", "test_new.py",
    "pkg/foo_test.py", "a/__pycache__/m.pyc", "pytest.py", "_pytest/python.py", "src/json.py", "lib/unittest/case.py",
    "../x", "/etc/passwd", ".git/config",
]  # fmt: skip
FREE = [
    "pkg/core.py", "pkg/json.py", "other/testing/product.py", "django/test/client.py", "docs/conf.py", "setup.py",
    "src/pkg/token.py", "contest.py", "requirements.txt", "protest.py",
]  # fmt: skip


@pytest.mark.parametrize("path", PROTECTED)
def test_protected(path: str) -> None:
    assert why_protected(path, TASK)


@pytest.mark.parametrize("path", FREE)
def test_free(path: str) -> None:
    assert why_protected(path, TASK) is None


def test_existing_module_with_a_standard_name_may_be_edited(tmp_path: Path) -> None:
    base = tree(tmp_path, {"types.py": FileState(b"")})
    assert why_protected("types.py", TASK, base) is None
    assert why_protected("types.py", TASK) == "stands in for the test runner"


def test_harness_files_are_dropped_on_request(tmp_path: Path) -> None:
    diff: TreeDiff = {"undo.sh": FileState(b""), "a.py": FileState(b"")}
    assert filter_diff(diff, TASK, tmp_path, drop=("undo.sh",)) == ({"a.py": FileState(b"")}, ["undo.sh"])


def test_filtered_text(tmp_path: Path) -> None:
    base = tree(tmp_path, {"a.py": FileState(b"1\n"), "conftest.py": FileState(b"1\n")})
    both = to_patch(base, {"a.py": FileState(b"2\n"), "conftest.py": FileState(b"2\n")})
    kept, dropped = filter_patch(both, TASK, base)
    assert kept == to_patch(base, {"a.py": FileState(b"2\n")})
    assert dropped == ["conftest.py"]
