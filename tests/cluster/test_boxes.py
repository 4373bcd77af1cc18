"""What is particular to pods: how they are started, kept from the network, lost, and found again. Real cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from swe_lightning.errors import InfraError, MissingPart, SandboxLost, SandboxStartError, UserError
from swe_lightning.recipe import KubernetesSection
from swe_lightning.records import InfraReason
from swe_lightning.sandbox import FileState, Limits
from swe_lightning.sandbox.check import escape_report
from swe_lightning.sandbox.kubernetes import KubernetesBackend
from swe_lightning.sandbox.kubernetes_api import OURS, Cluster
from swe_lightning.sandbox.kubernetes_manifests import network_policies
from swe_lightning.services import Service

LIMITS = Limits(cpu=1, memory_mb=256, pids=64, disk_mb=32)
KIT = Path(__file__).resolve().parents[3] / "shared" / "k8s-kit"
KIT_STATE = Path(os.environ.get("K8S_KIT_DIR") or Path(os.environ.get("TMPDIR", "/tmp")) / "k8s-kit")


@pytest.fixture(scope="module")
def api(cluster: str) -> Iterator[Cluster]:
    api = Cluster(KubernetesSection())
    yield api
    api.close()


@pytest.fixture(scope="module")
def on_the_kit(cluster: str) -> None:
    """For what needs a hand on the cluster's own machine."""
    if not os.environ["KUBECONFIG"].startswith(str(KIT_STATE)) or not KIT.exists():
        pytest.skip("needs the cluster kit, whose API server and node are this machine's: SWEL_TEST_CLUSTER=kit")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg/a.py").write_text("x = 1\n")
    return root


def wait_for(condition: Callable[[], Any], timeout_s: float = 30) -> Any:
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until, "it never came"
        time.sleep(0.1)
    return found


def ours(api: Cluster, label: str) -> list[str]:
    found = [*api.find("jobs", OURS), *api.find("pods", OURS)]
    return [
        o["metadata"]["name"] for o in found if o["metadata"]["annotations"]["swe-lightning/label-as-given"] == label
    ]


def test_the_pod_is_as_asked_and_shows_no_secret(cluster_backend: KubernetesBackend, api: Cluster, tree: Path) -> None:
    """S7, S14, S18, S19: what the cluster made of the manifest; an agent's environment is in none of its objects."""
    with cluster_backend.create(tree, env={"TOKEN": "s3cret-value"}, limits=LIMITS, label="power") as box:
        pod = api.get("pods", box.pod)
        job = api.get("jobs", box.name)
        assert box.run("echo $TOKEN", timeout_s=20).output == b"s3cret-value\n"
        seen = box.run(
            "ls /var/run/secrets /run/secrets 2>/dev/null; env | grep -i kubernetes; grep NoNewPrivs /proc/self/status;"
            "cat /proc/self/oom_score_adj",
            timeout_s=20,
        ).output
    assert pod is not None
    assert job is not None
    assert "s3cret-value" not in str(pod) + str(job)
    assert job["spec"]["backoffLimit"] == 0
    assert pod["spec"]["restartPolicy"] == "Never"
    assert not [v for v in pod["spec"]["volumes"] if set(v) - {"name", "emptyDir", "downwardAPI"}]
    assert seen == b"NoNewPrivs:\t1\n1000\n"
    wait_for(lambda: ours(api, "power") == [])


