"""What is asked of the cluster, as plain dictionaries: the Job of a box, the network policies, the probes' pods.

Pure, so that a snapshot test holds every line of it. A box is never restarted or retried by the cluster (an agent would
go on in a box that lost its memory), has no account, no service links, no name server, no host anything; it can write
to size-limited volumes only. The policies deny boxes everything, in both directions, and no rule anywhere is open to
all destinations.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from swe_lightning.recipe import KubernetesSection
from swe_lightning.sandbox.base import ORIGINAL_ROOT, TREE_ROOT, Limits
from swe_lightning.sandbox.boxside.pod import DOOR, SERVER
from swe_lightning.sandbox.bundle import launch

MANAGED = {"app.kubernetes.io/managed-by": "swe-lightning"}
ROLE, LABEL = "swe-lightning/role", "swe-lightning/label"
OWNER, RAW_LABEL = "swe-lightning/owner", "swe-lightning/label-as-given"
USER_DATABASE = {"passwd": "swe-lightning/passwd", "group": "swe-lightning/group"}
BOX, WIRE = "box", "wire"
BOX_POLICY, PROBE_POLICY = "swe-lightning-boxes", "swe-lightning-probes"
PROBE_PORT = 8472
PROBE_LIFETIME_S = 86_400
ENDED_TTL_S = 600
PATIENCE_S = 120
"""A box whose owner is silent for so long ends by itself."""
SHM_MB = 64
WIRE_MB = 384
UIDS = range(1_200_000_000, 1_800_000_000)
"""Of boxes: nobody's on any node. Each box has its own, so that the kernel counts its processes alone."""
LOST_NODE_S = 30


@dataclass(frozen=True)
class BoxSpec:
    name: str
    image: str
    uid: int
    tree_mb: int
    """What the tree takes in a tmpfs."""
    limits: Limits
    label: str
    owner: str
    hosts: str = ""
    """Lines of the hosts file that lead the names of services to the box's own loopback."""
    ports: tuple[int, ...] = ()
    """On which services are listened for there."""


def box_job(spec: BoxSpec, section: KubernetesSection) -> dict[str, Any]:
    """S7: one pod, never restarted, never retried, ended by the cluster in any case, removed by it afterwards."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(spec, "box"),
        "spec": {
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "activeDeadlineSeconds": section.max_lifetime_s,
            "ttlSecondsAfterFinished": ENDED_TTL_S,
            "template": {"metadata": _pod_metadata(spec), "spec": _box_pod(spec, section)},
        },
    }


def _box_pod(spec: BoxSpec, section: KubernetesSection) -> dict[str, Any]:
    limits = spec.limits
    tree_room = limits.disk_mb + spec.tree_mb
    shm = min(SHM_MB, limits.disk_mb)
    box = _container(BOX, spec.image, section, spec.uid, f"box({TREE_ROOT!r}, {PATIENCE_S})")
    box["resources"] = {
        "requests": {
            "cpu": _cores(min(section.cpu_request, limits.cpu)),
            "memory": f"{min(section.memory_request_mb, limits.memory_mb)}Mi",
            "ephemeral-storage": "1Mi",
        },
        # The volumes below lie in memory and count.
        "limits": {
            "cpu": _cores(limits.cpu),
            "memory": f"{limits.memory_mb + tree_room + limits.disk_mb + shm}Mi",
            "ephemeral-storage": "64Mi",
        },
    }
    box["volumeMounts"] = [
        {"name": "tree", "mountPath": TREE_ROOT},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "original", "mountPath": ORIGINAL_ROOT, "readOnly": True},
        {"name": "line", "mountPath": SERVER.rpartition("/")[0], "readOnly": True},
        *({"name": "users", "mountPath": f"/etc/{f}", "subPath": f, "readOnly": True} for f in USER_DATABASE),
    ]
    wire = _container(WIRE, spec.image, section, UIDS.start - 1, f"keeper({ORIGINAL_ROOT!r}, {PATIENCE_S})")
    wire["resources"] = {
        "requests": {"cpu": "10m", "memory": "32Mi", "ephemeral-storage": "1Mi"},
        "limits": {"cpu": "1", "memory": f"{WIRE_MB}Mi", "ephemeral-storage": f"{2 * spec.tree_mb + 64}Mi"},
    }
    wire["volumeMounts"] = [
        {"name": "original", "mountPath": ORIGINAL_ROOT},
        {"name": "line", "mountPath": SERVER.rpartition("/")[0]},
        {"name": "door", "mountPath": DOOR.rpartition("/")[0]},
    ]
    volumes = [
        _in_memory("tree", tree_room),
        _in_memory("tmp", limits.disk_mb),
        _in_memory("shm", shm),
        {"name": "original", "emptyDir": {"sizeLimit": f"{2 * spec.tree_mb + 16}Mi"}},
        _in_memory("line", 1),
        _in_memory("door", 1),
        {"name": "users", "downwardAPI": {"items": [_annotation(f, key) for f, key in USER_DATABASE.items()]}},
    ]
    pod = _pod(section) | {"hostname": "box", "containers": [box, wire], "volumes": volumes}
    if spec.hosts:
        lines = (line.split() for line in spec.hosts.splitlines())
        pod["hostAliases"] = [{"ip": address, "hostnames": [name]} for address, name in lines]
    if any(port < 1024 for port in spec.ports):
        # The wire is nobody. Kubernetes counts this one as safe since 1.22; older nodes refuse the pod.
        pod["securityContext"]["sysctls"] = [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]
    return pod


def probe_pod(spec: BoxSpec, role: str, call: str, section: KubernetesSection) -> dict[str, Any]:
    """A pod that no policy shuts off: what boxes must not reach (`listener`), or what must reach it (`control`)."""
    container = _container(WIRE, spec.image, section, UIDS.start - 1, call)
    container["resources"] = {
        "requests": {"cpu": "10m", "memory": "32Mi", "ephemeral-storage": "1Mi"},
        "limits": {"cpu": "200m", "memory": "64Mi", "ephemeral-storage": "64Mi"},
    }
    pod = _pod(section) | {"containers": [container], "activeDeadlineSeconds": PROBE_LIFETIME_S}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(spec, role), "spec": pod}


def network_policies() -> list[dict[str, Any]]:
    """S13: boxes reach nothing and are reached by nothing; the probes' pods reach each other."""
    probes = {"matchExpressions": [{"key": ROLE, "operator": "In", "values": ["listener", "control"]}]}
    port = [{"protocol": "TCP", "port": PROBE_PORT}]
    return [
        _policy(BOX_POLICY, {"matchLabels": {ROLE: "box"}}, ingress=[], egress=[]),
        _policy(
            PROBE_POLICY,
            probes,
            ingress=[{"from": [{"podSelector": {"matchLabels": MANAGED}}], "ports": port}],
            egress=[{"to": [{"podSelector": {"matchLabels": {ROLE: "listener"}}}], "ports": port}],
        ),
    ]


