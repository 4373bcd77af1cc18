"""Pods as boxes: the hardened image, no network, no power, a command server as process 1.

A box is a Job with one pod of two containers. `box` holds the tree (a size-limited volume in memory) and runs the
commands; `wire` (boxside/pod.py) keeps the line to it: the owner speaks to it over exec streams, which no command can
reach, and which may break and be opened again. The tree comes in through the wire, into a volume that the box can only
read. Before the first command the box is shown to reach nothing (kubernetes_isolation.py).

A pod that was killed for memory, evicted, deleted or lost with its node is SandboxLost with the cluster's reason, never
output. Whatever happens to the owner, the box ends: by the wire's patience, by its deadline, by `gc`.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import random
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

from swe_lightning.errors import SandboxLost, SandboxStartError, UserError
from swe_lightning.recipe import KubernetesSection
from swe_lightning.sandbox import seccomp
from swe_lightning.sandbox.base import FileState, Limits, TreeDiff
from swe_lightning.sandbox.boxside.wire import pack
from swe_lightning.sandbox.bundle import IN_BOX, launch
from swe_lightning.sandbox.client import CommandClient
from swe_lightning.sandbox.hardening import ENVIRONMENT, cluster_name
from swe_lightning.sandbox.image_names import chosen_image
from swe_lightning.sandbox.kubernetes_api import ApiError, Cluster, retrying
from swe_lightning.sandbox.kubernetes_ended import remove_ended
from swe_lightning.sandbox.kubernetes_isolation import Isolation
from swe_lightning.sandbox.kubernetes_line import ExecStream, Line
from swe_lightning.sandbox.kubernetes_manifests import UIDS, WIRE, BoxSpec, box_job
from swe_lightning.sandbox.kubernetes_pods import Pod, wait_running, why_lost
from swe_lightning.sandbox.kubernetes_routes import PodRoutes, listening
from swe_lightning.sandbox.kubernetes_tree import batches
from swe_lightning.sandbox.network import Endpoint, Network, endpoints, names_only
from swe_lightning.sandbox.owners import owner_stamp
from swe_lightning.sandbox.relay import Relay
from swe_lightning.sandbox.remote_box import RemoteBox
from swe_lightning.sandbox.remote_tree import container_env, prepare, survey
from swe_lightning.sandbox.starts import refuse_unusable, start_slot
from swe_lightning.sandbox.treediff import BaseTree
from swe_lightning.services import Service

logger = logging.getLogger("kubernetes")

BRIDGE = launch("-c", "from boxside import pod; pod.bridge()")
KEEP_ALIVE_S = 20.0
REASON_PATIENCE_S = 8.0
"""How long a node may take to report why a container ended."""


class KubernetesSandbox(RemoteBox):
    """One pod."""

    def __init__(
        self, owner: KubernetesBackend, name: str, pod: str, line: Line, base: BaseTree, routes: PodRoutes | None
    ) -> None:
        super().__init__(name, CommandClient(line.side(b"server"), name, lambda: None), base)
        self.pod, self.routes = pod, routes
        self._owner, self._line = owner, line

    def _why(self) -> str:
        return self._owner.reason_of(self.pod)

    def _remove(self) -> None:
        if self.routes is not None:
            self.routes.close()
        self._owner.remove(self.name, self.pod, ended=self._line.end())


class KubernetesBackend:
    """Makes pods. Thread-safe; at most `start_limit` starts are under way from this machine at once."""

    def __init__(
        self,
        section: KubernetesSection | None = None,
        *,
        image: str | None = None,
        registry: str | None = None,
        start_limit: int = 8,
        whitelist: tuple[Service, ...] = (),
    ) -> None:
        names_only(whitelist, "kubernetes")
        self._whitelist = whitelist
        self._section = section or KubernetesSection()
        self._image, self._registry, self._start_limit = image, registry, start_limit
        self._lock = threading.Lock()
        self._here: tuple[int, _Connected] | None = None
        self._leftovers: set[str] = set()
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
    ) -> KubernetesSandbox:
        refuse_unusable(tree, files)
        found, hosts = endpoints(Network(gateway, self._whitelist))
        here = self._connected()
        spec = BoxSpec(
            name=f"swel-{secrets.token_hex(8)}",
            image=self._full_name(image),
            uid=random.choice(UIDS),
            tree_mb=self._size_mb(tree),
            limits=limits,
            label=label,
            owner=here.owner,
            hosts=hosts,
            ports=tuple(e.port for e in found),
        )
        self._clear_leftovers()
        here.isolation.prepare(spec.image)
        with start_slot(self._start_limit, kind="kubernetes"):
            until = time.monotonic() + self._section.start_timeout_s
            line: Line | None = None
            routes: PodRoutes | None = None
            pod = ""
            try:
                pod = self._start(here.cluster, spec, until)
                line = Line(
                    functools.partial(ExecStream, here.cluster, pod, WIRE, BRIDGE),
                    functools.partial(self._why_gone, pod),
                )
                self._prepare(here, line, spec, tree, files, env, until)
                if found:
                    routes = self._routes(here, pod, found)
                    routes.start(until)
            except BaseException as error:
                if routes is not None:
                    routes.close()
                self.remove(spec.name, pod, ended=line is not None and line.end())
                if isinstance(error, OSError | SandboxLost):
                    why = self.reason_of(pod) if pod else ""
                    raise SandboxStartError(f"a sandbox did not come up: {error} {why}".strip()) from error
                raise
        here.lines.add(line)
        return KubernetesSandbox(self, spec.name, pod, line, BaseTree(tree, files), routes)

    def _routes(self, here: _Connected, pod: str, found: list[Endpoint]) -> PodRoutes:
        return PodRoutes(
            functools.partial(ExecStream, here.cluster, pod, WIRE, listening(found)),
            functools.partial(self._why_gone, pod),
            [e.target for e in found],
            here.relay(),
        )

    def _start(self, cluster: Cluster, spec: BoxSpec, until: float) -> str:
        manifest = box_job(spec, self._section)
        retrying(cluster, "cannot create a sandbox", lambda: cluster.create("jobs", manifest), until)
        pod = wait_running(cluster, f"job-name={spec.name}", spec.image, until)
        return str(pod["metadata"]["name"])

    def _prepare(
        self, here: _Connected, line: Line, spec: BoxSpec, tree: Path, files: Mapping[str, bytes],
        env: Mapping[str, str], until: float,
    ) -> None:  # fmt: skip
        """Tree in, isolation proven, then as any container: lay, record, limits, filter."""
        patience = max(5.0, until - time.monotonic())
        keeper = CommandClient(line.side(b"keeper"), spec.name, lambda: None)
        for batch in batches(tree):
            keeper.ask(pack(b"lay", *batch), patience)
        here.isolation.prove(keeper)
        server = CommandClient(line.side(b"server"), spec.name, lambda: None)
        try:
            image_env = json.loads(server.read_file(f"{IN_BOX}/{ENVIRONMENT}"))
        except FileNotFoundError:
            raise SandboxStartError(f"image {spec.image} was hardened by another version: build it again") from None
        states: TreeDiff = {path: FileState(data) for path, data in files.items()}
        # Memory is watched although the kernel limits it: some nodes end a whole box where one process went too far.
        prepare(
            server, container_env(image_env, env), spec.limits, states, patience,
            seccomp.filter_bytes(), lambda: None, watch=True, count_processes=True,
        )  # fmt: skip

    def gc(self, label: str | None = None) -> int:
        """Remove the boxes of owners that are gone, and of ended ones that the cluster has not removed by itself."""
        self._clear_leftovers()
        return remove_ended(self._connected().cluster, label)

    def close(self) -> None:
        """Remove the probe's pod. Boxes have to be destroyed before."""
        with self._lock:
            here = self._here
            self._here = None
        if here is not None and here[0] == os.getpid():
            here[1].close()

    def remove(self, name: str, pod: str, *, ended: bool) -> None:
        """`ended`: its processes are gone already. What the API server refuses now is tried at the next start or gc."""
        cluster = self._connected().cluster
        try:
            cluster.delete("jobs", name)
            until = time.monotonic() + 20
            while not ended and pod and time.monotonic() < until and cluster.get("pods", pod) is not None:
                time.sleep(0.1)
            self._leftovers.discard(name)
        except (ApiError, UserError) as error:
            self._leftovers.add(name)
            logger.warning("sandbox %s could not be removed yet: %s", name, error)

    def reason_of(self, pod: str) -> str:
        """The cluster's account; waited for a little, as nodes report late."""
        until = time.monotonic() + REASON_PATIENCE_S
        why = self._why_gone(pod)
        while not why and time.monotonic() < until:
            time.sleep(0.3)
            why = self._why_gone(pod)
        return why

    def _why_gone(self, pod: str) -> str:
        """ "" while the pod may still be there, or nobody can say."""
        cluster = self._connected().cluster
        try:
            found: Pod | None = cluster.get("pods", pod)
        except (ApiError, UserError):
            return ""
        return why_lost(found)

    def _clear_leftovers(self) -> None:
        for name in list(self._leftovers):
            self.remove(name, "", ended=True)

    def _full_name(self, image: str) -> str:
        name = chosen_image(image, self._image)
        hardened = cluster_name(name)
        return f"{self._registry.rstrip('/')}/{hardened}" if self._registry and hardened != name else hardened

    def _size_mb(self, tree: Path) -> int:
        info = tree.stat()
        key = (tree.absolute(), info.st_ino, info.st_mtime_ns)
        if key not in self._surveyed:
            self._surveyed[key] = survey(tree)
        return self._surveyed[key][1]

    def _connected(self) -> _Connected:
        """Connections must not be shared over a fork."""
        with self._lock:
            if self._here is None or self._here[0] != os.getpid():
                self._here = (os.getpid(), _Connected(self._section))
            return self._here[1]


class _Connected:
    """What one process has of the cluster: a client, the probe's pod, and a thread that keeps its lines alive."""

    def __init__(self, section: KubernetesSection) -> None:
        self.cluster = Cluster(section)
        self.owner = f"{socket.gethostname()} {owner_stamp()}"
        self.isolation = Isolation(self.cluster, section, self.owner)
        self.lines: weakref.WeakSet[Line] = weakref.WeakSet()
        self._relay: Relay | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        atexit.register(self.isolation.close)
        threading.Thread(target=self._keep_alive, name="kubernetes-lines", daemon=True).start()

    def _keep_alive(self) -> None:
        while not self._done.wait(KEEP_ALIVE_S):
            for line in list(self.lines):
                line.keep_alive()

    def relay(self) -> Relay:
        with self._lock:
            self._relay = self._relay or Relay()
            return self._relay

    def close(self) -> None:
        self._done.set()
        if self._relay is not None:
            self._relay.close()
        atexit.unregister(self.isolation.close)
        self.isolation.close()
        self.cluster.close()
