"""A task whose repository lies in its image: found by branch, exported without history, run, graded elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox_images import branches
from swe_lightning.errors import DataError, SandboxStartError
from swe_lightning.records import InfraReason, Task
from swe_lightning.sandbox.docker import DockerBackend
from swe_lightning.sandbox.image_names import task_image
from swe_lightning.sandbox.image_trees import checkout
from swe_lightning.sandbox.trees import agent_tree, pristine_tree

FIX = "return the_only_correct_answer"


@pytest.fixture(scope="module")
def task(task_image_name: str) -> Task:
    return Task(instance_id="pkg__1", repo="pkg", image_name="swesmith.x86_64.owner__pkg.deadbeef")


def test_branches_of_an_image(task_image_name: str, client: Any) -> None:
    """D2: packed, loose and remote ones; without starting a container, and remembered by image id."""
    assert branches(task_image_name) == {"main", "pkg__1", "pkg__2"}
    assert branches("jyangballin/swesmith.x86_64.owner__pkg.deadbeef") == {"main", "pkg__1", "pkg__2"}
    assert client.containers(all=True, filters={"ancestor": task_image_name}) == []
    with pytest.raises(SandboxStartError, match="swel images pull no/such") as error:
        branches("no/such")
    assert error.value.reason is InfraReason.IMAGE_UNAVAILABLE


def test_an_image_without_repository_says_so(docker_image: str) -> None:
    assert branches(docker_image) == set()
    with pytest.raises(DataError, match="has no /testbed"):
        checkout(docker_image)


def test_trees_are_found_by_branch_and_hold_no_history(task: Task) -> None:
    """D3: the hash in the image's name is never looked for."""
    hidden, pristine = agent_tree(task, show_tests=False), pristine_tree(task)
    remote = pristine_tree(task.model_copy(update={"instance_id": "pkg__2"}))
    assert remote == pristine
    assert (hidden / "pkg/__init__.py").read_text() == "def f():\n    return None\n"
    assert not (hidden / "test_pkg.py").exists()
    assert (pristine / "test_pkg.py").exists()
    for tree in (hidden, pristine):
        names = {str(p.relative_to(tree)) for p in tree.rglob("*") if p.is_file()}
        assert {"pkg/_speed.so", "pkg.egg-info/PKG-INFO"} < names
        assert not names & {"pkg/gen.c", "build/lib/pkg/__init__.py", "pkg/__pycache__/__init__.cpython-311.pyc"}
        assert FIX not in "".join(p.read_text() for p in tree.rglob("*") if p.is_file())
        assert not list(tree.rglob(".git"))
    with pytest.raises(DataError, match="no branch absent"):
        agent_tree(task.model_copy(update={"instance_id": "absent"}), show_tests=False)


def test_nothing_of_the_images_git_configuration_runs_here(task: Task) -> None:
    config = (checkout(task_image(task)).repository / "config").read_text()
    assert "fsmonitor" not in config
    assert not Path("/tmp/swel-pwned").exists()


def test_a_box_of_that_image(docker_image: str, task: Task, task_image_name: str) -> None:
    """S15, H1: the environment of the image's interactive shell, and a shell that prints nothing by itself."""
    backend = DockerBackend()
    with backend.create(agent_tree(task, show_tests=False), image=task_image(task)) as box:
        assert box.run("agentpython; echo $CONDA_DEFAULT_ENV", timeout_s=20).output == b"testbed python\ntestbed\n"
        assert box.run("bash -c true", timeout_s=20).output == b""
        assert box.run("command -v ls python", timeout_s=20).output == b"/usr/bin/ls\n/usr/bin/python\n"
        assert box.run("git --version", timeout_s=20).exit_code == 127
        assert box.run("ls -A /root/.cache 2>&1; find / -name .git 2>/dev/null", timeout_s=30).output.count(b"\n") == 1
        words = f"grep -rIl '{FIX}' / --exclude-dir=proc --exclude-dir=sys 2>/dev/null"
        assert box.run(words, timeout_s=60).output == b""
        assert box.run("ls", timeout_s=20).output == b"pkg\npkg.egg-info\n"
        assert box.diff() == {}
    backend.close()


def test_hardening_is_done_once(client: Any, task_image_name: str, build: Callable[..., str]) -> None:
    from swe_lightning.sandbox.hardening import Hardener

    first = Hardener(client).image(task_image_name)
    assert Hardener(client).image(task_image_name) == first
    assert Hardener(client).image(first.name).name == first.name, "a hardened image is taken as it is"
    assert first.env["PATH"].startswith("/opt/env/bin:/usr")
    assert "HOME" not in first.env
