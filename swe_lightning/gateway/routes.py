"""Paths of the proxy: whose call it is, in which mode and protocol. Exact, or 404; nothing is normalised."""

from __future__ import annotations

import re
from dataclasses import dataclass

from swe_lightning.gateway.problems import Problem
from swe_lightning.gateway.protocols import ADAPTERS, COUNT_TOKENS, MODELS
from swe_lightning.gateway.tokens import bearer

PREFIX = "/proxy/rollout/"
METHODS = dict.fromkeys((*ADAPTERS, COUNT_TOKENS), "POST") | dict.fromkeys(MODELS, "GET")
_PATH = re.compile(r"/proxy/rollout/([^/]+)/attempt/(0|[1-9][0-9]{0,5})/mode/(train|val)/(.+)")


@dataclass(frozen=True, slots=True)
class Route:
    """What the path says. `protocol` is its end, a key of METHODS."""

    rollout_id: str
    attempt: int
    mode: str
    protocol: str


def base_path(rollout_id: str, attempt: int | str, mode: str) -> str:
    return f"{PREFIX}{rollout_id}/attempt/{attempt}/mode/{mode}"


def parse_path(path: str) -> Route:
    """Exactly /proxy/rollout/{id}/attempt/{n}/mode/{mode}/{protocol}, or Problem 404."""
    match = _PATH.fullmatch(path)
    if match is None or match[4] not in METHODS:
        raise Problem(404, "unknown_path", f"nothing is served at {path[:300]}")
    return Route(match[1], int(match[2]), match[3], match[4])


def check_method(method: str, route: Route) -> None:
    """Problem 405 unless the route is served for `method`."""
    allowed = METHODS[route.protocol]
    if method != allowed:
        raise Problem(405, "wrong_method", f"{route.protocol} is served for {allowed}, not {method}", allow=allowed)


def speaks_anthropic(path: str) -> bool:
    """Whether errors at this path, an unknown one too, are told in Anthropic's form."""
    return path.startswith(PREFIX) and "/anthropic/" in path


def agent_token(headers: list[tuple[bytes, bytes]]) -> str:
    """OpenAI clients send Authorization, Anthropic clients x-api-key; Authorization counts if both are there."""
    found: dict[bytes, str] = {}
    for name, value in headers:
        if name in (b"authorization", b"x-api-key"):
            found.setdefault(name, value.decode("latin-1"))
    return bearer(found.get(b"authorization")) or found.get(b"x-api-key", "").strip()
