"""A rollout's time, and who used it: the agent, or our machines while it waited for an answer of the model.

Invariant: a rollout that runs out of time is the policy's own failure (wall_time, worth 0) only if at least half of its
time went elsewhere than into waiting for the gateway. Otherwise the machines were too slow or too few for the time they
gave it, which says nothing about the policy: infra upstream_error, however many calls the waiting is spread over.
The price: a policy that writes for more than half of its time is not punished for it here; that is what the limits of
steps and of tokens per call are for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from swe_lightning.errors import InfraError
from swe_lightning.harness.mini import InterruptAgentFlow, LimitsExceeded, TimeExceeded
from swe_lightning.records import InfraReason

WAITING_SHARE = 0.5


def over(exit_status: str, message: str) -> InterruptAgentFlow:
    """What to raise so that the agent ends here, with an exit status that counts as the policy's own."""
    kind = TimeExceeded if exit_status == "wall_time" else LimitsExceeded
    return kind({"role": "exit", "content": message, "extra": {"exit_status": exit_status, "submission": ""}})


class TimeBudget:
    """Begins when it is made and ends at `deadline`; both are on time.monotonic(). One per episode."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.waited_s = 0.0
        self._total_s = deadline - time.monotonic()

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent in here is the machines', pauses between retries included."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - began

    def out_of_time(self, when: str, *, refused: bool = False) -> Exception:
        """What ends the episode now. `refused`: its last call was turned away until the time was over."""
        if refused or self.waited_s > WAITING_SHARE * self._total_s:
            text = f"the rollout's time ran out {when}; it waited {self.waited_s:.0f} s for the model"
            return InfraError(InfraReason.UPSTREAM_ERROR, text)
        return over("wall_time", f"The rollout's time ran out {when}.")