def test_the_interface_of_a_pod_leads_nowhere(cluster_backend: KubernetesBackend, api: Cluster, tree: Path) -> None:
    """Node, API server, another box, a pod that answers everybody else: TCP, UDP and names."""
    with (
        cluster_backend.create(tree, limits=LIMITS) as box,
        cluster_backend.create(tree, limits=LIMITS) as other,
    ):
        addresses = {api.get("pods", b.pod)["status"][key] for b in (box, other) for key in ("podIP", "hostIP")}  # type: ignore[index]
        listener = cluster_backend._connected().isolation._address
        other.run("python -m http.server 8000 >/dev/null 2>&1 & sleep 1", timeout_s=20)
        assert (
            b"200"
            in other.run(
                "python -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000').status)\"",
                timeout_s=20,
            ).output
        )
        mine = api.get("pods", box.pod)["status"]["podIP"]  # type: ignore[index]
        source = f"""
import socket
for host in {[*sorted(addresses - {mine}), listener, "10.96.0.1", "1.1.1.1"]}:
    for port in (53, 80, 443, 8000, 8472, 10250, 20250):
        s = socket.socket(); s.settimeout(0.5)
        try: s.connect((host, port)); print("REACHED", host, port)
        except OSError: pass
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)
try:
    s.connect(("10.96.0.10", 53)); s.send(b"x" * 30); s.recv(100); print("ANSWERED")
except OSError: pass
try: print("RESOLVED", socket.gethostbyname("kubernetes.default.svc.cluster.local"))
except OSError: pass
print("done")
"""
        box.write({"probe.py": FileState(source.encode())})
        assert box.run("python probe.py", timeout_s=60).output == b"done\n"


