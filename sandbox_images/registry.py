"""What a registry says about one image, without pulling it: its digest, that it is absent, or how long to wait.

A daemon hides the Retry-After of a 429, and a pull that fails costs quota; a HEAD of the manifest does neither. Speaks
the registry API v2 with anonymous bearer tokens. Plain HTTP is used for registries on the loopback only.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal

import httpx

from swe_lightning.sandbox.image_names import Reference

HUB = "registry-1.docker.io"
ACCEPT = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
DEFAULT_WAIT_S = 60.0


@dataclass(frozen=True)
class Answer:
    state: Literal["found", "missing", "limited", "failed"]
    digest: str = ""
    wait_s: float = 0.0
    detail: str = ""


def ask(client: httpx.Client, reference: Reference) -> Answer:
    """Never raises for what a registry or a network does."""
    host = reference.registry or HUB
    path = reference.path if reference.registry or "/" in reference.path else f"library/{reference.path}"
    url = f"{scheme(host)}://{host}/v2/{path}/manifests/{reference.digest or reference.tag}"
    try:
        reply = client.head(url, headers={"Accept": ACCEPT})
        if reply.status_code == 401 and (token := _token(client, reply.headers.get("WWW-Authenticate", ""))):
            reply = client.head(url, headers={"Accept": ACCEPT, "Authorization": f"Bearer {token}"})
    except (httpx.HTTPError, ValueError) as error:
        return Answer("failed", detail=f"{host}: {type(error).__name__}: {error}")
    if reply.status_code == 200:
        return Answer("found", reply.headers.get("Docker-Content-Digest", reference.digest))
    if reply.status_code == 429:
        return Answer("limited", wait_s=retry_after(reply.headers.get("Retry-After", "")), detail=f"{host}: 429")
    if reply.status_code in (401, 403, 404):  # a hub answers 401 for repositories that do not exist
        return Answer("missing", detail=f"{host}: {reply.status_code} for {path}")
    return Answer("failed", detail=f"{host}: HTTP {reply.status_code}")


def scheme(host: str) -> str:
    return "http" if re.fullmatch(r"(localhost|127\.\d+\.\d+\.\d+)(:\d+)?", host) else "https"


def retry_after(value: str) -> float:
    """Seconds, from a number or a date."""
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return DEFAULT_WAIT_S


def _token(client: httpx.Client, challenge: str) -> str:
    """Anonymous pull token of a Bearer challenge; "" if it offers none."""
    if not challenge.lower().startswith("bearer "):
        return ""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    realm = fields.pop("realm", "")
    reply = client.get(realm, params=fields) if realm else None
    if reply is None or reply.status_code != 200:
        return ""
    body = reply.json()
    return str(body.get("token") or body.get("access_token") or "")
