"""The fix read from history, from the hidden tests or from a released package: none of them is in the box.

Each attack tries for real and asserts that nothing was gained. Where it would succeed on an open machine, the test also
makes sure that the target is there: otherwise "not found" would prove nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from swe_lightning.records import Task
from swe_lightning.sandbox.trees import pristine_tree

from .conftest import FIX, HIDDEN_TEST, Say


@pytest.mark.parametrize(
    "route",
    [
        "git --version",
        "env git --version",
        "/usr/bin/git --version",
        "/usr/lib/git-core/git --version",
        "/usr/libexec/git-core/git --version",
        "git-upload-pack --help",
        'python -c \'import subprocess; subprocess.run(["git", "--version"], check=True)\'',
        "cp /usr/bin/git /tmp/g && chmod +x /tmp/g && /tmp/g --version",
        "/lib64/ld-linux-x86-64.so.2 /usr/bin/git --version",
    ],
)
def test_git_does_not_run_by_any_route(sh: Say, route: str) -> None:
    assert "git version" not in sh(route)


def test_no_program_of_git_is_anywhere(sh: Say) -> None:
    """By content, whatever its name."""
    found = sh(
        "exec 2>/dev/null; find /usr /opt /bin /lib* -xdev -type f -perm /111 -size +1M -print0 |"
        "xargs -0 grep -l GIT_INDEX_FILE"
    )
    assert found.strip() == ""


def test_no_git_objects_or_references_are_visible(sh: Say, task: Task) -> None:
    assert task.repo_path is not None
    assert Path(task.repo_path, ".git/objects").is_dir()
    assert sh("find / \\( -name .git -o -name '*.pack' -o -name packed-refs -o -name ORIG_HEAD \\) 2>/dev/null") == ""
    assert "No such file" in sh(f"ls {task.repo_path}")


def test_neither_fix_nor_hidden_tests_are_visible(sh: Say, task: Task) -> None:
    assert FIX not in (pristine_tree(task) / "m.py").read_text()
    assert HIDDEN_TEST in (pristine_tree(task) / "test_m.py").read_text()
    words = f"-e {FIX.replace(' ', '.')} -e {HIDDEN_TEST}"
    places = "/testbed /tmp /opt /run /var /root /home /dev/shm /etc /proc/self/mountinfo"
    assert sh(f"grep -rIl {words} {places} 2>/dev/null") == ""
    assert sh("ls -a /testbed") == ".\n..\nm.py\n"


def test_released_packages_of_the_host_are_hidden(sh: Say) -> None:
    """Wherever they are installed: beside the interpreter, in the system's Python, in a cache."""
    shown = sh("find / -path /proc -prune -o -path /opt/env -prune -o -name '*-packages' -print 2>/dev/null").split()
    assert shown
    assert [line for directory in shown for line in sh(f"ls -A {directory}").split()] == []
    named = "-iname 'pydantic*' -o -name 'pip-*' -o -path '*/.cache/*'"
    assert sh(f"find / -path /proc -prune -o \\( {named} \\) -print 2>/dev/null") == ""
