"""Settings every test shares."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from swe_lightning.sandbox.docker import DockerBackend

# Continuous integration runs on two busy cores: slow input generation says nothing about the code under test.
settings.register_profile("swel", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("swel")


@pytest.fixture(scope="session")
def swel_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Exported trees, test environments and records of boxes lie in a directory of this session."""
    before = os.environ.get("SWEL_HOME")
    home = tmp_path_factory.mktemp("home")
    os.environ["SWEL_HOME"] = str(home)
    yield home
    if before is None:
        del os.environ["SWEL_HOME"]
    else:
        os.environ["SWEL_HOME"] = before


@pytest.fixture(scope="session")
def able(swel_home: Path) -> None:
    """Skips where this machine can start no local box, with the reason and the cure."""
    from swe_lightning.sandbox.check import check_host

    missing = check_host()
    if missing:
        pytest.skip(str(missing))


KIT = Path(__file__).resolve().parent.parent.parent / "shared" / "docker-kit"
DOCKER_HINT = (
    "give a running Docker daemon and, in SWEL_TEST_IMAGE, an image with bash, coreutils, grep, find and a Python "
    "that has pytest"
)


@pytest.fixture(scope="session")
def docker_daemon(swel_home: Path) -> Iterator[None]:
    """A daemon: the one that runs, else one that the engine kit starts for this session (root only)."""
    from swe_lightning.errors import MissingPart
    from swe_lightning.sandbox.docker_engine import connect

    started = False
    try:
        connect().close()
    except MissingPart as missing:
        if os.geteuid() != 0 or not (KIT / "up.sh").exists():
            pytest.skip(f"{missing}; {DOCKER_HINT}")
        done = subprocess.run([KIT / "up.sh"], capture_output=True, text=True, timeout=240)
        if done.returncode:
            pytest.skip(f"the Docker engine kit did not start: {done.stderr[-300:]}; {DOCKER_HINT}")
        started = "is up" in done.stdout
    yield
    if started:
        subprocess.run([KIT / "down.sh"], capture_output=True, timeout=120)


@pytest.fixture(scope="session")
def docker_image(docker_daemon: None) -> str:
    """An image with bash, Python and pytest: the given one, else one made from this machine's own files."""
    from swe_lightning.sandbox.docker_engine import connect

    given = os.environ.get("SWEL_TEST_IMAGE")
    if given:
        return given
    client = connect()
    base, name = "swel-test-base:py311", "swel-test-box:py311-2"
    if not client.images(name):
        if not (KIT / "make-base-image.py").exists():
            pytest.skip(f"no image to test with: {DOCKER_HINT}")
        argv = [KIT / "make-base-image.py", "--name", base, "--pip", "pytest"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
        if done.returncode:
            pytest.skip(f"the test image could not be made: {done.stderr[-300:]}; {DOCKER_HINT}")
        lines = f'FROM {base}\nCOPY bin /usr/bin/\nRUN ["ln", "-s", "/usr/bin/python3", "/usr/bin/python"]\n'
        context = io.BytesIO()
        with tarfile.open(fileobj=context, mode="w", dereference=True) as tar:
            entry = tarfile.TarInfo("Dockerfile")
            entry.size = len(lines)
            tar.addfile(entry, io.BytesIO(lines.encode()))
            for program in ("setsid", "nohup", "yes", "tty", "mkfifo", "mknod", "unshare", "mount", "umount"):
                tar.add(f"/usr/bin/{program}", f"bin/{program}")
        context.seek(0)
        list(client.build(fileobj=context, custom_context=True, tag=name, rm=True, network_mode="none"))
    client.close()
    return name


@pytest.fixture(scope="session")
def docker_backend(docker_image: str) -> Iterator[DockerBackend]:
    from swe_lightning.sandbox.docker import DockerBackend

    backend = DockerBackend(image=docker_image)
    yield backend
    backend.close()
