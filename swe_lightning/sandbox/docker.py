"""Containers as boxes: hardened image, no network, no power, a command server as process 1.

The tree is mounted read-only at /testbed.orig and copied by the server into a size-limited tmpfs at /testbed; the rest
of the root file system is read-only. The owner speaks to the server over the container's stdin and stdout: when the
owner dies the daemon closes them and the box ends by itself, and `gc` removes what is left of it by label. /testbed and
/tmp have `disk_mb` each; both count as memory, so the container may use that much more than `memory_mb`.

A container that is gone, stopped or was killed for memory is SandboxLost with the daemon's reason, never output.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swe_lightning import paths
from swe_lightning.errors import SandboxLost, SandboxStartError
from swe_lightning.sandbox import docker_engine as engine
from swe_lightning.sandbox import seccomp
from swe_lightning.sandbox.base import ORIGINAL_ROOT, TREE_ROOT, Limits, TreeDiff
from swe_lightning.sandbox.bundle import launch
from swe_lightning.sandbox.client import CommandClient, receive
from swe_lightning.sandbox.docker_routes import IN_BOX as ROUTES_IN_BOX
from swe_lightning.sandbox.docker_routes import Routes, routes
from swe_lightning.sandbox.hardening import BOX_UID, NO_NEW_PRIVILEGES, HardenedImage, Hardener
from swe_lightning.sandbox.image_names import chosen_image
from swe_lightning.sandbox.network import names_only
from swe_lightning.sandbox.owners import owner_is_gone, owner_stamp
from swe_lightning.sandbox.relay import Relay, RelayedBox
from swe_lightning.sandbox.remote_box import RemoteBox
from swe_lightning.sandbox.remote_tree import container_env, prepare, survey
from swe_lightning.sandbox.starts import refuse_unusable, start_slot
from swe_lightning.sandbox.treediff import BaseTree, FileState
from swe_lightning.services import Service

if TYPE_CHECKING:
    import docker

logger = logging.getLogger("docker")

START_TIMEOUT_S = 60.0
START_LIMIT = 8
LEFTOVER_S = 300.0
INODES = 200_000
SHM_MB = 64
LABEL = "swel.label"
SERVER = f"from boxside.container import main; main({TREE_ROOT!r})"


class DockerSandbox(RemoteBox):
    """One container."""

    def __init__(self, owner: DockerBackend, name: str, stream: engine.AttachedStream, base: BaseTree) -> None:
        super().__init__(name, CommandClient(stream, name, lambda: None), base)
        self.relayed: RelayedBox | None = None
        self._owner = owner

    def _why(self) -> str:
        return self._owner.why_lost(self.name)

    def _remove(self) -> None:
        if self.relayed is not None:
            self.relayed.close()
        self._owner.remove(self.name)


class DockerBackend:
    """Makes containers. Thread-safe; at most `start_limit` starts are under way on this machine at once."""

    def __init__(
        self,
        *,
        image: str | None = None,
        registry: str | None = None,
        start_limit: int = START_LIMIT,
        start_timeout_s: float = START_TIMEOUT_S,
        whitelist: tuple[Service, ...] = (),
    ) -> None:
        names_only(whitelist, "docker")
        self._whitelist = whitelist
        self._relay: tuple[int, Relay] | None = None
        self._image = image
        self._registry = registry
        self._start_limit = start_limit
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._clients: dict[tuple[int, str], docker.APIClient] = {}
        self._hardeners: dict[int, Hardener] = {}
        self._leftovers: dict[str, float] = {}
        self._surveyed: dict[tuple[Path, int, int], tuple[bool, int]] = {}

    def create(
        self,
        tree: Path,
        *,
        env: Mapping[str, str] = {},
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        label: str = "",
        files: Mapping[str, bytes] = {},
        gateway: Service | None = None,
        image: str = "",
    ) -> DockerSandbox:
        refuse_unusable(tree, files)
        hardened = self._hardener().image(self._full_name(image))
        name = f"swel-{os.getpid()}-{secrets.token_hex(6)}"
        self._clear_leftovers()
        source, size_mb = self._mountable(tree, name)
        environment = container_env(hardened.env, env)
        stream = None
        with start_slot(self._start_limit), routes(gateway, self._whitelist) as network:
            until = time.monotonic() + self._start_timeout_s
            try:
                host = host_settings(source, size_mb, limits, network)
                stream = self._start(name, hardened, host, label, until)
                listeners = self._prepare(stream, environment, limits, files, network, until)
            except BaseException:
                if stream is not None:
                    stream.close()
                # A daemon that was slow may still be about to make it.
                self._leftovers[name] = time.monotonic() + LEFTOVER_S
                self.remove(name)
                raise
        box = DockerSandbox(self, name, stream, BaseTree(tree, files))
        if listeners:
            box.relayed = self._ready_relay().open(listeners, [e.target for e in network.sockets])
        return box

    def _start(
        self, name: str, image: HardenedImage, host_options: dict[str, Any], label: str, until: float
    ) -> engine.AttachedStream:
        """A running container, attached before it started so that nothing it says is missed."""
        client = self._client("starts")
        host = client.create_host_config(**host_options)

        tries: list[int] = []

        def create() -> None:
            if tries:
                self.remove(name)  # what a try that failed may have left
            tries.append(1)
            client.create_container(
                image.name, launch("-c", SERVER), name=name, user=f"{BOX_UID}:{BOX_UID}", stdin_open=True,
                hostname="box", working_dir=TREE_ROOT, entrypoint=[], environment={}, network_disabled=True,
                labels={LABEL: label, engine.OWNER: owner_stamp()}, host_config=host,
                healthcheck={"test": ["NONE"]},
            )  # fmt: skip

        engine.starting(f"cannot create a sandbox from {image.source}", create, until)
        stream = engine.starting("cannot attach to a sandbox", lambda: engine.AttachedStream(client, name), until)
        try:
            engine.starting("cannot start a sandbox", lambda: client.start(name), until)
        except BaseException:
            stream.close()
            raise
        return stream

    def _prepare(
        self, stream: engine.AttachedStream, env: Mapping[str, str], limits: Limits, files: Mapping[str, bytes],
        network: Routes, until: float,
    ) -> list[int]:  # fmt: skip
        """Wait for the server, then: tree, extra files, base, services, limits, filter. Returns listening sockets."""
        states: TreeDiff = {path: FileState(data) for path, data in files.items()}
        try:
            stream.settimeout(max(0.1, until - time.monotonic()))
            receive(stream)
            server = CommandClient(stream, "new", lambda: None)
            patience = max(1.0, until - time.monotonic())
            return prepare(
                server, env, limits, states, patience, seccomp.filter_bytes(),
                lambda: network.collect(server, patience),
            )  # fmt: skip
        except (OSError, SandboxLost) as error:
            said = stream.stderr.decode(errors="replace").strip()[-1000:]
            slow = f" within {self._start_timeout_s:g} s" if isinstance(error, TimeoutError) else ""
            raise SandboxStartError(f"the command server of a sandbox did not start{slow}: {said or error}") from error

    def gc(self, label: str | None = None) -> int:
        """Remove the containers of owners that are gone."""
        self._clear_leftovers()
        client = self._client("rest")
        removed = 0
        for found in client.containers(all=True, filters={"label": engine.OWNER}):
            labels = found.get("Labels") or {}
            wanted = label is None or labels.get(LABEL) == label
            if wanted and owner_is_gone(labels.get(engine.OWNER, "")):
                removed += self.remove(found["Id"])
        return removed

    def close(self) -> None:
        for key in [k for k in self._clients if k[0] == os.getpid()]:
            self._clients.pop(key).close()
        if self._relay and self._relay[0] == os.getpid():
            self._relay[1].close()
        self._relay = None

    def remove(self, name: str) -> bool:
        """Kill and remove. A daemon that refuses is asked again at the next start or gc: nothing is forgotten."""
        import docker.errors
        import requests

        try:
            self._client("rest").remove_container(name, force=True, v=True)
            self._leftovers.pop(name, None)
            return True
        except docker.errors.NotFound:
            return False
        except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
            if getattr(error, "status_code", None) != 409:  # 409: another thread is at it
                self._leftovers[name] = time.monotonic() + LEFTOVER_S
                logger.warning("container %s could not be removed yet: %s", name, engine.short(error))
            return False
        finally:
            shutil.rmtree(copies() / name, ignore_errors=True)

    def why_lost(self, name: str) -> str:
        """The daemon's account of a container that stopped answering."""
        import docker.errors
        import requests

        try:
            state = self._client("rest").inspect_container(name)["State"]
        except docker.errors.NotFound:
            return "no such container"
        except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
            return f"the Docker daemon does not answer: {engine.short(error)}"
        if state.get("OOMKilled"):
            return "out of memory (oom): the container was killed at its memory limit"
        if not state.get("Running"):
            return (
                f"the container is not running (exit code {state.get('ExitCode')}) {state.get('Error') or ''}".strip()
            )
        return ""

    def _clear_leftovers(self) -> None:
        for name, expiry in list(self._leftovers.items()):
            if not self.remove(name) and time.monotonic() > expiry:
                self._leftovers.pop(name, None)

    def _full_name(self, image: str) -> str:
        name = chosen_image(image, self._image)
        return f"{self._registry.rstrip('/')}/{name}" if self._registry and image else name

    def _client(self, purpose: str) -> docker.APIClient:
        """Connections must not be shared over a fork; starts have a patience of their own."""
        key = (os.getpid(), purpose)
        with self._lock:
            if key not in self._clients:
                self._clients[key] = engine.connect(self._start_timeout_s if purpose == "starts" else 60)
            return self._clients[key]

    def _ready_relay(self) -> Relay:
        with self._lock:
            if self._relay is None or self._relay[0] != os.getpid():
                self._relay = (os.getpid(), Relay())
            return self._relay[1]

    def _hardener(self) -> Hardener:
        client = self._client("rest")
        with self._lock:
            return self._hardeners.setdefault(os.getpid(), Hardener(client))

    def _mountable(self, tree: Path, name: str) -> tuple[Path, int]:
        """A directory with this content that the box's user can read, and its size in MiB, rounded up."""
        info = tree.stat()
        key = (tree.absolute(), info.st_ino, info.st_mtime_ns)
        if key not in self._surveyed:
            self._surveyed[key] = survey(tree)
        readable, size = self._surveyed[key]
        if readable:
            return tree.absolute(), size
        copy = copies() / name
        shutil.copytree(tree, copy, symlinks=True)
        for path in [copy, *copy.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        return copy, size


def copies() -> Path:
    """Readable copies of trees that only their owner could read, each named like its container."""
    place = paths.home() / "docker-trees"
    place.mkdir(exist_ok=True)
    return place


def host_settings(tree: Path, tree_mb: int, limits: Limits, network: Routes) -> dict[str, Any]:
    """Everything that takes power away. /testbed and /tmp live in memory: the limit has to leave room for them."""
    import docker.types

    def tmpfs(size_mb: int, mode: str) -> str:
        return f"rw,exec,nosuid,nodev,size={size_mb}m,nr_inodes={INODES},mode={mode},uid={BOX_UID},gid={BOX_UID}"

    tree_room = limits.disk_mb + tree_mb
    memory = (limits.memory_mb + tree_room + limits.disk_mb + min(SHM_MB, limits.disk_mb)) << 20
    ulimit = docker.types.Ulimit
    mounts = [docker.types.Mount(ORIGINAL_ROOT, str(tree), type="bind", read_only=True)]
    if network.directory is not None:
        mounts.append(docker.types.Mount(ROUTES_IN_BOX, str(network.directory), type="bind", read_only=True))
    return {
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": [NO_NEW_PRIVILEGES],
        "read_only": True,
        "tmpfs": {
            TREE_ROOT: tmpfs(tree_room, "0755"),
            "/tmp": tmpfs(limits.disk_mb, "1777"),
            "/dev/shm": tmpfs(min(SHM_MB, limits.disk_mb), "1777"),
        },
        "mounts": mounts,
        "extra_hosts": network.hosts,
        "mem_limit": memory,
        "memswap_limit": memory,
        "nano_cpus": int(limits.cpu * 1e9),
        "pids_limit": limits.pids + 3,
        "ipc_mode": "private",
        "restart_policy": {"Name": "no"},
        "log_config": docker.types.LogConfig(type="none"),
        "ulimits": [ulimit(name="core", soft=1, hard=1), ulimit(name="nofile", soft=4096, hard=4096)],
    }
