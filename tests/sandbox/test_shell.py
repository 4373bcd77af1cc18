"""`swel sandbox shell` and `sandbox.keep`: what a person sees of a box, without a terminal and after its end."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from swe_lightning.controller.runner import real_rooms
from swe_lightning.recipe import SandboxSection, load_recipe
from swe_lightning.sandbox import FileState, make_backend


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    (root / "m.py").write_text("buggy\n")

    def git(*arguments: str) -> None:
        argv = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(root), *arguments]
        subprocess.run(argv, check=True, capture_output=True)

    git("init", "-q", "-b", "pkg__1")
    git("add", "-A")
    git("commit", "-qm", "Bug Patch")
    git("commit", "-qm", "Remove F2P Tests", "--allow-empty")
    git("branch", "pkg__2")
    row = {"repo": "pkg", "repo_path": str(root), "test_env": {"PYTHONPATH": "src"}}
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"instance_id": f"pkg__{n}", **row}) + "\n" for n in (1, 2)))
    return file


def swel(*arguments: str, feed: str = "") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "cli", "sandbox", "shell", *arguments]
    return subprocess.run(argv, input=feed, capture_output=True, text=True, timeout=60)


def test_a_command_and_a_script_run_as_the_agents_would(able: None, tasks: Path) -> None:
    done = swel(str(tasks), "--task", "pkg__1", "-c", 'echo "$0 $PWD $PYTHONPATH"; cat m.py; exit 3')
    assert (done.stdout, done.returncode) == ("bash /testbed src\nbuggy\n", 3), done.stderr
    done = swel(str(tasks), "--task", "pkg__2", feed="cd /tmp\nread x || echo no input\npwd\n")
    assert (done.stdout, done.returncode) == ("no input\n/tmp\n", 0), done.stderr
    done = swel(str(tasks), "--task", "pkg__1", "--json", "--timeout-s", "0.5", "-c", "echo a; sleep 9")
    assert json.loads(done.stdout) == {"exit_code": 124, "timed_out": True, "truncated": False, "output": "a\n"}


def test_mistakes_are_one_sentence(able: None, tasks: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ([str(tasks)], "name one with --task"),
        ([str(tasks), "--task", "none"], "no task none"),
        ([str(tmp_path / "none.jsonl")], "none.jsonl"),
        ([str(tasks), "--task", "pkg__1", "--set", "sandbox.cpu=2"], "--recipe"),
    ):
        done = swel(*arguments, "-c", "true")
        assert done.returncode == 2, done
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_a_terminal_gets_a_prompt_and_each_line_is_a_command(able: None, tasks: Path) -> None:
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "cli", "sandbox", "shell", str(tasks), "--task", "pkg__1"]
    process = subprocess.Popen(argv, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    os.write(ours, b"cd /tmp; echo x >/testbed/new\npwd\n\x04")
    out, err = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0, err
    assert "/testbed\n" in out
    assert "1 changed: 'new'" in err


def test_what_a_box_had_is_kept(able: None, tree: Path, tmp_path: Path) -> None:
    place = tmp_path / "kept"
    backend = make_backend(SandboxSection(keep=place))
    with backend.create(tree, label="run/1", files={"given": b"g"}) as box:
        box.run(
            "rm pkg/a.py; rm -r pkg/deep; echo f >pkg/deep; ln -s /etc link2; chmod +x pkg/b.py; mkfifo p", timeout_s=9
        )
        expected = box.diff()
    (kept,) = place.iterdir()
    assert kept.name.startswith("run_1-")
    assert not (kept / "tree/pkg/a.py").exists()
    assert (kept / "tree/pkg/deep").read_text() == "f\n"
    assert (kept / "tree/link2").readlink() == Path("/etc")
    assert (kept / "tree/given").read_bytes() == b"g"
    assert os.access(kept / "tree/pkg/b.py", os.X_OK)
    said = (kept / "changes.txt").read_text()
    assert all(repr(name) in said for name in expected)
    assert "left out 'p: " in said
    assert expected["link2"] == FileState(b"/etc", 0o777, symlink=True)


@pytest.mark.parametrize("remember", [True, False])
def test_an_override_keeps_what_runs_had(able: None, tree: Path, tmp_path: Path, remember: bool) -> None:
    """`swel train` and `swel eval` with `--set sandbox.keep=...`: boxes as their workers make them."""
    recipe = load_recipe("recipes/tiny_cpu.yaml", [f"sandbox.keep={tmp_path / 'kept'}"])
    assert recipe.sandbox.remember_commands
    with real_rooms(tmp_path).backend(recipe.sandbox, remember).create(tree, label="s1-g1-r1") as box:
        box.run("echo new >made", timeout_s=9)
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.name.startswith("s1-g1-r1-")
    assert (kept / "tree/made").read_text() == "new\n"


def test_a_full_disk_does_not_hide_what_the_box_said(able: None, tree: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    backend = make_backend(SandboxSection(keep=tmp_path / "file"))
    with backend.create(tree) as box:
        assert box.run("echo fine", timeout_s=9).output == b"fine\n"
