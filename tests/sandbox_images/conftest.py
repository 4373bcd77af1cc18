"""Images with a repository inside, made from the test image; a real registry on the loopback where one is installed."""

from __future__ import annotations

import io
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swe_lightning.sandbox.docker_engine import connect

FIX = "return the_only_correct_answer"


@pytest.fixture(scope="session", autouse=True)
def own_home(swel_home: Path) -> None:
    """Every test of this room."""


@pytest.fixture(scope="session")
def client(docker_daemon: None) -> Iterator[Any]:
    client = connect()
    yield client
    client.close()


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As in published images: main holds the fix, one task's branch is local, another only a remote's."""
    root = tmp_path_factory.mktemp("history") / "testbed"
    root.mkdir()

    def git(*arguments: str) -> str:
        argv = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(root), *arguments]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q", "-b", "main")
    (root / "pkg").mkdir()
    (root / "pkg/__init__.py").write_text(f"def f():\n    {FIX}\n")
    (root / "test_pkg.py").write_text("import pkg\n\n\ndef test():\n    assert pkg.f() == 1\n")
    (root / ".gitignore").write_text("*.so\n*.egg-info\n__pycache__\nbuild\n")
    git("add", "-A")
    git("commit", "-qm", "Initial")
    git("checkout", "-qb", "pkg__1")
    (root / "pkg/__init__.py").write_text("def f():\n    return None\n")
    git("commit", "-qam", "Bug Patch")
    git("rm", "-q", "test_pkg.py")
    git("commit", "-qm", "Remove F2P Tests")
    git("pack-refs", "--all")
    git("update-ref", "refs/remotes/origin/pkg__2", "pkg__1")
    git("symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/pkg__2")
    git("checkout", "-q", "main")
    git("config", "core.fsmonitor", "touch /tmp/swel-pwned; false")
    for name in ("build/lib/pkg/__init__.py", "pkg/__pycache__/__init__.cpython-311.pyc", "pkg/gen.c"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(FIX)
    for name in ("pkg/_speed.so", "pkg.egg-info/PKG-INFO"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("built\n")
    return root


@pytest.fixture(scope="session")
def build(client: Any, docker_image: str) -> Callable[..., str]:
    def build(name: str, directory: Path | None = None, lines: str = "") -> str:
        context = io.BytesIO()
        with tarfile.open(fileobj=context, mode="w") as tar:
            text = f"FROM {docker_image}\n" + ("COPY testbed /testbed\n" if directory else "") + lines
            entry = tarfile.TarInfo("Dockerfile")
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
            if directory:
                tar.add(directory, "testbed")
        context.seek(0)
        said = list(
            client.build(fileobj=context, custom_context=True, tag=name, rm=True, network_mode="none", decode=True)
        )
        assert "error" not in said[-1], said[-3:]
        return name

    return build


@pytest.fixture(scope="session")
def task_image_name(build: Callable[..., str], history: Path) -> str:
    """The hash in its name is of no commit: repositories are recreated, images are not renamed."""
    lines = (
        'RUN ["bash", "-c", "mkdir -p /opt/env/bin /root/.cache/pip /usr/bin; '
        "printf '#!/bin/bash\\\\necho testbed python\\\\n' >/opt/env/bin/agentpython; "
        "chmod +x /opt/env/bin/agentpython; "
        "echo secret >/root/.cache/pip/wheel; printf '#!/bin/sh\\\\necho git version 9\\\\n' >/usr/bin/git; "
        "chmod +x /usr/bin/git; "
        "printf 'echo noise; export PATH=/opt/env/bin:$PATH; export CONDA_DEFAULT_ENV=testbed\\\\n' >/root/.bashrc\"]\n"
    )
    return build("swebench/swesmith.x86_64.owner_1776_pkg.deadbeef:latest", history, lines)


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a real registry. Debian's package docker-registry has the program."""
    program = shutil.which("docker-registry")
    if not program:
        pytest.skip("needs a registry: apt-get install docker-registry")
    place = tmp_path_factory.mktemp("registry")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (place / "config.yml").write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {place}/data}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    process = subprocess.Popen(
        [program, "serve", place / "config.yml"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 15
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)
