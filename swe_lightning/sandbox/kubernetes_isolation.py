"""Proof, before a box is handed out, that the cluster keeps boxes from the network. Refuses clusters that do not.

NetworkPolicy objects are wishes: a cluster whose network plugin ignores them accepts them all the same. So one pod of
each process listens, a second one shows that a pod can reach it at all, and then every box has to fail to reach it, and
the API server too, from its own network namespace. Plugins that are late are waited for a little.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from functools import partial
from typing import Any

from swe_lightning.errors import MissingPart, SandboxStartError, UserError
from swe_lightning.recipe import KubernetesSection
from swe_lightning.sandbox.base import Limits
from swe_lightning.sandbox.boxside.wire import pack
from swe_lightning.sandbox.client import CommandClient
from swe_lightning.sandbox.kubernetes_api import ApiError, Cluster, retrying
from swe_lightning.sandbox.kubernetes_manifests import (
    PROBE_PORT,
    UIDS,
    BoxSpec,
    network_policies,
    probe_pod,
)
from swe_lightning.sandbox.kubernetes_pods import phase, wait_running

CONNECT_S = 1.0
LATE_S = 15.0
"""How long a policy may take to hold for a new pod."""


class Isolation:
    """Thread-safe, of one process."""

    def __init__(self, cluster: Cluster, section: KubernetesSection, owner: str) -> None:
        self._cluster, self._section, self._owner = cluster, section, owner
        self._lock = threading.Lock()
        self._listener = self._address = ""

    def prepare(self, image: str) -> None:
        """Policies and a listening pod are there, and that pod can be reached by those that may."""
        with self._lock:
            if self._listener and self._alive():
                return
            until = time.monotonic() + self._section.start_timeout_s
            for policy in network_policies():
                retrying(self._cluster, "cannot set up the network policies", partial(self._apply, policy), until)
            listener = self._start("listener", f"answer({PROBE_PORT})", image, until)
            self._listener = listener["metadata"]["name"]
            self._address = listener["status"]["podIP"]
            try:
                self._control(image, until)
            except BaseException:
                self._remove(self._listener)
                self._listener = ""
                raise

    def prove(self, keeper: CommandClient) -> None:
        """From within a box that no command has run in yet."""
        until = time.monotonic() + LATE_S
        request = pack(b"probe", b"%f" % CONNECT_S, self._address.encode(), b"%d" % PROBE_PORT)
        while reached := keeper.ask(request, 30.0):
            if time.monotonic() > until:
                raise MissingPart(
                    f"the cluster {self._cluster.where} does not enforce NetworkPolicy: a pod in namespace "
                    f"{self._cluster.namespace} that may reach nothing reached {reached[0].decode()}; boxes need a "
                    "network plugin that enforces policies (Calico, Cilium and others do, Flannel alone does not)"
                )
            time.sleep(0.3)

    def close(self) -> None:
        with self._lock:
            if self._listener:
                self._remove(self._listener)
            self._listener = ""

    def _alive(self) -> bool:
        pod = retrying(
            self._cluster, "cannot look for the probe's pod", lambda: self._cluster.get("pods", self._listener),
            time.monotonic() + 60,
        )  # fmt: skip
        return pod is not None and phase(pod) == "Running"

    def _control(self, image: str, until: float) -> None:
        patience = 30
        call = f"reach({self._address!r}, {PROBE_PORT}, {patience})"
        name = ""
        try:
            pod = self._start("control", call, image, until)
            name = pod["metadata"]["name"]
            while phase(pod) not in ("Succeeded", "Failed") and time.monotonic() < until:
                time.sleep(0.2)
                pod = self._cluster.get("pods", name) or {}
            if phase(pod) != "Succeeded":
                raise SandboxStartError("")
        except SandboxStartError as error:
            if error.args and str(error):
                raise
            raise MissingPart(
                f"in namespace {self._cluster.namespace} of {self._cluster.where} a pod that may reach another one "
                "does not, so nothing can be proven about those that may not; look for a policy that denies everything "
                "to all pods there, or use another namespace"
            ) from error
        finally:
            if name:
                self._remove(name)

    def _start(self, role: str, call: str, image: str, until: float) -> dict[str, Any]:
        name = f"swel-{role}-{secrets.token_hex(6)}"
        spec = BoxSpec(name, image, UIDS.start - 1, 0, Limits(), "", self._owner)
        manifest = probe_pod(spec, role, call, self._section)
        manifest["metadata"]["labels"]["swe-lightning/probe"] = name
        try:
            retrying(self._cluster, "cannot start a probe's pod", lambda: self._cluster.create("pods", manifest), until)
            return wait_running(
                self._cluster, f"swe-lightning/probe={name}", image, until, ended_is_fine=role == "control"
            )
        except BaseException:
            self._remove(name)
            raise

    def _apply(self, policy: dict[str, Any]) -> None:
        name = policy["metadata"]["name"]
        found = self._cluster.get("networkpolicies", name)
        if found is None:
            self._cluster.create("networkpolicies", policy)
        elif _significant(found["spec"]) != _significant(policy["spec"]):
            policy["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
            self._cluster.replace("networkpolicies", name, policy)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(ApiError, UserError):
            self._cluster.delete("pods", name)


def _significant(value: Any) -> Any:
    """What a server gives back, without the empty parts it leaves out."""
    if isinstance(value, dict):
        return {k: v for k, v in ((k, _significant(v)) for k, v in value.items()) if v not in ({}, [], None)}
    return [_significant(v) for v in value] if isinstance(value, list) else value
