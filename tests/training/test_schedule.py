"""Which task is in which step: seeded, complete, and the same after a restart."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swe_lightning.recipe import load_recipe
from swe_lightning.records import Task
from swe_lightning.training.schedule import plan_step, tasks_of_step

counts = st.integers(1, 40)
per_steps = st.integers(1, 20)


@given(counts, per_steps, st.integers(0, 30), st.integers(0, 3))
def test_a_step_has_its_size_and_repeats_only_if_it_must(count: int, per_step: int, step: int, seed: int) -> None:
    chosen = tasks_of_step(step, count, per_step, seed)
    assert len(chosen) == per_step
    assert set(chosen) <= set(range(count))
    assert max(Counter(chosen).values()) <= -(-per_step // count) + (1 if count < per_step else 0)
    if count >= per_step:
        assert len(set(chosen)) == per_step


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3))
def test_an_epoch_visits_every_task_once(per_step: int, steps: int, seed: int) -> None:
    count = per_step * steps
    seen = [i for step in range(steps) for i in tasks_of_step(step, count, per_step, seed)]
    assert sorted(seen) == list(range(count))


def test_planning_twice_gives_the_same_rollouts_and_the_group_has_one_task() -> None:
    recipe = load_recipe("tiny_cpu.yaml", ["rollout.groups_per_step=3", "rollout.group_size=2"])
    tasks = [Task(instance_id=f"t{i}", repo="r") for i in range(7)]
    first, again = plan_step(recipe, tasks, 4), plan_step(recipe, tasks, 4)
    assert [r.model_dump() for r in first] == [r.model_dump() for r in again]
    assert [r.rollout_id for r in first][:3] == ["s00004-g000-r00", "s00004-g000-r01", "s00004-g001-r00"]
    by_group = {(r.group_id, r.task["instance_id"]) for r in first}
    assert len(by_group) == 3
    assert len({r.rollout_id for step in range(3) for r in plan_step(recipe, tasks, step)}) == 18


def test_order_depends_on_seed_and_epoch() -> None:
    def epoch(number: int, seed: int) -> list[int]:
        return tasks_of_step(number, 30, 30, seed)

    assert epoch(0, 0) != list(range(30))
    assert len({tuple(epoch(number, seed)) for number in range(3) for seed in range(3)}) == 9


def test_a_rollout_carries_what_the_recipe_says() -> None:
    recipe = load_recipe("tiny_cpu.yaml", ["rollout.temperature=0.9", "rollout.max_attempts=2", "training.seed=5"])
    tasks = [Task(instance_id=f"t{i}", repo="r") for i in range(40)]
    planned = plan_step(recipe, tasks, 0)
    assert {(r.mode, r.max_attempts, r.timeout_s) for r in planned} == {("train", 2, recipe.rollout.timeout_s)}
    assert planned[0].config["sampling"] == {"temperature": 0.9, "top_p": 1.0}
    assert planned[0].config["harness"]["step_limit"] == recipe.harness.step_limit
    assert [r.task["instance_id"] for r in planned[:: recipe.rollout.group_size]] == [
        f"t{i}" for i in tasks_of_step(0, 40, recipe.rollout.groups_per_step, 5)
    ]
