"""What `swel runs` shows, as plain JSON data: the runs of a directory, and one run (one rollout: rollouts.py).

Reads files and the store only; works while the run is going on and after its processes are gone. tables.py prints it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from swe_lightning.errors import DataError
from swe_lightning.monitor.rollouts import decoder, show_rollout
from swe_lightning.monitor.store import StoreReader, has_store, open_store
from swe_lightning.records import is_resolved
from swe_lightning.rundir import RunDir

__all__ = ["decoder", "list_runs", "open_store", "show_rollout", "show_run"]

SEARCH_DEPTH = 4


def list_runs(root: Path) -> list[dict[str, Any]]:
    """Runs below `root`, oldest first. DataError if `root` does not exist."""
    if not root.is_dir():
        raise DataError(f"no directory {root}; give the directory that holds the runs")
    found = sorted(_run_dirs(root, SEARCH_DEPTH), key=lambda path: (_started(path), path))
    return [_listed(path) for path in found]


def show_run(run_dir: Path) -> dict[str, Any]:
    """One run: its overview plus settings, outcomes, infrastructure reasons, last metrics and evaluations."""
    if not _is_run(run_dir):
        raise DataError(f"{run_dir} is not a run directory (neither recipe.yaml nor gateway.db); see swel runs list")
    metrics = _metrics(run_dir)
    data = _overview(run_dir, _counts(run_dir))
    data["whitelist"] = _recipe(run_dir).get("sandbox", {}).get("whitelist", [])
    data |= {"outcomes": {}, "infra": {}, "recent": [], "calls": 0}
    if has_store(run_dir):
        with open_store(run_dir) as store:
            data |= _outcomes(store)
    data |= {"metrics": metrics[-1] if metrics else {}, "history": metrics[-10:], "evaluations": _evaluations(run_dir)}
    return data


def _run_dirs(place: Path, depth: int) -> Iterator[Path]:
    if _is_run(place):
        yield place
    if depth == 0:
        return
    try:
        below = sorted(p for p in place.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        return
    for path in below:
        if path.name not in ("checkpoints", "logs", "memo", "keys"):
            yield from _run_dirs(path, depth - 1)


def _is_run(place: Path) -> bool:
    return (place / "recipe.yaml").is_file() or has_store(place)


def _started(place: Path) -> float:
    files = [place / name for name in ("recipe.yaml", "gateway.db", "keys")]
    return min((f.stat().st_mtime for f in files if f.exists()), default=0.0)


def _listed(run_dir: Path) -> dict[str, Any]:
    """One damaged store must not hide the other runs."""
    try:
        return _overview(run_dir, _counts(run_dir))
    except DataError:
        return _overview(run_dir, {}) | {"state": "unreadable"}


def _counts(run_dir: Path) -> dict[str, int]:
    if not has_store(run_dir):
        return {}
    with open_store(run_dir) as store:
        return store.counts()


def _overview(run_dir: Path, counts: dict[str, int]) -> dict[str, Any]:
    recipe, metrics = _recipe(run_dir), _metrics(run_dir)
    # The loop counts from 0: the line of step 15 says that 16 steps are done.
    step = max((m.get("step", 0) + 1 for m in metrics), default=0)
    steps = recipe.get("training", {}).get("steps") if recipe else None
    last = metrics[-1] if metrics else {}
    values = [m["val_rate"] for m in metrics if m.get("val_rate") is not None]
    return {
        "path": str(run_dir),
        "name": recipe.get("name", run_dir.name),
        "state": _state(run_dir, step, steps),
        "step": step,
        "steps": steps,
        "reward_mean": last.get("reward_mean"),
        "val_rate": values[-1] if values else None,
        "rollouts": counts,
        "checkpoints": RunDir(run_dir).saved_steps(),
    }


def _state(run_dir: Path, step: int, steps: int | None) -> str:
    """running (the lock is held), finished, stopped (resumable), or evaluation (no recipe of its own)."""
    if _locked(run_dir / "lock"):
        return "running"
    if steps is None:
        return "evaluation"
    return "finished" if step >= steps else "stopped"


def _locked(file: Path) -> bool:
    try:
        fd = os.open(file, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _recipe(run_dir: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load((run_dir / "recipe.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return data if isinstance(data, dict) else {}


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; of two lines of one step (a crash in between) the later one counts."""
    by_step = {m.get("step"): m for m in RunDir(run_dir).metrics()}
    return list(by_step.values())


def _outcomes(store: StoreReader) -> dict[str, Any]:
    outcomes: dict[str, Counter[str]] = {}
    infra: Counter[str] = Counter()
    recent = []
    for row in store.outcomes():
        outcome = row["outcome"] or {}
        if outcome.get("infra_reason"):
            infra[outcome["infra_reason"]] += 1
        elif outcome:
            label = "resolved" if is_resolved(outcome.get("reward")) else outcome.get("exit_status") or "unresolved"
            outcomes.setdefault(row["mode"], Counter())[label] += 1
        recent.append({**row, "outcome": None, "reward": outcome.get("reward"), "message": outcome.get("message", "")})
    shown = [{k: r[k] for k in ("rollout_id", "mode", "state", "attempt", "reward", "message")} for r in recent[-10:]]
    by_mode = {mode: dict(counts) for mode, counts in outcomes.items()}
    return {"outcomes": by_mode, "infra": dict(infra), "recent": shown, "calls": store.call_count()}


def _evaluations(run_dir: Path) -> list[dict[str, Any]]:
    found = []
    for file in sorted((run_dir / "evals").rglob("*.json")):
        try:
            data = json.loads(file.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(data, dict) and isinstance(data.get("summary"), dict) and "records" in data:
            found.append({"file": str(file), **data["summary"]})
    return found
