"""From planned rollouts to finished ones, and from finished ones to rows.

Waiting is a long poll on the gateway's completion log, never a busy loop. What yields no row leaves under a reason;
a step that yields no row at all is an error that names the reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from swe_lightning.errors import SwelError
from swe_lightning.gateway.client import GatewayClient
from swe_lightning.recipe import Recipe
from swe_lightning.records import Rollout, Row
from swe_lightning.trajectory import rows_of

POLL_S = 5.0


class Waiter:
    """Creates rollouts and follows the completion log until they are terminal; one per gateway connection.

    Creation tells which of them exist already (a resumed step), so only what ends afterwards has to be heard from the
    log, and nothing older is kept in memory.
    """

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway
        self._cursor = 0

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
        current = self._create(planned, again)
        finished: dict[str, Rollout] = {}
        for rollout in current:
            if rollout.state.terminal:
                finished[rollout.rollout_id] = rollout
                on_finished(rollout)
        open_ids = {r.rollout_id for r in current} - finished.keys()
        if open_ids:
            on_open(sorted(open_ids))
        while open_ids:
            check()
            batch, self._cursor = self._gateway.terminal(after=self._cursor, wait_s=POLL_S)
            for rollout in batch:
                if rollout.rollout_id in open_ids:
                    open_ids.discard(rollout.rollout_id)
                    finished[rollout.rollout_id] = rollout
                    on_finished(rollout)
        return [finished[r.rollout_id] for r in current]

    def _create(self, planned: Sequence[Rollout], again: bool) -> list[Rollout]:
        current = list(self._gateway.create_rollouts(planned))
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
        return current


@dataclass
class Collected:
    """Rows of one step with the ledger of what yielded none."""

    rows: list[Row] = field(default_factory=list)
    rewards: dict[str, float | None] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    exit_statuses: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    example: str = ""
    """One infrastructure failure in its own words."""


def collect(gateway: GatewayClient, rollouts: Sequence[Rollout], recipe: Recipe) -> Collected:
    """Fetch the calls of finished rollouts and turn them into rows.

    An infrastructure failure has reward None and contributes nothing but its reason.
    """
    out = Collected()
    for rollout in rollouts:
        outcome = rollout.outcome
        out.groups[rollout.rollout_id] = rollout.group_id
        if outcome is None or outcome.reward is None:
            reason = outcome.infra_reason if outcome and outcome.infra_reason else "no_outcome"
            out.dropped[f"infra:{reason}"] += 1
            out.rewards[rollout.rollout_id] = None
            out.example = out.example or f"{rollout.rollout_id}: {outcome.message if outcome else 'no outcome'}"
            continue
        out.rewards[rollout.rollout_id] = outcome.reward
        out.exit_statuses[outcome.exit_status or "unknown"] += 1
        calls = gateway.calls(rollout.rollout_id, rollout.attempt)
        out.calls += len(calls)
        report = rows_of(calls, duplicate_calls=recipe.algorithm.duplicate_calls)
        out.dropped.update(report.dropped)
        for row in report.rows:
            row.group_id = rollout.group_id
            if _within_limits(row, recipe, out.dropped):
                out.rows.append(row)
    if not out.rows:
        reasons = (
            ", ".join(f"{count} x {reason}" for reason, count in out.dropped.most_common()) or "no reason recorded"
        )
        example = f" (for example {out.example})" if out.example else ""
        raise SwelError(f"{len(rollouts)} rollouts gave no training row: {reasons}{example}")
    return out


def _within_limits(row: Row, recipe: Recipe, dropped: Counter[str]) -> bool:
    """The whole row stays or leaves: a row cut in the middle would train on a context nobody saw."""
    first = int(row.mask.argmax()) if row.mask.any() else len(row.ids)
    if first > recipe.training.prompt_limit:
        dropped["row:prompt_too_long"] += 1
        return False
    if len(row.ids) - first > recipe.training.response_limit:
        dropped["row:response_too_long"] += 1
        return False
    return True
