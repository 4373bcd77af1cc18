"""Claims queued rollouts, never more than there are free places, in a thread of its own.

A permit is a free place. It is taken before a rollout is looked for and given back when the attempt is through, so the
gateway's queue stays where it can be reordered and cancelled, and a dead controller holds as little as possible.

A rollout that comes back after a failed attempt is left in the queue for a while, so that a fault that fails fast does
not burn all its attempts within a second. Meanwhile others are claimed past it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from swe_lightning.controller.protocol import Job
from swe_lightning.errors import GatewayError
from swe_lightning.gateway.client import GatewayClient
from swe_lightning.records import Rollout, RolloutState

logger = logging.getLogger("controller")
POLL_S = 1.0
CLAIMS_AT_ONCE = 8
RETRY_S = 1.0
MAX_BACK_OFF_S = 30.0
LOOK_AGAIN_S = 0.25
"""How soon to look again while all that is queued waits for its back-off."""


def back_off_s(failed_attempts: int) -> float:
    """How long to leave a rollout alone; nothing for one that has not failed yet."""
    return min(2.0 ** min(failed_attempts, 10), MAX_BACK_OFF_S) if failed_attempts else 0.0


class Claimer:
    """Calls `found(job)` for each claimed rollout. `claiming` holds the ids between asking and `settled(id)`."""

    def __init__(self, gateway: GatewayClient, *, places: int, name: str, found: Callable[[Job], None]) -> None:
        self.claiming: set[str] = set()
        self._gateway = gateway
        self._name = name
        self._found = found
        self._not_before: dict[tuple[str, int], float] = {}
        """(rollout, failed attempts) -> when to claim it again, on time.monotonic(). The claimer's thread only."""
        self._permits = threading.Semaphore(places)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="claimer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def give_back(self) -> None:
        self._permits.release()

    def settled(self, rollout_id: str) -> None:
        with self._lock:
            self.claiming.discard(rollout_id)

    def _loop(self) -> None:
        with ThreadPoolExecutor(CLAIMS_AT_ONCE, thread_name_prefix="claim") as pool:
            while not self._stop.is_set():
                permits = self._take()
                claimed = 0
                if permits:
                    try:
                        claimed = self._claim_some(permits, pool)
                    except GatewayError as error:
                        logger.warning("cannot look for rollouts: %s", error)
                        self._stop.wait(RETRY_S)
                for _ in range(permits - claimed):
                    self._permits.release()

    def _take(self) -> int:
        """Every free place there is; waits for the first."""
        if not self._permits.acquire(timeout=POLL_S):
            return 0
        taken = 1
        while self._permits.acquire(blocking=False):
            taken += 1
        return taken

    def _claim_some(self, permits: int, pool: ThreadPoolExecutor) -> int:
        # Those that wait keep their places in the queue: ask for as many more.
        limit = permits + len(self._not_before)
        listed = self._gateway.list_rollouts(state=RolloutState.QUEUING, limit=limit, wait_s=POLL_S)
        queued = self._due(listed)[:permits]
        if listed and not queued:
            self._stop.wait(LOOK_AGAIN_S)
        with self._lock:
            self.claiming |= {r.rollout_id for r in queued}
        return sum(pool.map(self._claim, queued))

    def _due(self, listed: list[Rollout]) -> list[Rollout]:
        """Those whose back-off is over. It begins when we first see the rollout back in the queue."""
        now = time.monotonic()
        seen = {(r.rollout_id, r.attempt): back_off_s(r.attempt) for r in listed if r.attempt}
        self._not_before = {key: self._not_before.get(key, now + wait) for key, wait in seen.items()}
        return [r for r in listed if self._not_before.get((r.rollout_id, r.attempt), now) <= now]

    def _claim(self, rollout: Rollout) -> bool:
        try:
            if self._stop.is_set():
                raise InterruptedError("stopping")
            lease = self._gateway.claim(rollout.rollout_id, self._name)
        except (GatewayError, InterruptedError) as error:
            if getattr(error, "status", 409) != 409:
                logger.warning("cannot claim %s: %s", rollout.rollout_id, error)
            self.settled(rollout.rollout_id)
            return False
        self._found(Job(lease.rollout, lease.rollout.attempt, lease.agent_token, lease.grade_token, lease.base_url))
        return True
