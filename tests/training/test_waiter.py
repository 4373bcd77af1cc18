"""Waiting for rollouts: the first result of each counts, whatever else the completion log holds."""

from __future__ import annotations

from collections.abc import Sequence

from swe_lightning.records import Outcome, Rollout, RolloutState
from swe_lightning.training.waiter import Waiter


def rollout(name: str, attempt: int = 0, reward: float | None = None) -> Rollout:
    state = RolloutState.QUEUING if reward is None else RolloutState.SUCCEEDED
    outcome = None if reward is None else Outcome(reward=reward)
    return Rollout(rollout_id=name, group_id="g", attempt=attempt, state=state, outcome=outcome)


class Log:
    """A completion log that is handed out batch by batch."""

    def __init__(self, *batches: list[Rollout], existing: Sequence[Rollout] = ()) -> None:
        self.batches, self.existing = list(batches), {r.rollout_id: r for r in existing}
        self.asked: list[int] = []

    def create_rollouts(self, planned: Sequence[Rollout]) -> list[Rollout]:
        return self.create_to_follow(planned)[0]

    def create_to_follow(self, planned: Sequence[Rollout]) -> tuple[list[Rollout], int]:
        return [self.existing.get(r.rollout_id, r) for r in planned], 700

    def terminal(self, *, after: int, wait_s: float) -> tuple[list[Rollout], int]:
        self.asked.append(after)
        return self.batches.pop(0), after + 1


def test_w11_a_late_first_attempt_is_ignored_and_counted() -> None:
    """Attempt 1 timed out and was given up, attempt 2 is done; then attempt 1 reports after all."""
    log = Log([rollout("a", 2, 1.0), rollout("other", 1, 0.0)], [rollout("a", 1, 0.0), rollout("b", 1, 0.5)])
    waiter, seen = Waiter(log), []  # type: ignore[arg-type, var-annotated]
    done = waiter.run([rollout("a"), rollout("b")], on_finished=lambda r: seen.append((r.rollout_id, r.attempt)))
    assert [(r.rollout_id, r.attempt, r.outcome.reward) for r in done if r.outcome] == [("a", 2, 1.0), ("b", 1, 0.5)]
    assert seen == [("a", 2), ("b", 1)]
    assert waiter.late == 1
    assert log.asked == [700, 701], "the log is read from where it ended at creation, not from its begin"


def test_what_has_ended_before_is_not_waited_for_and_not_late() -> None:
    log = Log([rollout("b", 1, 0.0)], existing=[rollout("a", 1, 1.0)])
    waiter = Waiter(log)  # type: ignore[arg-type]
    opened: list[str] = []
    done = waiter.run([rollout("a"), rollout("b")], on_open=opened.extend)
    assert ([r.rollout_id for r in done], opened, waiter.late) == (["a", "b"], ["b"], 0)
    again = Waiter(Log(existing=done))  # type: ignore[arg-type]
    assert [r.attempt for r in again.run([rollout("a"), rollout("b")])] == [1, 1]
    assert again.late == 0
