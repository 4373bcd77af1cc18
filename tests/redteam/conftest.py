"""One box per attack, on a tree that was exported from a repository with a history worth stealing."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swe_lightning.records import Task
from swe_lightning.sandbox import Backend, Limits, Sandbox
from swe_lightning.sandbox.local import LocalBackend
from swe_lightning.sandbox.trees import agent_tree

LIMITS = Limits(cpu=2, memory_mb=256, pids=64, disk_mb=32, output_bytes=50_000)
FIX = "return the_only_correct_answer"
HIDDEN_TEST = "assert_the_hidden_expectation"
Say = Callable[..., str]
"""Runs a shell command, or Python source, in the box; what it printed."""


kubernetes = ["kubernetes"] if os.environ.get("SWEL_TEST_KUBECONFIG") or os.environ.get("SWEL_TEST_CLUSTER") else []
"""Only where a cluster is given: tests/conftest.py says how."""


@pytest.fixture(scope="session", autouse=True)
def own_home(swel_home: Path) -> None:
    """Every test of this room."""


LOCAL_ONLY = {
    "test_filling_the_disk_ends_at_the_limit": "in containers /testbed, /tmp and /dev/shm have limits of their own",
    "test_a_single_huge_sparse_file_is_refused": "a container's tmpfs refuses it with another error",
    "test_released_packages_of_the_host_are_hidden": "the packages of an image are its own, not the host's",
    "test_files_of_the_host_are_not_there": "an image has system directories of its own",
    "test_whiteouts_and_overlay_marks_cannot_be_forged": "a container's tree is no overlay",
    "test_setuid_programs_gain_nothing": "another user id; tests/sandbox/test_docker.py has its counterpart",
    "test_as_root_the_boxs_user_is_nobody_on_the_host": "another user id",
}
"""Attacks on how local boxes are made; their aims in containers are tested in tests/sandbox/test_docker.py."""


NOT_IN_PODS = {
    "test_only_a_loopback_exists": "a pod has an interface; tests/cluster/test_boxes.py shows that it leads nowhere",
    "test_more_names_than_the_limit_are_refused": "Kubernetes limits the bytes of a volume, not its names",
    "test_small_limits_are_limits_too": "names without end cost a small pod its memory, and with it the pod",
}
"""What pods cannot promise in the same way; docs/security.md says so too."""


def why_not(test: str) -> str | None:
    """Why this test, parameters and all, has no meaning on its backend; None: it has."""
    name, _, parameters = test.partition("[")
    pod = "kubernetes" in parameters
    if (pod or "docker" in parameters) and name in LOCAL_ONLY:
        return LOCAL_ONLY[name]
    return NOT_IN_PODS.get(name) if pod else None


@pytest.fixture(autouse=True)
def fits_the_backend(request: pytest.FixtureRequest) -> None:
    if reason := why_not(request.node.name):
        pytest.skip(reason)


@pytest.fixture(scope="session", params=["local", "docker", *kubernetes])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "docker":
        yield request.getfixturevalue("docker_backend")
        return
    if request.param == "kubernetes":
        yield request.getfixturevalue("cluster_backend")
        return
    request.getfixturevalue("able")
    backend = LocalBackend()
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """main holds the fix; the task's branch holds the bug, then loses its tests."""
    root = tmp_path_factory.mktemp("repository")

    def git(*arguments: str) -> None:
        argv = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(root), *arguments]
        subprocess.run(argv, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    (root / "m.py").write_text(f"def f():\n    {FIX}\n")
    (root / "test_m.py").write_text(f"def test():\n    {HIDDEN_TEST}\n")
    git("add", "-A")
    git("commit", "-qm", "Initial")
    git("checkout", "-qb", "pkg__1")
    (root / "m.py").write_text("def f():\n    return None\n")
    git("commit", "-qam", "Bug Patch")
    git("rm", "-q", "test_m.py")
    git("commit", "-qm", "Remove F2P Tests")
    return Task(instance_id="pkg__1", repo="pkg", repo_path=str(root))


@pytest.fixture
def box(backend: Backend, task: Task) -> Iterator[Sandbox]:
    with backend.create(agent_tree(task, show_tests=False), limits=LIMITS) as box:
        yield box


@pytest.fixture
def sh(box: Sandbox) -> Callable[..., str]:
    def sh(command: str, timeout_s: float = 60) -> str:
        return box.run(command, timeout_s=timeout_s).output.decode(errors="replace")

    return sh


@pytest.fixture
def py(box: Sandbox) -> Callable[..., str]:
    """Run Python source in the box."""

    def py(source: str, timeout_s: float = 60) -> str:
        return box.run(f"python - 2>&1 <<'END_OF_SOURCE'\n{source}\nEND_OF_SOURCE", timeout_s=timeout_s).output.decode(
            errors="replace"
        )

    return py


def running(command_line: str) -> list[str]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if (directory / "cmdline").read_bytes() == command_line.encode():
                found.append(directory.name)
        except OSError:
            continue
    return found


def wait_for(command_line: str, *, present: bool) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if bool(running(command_line)) == present:
            return True
        time.sleep(0.02)
    return False
