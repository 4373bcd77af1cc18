"""Which task is in which step: a pure function of the seed, so that a resumed run plans the same rollouts.

Rollout ids are chosen here (`s00012-g003-r05`). Creation in the gateway is idempotent by id, so planning a step twice
(after a crash) finds the rollouts that exist and adds only what is missing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from swe_lightning.recipe import Recipe
from swe_lightning.records import Rollout, Task


def tasks_of_step(step: int, count: int, per_step: int, seed: int) -> list[int]:
    """Indices of the `per_step` tasks of `step`: epochs are seeded permutations, laid end to end.
    Where an epoch ends within a step, a task that would come twice in it gives way to another of the new epoch.

    Within a step no index repeats unless there are fewer tasks than `per_step`.
    """
    indices: list[int] = []
    position = step * per_step
    while len(indices) < per_step:
        epoch, offset = divmod(position, count)
        order = list(range(count))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        taken = order[offset : offset + per_step - len(indices)]
        indices += _without_repeats(taken, indices, order)
        position += len(taken)
    return indices


def _without_repeats(taken: list[int], already: list[int], order: list[int]) -> list[int]:
    """Replace tasks that an epoch boundary would repeat within a step by others of the epoch, where there are any."""
    seen = set(already)
    spare = [i for i in order if i not in seen and i not in taken]
    out = []
    for index in taken:
        if index in seen and spare:
            index = spare.pop(0)
        seen.add(index)
        out.append(index)
    return out


def rollout_config(recipe: Recipe, *, temperature: float, top_p: float = 1.0) -> dict[str, Any]:
    """What the controller needs to run a rollout, as plain JSON."""
    return {
        "harness": recipe.harness.model_dump(mode="json"),
        "sandbox": recipe.sandbox.model_dump(mode="json"),
        "grading": recipe.grading.model_dump(mode="json"),
        "reward": recipe.reward.model_dump(mode="json"),
        "sampling": {"temperature": temperature, "top_p": top_p},
    }


def plan_step(recipe: Recipe, tasks: Sequence[Task], step: int) -> list[Rollout]:
    """The rollouts of one step: `groups_per_step` groups of `group_size`."""
    r = recipe.rollout
    config = rollout_config(recipe, temperature=r.temperature)
    planned = []
    for g, index in enumerate(tasks_of_step(step, len(tasks), r.groups_per_step, recipe.training.seed)):
        group_id = f"s{step:05d}-g{g:03d}"
        planned += [
            Rollout(
                rollout_id=f"{group_id}-r{i:02d}",
                group_id=group_id,
                mode="train",
                task=tasks[index].model_dump(mode="json"),
                config=config,
                timeout_s=r.timeout_s,
                max_attempts=r.max_attempts,
            )
            for i in range(r.group_size)
        ]
    return planned
