"""Real boxes on real trees. What every backend promises is tested on containers and both layouts of the local one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from swe_lightning.sandbox import Backend, Limits, Sandbox
from swe_lightning.sandbox.local import LocalBackend, LocalSandbox

SMALL = Limits(cpu=2, memory_mb=512, pids=128, disk_mb=64, output_bytes=20_000)


kubernetes = ["kubernetes"] if os.environ.get("SWEL_TEST_KUBECONFIG") or os.environ.get("SWEL_TEST_CLUSTER") else []
"""Only where a cluster is given: tests/conftest.py says how."""


@pytest.fixture(scope="session", autouse=True)
def own_home(swel_home: Path) -> None:
    """Every test of this room."""


@pytest.fixture(scope="session", params=["overlay", "copy", "docker", *kubernetes])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "docker":
        yield request.getfixturevalue("docker_backend")
        return
    if request.param == "kubernetes":
        yield request.getfixturevalue("cluster_backend")
        return
    request.getfixturevalue("able")
    backend = LocalBackend(force_copy=request.param == "copy")
    yield backend
    backend.close()


@pytest.fixture(scope="session", params=["overlay", "copy"])
def local_backend(request: pytest.FixtureRequest, able: None) -> Iterator[LocalBackend]:
    """For what only local boxes promise, or how they keep it."""
    backend = LocalBackend(force_copy=request.param == "copy")
    yield backend
    backend.close()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "pkg/deep/er").mkdir(parents=True)
    (root / "pkg/a.py").write_text("x = 1\n")
    (root / "pkg/b.py").write_text("y = 2\n")
    (root / "pkg/deep/c.py").write_text("z = 3\n")
    (root / "pkg/deep/er/d.py").write_text("w = 4\n")
    (root / "run.sh").write_text("echo ran\n")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("pkg/a.py")
    return root


@pytest.fixture
def box(backend: Backend, tree: Path) -> Iterator[Sandbox]:
    with backend.create(tree, limits=SMALL) as box:
        yield box


@pytest.fixture
def local_box(local_backend: LocalBackend, tree: Path) -> Iterator[LocalSandbox]:
    with local_backend.create(tree, limits=SMALL) as box:
        yield box
