"""The cluster as the rest of the room sees it: one client, typed errors, retries of what may be asked twice.

Where the cluster is comes from KUBECONFIG, the user's default file or the pod this runs in; context and namespace from
the recipe. No client, no configuration, no cluster and no permission are one sentence each (exit 2). What an overloaded
or restarting API server says (429, 5xx, a broken connection) is tried again with growing, jittered pauses; every object
has a name of our choosing, so a creation that is asked twice is one object.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from swe_lightning.errors import MissingPart, SandboxStartError, UserError
from swe_lightning.recipe import KubernetesSection

if TYPE_CHECKING:
    from kubernetes import client

T = TypeVar("T")
RETRIED = {408, 429, 500, 502, 503, 504}
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
TIMEOUT = httpx.Timeout(30.0, connect=5.0)
IN_CLUSTER_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
OURS = "app.kubernetes.io/managed-by=swe-lightning"
"""Selects what this project makes."""
PATHS = {"jobs": "apis/batch/v1", "pods": "api/v1", "networkpolicies": "apis/networking.k8s.io/v1"}


class ApiError(Exception):
    """The API server refused (`status`), or did not answer (0). The message is its own, on one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(" ".join(message.split())[:400])
        self.status = status


class Cluster:
    """Thread-safe, of one process. Objects go in and come out as plain dictionaries, so no version's classes matter."""

    def __init__(self, section: KubernetesSection) -> None:
        self.configuration, self.namespace, self.where = configuration(section)
        self.tls = tls_context(self.configuration)
        self._http = httpx.Client(
            base_url=self.configuration.host,
            verify=self.tls or True,
            timeout=TIMEOUT,
            proxy=self.configuration.proxy or None,
            trust_env=False,
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=16),
        )

    def close(self) -> None:
        self._http.close()

    def headers(self) -> dict[str, str]:
        """Credentials, refreshed where they expire."""
        token = self.configuration.auth_settings().get("BearerToken")
        return {"authorization": str(token["value"])} if token and token.get("value") else {}

    def create(self, kind: str, manifest: dict[str, Any]) -> bool:
        """False: an object of that name is there already."""
        return self._unless(409, "POST", kind, body=manifest) is not None

    def replace(self, kind: str, name: str, manifest: dict[str, Any]) -> None:
        self._call("PUT", kind, name, body=manifest)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        return self._unless(404, "GET", kind, name)

    def find(self, kind: str, selector: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._call("GET", kind, query={"labelSelector": selector})["items"]
        return found

    def delete(self, kind: str, name: str) -> bool:
        """At once, and what it owns in the background. False: it was not there."""
        body = {"propagationPolicy": "Background", "gracePeriodSeconds": 0}
        return self._unless(404, "DELETE", kind, name, body=body) is not None

    def _unless(
        self, status: int, method: str, kind: str, name: str = "", *, body: Any = None
    ) -> dict[str, Any] | None:
        """None when the server answers with that status."""
        try:
            return self._call(method, kind, name, body=body)
        except ApiError as error:
            if error.status == status:
                return None
            raise

    def _call(
        self, method: str, kind: str, name: str = "", *, body: Any = None, query: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """ApiError; UserError for what this account may not do."""
        path = f"/{PATHS[kind]}/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")
        try:
            answer = self._http.request(method, path, headers=self.headers(), json=body, params=query)
        except httpx.HTTPError as error:
            raise ApiError(0, f"{type(error).__name__} {error}") from error
        if answer.is_success:
            done: dict[str, Any] = answer.json()
            return done
        said = _message(answer.text)
        if answer.status_code in (401, 403):
            raise UserError(
                f"the cluster {self.where} refuses {method} {kind} in namespace {self.namespace}: {said}; "
                "docs/kubernetes.md has the Role that swel needs"
            )
        raise ApiError(answer.status_code, said)


def tls_context(config: client.Configuration) -> ssl.SSLContext | None:
    """For the API server and its exec streams alike. None: it is spoken to in the clear."""
    if not config.host.startswith("https"):
        return None
    context = ssl.create_default_context(cafile=config.ssl_ca_cert or None)
    if not config.verify_ssl or config.assert_hostname is False:
        context.check_hostname = False
    if not config.verify_ssl:
        context.verify_mode = ssl.CERT_NONE
    if config.cert_file:
        context.load_cert_chain(config.cert_file, config.key_file)
    return context


def _message(text: str) -> str:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(text)["message"])
    return text


def configuration(section: KubernetesSection) -> tuple[client.Configuration, str, str]:
    """(how to reach the cluster, namespace, its name for messages). MissingPart or UserError in one sentence."""
    try:
        import yaml
        from kubernetes import client, config
        from kubernetes.config.config_exception import ConfigException
    except ImportError:
        raise MissingPart(
            "kubernetes sandboxes need the kubernetes package: pip install 'swe-lightning[k8s]'"
        ) from None
    found = client.Configuration()
    if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG") and section.context is None:
        with contextlib.suppress(ConfigException):
            config.load_incluster_config(found)
            namespace = section.namespace or IN_CLUSTER_NAMESPACE.read_text(encoding="utf-8").strip()
            return found, namespace, "of this pod"
    given = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    if not any(Path(p).is_file() for p in given.split(os.pathsep)):
        raise MissingPart(
            f"no cluster is configured: there is no file {given}; set KUBECONFIG to a kubeconfig file "
            "(or run inside the cluster, with a service account)"
        )
    try:
        contexts, active = config.list_kube_config_contexts(given)
        config.load_kube_config(given, context=section.context, client_configuration=found, persist_config=False)
    except (ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{given} cannot be used: {' '.join(str(error).split())}") from error
    chosen = next((c for c in contexts if c["name"] == section.context), active)
    namespace = section.namespace or (chosen or {}).get("context", {}).get("namespace") or "default"
    return found, namespace, f"{(chosen or {}).get('name', '')} ({found.host})"


def said_by(cluster: Cluster) -> str:
    """One line that proves that it answers this account; SwelError in one sentence else."""
    try:
        found = retrying(cluster, "no cluster", lambda: cluster.find("jobs", OURS), time.monotonic())
        return f"the cluster {cluster.where} answers; {len(found)} sandboxes in namespace {cluster.namespace}"
    finally:
        cluster.close()


def retrying(cluster: Cluster, what: str, call: Callable[[], T], until: float) -> T:
    """`call` until it succeeds, is refused for good, or time is up. SandboxStartError with the last words."""
    pause = FIRST_PAUSE_S
    while True:
        try:
            return call()
        except ApiError as error:
            if error.status and error.status not in RETRIED:
                raise SandboxStartError(f"{what}: {error}") from error
            pause = min(LONGEST_PAUSE_S, pause * (1.5 + random.random()))
            if time.monotonic() + pause > until:
                raise SandboxStartError(f"{what}: the API server {cluster.where} does not answer: {error}") from error
            time.sleep(pause)