def test_a_cluster_that_does_not_enforce_policies_is_refused(
    cluster: str, api: Cluster, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policies add up: one that allows boxes everything is what a plugin that enforces none amounts to."""
    policy = network_policies()[0]
    policy["metadata"]["name"] = "swel-test-open"
    policy["spec"] |= {"ingress": [{}], "egress": [{}]}
    monkeypatch.setattr("swe_lightning.sandbox.kubernetes_isolation.LATE_S", 1.0)
    api.create("networkpolicies", policy)
    backend = KubernetesBackend(image=cluster)
    try:
        wait_for(lambda: api.get("networkpolicies", "swel-test-open"))
        with pytest.raises(MissingPart, match=r"does not enforce NetworkPolicy: .* reached 1"):
            backend.create(tree, limits=LIMITS, label="open")
        wait_for(lambda: ours(api, "open") == [])
    finally:
        api.delete("networkpolicies", "swel-test-open")
        backend.close()


def test_a_changed_policy_is_put_right(cluster: str, api: Cluster, tree: Path) -> None:
    found = api.get("networkpolicies", "swe-lightning-boxes")
    assert found is not None
    found["spec"]["egress"] = [{}]
    api.replace("networkpolicies", "swe-lightning-boxes", found)
    backend = KubernetesBackend(image=cluster)
    try:
        backend.create(tree, limits=LIMITS).destroy()
    finally:
        backend.close()
    assert "egress" not in api.get("networkpolicies", "swe-lightning-boxes")["spec"]  # type: ignore[index]


def test_a_deleted_pod_is_a_lost_sandbox(cluster_backend: KubernetesBackend, api: Cluster, tree: Path) -> None:
    """S3: the first command says so, and so does every later one; never text that looks like output."""
    with cluster_backend.create(tree, limits=LIMITS) as box:
        api.delete("pods", box.pod)
        for command in ("sleep 30", "echo hello"):  # its node notices a little later
            with pytest.raises(SandboxLost, match=r"no such pod|container box ended|being deleted") as lost:
                box.run(command, timeout_s=40)
            assert lost.value.reason is InfraReason.SANDBOX_LOST


def test_a_server_killed_for_memory_is_a_lost_sandbox_that_says_so(
    cluster_backend: KubernetesBackend, api: Cluster, tree: Path, on_the_kit: None
) -> None:
    """S9: the limit is taken away under the server itself, which no command can do to it."""
    with cluster_backend.create(tree, limits=LIMITS) as box:
        box.run("head -c 20M /dev/zero >/testbed/a", timeout_s=20)
        pod = api.get("pods", box.pod)
        assert pod is not None
        (container,) = [c for c in pod["status"]["containerStatuses"] if c["name"] == "box"]
        name = container["containerID"].rpartition("/")[2]
        groups = [p for p in Path("/sys/fs/cgroup/memory/kubepods").rglob(name) if p.is_dir()]
        if not groups:
            pytest.skip("no cgroup v1 hierarchy of this cluster's node here")
        used = int((groups[0] / "memory.usage_in_bytes").read_text())
        (groups[0] / "memory.limit_in_bytes").write_text(str(used + (2 << 20)))
        with pytest.raises(SandboxLost, match=r"out of memory \(oom\)") as lost:
            box.write({f"big{i}": FileState(bytes(6 << 20)) for i in range(4)})
        assert lost.value.reason is InfraReason.SANDBOX_LOST


@pytest.mark.parametrize("when", ["idle", "in a command"])
def test_a_restarted_api_server_costs_time_and_nothing_else(
    cluster_backend: KubernetesBackend, tree: Path, on_the_kit: None, when: str
) -> None:
    """The command under way runs once, and its reply comes."""
    with cluster_backend.create(tree, limits=LIMITS) as box:

        def restart() -> None:
            time.sleep(1 if when != "idle" else 0)
            subprocess.run([KIT / "kill-apiserver.sh"], check=True, capture_output=True)
            time.sleep(1)
            subprocess.run([KIT / "start-apiserver.sh"], check=True, capture_output=True)

        thread = threading.Thread(target=restart)
        thread.start()
        if when == "idle":
            thread.join()
        result = box.run("echo ran >>count; sleep 3; cat count", timeout_s=60)
        thread.join()
        assert (result.output, result.exit_code) == (b"ran\n", 0)
        assert set(box.diff()) == {"count"}
        assert box.run("echo next", timeout_s=20).output == b"next\n"


def test_a_box_ends_when_its_owner_is_silent(cluster_backend: KubernetesBackend, api: Cluster, tree: Path) -> None:
    """Its line is closed and nobody speaks: shortened here, two minutes otherwise."""
    import swe_lightning.sandbox.kubernetes_manifests as manifests

    before, manifests.PATIENCE_S = manifests.PATIENCE_S, 4
    try:
        box = cluster_backend.create(tree, limits=LIMITS, label="silent")
    finally:
        manifests.PATIENCE_S = before
    try:
        assert box.run("echo here", timeout_s=20).output == b"here\n"
        wait_for(lambda: api.get("pods", box.pod)["status"]["phase"] == "Succeeded")  # type: ignore[index]
        with pytest.raises(SandboxLost, match=r"container (box|wire) ended|succeeded"):
            box.run("echo hello", timeout_s=20)
    finally:
        box.destroy()


OWNER = """
import sys, time
from pathlib import Path
from swe_lightning.sandbox.kubernetes import KubernetesBackend
box = KubernetesBackend(image=sys.argv[2]).create(Path(sys.argv[1]), label=sys.argv[3])
print(box.name, box.pod, flush=True)
time.sleep(600)
"""


def test_gc_finds_what_a_killed_owner_left(
    cluster_backend: KubernetesBackend, cluster: str, api: Cluster, tree: Path
) -> None:
    """S4: by label, and nothing that lives."""
    argv = [sys.executable, "-c", OWNER, str(tree), cluster, "crashed, 1"]
    with cluster_backend.create(tree, limits=LIMITS, label="living") as living:
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            name, pod = owner.stdout.readline().split()
            assert cluster_backend.gc("crashed, 1") == 0
            owner.send_signal(signal.SIGKILL)
        assert api.get("jobs", name) is not None
        assert cluster_backend.gc("other") == 0
        argv = [
            sys.executable,
            "-m",
            "cli",
            "sandbox",
            "gc",
            "--backend",
            "kubernetes",
            "--label",
            "crashed, 1",
            "--json",
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert done.stdout == '{"kubernetes": 1}\n', done.stderr
        wait_for(lambda: api.get("pods", pod) is None)
        assert cluster_backend.gc() == 1, "its probe's pod"
        assert living.run("echo here", timeout_s=20).output == b"here\n"


def test_an_absent_image_is_image_unavailable_and_stays_with_its_rollout(cluster: str, tree: Path) -> None:
    """S11, S17: one of four starts fails with its own typed reason; three work."""
    backend = KubernetesBackend(KubernetesSection(image_pull_policy="Never"), image=cluster)

    def work(image: str) -> bytes | InfraError:
        try:
            with backend.create(tree, limits=LIMITS, image=image) as box:
                return box.run("echo fine", timeout_s=20).output
        except InfraError as error:
            return error

    try:
        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(work, ["", "no/such-image:1", "", ""]))
    finally:
        backend.close()
    assert [d for d in done if isinstance(d, bytes)] == [b"fine\n"] * 3
    (failed,) = (d for d in done if not isinstance(d, bytes))
    assert failed.reason is InfraReason.IMAGE_UNAVAILABLE
    assert "ErrImageNeverPull" in str(failed)


def test_a_box_no_node_has_room_for_says_so_and_leaves_nothing(cluster: str, api: Cluster, tree: Path) -> None:
    backend = KubernetesBackend(KubernetesSection(cpu_request=900, start_timeout_s=60), image=cluster)
    try:
        backend._connected().isolation.prepare(cluster)
        backend._section = KubernetesSection(cpu_request=900, start_timeout_s=3)
        with pytest.raises(SandboxStartError, match="Insufficient cpu") as failed:
            backend.create(tree, limits=Limits(cpu=1000), label="huge")
        assert failed.value.reason is InfraReason.SANDBOX_START
        wait_for(lambda: ours(api, "huge") == [])
    finally:
        backend.close()


def test_an_account_without_rights_is_one_sentence(
    cluster: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import yaml

    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text(encoding="utf-8"))
    config["users"][0]["user"] = {"token": "nobody-knows-this"}
    (tmp_path / "config").write_text(yaml.safe_dump(config), encoding="utf-8")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(UserError, match="refuses GET networkpolicies in namespace default"):
        KubernetesBackend(image=cluster).create(tree)


HELLO = "import socket; print(socket.create_connection((%r, %d), 10).makefile().read(), end='')"


@pytest.fixture
def service() -> Iterator[int]:
    """Says hello to everybody, on this machine's loopback, which no node reaches."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as connection:
                        connection.sendall(b"hello from outside\n")

        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]


