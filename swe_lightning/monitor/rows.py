"""A run's rows as its trainer made them: the same rules, from the same store, any time later.

Reads the run's recipe for the rules (limits, duplicate calls); a run without one (an evaluation) has the defaults.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from swe_lightning.errors import DataError
from swe_lightning.monitor.store import open_store
from swe_lightning.trajectory.commands import Rules, stats


def rules_of(run_dir: Path) -> Rules:
    """The row rules of the run's recipe."""
    try:
        recipe = yaml.safe_load((run_dir / "recipe.yaml").read_text(encoding="utf-8"))
    except OSError:
        return Rules()
    except yaml.YAMLError as error:
        raise DataError(f"{run_dir / 'recipe.yaml'} is damaged: {' '.join(str(error).split())}") from error
    training, algorithm = recipe.get("training") or {}, recipe.get("algorithm") or {}
    given = {name: training[name] for name in ("prompt_limit", "response_limit", "over_limit") if name in training}
    if "duplicate_calls" in algorithm:
        given["duplicate_calls"] = algorithm["duplicate_calls"]
    return Rules(**given)


def stats_of(run_dir: Path, step: int | None = None) -> dict[str, Any]:
    """Statistics and ledger of the finished training rollouts (of one step, by the name of their group)."""
    rules, infra = rules_of(run_dir), Counter[str]()
    prefix = "" if step is None else f"s{step:05d}-"
    with open_store(run_dir) as store:
        graded = []
        for row in store.outcomes():
            outcome = row["outcome"]
            if row["mode"] != "train" or not outcome or not row["group_id"].startswith(prefix):
                continue
            if outcome.get("reward") is None:
                infra[f"infra:{outcome.get('infra_reason')}"] += 1
            else:
                graded.append((row["rollout_id"], row["attempt"]))
        return stats((store.calls(name, attempt, deltas=True) for name, attempt in graded), rules, infra)
