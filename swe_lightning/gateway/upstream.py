"""The model servers: which one a rollout talks to, and when a request is sent again.

A rollout sticks to one endpoint (its prefix cache lives there) and moves only when that endpoint is down. A request is
sent again only when the connection failed or the server said 503: generating twice is safe, because nothing of a failed
try is recorded. While no endpoint answers, a call waits up to `patience_s`, so that a restart is only a slow call. All
tries end when the client goes away: the caller cancels, which closes the connection and with it the generation.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import aiohttp

from swe_lightning.gateway.jsonio import dumps, loads
from swe_lightning.gateway.problems import Problem

VERSION_HEADER = "x-swel-weight-version"
_MAX_DROPS = 2
_DOWN_S = 1.0
_STICKY = 65536


@dataclass(slots=True)
class Endpoint:
    """One model server. `url` is its OpenAI base, with or without /v1."""

    url: str
    name: str = "policy"
    version: int = 0
    max_context: int | None = None
    in_flight: int = 0
    assigned: int = 0
    """Rollouts sent here so far; decides between endpoints that are equally busy."""
    down_until: float = 0.0

    def address(self, path: str) -> str:
        base = self.url.rstrip("/")
        return f"{base}/{path}" if base.endswith("/v1") else f"{base}/v1/{path}"


@dataclass(slots=True)
class Reply:
    """What the model server answered (any status), from where, and under which weights."""

    status: int
    body: Any
    """Parsed JSON; None if the answer was not JSON."""
    text: str
    """The answer's beginning if it was not JSON."""
    endpoint: Endpoint
    retries: int
    version_start: int
    version_end: int


@dataclass(frozen=True)
class UpstreamLimits:
    patience_s: float = 300.0
    """How long a call waits for an endpoint that refuses connections or answers 503."""
    call_timeout_s: float = 3600.0
    """Wall time of one generation."""


class Upstreams:
    """The registered endpoints and one keep-alive client for all of them."""

    def __init__(self, limits: UpstreamLimits | None = None) -> None:
        self.limits = limits or UpstreamLimits()
        self.retries = 0
        self._endpoints: dict[str, Endpoint] = {}
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        # Shorter than the keep-alive of common servers (5 s): never reuse a connection that is about to be closed.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
        timeout = aiohttp.ClientTimeout(total=self.limits.call_timeout_s, sock_connect=10)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def register(self, *, url: str, name: str, version: int, max_context: int | None) -> None:
        endpoint = self._endpoints.setdefault(url, Endpoint(url))
        endpoint.name, endpoint.version, endpoint.max_context = name, version, max_context
        endpoint.down_until = 0.0

    def remove(self, url: str) -> None:
        self._endpoints.pop(url, None)

    def all(self) -> list[Endpoint]:
        return list(self._endpoints.values())

    def endpoint_of(self, rollout_id: str) -> Endpoint:
        """The rollout's endpoint: the one it had while that is up, else the least loaded that is up, else any."""
        if not self._endpoints:
            message = "no model is registered; POST /api/models first"
            raise Problem(503, "no_model", message, retry_after_s=5)
        now = time.monotonic()
        usual = self._endpoints.get(self._sticky.get(rollout_id, ""))
        up = [e for e in self._endpoints.values() if e.down_until <= now]
        if usual is not None and (usual in up or not up):
            return usual
        chosen = min(up or self._endpoints.values(), key=lambda e: (e.in_flight, e.assigned))
        chosen.assigned += 1
        self._sticky[rollout_id] = chosen.url
        if len(self._sticky) > _STICKY:
            self._sticky.popitem(last=False)
        return chosen

    async def post(self, rollout_id: str, path: str, body: dict[str, Any]) -> Reply:
        """Send until answered. Problem 502 `upstream_error` when patience ends, 504 when generating takes too long."""
        deadline = time.monotonic() + self.limits.patience_s
        tries, drops = 0, 0
        while True:
            endpoint = self.endpoint_of(rollout_id)
            try:
                return await self._once(endpoint, path, body, tries)
            except _Unavailable as error:
                why, dropped = str(error), error.dropped
            except TimeoutError:
                limit = f"{self.limits.call_timeout_s:g} s"
                raise Problem(504, "upstream_timeout", f"{endpoint.url} did not answer within {limit}") from None
            tries += 1
            drops += dropped
            self.retries += 1
            endpoint.down_until = time.monotonic() + _DOWN_S
            if drops > _MAX_DROPS or time.monotonic() >= deadline:
                raise Problem(502, "upstream_error", f"{endpoint.url} failed {tries} times; last: {why}")
            await asyncio.sleep(min(0.05 * 2 ** min(tries, 6), 2.0))

    async def _once(self, endpoint: Endpoint, path: str, body: dict[str, Any], tries: int) -> Reply:
        assert self._session is not None
        version = endpoint.version
        data = dumps(body | {"model": endpoint.name})
        endpoint.in_flight += 1
        try:
            headers = {"content-type": "application/json"}
            async with self._session.post(endpoint.address(path), data=data, headers=headers) as response:
                raw = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise _Unavailable(f"cannot connect ({error.strerror or error})", dropped=False) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise _Unavailable(f"connection lost ({error})", dropped=True) from error
        finally:
            endpoint.in_flight -= 1
        if response.status == 503:
            raise _Unavailable(f"503 {raw[:200].decode(errors='replace')}", dropped=False)
        try:
            parsed, text = loads(raw), ""
        except ValueError:
            parsed, text = None, raw[:500].decode(errors="replace")
        start, end = _versions(response.headers.get(VERSION_HEADER), version, endpoint.version)
        return Reply(response.status, parsed, text, endpoint, tries, start, end)


class _Unavailable(Exception):
    """This try failed before an answer. `dropped`: the request may have reached the server."""

    def __init__(self, why: str, *, dropped: bool) -> None:
        super().__init__(why)
        self.dropped = dropped


def _versions(header: str | None, at_admission: int, at_finish: int) -> tuple[int, int]:
    """Weight versions at admission and finish. The server's word (`7`, or `6-7` if mixed) beats the registry."""
    if header:
        first, dash, last = header.partition("-")
        if first.strip().isdigit() and (not dash or last.strip().isdigit()):
            return (int(first), int(last)) if dash else (at_admission, int(first))
    return at_admission, at_finish