def test_the_gateway_and_named_services_and_nothing_else(cluster: str, tree: Path, service: int) -> None:
    """Over the exec stream: the policies stay shut, and the isolation is proved for this box as for any other."""
    backend = KubernetesBackend(image=cluster, whitelist=(Service("localhost", service),))
    try:
        with backend.create(tree, limits=LIMITS, gateway=Service("127.0.0.1", service)) as box:
            for port in (8080, service):
                assert box.run(f'python -c "{HELLO % ("127.0.0.1", port)}"', timeout_s=30).output == (
                    b"hello from outside\n"
                )
            other = box.run(f'python -c "{HELLO % ("127.0.0.1", service + 1)}" 2>&1 | tail -1', timeout_s=30).output
            assert b"refused" in other
            box.run("kill -9 -1", timeout_s=30)  # nothing of the box carries the bytes
            assert b"hello" in box.run(f'python -c "{HELLO % ("localhost", service)}"', timeout_s=30).output
    finally:
        backend.close()


def test_a_service_survives_a_restarted_api_server(
    cluster_backend: KubernetesBackend, tree: Path, service: int, on_the_kit: None
) -> None:
    with cluster_backend.create(tree, limits=LIMITS, gateway=Service("127.0.0.1", service)) as box:
        subprocess.run([KIT / "kill-apiserver.sh"], check=True, capture_output=True)
        subprocess.run([KIT / "start-apiserver.sh"], check=True, capture_output=True, timeout=60)
        ask = f'for i in $(seq 60); do python -c "{HELLO % ("127.0.0.1", 8080)}" 2>/dev/null && break; sleep 0.5; done'
        assert box.run(ask, timeout_s=60).output == b"hello from outside\n"


def test_this_clusters_report_is_clean(cluster_backend: KubernetesBackend) -> None:
    rows = escape_report(cluster_backend, cgroup=True, interface=True)
    assert [row for row in rows if not row[1]] == []
