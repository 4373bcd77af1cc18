"""From finished rollouts to the rows of one step, with an account of everything that gave none.

Invariants: rollouts = rollouts with rows in the batch + rollouts without, each under a reason; a group too stale to
train on leaves whole and is sampled again, counted; a step that has no row at all is an error that names every reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from swe_lightning.errors import NoTrainingRows, SwelError
from swe_lightning.objective.batch import build_batch
from swe_lightning.objective.staleness import StalenessGate, oldest_version
from swe_lightning.recipe import Recipe
from swe_lightning.records import Batch, ModelCall, Rollout, Row
from swe_lightning.trajectory import RowsReport, rows_of
from swe_lightning.trajectory.report import why_no_rows

STALE = "rollout:stale"
MAX_REQUEUES = 2
"""Rounds in a row in which a group may come back stale; sampled under the current weights it cannot, if all is well."""


class CallSource(Protocol):
    """What the collector asks a gateway: the calls of one attempt, prompts as differences where possible."""

    def calls(self, rollout_id: str, attempt: int | None = None, *, deltas: bool = False) -> list[ModelCall]: ...


@dataclass
class Collected:
    """Rows of one step with the ledger of what yielded none."""

    report: RowsReport = field(default_factory=RowsReport)
    rewards: dict[str, float | None] = field(default_factory=dict)
    """What training uses: shaped where the recipe asks for it."""
    raw_rewards: dict[str, float | None] = field(default_factory=dict)
    """The verdicts, for statistics."""
    groups: dict[str, str] = field(default_factory=dict)
    infra: Counter[str] = field(default_factory=Counter)
    exit_statuses: Counter[str] = field(default_factory=Counter)
    stale: dict[str, list[str]] = field(default_factory=dict)
    """Group -> its rollouts of every round that came back stale, all left out."""
    without_rows: dict[str, str] = field(default_factory=dict)
    """Rollout -> why it has no row in the batch, in words."""

    @property
    def rows(self) -> list[Row]:
        return self.report.rows

    @property
    def dropped(self) -> Counter[str]:
        """Everything left out, by reason: calls, rows, rollouts, infrastructure failures."""
        return self.report.dropped + self.infra + Counter({STALE: sum(map(len, self.stale.values()))})

    def __iadd__(self, other: Collected) -> Collected:
        self.report += other.report
        self.infra.update(other.infra)
        self.exit_statuses.update(other.exit_statuses)
        self.rewards |= other.rewards
        self.raw_rewards |= other.raw_rewards
        self.groups |= other.groups
        for group_id, members in other.stale.items():
            self.stale.setdefault(group_id, []).extend(members)
        self.without_rows |= other.without_rows
        return self

    def summary(self) -> dict[str, Any]:
        """The step's record: merge statistics, breaks by kind, tokens, drops, tokens lost to limits."""
        graded = [r for r in self.raw_rewards.values() if r is not None]
        shaped = [r for r in self.rewards.values() if r is not None]
        stats = self.report.stats
        breaks = {k.removeprefix("breaks_"): int(stats.pop(k)) for k in list(stats) if k.startswith("breaks_")}
        return {
            **stats,
            "reward_mean": sum(graded) / len(graded) if graded else None,
            **({"shaped_reward_mean": sum(shaped) / len(shaped)} if shaped != graded else {}),
            "rollouts": len(self.rewards),
            "graded": len(graded),
            "breaks": breaks,
            "dropped": dict(self.dropped),
            "lost_tokens": dict(self.report.lost_tokens),
            "exit_statuses": dict(self.exit_statuses),
        }


class Collector:
    """Makes rows of finished rollouts, group by group; one per run, so that requeues are counted over the run."""

    def __init__(self, gateway: CallSource, recipe: Recipe) -> None:
        self._gateway, self._recipe = gateway, recipe
        self.gate = StalenessGate(recipe.rollout.max_staleness)

    def collect(self, rollouts: Sequence[Rollout], version: int) -> Collected:
        """Rows of whole groups; `version`: the weights they are to train. Stale groups are only named."""
        out, groups = Collected(), dict[str, list[Rollout]]()
        for rollout in rollouts:
            groups.setdefault(rollout.group_id, []).append(rollout)
        for group_id, members in groups.items():
            found = Collected()
            for rollout in members:
                self._add(rollout, found)
            if self.gate.admit(group_id, oldest_version(found.rows, version), version):
                out += found
            else:
                out.stale[group_id] = [r.rollout_id for r in members]
                out.without_rows |= dict.fromkeys(out.stale[group_id], STALE)
        return out

    def _add(self, rollout: Rollout, out: Collected) -> None:
        name, outcome = rollout.rollout_id, rollout.outcome
        out.groups[name] = rollout.group_id
        if outcome is None or outcome.reward is None:
            reason = f"infra:{outcome.infra_reason}" if outcome and outcome.infra_reason else "infra:no_outcome"
            out.infra[reason] += 1
            out.rewards[name] = out.raw_rewards[name] = None
            out.without_rows[name] = f"{reason}: {outcome.message}" if outcome and outcome.message else reason
            return
        out.rewards[name], out.raw_rewards[name] = outcome.training_reward, outcome.reward
        out.exit_statuses[outcome.exit_status or "unknown"] += 1
        report = self._rows(rollout)
        for row in report.rows:
            row.group_id = rollout.group_id
        if not report.rows:
            out.without_rows[name] = ", ".join(f"{n} x {reason}" for reason, n in report.dropped.most_common())
        out.report += report

    def _rows(self, rollout: Rollout) -> RowsReport:
        recipe = self._recipe
        calls = self._gateway.calls(rollout.rollout_id, rollout.attempt, deltas=True)
        report = rows_of(calls, duplicate_calls=recipe.algorithm.duplicate_calls)
        t = recipe.training
        return report.limit(t.prompt_limit, t.response_limit, t.over_limit)


def gather(
    run: Callable[[Sequence[Rollout]], list[Rollout]], collector: Collector, planned: Sequence[Rollout], version: int
) -> Collected:
    """Roll out and collect a step. A group that turns out stale is sampled again, whole and under new ids.

    SwelError when a group stays stale although it was just sampled (the servers do not hold the current weights);
    NoTrainingRows when nothing is left to train on.
    """
    out, wanted = Collected(), planned
    for number in range(1, MAX_REQUEUES + 2):
        found = collector.collect(run(wanted), version)
        out += found
        if not found.stale:
            break
        if number > MAX_REQUEUES:
            raise SwelError(
                f"group {min(found.stale)} was sampled {number} times and is still more than {collector.gate.max_lag} "
                f"updates behind weight version {version}: the model servers do not hold the current weights"
            )
        wanted = requeued(planned, found.stale, number)
    out.report.check()
    if not out.rows:
        raise NoTrainingRows(why_no_rows(out.dropped, len(out.without_rows)), out.without_rows)
    return out


def requeued(planned: Sequence[Rollout], groups: Collection[str], number: int) -> list[Rollout]:
    """The rollouts of these groups as new ones (`...-stale1`): what is stored under the old ids stays as it is."""
    return [
        r.model_copy(update={"rollout_id": f"{r.rollout_id}-stale{number}"}) for r in planned if r.group_id in groups
    ]


def batch_of(collected: Collected, recipe: Recipe, step: int) -> Batch:
    """The batch of a step. The shuffled-reward control draws another permutation in every step and for every seed."""
    seed = step + recipe.training.seed
    return build_batch(collected.rows, collected.rewards, collected.groups, recipe.algorithm, seed=seed)
