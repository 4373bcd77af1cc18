"""Runs tasks in validation mode through the gateway and collects how they ended.

Rollout ids are chosen here (`eval-<label>-<task>-<sample>`), so running the same evaluation again finds what exists:
graded rollouts are kept, unfinished ones waited for, infrastructure failures run again under a new id (`...-again1`),
because a finished rollout stays finished. It runs no sandbox and no model itself; whatever serves the gateway's
model (a checkpoint, a scripted strategy) is what is evaluated.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swe_lightning.errors import DataError, GatewayError
from swe_lightning.evaluation.result import EvalRecord, EvalResult
from swe_lightning.recipe import Recipe
from swe_lightning.records import Rollout, Task
from swe_lightning.training.schedule import rollout_config

if TYPE_CHECKING:
    from swe_lightning.gateway.client import GatewayClient

Slot = tuple[str, int]
"""Task and number of the sample."""
POLL_S = 5.0
CHUNK = 200
"""Rollouts per creation request."""


def evaluate(
    *,
    gateway: GatewayClient,
    tasks: Sequence[Task],
    recipe: Recipe,
    samples: int,
    temperature: float,
    label: str,
    run_dir: Path,
    progress: Callable[[int], Any] | None = None,
    on_open: Callable[[Collection[str]], Any] | None = None,
    identity: str | None = None,
) -> EvalResult:
    """`samples` rollouts per task. Returns when all are finished; writes evals/<label>.json and predictions.

    `progress(n)` is called with newly finished rollouts, and with 0 at every poll: it may raise to stop waiting.
    `on_open(ids)` is called once if there is anything to wait for. `identity` says what is evaluated (a digest of the
    weights): the same label with another identity is refused.
    Raises DataError if `label` names an evaluation with other tasks or settings.
    """
    _check_label(label)
    tell = progress or (lambda _: None)
    config = rollout_config(recipe, temperature=temperature)
    if identity is not None:
        config["identity"] = identity
    slots = {(t.instance_id, k): _planned(t, k, label, config, recipe) for t in tasks for k in range(samples)}
    if len(slots) != len(tasks) * samples:
        raise DataError("the task list holds an instance_id twice; remove the duplicate")
    current, cursor = _open(gateway, slots)
    waiting = {r.rollout_id: slot for slot, r in current.items() if not r.state.terminal}
    tell(len(current) - len(waiting))
    if waiting and on_open:
        on_open(list(waiting))
    while waiting:
        tell(0)
        batch, cursor = gateway.terminal(after=cursor, wait_s=POLL_S)
        for rollout in batch:
            slot = waiting.pop(rollout.rollout_id, None)
            if slot is not None:
                current[slot] = rollout
                tell(1)
    records = [EvalRecord.of(rollout, slot[1]) for slot, rollout in current.items()]
    for record, rollout in zip(records, current.values(), strict=True):
        record.patch = _patch(run_dir, rollout)
    result = EvalResult(label, samples, temperature, records)
    result.save(run_dir)
    return result


def _open(gateway: GatewayClient, slots: dict[Slot, Rollout]) -> tuple[dict[Slot, Rollout], int]:
    """The rollout that counts for each slot, created where none exists or the last one had no verdict; and the cursor
    of the first creation, behind which the end of those that are open is told."""
    current: dict[Slot, Rollout] = {}
    todo = dict(slots)
    existed = _existing(gateway, list(slots.values()))
    again, ends = 0, []
    while todo:
        created, end = _create(gateway, list(todo.values()))
        ends.append(end)
        retry = {}
        for slot, rollout in zip(todo, created, strict=True):
            if rollout.rollout_id in existed and _without_verdict(rollout):
                retry[slot] = slots[slot].model_copy(
                    update={"rollout_id": f"{slots[slot].rollout_id}-again{again + 1}"}
                )
            else:
                current[slot] = rollout
        again += 1
        todo = retry
    return {slot: current[slot] for slot in slots}, min(ends, default=0)


def _without_verdict(rollout: Rollout) -> bool:
    return rollout.state.terminal and (rollout.outcome is None or rollout.outcome.reward is None)


def _existing(gateway: GatewayClient, planned: list[Rollout]) -> set[str]:
    """Ids that were there before this call: only their failures are from an earlier run and worth another try."""
    groups = dict.fromkeys(r.group_id for r in planned)
    return {r.rollout_id for group in groups for r in gateway.list_rollouts(group_id=group)}


def _create(gateway: GatewayClient, rollouts: list[Rollout]) -> tuple[list[Rollout], int]:
    """They as they stand, and the end of the completion log before the first of them."""
    created: list[Rollout] = []
    ends: list[int] = []
    for at in range(0, len(rollouts), CHUNK):
        try:
            part, end = gateway.create_to_follow(rollouts[at : at + CHUNK])
        except GatewayError as error:
            if error.status == 409:
                raise DataError(
                    f"this label was already used with another model, other tasks or settings ({error}); "
                    "choose another label"
                ) from error
            raise
        created += part
        ends.append(end)
    return created, min(ends)


def _planned(task: Task, sample: int, label: str, config: dict[str, Any], recipe: Recipe) -> Rollout:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", task.instance_id)
    if len(name) > 100:  # rollout ids are at most 200 characters
        name = f"{name[:80]}-{hashlib.blake2b(task.instance_id.encode(), digest_size=8).hexdigest()}"
    return Rollout(
        rollout_id=f"eval-{label}-{name}-{sample}",
        group_id=f"eval-{label}-{name}",
        mode="val",
        task=task.model_dump(mode="json"),
        config=config,
        timeout_s=recipe.rollout.timeout_s,
        max_attempts=recipe.rollout.max_attempts,
    )


def _patch(run_dir: Path, rollout: Rollout) -> str | None:
    """The submitted patch as the worker wrote it (always UTF-8); None if nothing was submitted or changed."""
    from swe_lightning.controller.runner import attempt_file

    file = attempt_file(run_dir, rollout.rollout_id, rollout.attempt, "patch")
    return file.read_bytes().decode() if file.is_file() else None


def _check_label(label: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", label):
        raise DataError(f"evaluation label {label!r}: use up to 64 letters, digits, dots, dashes and underscores")
