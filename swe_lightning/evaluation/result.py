"""What an evaluation found: one record per rollout, and everything derived from them.

An infrastructure failure has no reward: it is in no rate and no difference, and it is counted. Saved as
`evals/<label>.json` in the run directory, with SWE-bench prediction files beside it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from swe_lightning.errors import DataError
from swe_lightning.evaluation.stats import pass_at_k, wilson
from swe_lightning.records import Rollout, is_resolved
from swe_lightning.rundir import write_atomic


@dataclass
class EvalRecord:
    """One finished rollout: `reward`, or `infra_reason` (then reward is None)."""

    rollout_id: str
    instance_id: str
    repo: str
    sample: int
    reward: float | None = None
    exit_status: str = ""
    infra_reason: str | None = None
    message: str = ""
    seconds: float = 0.0
    patch: str | None = None

    @property
    def resolved(self) -> bool:
        return is_resolved(self.reward)

    @classmethod
    def of(cls, rollout: Rollout, sample: int) -> EvalRecord:
        outcome, task = rollout.outcome, rollout.task
        record = cls(rollout.rollout_id, task["instance_id"], task.get("repo") or "", sample)
        if rollout.started_at is not None and rollout.ended_at is not None:
            record.seconds = rollout.ended_at - rollout.started_at
        if outcome is not None:
            record.reward, record.exit_status, record.message = outcome.reward, outcome.exit_status, outcome.message
            record.infra_reason = outcome.infra_reason.value if outcome.infra_reason else None
        return record


@dataclass
class EvalResult:
    label: str
    samples: int
    temperature: float
    records: list[EvalRecord] = field(default_factory=list)

    @property
    def graded(self) -> int:
        return sum(r.reward is not None for r in self.records)

    @property
    def resolved(self) -> int:
        return sum(r.resolved for r in self.records)

    @property
    def rate(self) -> float | None:
        """Resolved share of the graded rollouts; None if none was graded."""
        return self.resolved / self.graded if self.graded else None

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson 95 % interval of `rate` (rollouts taken as independent; comparisons cluster, this does not)."""
        return wilson(self.resolved, self.graded)

    @property
    def infra(self) -> Counter[str]:
        return Counter(r.infra_reason or "no_outcome" for r in self.records if r.reward is None)

    @property
    def exit_statuses(self) -> Counter[str]:
        return Counter(r.exit_status for r in self.records if r.reward is not None)

    def by_task(self) -> dict[str, float]:
        """Task -> resolved share of its graded rollouts; tasks without a graded rollout are absent."""
        found: dict[str, list[bool]] = {}
        for r in self.records:
            if r.reward is not None:
                found.setdefault(r.instance_id, []).append(r.resolved)
        return {task: sum(results) / len(results) for task, results in found.items()}

    def cluster_of(self) -> dict[str, str]:
        """Task -> package (its repository; a task without one is its own cluster)."""
        return {r.instance_id: r.repo or r.instance_id for r in self.records}

    def pass_at(self, k: int) -> float | None:
        """Mean unbiased pass@k over the tasks with at least k graded rollouts; None if there is none."""
        counts: dict[str, list[int]] = {}
        for r in self.records:
            if r.reward is not None:
                n_c = counts.setdefault(r.instance_id, [0, 0])
                n_c[0] += 1
                n_c[1] += r.resolved
        values = [pass_at_k(n, c, k) for n, c in counts.values() if n >= k]
        return sum(values) / len(values) if values else None

    def summary(self) -> dict[str, Any]:
        low, high = self.interval
        tasks = len({r.instance_id for r in self.records})
        numbers = {"rate": self.rate, "low": low, "high": high, "resolved": self.resolved, "graded": self.graded}
        counted = {"infra": dict(self.infra), "exit_statuses": dict(self.exit_statuses)}
        at_k = {f"pass@{k}": self.pass_at(k) for k in sorted({1, self.samples})}
        return {"label": self.label, "tasks": tasks, "samples": self.samples, **numbers, **at_k, **counted}

    def line(self) -> str:
        """One line for a terminal."""
        if self.rate is None:
            return f"{self.label}: no verdict ({_counted(self.infra) or 'no rollouts'})"
        low, high = self.interval
        lost = f", no verdict for {_counted(self.infra)}" if self.infra else ""
        return f"{self.label}: {self.resolved}/{self.graded} = {self.rate:.3f} (95 % {low:.3f} to {high:.3f}){lost}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "summary": self.summary()}

    def save(self, run_dir: Path) -> Path:
        """evals/<label>.json, and one SWE-bench prediction file per sample."""
        folder = run_dir / "evals"
        folder.mkdir(parents=True, exist_ok=True)
        for sample in range(self.samples):
            suffix = f".s{sample}" if self.samples > 1 else ""
            rows = [r for r in self.records if r.sample == sample and r.reward is not None]
            text = "".join(json.dumps(_prediction(self.label, r)) + "\n" for r in rows)
            write_atomic(folder / f"{self.label}{suffix}.predictions.jsonl", text)
        path = folder / f"{self.label}.json"
        write_atomic(path, json.dumps(self.as_dict(), indent=1))
        return path

    @classmethod
    def load(cls, path: Path) -> EvalResult:
        try:
            data = json.loads(path.read_bytes())
            records = [EvalRecord(**r) for r in data["records"]]
            return cls(data["label"], data["samples"], data["temperature"], records)
        except OSError as error:
            raise DataError(f"cannot read evaluation {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not an evaluation written by swel eval") from error


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in counts.most_common())


def _prediction(label: str, record: EvalRecord) -> dict[str, str]:
    return {"instance_id": record.instance_id, "model_name_or_path": label, "model_patch": record.patch or ""}
