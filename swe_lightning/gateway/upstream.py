"""The model servers: which one a rollout talks to, and when a request is sent again.

A rollout sticks to one endpoint (its prefix cache lives there) and moves only when that endpoint is down. A request is
sent again only when the connection failed, the server said 503, or its health checks gave it up: generating twice is
safe, because nothing of a failed try is recorded, and a request that may have reached a server is sent again at most
`max_resends` times. While no endpoint answers, a call waits up to `patience_s`, so that a restart is only a slow call.
All tries end when the client goes away: the caller cancels, which closes the connection and with it the generation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import aiohttp

from swe_lightning.gateway.endpoints import Endpoint
from swe_lightning.gateway.jsonio import dumps
from swe_lightning.gateway.meter import CALL_S, Histogram
from swe_lightning.gateway.problems import Problem, shutting_down
from swe_lightning.gateway.reply_reader import ReplyReader

log = logging.getLogger("swel.gateway.upstream")
VERSION_HEADER = "x-swel-weight-version"
_STICKY = 65536
_HEADERS = {"content-type": "application/json"}


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
    max_resends: int = 2
    """How often a request is sent again after a try that may have reached a server."""


class Upstreams:
    """The registered endpoints and one keep-alive client for all of them."""

    def __init__(self, limits: UpstreamLimits | None = None) -> None:
        self.limits = limits or UpstreamLimits()
        self.retries = 0
        self.seconds = Histogram(CALL_S)
        """Of one exchange with a model server, whatever it answered."""
        self.replies = ReplyReader()
        self._endpoints: dict[str, Endpoint] = {}
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._session: aiohttp.ClientSession | None = None
        self._stopping = False

    async def start(self) -> None:
        # Shorter than the keep-alive of common servers (5 s): never reuse a connection that is about to be closed.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),  # the whole exchange has its own
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            read_bufsize=2**20,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def register(self, *, url: str, name: str, version: int, max_context: int | None) -> None:
        endpoint = self._endpoints.setdefault(url, Endpoint(url))
        endpoint.name, endpoint.version, endpoint.max_context = name, version, max_context
        endpoint.suspect_until = 0.0

    def remove(self, url: str) -> None:
        endpoint = self._endpoints.pop(url, None)
        if endpoint is not None and any(e.up() for e in self._endpoints.values()):
            endpoint.abandon()  # the rollouts here move now, not when this server ends

    def forget(self, rollout_id: str) -> None:
        """An attempt has ended: what was kept for its next call goes."""
        self._sticky.pop(rollout_id, None)
        self.replies.forget(rollout_id)

    @property
    def placed(self) -> int:
        """Rollouts that have an endpoint."""
        return len(self._sticky)

    async def stop(self) -> None:
        """Calls in flight end with Problem 503 `shutting_down`, and so does whatever comes now."""
        self._stopping = True
        for endpoint in self._endpoints.values():
            endpoint.abandon()

    def all(self) -> list[Endpoint]:
        return list(self._endpoints.values())

    def endpoint_of(self, rollout_id: str) -> Endpoint:
        """The rollout's endpoint: the one it had while that is up, else the least loaded that is up, else any."""
        if not self._endpoints:
            message = "no model is registered; POST /api/models first"
            raise Problem(503, "no_model", message, retry_after_s=5)
        usual = self._endpoints.get(self._sticky.get(rollout_id, ""))
        if usual is not None and usual.up():
            return usual
        up = [e for e in self._endpoints.values() if e.up()]
        if usual is not None and not up:
            return usual
        chosen = min(up or self._endpoints.values(), key=lambda e: (e.in_flight, e.assigned))
        chosen.assigned += 1
        self._sticky[rollout_id] = chosen.url
        if len(self._sticky) > _STICKY:
            self._sticky.popitem(last=False)
        return chosen

    async def post(self, rollout_id: str, path: str, body: dict[str, Any]) -> Reply:
        """Send until answered. Problem 502 `upstream_error` when patience ends, 504 when generating takes too long;
        its details tell how often it was `tries`."""
        deadline = time.monotonic() + self.limits.patience_s
        tries, resends = 0, 0
        while True:
            if self._stopping:
                raise shutting_down(tries=tries)
            endpoint = self.endpoint_of(rollout_id)
            try:
                return await self._once(endpoint, rollout_id, path, body, tries)
            except _Unavailable as error:
                failure = error
            tries += 1
            resends += failure.reached
            if not failure.final:
                endpoint.suspect()
            if self._stopping:
                continue
            if failure.final or resends > self.limits.max_resends or time.monotonic() >= deadline:
                status, code = (504, "upstream_timeout") if failure.final else (502, "upstream_error")
                message = f"{endpoint.url} failed after {tries} tries: {failure}"
                raise Problem(status, code, message, details={"tries": tries})
            self.retries += 1
            await asyncio.sleep(min(0.05 * 2 ** min(tries, 6), 2.0))

    async def _once(self, endpoint: Endpoint, rollout_id: str, path: str, body: dict[str, Any], tries: int) -> Reply:
        version, started = endpoint.version, time.monotonic()
        status, headers, raw = await self._exchange(
            endpoint, endpoint.address(path), dumps(body | {"model": endpoint.name})
        )
        self.seconds.observe(time.monotonic() - started)
        if status == 503:
            raise _Unavailable(f"503 {raw[:200].decode(errors='replace')}")
        try:
            parsed, text = self.replies.parse(raw, rollout_id), ""
        except ValueError:
            parsed, text = None, raw[:500].decode(errors="replace")
        start, end = _versions(headers.get(VERSION_HEADER), version, endpoint.version)
        if end != version == endpoint.version and endpoint.disputed != (version, end):
            endpoint.disputed = version, end
            log.warning(
                "a model server has other weights than registered: its calls are not trained on, register it again",
                extra={"upstream": endpoint.url, "registered": version, "says": end},
            )
        return Reply(status, parsed, text, endpoint, tries, start, end)

    async def _exchange(self, endpoint: Endpoint, address: str, data: bytes) -> tuple[int, Any, bytes]:
        """Status, headers and body of one answer, or _Unavailable."""
        assert self._session is not None
        endpoint.in_flight += 1
        call = asyncio.timeout(self.limits.call_timeout_s)
        until = asyncio.get_running_loop().time() + self.limits.call_timeout_s
        try:
            async with call:
                endpoint.open_calls.add(call)
                async with self._session.post(address, data=data, headers=_HEADERS) as response:
                    return response.status, response.headers, await response.read()
        except aiohttp.ClientConnectorError as error:
            raise _Unavailable(f"cannot connect ({error.strerror or error})") from error
        except TimeoutError as error:
            if not call.expired():  # connecting took too long
                raise _Unavailable("cannot connect (timed out)") from error
            if asyncio.get_running_loop().time() >= until:
                limit = f"{self.limits.call_timeout_s:g} s"
                raise _Unavailable(f"no answer within {limit}", reached=True, final=True) from None
            raise _Unavailable(f"given up ({endpoint.why or 'removed'})", reached=True) from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            raise _Unavailable(f"connection lost ({error})", reached=True) from error
        finally:
            endpoint.open_calls.discard(call)
            endpoint.in_flight -= 1


class _Unavailable(Exception):
    """This try failed before an answer. `reached`: the request may have reached the server. `final`: do not retry."""

    def __init__(self, why: str, *, reached: bool = False, final: bool = False) -> None:
        super().__init__(why)
        self.reached, self.final = reached, final


def _versions(header: str | None, at_admission: int, at_finish: int) -> tuple[int, int]:
    """Weight versions at admission and finish. The server's word (`7`, or `6-7` if mixed) beats the registry."""
    if header:
        first, dash, last = header.partition("-")
        if first.strip().isdigit() and (not dash or last.strip().isdigit()):
            return (int(first), int(last)) if dash else (at_admission, int(first))
    return at_admission, at_finish
