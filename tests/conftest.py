"""Settings every test shares."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from swe_lightning.sandbox.docker import DockerBackend
    from swe_lightning.sandbox.kubernetes import KubernetesBackend

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


def bounded(argv: list[Path], timeout_s: float) -> tuple[int, str]:
    """(exit code, output). Through a file: a daemon that holds a pipe open would keep us past any timeout."""
    with tempfile.TemporaryFile() as output:
        try:
            code = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
        output.seek(0)
        return code, output.read().decode(errors="replace")


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
        code, said = bounded([KIT / "up.sh"], 240)
        if code:
            pytest.skip(f"the Docker engine kit did not start: {said[-300:]}; {DOCKER_HINT}")
        started = "is up" in said
    yield
    if started:
        bounded([KIT / "down.sh"], 120)


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


K8S_KIT = KIT.parent / "k8s-kit"
CLUSTER_HINT = (
    "give a cluster in SWEL_TEST_KUBECONFIG and, in SWEL_TEST_CLUSTER_IMAGE, an image its nodes can have that "
    "`swel images build` made of one with bash, coreutils, grep, find and a Python that has pytest; or set "
    "SWEL_TEST_CLUSTER=kit to start the cluster kit (root only)"
)
CLUSTER_GIVEN = bool(os.environ.get("SWEL_TEST_KUBECONFIG") or os.environ.get("SWEL_TEST_CLUSTER") == "kit")


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster, whose configuration is in KUBECONFIG from now on: the given one, else one the kit starts. Yields the
    hardened image to test with."""
    if not CLUSTER_GIVEN:
        pytest.skip(f"no cluster: {CLUSTER_HINT}")
    before = os.environ.get("KUBECONFIG")
    given, image = os.environ.get("SWEL_TEST_KUBECONFIG"), os.environ.get("SWEL_TEST_CLUSTER_IMAGE")
    kit = None
    if given:
        if not image:
            pytest.skip(f"no image for the cluster: {CLUSTER_HINT}")
    else:
        docker_image = request.getfixturevalue("docker_image")
        kit, given = start_kit(tmp_path_factory.mktemp("kit"))
        image = load_image(kit, docker_image)
    os.environ["KUBECONFIG"] = given
    yield image
    if before is None:
        del os.environ["KUBECONFIG"]
    else:
        os.environ["KUBECONFIG"] = before
    if kit is not None and not os.environ.get("SWEL_TEST_CLUSTER_KEEP"):
        subprocess.run([kit / "down.sh"], capture_output=True, timeout=120)


def start_kit(place: Path) -> tuple[Path, str]:
    """The kit's cluster with one real node, and its kubeconfig. Volumes in memory have a size, as they have by default
    since Kubernetes 1.22."""
    if os.geteuid() != 0 or not (K8S_KIT / "up.sh").exists():
        pytest.skip(f"the cluster kit is not here, or this user is not root: {CLUSTER_HINT}")
    kit = place / "k8s-kit"
    shutil.copytree(K8S_KIT, kit)
    (place / "docker-kit").symlink_to(KIT)
    node = kit / "start-node.sh"
    plain = node.read_text()
    node.write_text(plain.replace("{DevicePlugins: false}", "{DevicePlugins: false, SizeMemoryBackedVolumes: true}"))
    done = subprocess.run([kit / "up.sh", "--node"], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"the cluster kit did not start: {done.stderr[-300:]}; {CLUSTER_HINT}")
    return kit, done.stdout.strip()


def load_image(kit: Path, docker_image: str) -> str:
    """Hardened here, and given to the kit's node by hand."""
    from swe_lightning.sandbox.docker_engine import connect
    from swe_lightning.sandbox.hardening import Hardener, cluster_name

    client = connect()
    name = cluster_name(docker_image)
    repository, _, tag = name.rpartition(":")
    client.tag(Hardener(client).image(docker_image).name, repository, tag=tag)
    archive = kit / "image.tar"
    with archive.open("wb") as file:
        file.writelines(client.get_image(name))
    client.close()
    subprocess.run([kit / "load-image.sh", name, archive], check=True, capture_output=True, timeout=120)
    archive.unlink()
    return name


@pytest.fixture(scope="session")
def cluster_backend(cluster: str) -> Iterator[KubernetesBackend]:
    from swe_lightning.recipe import KubernetesSection
    from swe_lightning.sandbox.kubernetes import KubernetesBackend

    backend = KubernetesBackend(KubernetesSection(start_timeout_s=120), image=cluster)
    yield backend
    backend.close()
