"""Creates rollouts and waits for them: a long poll on the gateway's completion log, never a busy loop.

The first result of a rollout counts; a later one (an attempt that was given up and finished after all) is ignored and
counted, never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from swe_lightning.gateway.client import GatewayClient
from swe_lightning.objective.staleness import Arrivals
from swe_lightning.records import Rollout

POLL_S = 5.0


class Waiter:
    """Creates rollouts and follows the completion log until they are terminal; one per gateway connection.

    Creation tells which of them exist already (a resumed step) and where the log ends in the same moment, so only what
    ends afterwards has to be heard: a run that resumes does not read the log of the steps before.
    """

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway
        self.late = 0
        """Results of a rollout that already had one (a timed-out attempt that finished after all)."""

    def run(
        self,
        planned: Sequence[Rollout],
        *,
        on_finished: Callable[[Rollout], None] = lambda _: None,
        on_open: Callable[[Collection[str]], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
        again: bool = False,
    ) -> list[Rollout]:
        """Block until every planned rollout is terminal; returns them in planned order.

        `on_open(ids)` is called once if there is anything to wait for; `check` runs between polls and may raise (a
        service that died, an interrupt). `again`: what an earlier process left without a verdict is run once more,
        under a new id (`...-again1`), because a finished rollout stays finished.
        """
        current, cursor = self._create(planned, again)
        finished: dict[str, Rollout] = {}
        arrivals = Arrivals()
        for rollout in current:
            if rollout.state.terminal and arrivals.take(rollout.rollout_id, rollout.attempt):
                finished[rollout.rollout_id] = rollout
                on_finished(rollout)
        open_ids = {r.rollout_id for r in current} - finished.keys()
        if open_ids:
            on_open(sorted(open_ids))
        while open_ids:
            check()
            batch, cursor = self._gateway.terminal(after=cursor, wait_s=POLL_S)
            for rollout in batch:
                name = rollout.rollout_id
                if (name in open_ids or name in finished) and arrivals.take(name, rollout.attempt):
                    open_ids.discard(name)
                    finished[name] = rollout
                    on_finished(rollout)
        self.late += arrivals.late
        return [finished[r.rollout_id] for r in current]

    def _create(self, planned: Sequence[Rollout], again: bool) -> tuple[list[Rollout], int]:
        """The rollouts that count, and the cursor to follow them from: that of the first creation."""
        current, cursor = self._gateway.create_to_follow(planned)
        number = 0
        while again:
            number += 1
            lost = [
                i for i, r in enumerate(current) if r.state.terminal and (not r.outcome or r.outcome.reward is None)
            ]
            if not lost:
                break
            anew = [
                planned[i].model_copy(update={"rollout_id": f"{planned[i].rollout_id}-again{number}"}) for i in lost
            ]
            for index, rollout in zip(lost, self._gateway.create_rollouts(anew), strict=True):
                current[index] = rollout
        return current, cursor
