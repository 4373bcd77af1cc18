"""The life of a rollout as a pure function: what an action changes, or why it is refused.

    queuing --claim--> running --report(reward)--> succeeded
       ^                  |----report(infra) / release, attempts left--> queuing
       |__________________|----report(infra) / release, none left------> failed
    queuing | running --cancel--> failed

Terminal is final. Whatever comes from an attempt that is not the current, running one is late: refused, counted, and
without any effect on what is stored. An attempt starts with its claim and never starts twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from swe_lightning.gateway.problems import Problem
from swe_lightning.records import InfraReason, Outcome, RolloutState

QUEUING, RUNNING = RolloutState.QUEUING, RolloutState.RUNNING
SUCCEEDED, FAILED = RolloutState.SUCCEEDED, RolloutState.FAILED


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rollout stands."""

    rollout_id: str
    state: RolloutState
    attempt: int
    max_attempts: int


def claim(at: Position, now: float) -> dict[str, Any]:
    """Columns to change when a worker takes the rollout."""
    if at.state is not QUEUING:
        raise Problem(
            409, "not_queuing", f"rollout {at.rollout_id} is {at.state}; only a queuing rollout can be claimed"
        )
    return {"state": RUNNING, "attempt": at.attempt + 1, "started_at": now, "ended_at": None, "outcome": None}


def report(at: Position, attempt: int, outcome: Outcome, now: float) -> dict[str, Any]:
    """Columns to change when an attempt ends with `outcome`."""
    if (outcome.reward is None) == (outcome.infra_reason is None):
        raise Problem(422, "bad_outcome", "an outcome has either a reward or an infra_reason, and never both")
    if outcome.reward is not None and not math.isfinite(outcome.reward):
        raise Problem(422, "bad_outcome", "the reward is not a finite number")
    if outcome.shaped_reward is not None and (outcome.reward is None or not math.isfinite(outcome.shaped_reward)):
        raise Problem(422, "bad_outcome", "a shaped reward is a finite number beside a reward")
    must_be_current(at, attempt)
    if outcome.reward is not None:
        return {"state": SUCCEEDED, "ended_at": now, "outcome": outcome}
    if attempt < at.max_attempts:
        return {"state": QUEUING, "started_at": None, "outcome": None}
    return {"state": FAILED, "ended_at": now, "outcome": outcome}


def cancel(at: Position, message: str, now: float) -> dict[str, Any]:
    """Columns to change when the rollout is given up; nothing if that was done before."""
    if at.state is FAILED:
        return {}
    if at.state is SUCCEEDED:
        raise Problem(409, "rollout_ended", f"rollout {at.rollout_id} has succeeded and cannot be cancelled")
    outcome = Outcome(infra_reason=InfraReason.CANCELLED, message=message)
    return {"state": FAILED, "ended_at": now, "outcome": outcome}


def must_be_current(at: Position, attempt: int) -> None:
    """Problem 409 `rollout_ended` unless `attempt` is the one that runs now."""
    if at.state is RUNNING and attempt == at.attempt:
        return
    if attempt > at.attempt or attempt < 1:
        raise Problem(404, "unknown_attempt", f"rollout {at.rollout_id} has no attempt {attempt}")
    where = f"it is {at.state}" if attempt == at.attempt else f"attempt {at.attempt} followed ({at.state})"
    message = f"attempt {attempt} of rollout {at.rollout_id} is over: {where}; what arrives now is not recorded"
    raise Problem(409, "rollout_ended", message, late=True)
