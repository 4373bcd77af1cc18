"""A pod's status, read: is it up, why does it not come up, why is it lost. Pure but for the one function that waits."""

from __future__ import annotations

import random
import time
from typing import Any

from swe_lightning.errors import SandboxStartError
from swe_lightning.records import InfraReason
from swe_lightning.sandbox.kubernetes_api import Cluster, retrying
from swe_lightning.sandbox.kubernetes_manifests import BOX

NO_IMAGE = {"ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "RegistryUnavailable"}
"""Not ErrImagePull: the kubelet tries again by itself before it says ImagePullBackOff."""
NO_START = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"}
POLL_S = (0.1, 1.0)
Pod = dict[str, Any]


def wait_running(cluster: Cluster, selector: str, image: str, until: float, *, ended_is_fine: bool = False) -> Pod:
    """The one pod of that selector, once all its containers run. SandboxStartError with what kept it, typed."""
    pause = POLL_S[0]
    pod: Pod | None = None
    while True:
        found = retrying(cluster, "cannot look for a sandbox's pod", lambda: cluster.find("pods", selector), until)
        pod = found[0] if found else None
        if pod is not None:
            if ended_is_fine and phase(pod) == "Succeeded":
                return pod
            error = start_error(pod, image)
            if error is not None:
                raise error
            if is_running(pod):
                return pod
        if time.monotonic() + pause > until:
            raise SandboxStartError(f"a sandbox's pod did not start in time: {waits_for(pod)}")
        time.sleep(pause * (0.8 + 0.4 * random.random()))
        pause = min(POLL_S[1], pause * 1.3)


def phase(pod: Pod) -> str:
    return str(pod.get("status", {}).get("phase", ""))


def is_running(pod: Pod) -> bool:
    statuses = _statuses(pod)
    return phase(pod) == "Running" and bool(statuses) and all("running" in s.get("state", {}) for s in statuses)


def start_error(pod: Pod, image: str) -> SandboxStartError | None:
    """What no waiting mends."""
    for status in _statuses(pod):
        waiting = status.get("state", {}).get("waiting") or {}
        reason, message = waiting.get("reason", ""), " ".join(str(waiting.get("message", "")).split())[:300]
        if reason in NO_IMAGE:
            return SandboxStartError(
                f"image {image} cannot be had by the nodes ({reason}: {message}); "
                "swel images build IMAGE --push REGISTRY makes and pushes it",
                InfraReason.IMAGE_UNAVAILABLE,
            )
        if reason in NO_START:
            return SandboxStartError(f"a sandbox's container does not start ({reason}: {message}){_hint(message)}")
    if phase(pod) in ("Failed", "Succeeded") or any("terminated" in s.get("state", {}) for s in _statuses(pod)):
        why = why_lost(pod)
        return SandboxStartError(f"a sandbox's pod ended while it was being started: {why}{_hint(why)}")
    return None


def waits_for(pod: Pod | None) -> str:
    if pod is None:
        return "the cluster made no pod for its Job (quota, admission?)"
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"no node takes it ({condition.get('reason')}: {' '.join(str(condition.get('message')).split())})"
    for status in _statuses(pod):
        waiting = status.get("state", {}).get("waiting") or {}
        if waiting:
            return f"{waiting.get('reason')} {waiting.get('message') or ''}".strip()
    return f"it is {phase(pod) or 'unknown'}"


def why_lost(pod: Pod | None) -> str:
    """S9: the cluster's account of a pod that stopped answering; "" when it sees nothing wrong."""
    if pod is None:
        return "no such pod: somebody deleted it, or its node"
    status = pod.get("status", {})
    reason, message = status.get("reason") or "", " ".join(str(status.get("message") or "").split())
    if reason == "Evicted":
        return f"evicted by its node: {message}"
    if reason == "DeadlineExceeded":
        return "its lifetime is over (sandbox.kubernetes.max_lifetime_s)"
    for condition in status.get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return f"taken away ({condition.get('reason')}): {condition.get('message')}"
    for one in sorted(_statuses(pod), key=lambda s: s.get("name") != BOX):
        ended = one.get("state", {}).get("terminated") or one.get("lastState", {}).get("terminated") or {}
        if ended.get("reason") == "OOMKilled":
            return f"out of memory (oom): container {one.get('name')} was killed at its memory limit"
    if reason in ("NodeLost", "NodeAffinity", "Shutdown", "Terminated") or phase(pod) == "Unknown":
        return f"its node was lost ({reason or 'Unknown'}): {message}"
    for one in _statuses(pod):
        ended = one.get("state", {}).get("terminated") or {}
        if ended:
            said = " ".join(str(ended.get("message") or "").split())
            return (
                f"container {one.get('name')} ended ({ended.get('reason')}, exit code {ended.get('exitCode')}) {said}"
            )
    if pod.get("metadata", {}).get("deletionTimestamp"):
        return "the pod is being deleted"
    for condition in status.get("conditions") or []:
        if condition.get("type") == "Ready" and condition.get("status") != "True" and phase(pod) == "Running":
            return f"its node {pod.get('spec', {}).get('nodeName')} does not answer (node lost)"
    return f"the pod has {phase(pod).lower()}" if phase(pod) in ("Failed", "Succeeded") else ""


def _statuses(pod: Pod) -> list[dict[str, Any]]:
    return list(pod.get("status", {}).get("containerStatuses") or [])


def _hint(text: str) -> str:
    return "; is the image hardened? (swel images build)" if "/opt/swel" in text else ""
