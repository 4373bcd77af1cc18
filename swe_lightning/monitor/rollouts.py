"""One rollout followed from issue text to reward and token rows, as plain JSON data.

The gateway's record is the source of truth: what a turn said, what the engine sampled, what is trained of it. Shows the
last attempt; earlier ones appear among the events.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from swe_lightning.monitor.rows import rules_of
from swe_lightning.monitor.store import open_store
from swe_lightning.records import ModelCall, Row
from swe_lightning.rundir import RunDir
from swe_lightning.trajectory import commands


def show_rollout(run_dir: Path, rollout_id: str) -> dict[str, Any]:
    """One rollout of a run, followed through its last attempt."""
    with open_store(run_dir) as store:
        rollout, calls = store.rollout(rollout_id), store.calls(rollout_id)
        history = store.events(rollout_id)
    rules = rules_of(run_dir)
    report = rules.report(calls)
    task, outcome = rollout.pop("task") or {}, rollout.pop("outcome") or {}
    shown = commands.show(calls, rules, decode=decoder(run_dir))
    return {
        "rollout": rollout,
        "task": {k: task.get(k) for k in ("instance_id", "repo", "FAIL_TO_PASS", "bug_file", "bug_line", "bug_func")},
        "issue": task.get("problem_statement") or "",
        "turns": _turns(calls, report.rows),
        "outcome": outcome,
        **shown,
        "events": history,
        "log_files": sorted(str(p) for p in (run_dir / "logs" / "rollouts" / rollout_id).glob("*")),
    }


def decoder(run_dir: Path) -> Callable[[Sequence[int]], str] | None:
    """ids -> text by the tokenizer of the run's newest checkpoint or its model; None where there is none to read."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    run = RunDir(run_dir)
    places = [run.checkpoint(step) for step in reversed(run.saved_steps())]
    places.append(Path(str(_model_path(run_dir))))
    for place in places:
        file = place / "tokenizer.json"
        if file.is_file():
            tokenizer = Tokenizer.from_file(str(file))
            return lambda ids: tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
    return None


def _model_path(run_dir: Path) -> str:
    try:
        return str(yaml.safe_load((run_dir / "recipe.yaml").read_text(encoding="utf-8"))["model"]["path"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return ""


def _turns(calls: Sequence[ModelCall], rows: Sequence[Row]) -> list[dict[str, Any]]:
    trained = _trained_by_call(rows)
    turns = []
    for i, call in enumerate(calls):
        following = calls[i + 1].request.get("messages") if i + 1 < len(calls) else None
        logprobs = np.asarray(call.logprobs, dtype=float)
        turns.append(
            {
                "sequence": call.sequence,
                "protocol": call.protocol,
                "reply": _reply(call),
                "observation": _observation(call, following),
                "prompt_tokens": len(call.prompt_ids),
                "response_tokens": len(call.response_ids),
                "trained_tokens": trained.get(call.sequence, 0),
                "logprob_mean": float(logprobs.mean()) if logprobs.size else None,
                "logprob_min": float(logprobs.min()) if logprobs.size else None,
                "finish_reason": call.finish_reason,
                "weight_versions": [call.version_start, call.version_end],
                "seconds": round(call.ended_at - call.started_at, 3),
                "trainable": call.trainable,
                "reason": call.reason,
                "superseded": call.superseded,
            }
        )
    return turns


def _trained_by_call(rows: Sequence[Row]) -> dict[int, int]:
    """Sequence number -> tokens with mask 1, over all rows. `calls` and `spans` of a row run in parallel."""
    trained: Counter[int] = Counter()
    for row in rows:
        for sequence, (start, end, _) in zip(row.calls, row.spans, strict=False):
            trained[sequence] += int(row.mask[start:end].sum())
    return dict(trained)


def _reply(call: ModelCall) -> str:
    choice = (call.response.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    return message.get("content") or choice.get("text") or json.dumps(message.get("tool_calls") or "", default=str)


def _observation(call: ModelCall, following: list[dict[str, Any]] | None) -> str | None:
    """What the next call's conversation adds behind this reply; None where no next call continues this one."""
    before = call.request.get("messages") or []
    if not following or following[: len(before)] != before:
        return None
    added = [m for m in following[len(before) :] if m.get("role") != "assistant"]
    return "\n".join(str(m.get("content") or "") for m in added)
