"""Active health checks: who is asked whether it lives, how often, and what follows from the answer.

Every endpoint is asked at its own pace (a hung one delays nobody). `fail_after` failures in a row take it out: its
rollouts move with their next call, and calls that hang in it move too, if another endpoint is up. `recover_after`
successes bring it back; rollouts that moved stay where they are (their prefix cache is there now), new ones come.
A server without /health is asked for its models instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import aiohttp

from swe_lightning.gateway.endpoints import Endpoint
from swe_lightning.gateway.upstream import Upstreams

log = logging.getLogger("swel.gateway.health")
_NO_SUCH_PATH = (404, 405, 501)


@dataclass(frozen=True)
class HealthLimits:
    interval_s: float = 2.0
    """Between two checks of an endpoint; 0 = no active checks."""
    timeout_s: float = 5.0
    fail_after: int = 3
    recover_after: int = 1


class HealthChecks:
    """Checks all endpoints of `upstreams` from start() to stop()."""

    def __init__(self, upstreams: Upstreams, limits: HealthLimits | None = None) -> None:
        self.upstreams, self.limits = upstreams, limits or HealthLimits()
        self._task: asyncio.Task[None] | None = None
        self._asking: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        if self.limits.interval_s > 0:
            self._task = asyncio.create_task(self._run(), name="health checks")

    async def stop(self) -> None:
        tasks = [*self._asking.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self.limits.timeout_s)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a kept connection would not see a restart
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while True:
                for endpoint in self.upstreams.all():
                    last = self._asking.get(endpoint.url)
                    if last is None or last.done():
                        self._asking[endpoint.url] = asyncio.create_task(self._check(session, endpoint))
                self._asking = {url: task for url, task in self._asking.items() if not task.done()}
                await asyncio.sleep(self.limits.interval_s)

    async def _check(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        failure = await _ask(session, endpoint)
        if failure is not None:
            endpoint.checks_failed += 1
            endpoint.why = failure
        if (failure is None) == endpoint.healthy:
            endpoint.streak = 0
            return
        endpoint.streak += 1
        if endpoint.streak < (self.limits.fail_after if endpoint.healthy else self.limits.recover_after):
            return
        endpoint.healthy, endpoint.streak = failure is None, 0
        if endpoint.healthy:
            log.info("model server is back", extra={"upstream": endpoint.url})
        else:
            moved = endpoint.abandon() if any(e.up() for e in self.upstreams.all()) else 0
            log.warning("model server is down", extra={"upstream": endpoint.url, "why": failure, "calls_moved": moved})


async def _ask(session: aiohttp.ClientSession, endpoint: Endpoint) -> str | None:
    """None if the server says it is well, else what is wrong."""
    try:
        status = await _status(session, endpoint.root("health"))
        if status in _NO_SUCH_PATH:
            status = await _status(session, endpoint.address("models"))
    except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
        return f"{type(error).__name__}: {error}".rstrip(": ")
    return None if status == 200 else f"health check answered {status}"


async def _status(session: aiohttp.ClientSession, address: str) -> int:
    async with session.get(address, allow_redirects=False) as response:
        with contextlib.suppress(aiohttp.ClientPayloadError):
            await response.content.read(65536)
        return response.status
