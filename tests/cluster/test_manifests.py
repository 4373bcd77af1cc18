"""What is asked of a cluster, line by line, and how its answers are read. Needs no cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from swe_lightning.errors import MissingPart, UserError
from swe_lightning.recipe import KubernetesSection, SandboxSection
from swe_lightning.records import InfraReason
from swe_lightning.sandbox import Limits, make_backend
from swe_lightning.sandbox.hardening import cluster_name
from swe_lightning.sandbox.kubernetes_api import configuration
from swe_lightning.sandbox.kubernetes_manifests import (
    BoxSpec,
    box_job,
    label_value,
    network_policies,
    probe_pod,
)
from swe_lightning.sandbox.kubernetes_pods import start_error, waits_for, why_lost
from swe_lightning.sandbox.network import Network, endpoints
from swe_lightning.services import Service

SECTION = KubernetesSection(image_pull_secret="registry", node_selector={"pool": "boxes"}, max_lifetime_s=7200)
SPEC = BoxSpec(
    name="swel-1",
    image="registry.example/swel-hardened/x:1",
    uid=1_200_000_007,
    tree_mb=5,
    limits=Limits(cpu=2, memory_mb=1024, pids=100, disk_mb=512),
    label="run 7",
    owner="host 1 2 3 4",
)


@pytest.fixture
def job() -> dict[str, Any]:
    return box_job(SPEC, SECTION)


@pytest.fixture
def pod(job: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = job["spec"]["template"]["spec"]
    return spec


def test_a_box_is_one_pod_that_the_cluster_never_repeats(job: dict[str, Any], pod: dict[str, Any]) -> None:
    """S7."""
    assert {k: v for k, v in job["spec"].items() if k != "template"} == {
        "backoffLimit": 0,
        "completions": 1,
        "parallelism": 1,
        "activeDeadlineSeconds": 7200,
        "ttlSecondsAfterFinished": 600,
    }
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 0


def test_a_pod_has_no_power() -> None:
    """S14, S18, S19: of boxes and probes alike, in every container."""
    for spec in (
        box_job(SPEC, SECTION)["spec"]["template"]["spec"],
        probe_pod(SPEC, "listener", "answer(1)", SECTION)["spec"],
    ):
        assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
        assert [spec[f"host{what}"] for what in ("Network", "PID", "IPC")] == [False] * 3
        assert spec["shareProcessNamespace"] is False
        assert (spec["dnsPolicy"], spec["dnsConfig"]["nameservers"]) == ("None", ["127.0.0.1"])
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
        assert spec["nodeSelector"] == {"pool": "boxes"}
        assert "serviceAccountName" not in spec
        assert {kind for v in spec.get("volumes", []) for kind in v if kind != "name"} <= {"emptyDir", "downwardAPI"}
        for container in spec["containers"]:
            context = dict(container["securityContext"])
            assert context.pop("runAsUser") == context.pop("runAsGroup") >= 1_000_000_000
            assert context == {
                "runAsNonRoot": True,
                "privileged": False,
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            }
            assert set(container["resources"]["limits"]) == {"cpu", "memory", "ephemeral-storage"}
            assert "env" not in container


def test_everything_a_box_can_write_to_has_a_size(pod: dict[str, Any]) -> None:
    box, wire = pod["containers"]
    volumes = {v["name"]: v["emptyDir"] for v in pod["volumes"] if "emptyDir" in v}
    assert all("sizeLimit" in v for v in volumes.values())
    writable = {m["mountPath"]: m["name"] for m in box["volumeMounts"] if not m.get("readOnly")}
    assert writable == {"/testbed": "tree", "/tmp": "tmp", "/dev/shm": "shm"}
    sizes = [volumes[name] for name in writable.values()]
    assert sizes == [{"medium": "Memory", "sizeLimit": f"{size}Mi"} for size in (517, 512, 64)]
    assert box["resources"]["limits"] == {"cpu": "2000m", "memory": f"{1024 + 517 + 512 + 64}Mi"} | {
        "ephemeral-storage": "64Mi"
    }
    assert box["resources"]["requests"] == {"cpu": "100m", "memory": "256Mi", "ephemeral-storage": "1Mi"}
    assert "/run/swel" not in [m["mountPath"] for m in box["volumeMounts"]], "the wire's own door"
    assert wire["securityContext"]["runAsUser"] != box["securityContext"]["runAsUser"]


def test_labels_serve_gc_and_hold_any_text(job: dict[str, Any]) -> None:
    labels, notes = job["metadata"]["labels"], job["metadata"]["annotations"]
    assert labels["app.kubernetes.io/managed-by"] == "swe-lightning"
    assert notes["swe-lightning/label-as-given"] == "run 7"
    assert labels["swe-lightning/label"] == label_value("run 7") != "run 7"
    assert label_value("run-7") == "run-7"
    assert label_value("") == ""
    assert len(label_value("x" * 64)) <= 63
    assert job["spec"]["template"]["metadata"]["labels"]["swe-lightning/role"] == "box"


def test_boxes_are_denied_everything_and_no_rule_is_open_to_all() -> None:
    """S13: no rule without `to` or `from`, no empty selector among them that reaches out of the namespace."""
    boxes, probes = network_policies()
    assert boxes["spec"] == {
        "podSelector": {"matchLabels": {"swe-lightning/role": "box"}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [],
        "egress": [],
    }
    for policy in (boxes, probes):
        for way, peers in (("egress", "to"), ("ingress", "from")):
            for rule in policy["spec"][way]:
                assert rule[peers]
                assert all(set(peer) == {"podSelector"} and peer["podSelector"] for peer in rule[peers])
                assert [p["port"] for p in rule["ports"]] == [8472]
    roles = probes["spec"]["podSelector"]["matchExpressions"][0]["values"]
    assert "box" not in roles, "a second policy would open what the first one denies"


def test_options_show_in_the_pod_only_when_asked_for(pod: dict[str, Any]) -> None:
    assert "hostUsers" not in pod
    assert "runtimeClassName" not in pod
    section = KubernetesSection(user_namespaces=True, runtime_class="gvisor", image_pull_policy="Never")
    other = box_job(SPEC, section)["spec"]["template"]["spec"]
    assert (other["hostUsers"], other["runtimeClassName"]) == (False, "gvisor")
    assert {c["imagePullPolicy"] for c in other["containers"]} == {"Never"}


def status(**state: Any) -> dict[str, Any]:
    return {"name": "box", "state": state}


LOSSES: dict[str, tuple[dict[str, Any] | None, str]] = {
    "gone": (None, "no such pod"),
    "oom": (
        {"phase": "Failed", "containerStatuses": [status(terminated={"reason": "OOMKilled", "exitCode": 137})]},
        "out of memory (oom)",
    ),
    "evicted": ({"phase": "Failed", "reason": "Evicted", "message": "low on disk"}, "evicted by its node: low on disk"),
    "deadline": ({"phase": "Failed", "reason": "DeadlineExceeded"}, "lifetime is over"),
    "node": ({"phase": "Unknown", "reason": "NodeLost"}, "node was lost"),
    "silent node": (
        {"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]},
        "does not answer (node lost)",
    ),
    "preempted": (
        {
            "phase": "Running",
            "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}],
        },
        "PreemptionByScheduler",
    ),
    "ended": (
        {"phase": "Failed", "containerStatuses": [status(terminated={"reason": "Error", "exitCode": 1})]},
        "exit code 1",
    ),
    "fine": ({"phase": "Running", "containerStatuses": [status(running={})]}, ""),
}


@pytest.mark.parametrize("case", LOSSES)
def test_losses_are_told_apart(case: str) -> None:
    """S9 and its kin."""
    found, expected = LOSSES[case]
    why = why_lost(None if found is None else {"metadata": {}, "spec": {}, "status": found})
    assert expected in why
    assert bool(why) == bool(expected)


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"])
def test_an_image_that_cannot_be_had_is_image_unavailable(reason: str) -> None:
    waiting = {"reason": reason, "message": "manifest unknown"}
    error = start_error({"status": {"phase": "Pending", "containerStatuses": [status(waiting=waiting)]}}, "x:1")
    assert error is not None
    assert error.reason is InfraReason.IMAGE_UNAVAILABLE
    assert "x:1" in str(error)
    assert "manifest unknown" in str(error)


def test_other_starts_that_fail_or_wait() -> None:
    def pending(reason: str, message: str = "") -> dict[str, Any]:
        return {
            "status": {
                "phase": "Pending",
                "containerStatuses": [status(waiting={"reason": reason, "message": message})],
            }
        }

    broken = start_error(pending("RunContainerError", 'exec: "/opt/swel/lib/loader": no such file'), "x")
    assert broken is not None
    assert broken.reason is InfraReason.SANDBOX_START
    assert "is the image hardened?" in str(broken)
    assert start_error(pending("ErrImagePull"), "x") is None, "the kubelet tries again"
    assert start_error(pending("ContainerCreating"), "x") is None
    full = {
        "status": {
            "phase": "Pending",
            "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "Insufficient cpu"}
            ],
        }
    }
    assert start_error(full, "x") is None, "a node may be on its way"
    assert "Insufficient cpu" in waits_for(full)
    assert "no pod" in waits_for(None)


def test_the_recipe_section_is_strict() -> None:
    with pytest.raises(ValidationError):
        KubernetesSection.model_validate({"namespaces": "x"})
    with pytest.raises(ValidationError):
        KubernetesSection(image_pull_policy="Sometimes")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="needs a name"):
        make_backend(SandboxSection(backend="kubernetes", whitelist=["192.0.2.7:5432"]))


def test_services_are_names_of_the_boxs_own_loopback(pod: dict[str, Any]) -> None:
    """No policy is opened for them: what listens there is in the pod (docs/kubernetes.md)."""
    assert "hostAliases" not in pod
    assert "sysctls" not in pod["securityContext"]
    found, hosts = endpoints(Network(Service("10.0.0.1", 9000), (Service("a.org", 5432), Service("b.org", 5432))))
    spec = replace(SPEC, hosts=hosts, ports=tuple(e.port for e in found))
    with_services = box_job(spec, SECTION)["spec"]["template"]["spec"]
    assert with_services.pop("hostAliases") == [
        {"ip": "127.0.1.1", "hostnames": ["a.org"]},
        {"ip": "127.0.1.2", "hostnames": ["b.org"]},
    ]
    assert with_services == pod


def test_a_privileged_port_is_opened_to_the_wire_by_the_one_safe_setting() -> None:
    spec = box_job(replace(SPEC, ports=(8080, 443)), SECTION)["spec"]["template"]["spec"]
    assert spec["securityContext"]["sysctls"] == [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]


def test_no_configuration_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(MissingPart, match="set KUBECONFIG"):
        configuration(KubernetesSection())
    (tmp_path / "none").write_text("clusters: [")
    with pytest.raises(UserError, match="cannot be used"):
        configuration(KubernetesSection())
    (tmp_path / "none").write_text("{apiVersion: v1, kind: Config, contexts: [], clusters: [], users: []}")
    with pytest.raises(UserError, match="cannot be used"):
        configuration(KubernetesSection(context="nowhere"))


def test_the_name_of_a_hardened_image_needs_no_daemon(swel_home: Any) -> None:
    name = cluster_name("swebench/swesmith.x86_64.o_1776_p.c0ffee")
    assert name.startswith("swel-hardened/swesmith.x86_64.o_1776_p.c0ffee:")
    assert cluster_name(name) == cluster_name(f"registry.example:5000/{name}").removeprefix("registry.example:5000/")
    assert cluster_name("swebench/swesmith.x86_64.o_1776_p.c0ffee:v2") != name
