"""Between table rows and records: how a rollout, an event and the hot path's view of a rollout are read and written."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from swe_lightning.gateway import compact
from swe_lightning.gateway.jsonio import dumps, loads
from swe_lightning.gateway.lifecycle import Position
from swe_lightning.gateway.problems import Problem
from swe_lightning.gateway.schema import content_digest, contents, rollouts
from swe_lightning.records import Outcome, Rollout, RolloutState

CALL_KIND = "model_call"


@dataclass(frozen=True, slots=True)
class Live:
    """What the hot path needs to know of a running rollout."""

    attempt: int
    mode: str
    sampling: dict[str, Any]


def position(row: Any) -> Position:
    return Position(row.rollout_id, RolloutState(row.state), row.attempt, row.max_attempts)


def live(r: Rollout) -> Live:
    sampling = r.config.get("sampling")
    return Live(r.attempt, r.mode, sampling if isinstance(sampling, dict) else {})


def digest(r: Rollout) -> bytes:
    content = [r.group_id, r.mode, r.max_attempts, r.timeout_s, r.task, r.config]
    return hashlib.sha256(dumps(content, sort_keys=True)).digest()


def new_row(r: Rollout, digest: bytes, now: float, bodies: dict[bytes, bytes]) -> dict[str, Any]:
    """The row of a new rollout; its task and configuration go into `bodies` by their digests."""
    if not math.isfinite(r.timeout_s):
        raise Problem(422, "bad_request", f"rollout {r.rollout_id}: timeout_s is not a number")
    return {
        "rollout_id": r.rollout_id,
        "group_id": r.group_id,
        "mode": r.mode,
        "state": RolloutState.QUEUING,
        "attempt": 0,
        "max_attempts": r.max_attempts,
        "timeout_s": r.timeout_s,
        "digest": digest,
        "created_at": now,
        "task": _content(dumps(r.task), bodies),
        "config": _content(dumps(r.config), bodies),
    }


def as_new(r: Rollout, now: float) -> Rollout:
    """What reading the row of `new_row` gives."""
    return Rollout(
        rollout_id=r.rollout_id,
        group_id=r.group_id,
        mode=r.mode,
        max_attempts=r.max_attempts,
        timeout_s=r.timeout_s,
        task=r.task,
        config=r.config,
        created_at=now,
    )


def _content(body: bytes, bodies: dict[bytes, bytes]) -> bytes:
    digest = content_digest(body)
    bodies[digest] = body
    return digest


_TASK, _CONFIG = contents.alias("task"), contents.alias("config")
WHOLE = (
    sa.select(rollouts, _TASK.c.body.label("task_body"), _CONFIG.c.body.label("config_body"))
    .join(_TASK, _TASK.c.digest == rollouts.c.task)
    .join(_CONFIG, _CONFIG.c.digest == rollouts.c.config)
)
"""Select rollouts as `rollout` reads them."""


def rollout(row: Any) -> Rollout:
    return Rollout(
        rollout_id=row.rollout_id,
        group_id=row.group_id,
        mode=row.mode,
        state=RolloutState(row.state),
        attempt=row.attempt,
        max_attempts=row.max_attempts,
        task=loads(row.task_body),
        config=loads(row.config_body),
        timeout_s=row.timeout_s,
        created_at=row.created_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        outcome=Outcome.model_validate(loads(row.outcome)) if row.outcome else None,
        weight_versions=loads(row.weight_versions) if row.weight_versions else [],
    )


def request_id(kind: str, attempt: int, chosen: str) -> str:
    """What tells a repetition: the id that a client chose, within one kind of request of one attempt.

    So an agent that takes a grader's id for an event of its own keeps no reward away, and a worker may number its
    requests anew in each attempt.
    """
    return f"{kind} {attempt}{_SEPARATOR}{chosen}"


_SEPARATOR = "\x1f"


def event(row: Any) -> dict[str, Any]:
    shown = {name: row[name] for name in ("attempt", "sequence", "kind", "event_id", "at")}
    shown["event_id"] = shown["event_id"].rpartition(_SEPARATOR)[2]
    if row["kind"] != CALL_KIND:
        return shown | {"data": loads(row["body"])}
    return shown | {"data": compact.summary(row)}
