"""The state machine, row by row."""

from __future__ import annotations

import pytest

from swe_lightning.gateway import lifecycle
from swe_lightning.gateway.lifecycle import Position
from swe_lightning.gateway.problems import Problem
from swe_lightning.records import InfraReason, Outcome, RolloutState

Q, R, S, F = RolloutState.QUEUING, RolloutState.RUNNING, RolloutState.SUCCEEDED, RolloutState.FAILED
REWARD, FAULT = Outcome(reward=0.0), Outcome(infra_reason=InfraReason.SANDBOX_LOST)


def at(state: RolloutState, attempt: int) -> Position:
    return Position("r", state, attempt, max_attempts=3)


@pytest.mark.parametrize(("state", "fine"), [(Q, True), (R, False), (S, False), (F, False)])
def test_only_a_queuing_rollout_is_claimed(state: RolloutState, fine: bool) -> None:
    if fine:
        assert lifecycle.claim(at(state, 1), 5.0)["attempt"] == 2
    else:
        with pytest.raises(Problem) as e:
            lifecycle.claim(at(state, 1), 5.0)
        assert (e.value.status, e.value.code) == (409, "not_queuing")


@pytest.mark.parametrize(
    ("attempt", "outcome", "state"),
    [(1, REWARD, S), (3, REWARD, S), (1, FAULT, Q), (2, FAULT, Q), (3, FAULT, F)],
)
def test_report(attempt: int, outcome: Outcome, state: RolloutState) -> None:
    changes = lifecycle.report(at(R, attempt), attempt, outcome, 9.0)
    assert changes["state"] is state
    assert changes.get("ended_at") == (9.0 if state.terminal else None)


@pytest.mark.parametrize(("state", "current", "reported"), [(R, 2, 1), (Q, 1, 1), (S, 1, 1), (F, 3, 2)])
def test_late_is_refused_and_marked(state: RolloutState, current: int, reported: int) -> None:
    with pytest.raises(Problem) as e:
        lifecycle.report(at(state, current), reported, REWARD, 9.0)
    assert (e.value.status, e.value.code, e.value.late) == (409, "rollout_ended", True)


def test_an_attempt_that_never_was_is_unknown_not_late() -> None:
    for attempt in (0, 3):
        with pytest.raises(Problem) as e:
            lifecycle.report(at(R, 2), attempt, REWARD, 9.0)
        assert (e.value.status, e.value.late) == (404, False)


@pytest.mark.parametrize(
    "outcome", [Outcome(), Outcome(reward=1.0, infra_reason="worker_lost"), Outcome(reward=float("nan"))]
)
def test_reward_or_reason_and_never_both(outcome: Outcome) -> None:
    with pytest.raises(Problem) as e:
        lifecycle.report(at(R, 1), 1, outcome, 9.0)
    assert e.value.status == 422


def test_cancel() -> None:
    for state in (Q, R):
        assert lifecycle.cancel(at(state, 1), "", 9.0)["outcome"].infra_reason is InfraReason.CANCELLED
    assert lifecycle.cancel(at(F, 1), "", 9.0) == {}
    with pytest.raises(Problem, match="succeeded"):
        lifecycle.cancel(at(S, 1), "", 9.0)
