"""Claims queued rollouts, never more than there are free places, in a thread of its own.

A permit is a free place. It is taken before a rollout is looked for and given back when the attempt is through, so the
gateway's queue stays where it can be reordered and cancelled, and a dead controller holds as little as possible.
"""

from __future__ import annotations

import logging
import threading
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


class Claimer:
    """Calls `found(job)` for each claimed rollout. `claiming` holds the ids between asking and `settled(id)`."""

    def __init__(self, gateway: GatewayClient, *, places: int, name: str, found: Callable[[Job], None]) -> None:
        self.claiming: set[str] = set()
        self._gateway = gateway
        self._name = name
        self._found = found
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
        queued = self._gateway.list_rollouts(state=RolloutState.QUEUING, limit=permits, wait_s=POLL_S)[:permits]
        with self._lock:
            self.claiming |= {r.rollout_id for r in queued}
        return sum(pool.map(self._claim, queued))

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