def _policy(name: str, selector: dict[str, Any], *, ingress: list[Any], egress: list[Any]) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "labels": MANAGED},
        "spec": {"podSelector": selector, "policyTypes": ["Ingress", "Egress"], "ingress": ingress, "egress": egress},
    }


def _pod(section: KubernetesSection) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostNetwork": False,
        "hostPID": False,
        "hostIPC": False,
        "shareProcessNamespace": False,
        # A name server has to be named; nothing listens at this one, and no packet could leave.
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"], "options": [{"name": "timeout", "value": "1"}]},
        "terminationGracePeriodSeconds": 0,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "tolerations": [
            {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute"}
            | {"tolerationSeconds": LOST_NODE_S}
            for why in ("not-ready", "unreachable")
        ]
        + section.tolerations,
        "nodeSelector": section.node_selector,
    }
    if section.user_namespaces:
        pod["hostUsers"] = False
    if section.runtime_class:
        pod["runtimeClassName"] = section.runtime_class
    if section.image_pull_secret:
        pod["imagePullSecrets"] = [{"name": section.image_pull_secret}]
    return pod


def _container(name: str, image: str, section: KubernetesSection, uid: int, call: str) -> dict[str, Any]:
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": section.image_pull_policy,
        "command": launch("-c", f"from boxside import pod; pod.{call}"),
        "workingDir": "/",
        "securityContext": {
            "runAsUser": uid,
            "runAsGroup": uid,
            "runAsNonRoot": True,
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _metadata(spec: BoxSpec, role: str) -> dict[str, Any]:
    return {
        "name": spec.name,
        "labels": {**MANAGED, ROLE: role, LABEL: label_value(spec.label)},
        "annotations": {OWNER: spec.owner, RAW_LABEL: spec.label},
    }


def _pod_metadata(spec: BoxSpec) -> dict[str, Any]:
    uid = spec.uid
    metadata = _metadata(spec, "box")
    del metadata["name"]
    metadata["annotations"] |= {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        USER_DATABASE["passwd"]: "root:x:0:0:root:/root:/bin/bash\n"
        f"nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\nswel:x:{uid}:{uid}:swel:/tmp:/bin/bash\n",
        USER_DATABASE["group"]: f"root:x:0:\nnogroup:x:65534:\nswel:x:{uid}:\n",
    }
    return metadata


def label_value(text: str) -> str:
    """A label Kubernetes accepts: the text itself where it is one, else a digest of it."""
    if re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", text):
        return text
    return "sha256-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _in_memory(name: str, size_mb: int) -> dict[str, Any]:
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{size_mb}Mi"}}


def _annotation(path: str, key: str) -> dict[str, Any]:
    return {"path": path, "fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}}


def _cores(cpu: float) -> str:
    return f"{max(1, round(cpu * 1000))}m"
