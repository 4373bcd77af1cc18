"""One model server as the gateway knows it: address, weights, load, and whether it may be asked now.

Two signals decide whether an endpoint is up. A call that could not reach it makes it suspect for a second, so that the
next call tries another one; the health checks (health.py) take it out until they succeed again. Neither ever makes a
call fail: when no endpoint is up, the usual one is asked anyway.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

SUSPECT_S = 1.0


@dataclass(slots=True, eq=False)
class Endpoint:
    """One model server. `url` is its OpenAI base, with or without /v1."""

    url: str
    name: str = "policy"
    version: int = 0
    max_context: int | None = None
    in_flight: int = 0
    assigned: int = 0
    """Rollouts sent here so far; decides between endpoints that are equally busy."""
    suspect_until: float = 0.0
    healthy: bool = True
    """What the health checks last decided; True until they have decided otherwise."""
    checks_failed: int = 0
    """Failed health checks since the gateway started."""
    streak: int = 0
    """Checks in a row that contradict `healthy`."""
    why: str = ""
    """What the last failed check said."""
    disputed: tuple[int, int] | None = None
    """Versions (registered, said by the server) of which the log has told that they differ."""
    open_calls: set[asyncio.Timeout] = field(default_factory=set)
    """One per call in flight; a call whose timeout is moved to now is given up (see `abandon`)."""

    def up(self) -> bool:
        return self.healthy and self.suspect_until <= time.monotonic()

    def suspect(self) -> None:
        self.suspect_until = time.monotonic() + SUSPECT_S

    def address(self, path: str) -> str:
        """Of a route below /v1, or of one at the server's root if it begins with a slash."""
        if path.startswith("/"):
            return self.root(path[1:])
        base = self.url.rstrip("/")
        return f"{base}/{path}" if base.endswith("/v1") else f"{base}/v1/{path}"

    def root(self, path: str) -> str:
        """Address of what lies beside /v1, such as /health."""
        return f"{self.url.rstrip('/').removesuffix('/v1')}/{path}"

    def abandon(self) -> int:
        """Give up the calls in flight here, so that their callers can move on; returns how many."""
        now, calls = asyncio.get_running_loop().time(), list(self.open_calls)
        for call in calls:
            if not call.expired():
                call.reschedule(now)
        return len(calls)
