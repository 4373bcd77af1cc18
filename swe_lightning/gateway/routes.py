"""Paths of the proxy: whose call it is, in which mode and protocol. Exact, or 404; nothing is normalised."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from swe_lightning.gateway.problems import Problem
from swe_lightning.gateway.protocols import ADAPTERS, COUNT_TOKENS, MODELS
from swe_lightning.gateway.tokens import bearer

PREFIX = "/proxy/rollout/"
METHODS = dict.fromkeys((*ADAPTERS, COUNT_TOKENS), "POST") | dict.fromkeys(MODELS, "GET")
MAX_VALUES = 2_000_000
"""Commas and brackets in a body, in texts too. Each may become an object of 100 bytes, and parsing them stops the rest
of the gateway for a while; a conversation of a million tokens stays far below."""
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


class BodyBudget:
    """How many bytes the open calls of each rollout may hold together: what one agent can make the gateway keep."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        """Rollouts that hold something."""
        return len(self._held)

    @contextmanager
    def reading(self, rollout_id: str, receive: Any) -> Iterator[Any]:
        """`receive`, counted; what came is held until the block ends. It raises Problem 429 above the limit."""
        mine = 0

        async def counted() -> Any:
            nonlocal mine
            message = await receive()
            size = len(message.get("body", b""))
            mine += size
            self._held[rollout_id] = held = self._held.get(rollout_id, 0) + size
            if held > self._limit:
                message = f"the open calls of rollout {rollout_id} hold more than {self._limit} bytes"
                raise Problem(429, "rollout_busy", message, retry_after_s=1)
            return message

        try:
            yield counted
        finally:
            left = self._held.get(rollout_id, 0) - mine
            if left:
                self._held[rollout_id] = left
            else:
                self._held.pop(rollout_id, None)


async def read_body(receive: Any, limit: int) -> bytes:
    """The whole request body; Problem 413 as soon as it is larger than `limit` bytes, or if it holds too much."""
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Problem(400, "bad_request", "the client left before the body was complete")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise Problem(413, "body_too_large", f"the body is larger than {limit} bytes")
        chunks.append(chunk)
        if not message.get("more_body"):
            break
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if size > MAX_VALUES and sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise Problem(413, "body_too_large", f"the body holds more than {MAX_VALUES} commas and brackets")
    return body
