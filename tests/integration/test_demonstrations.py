"""The stand-in for the shell and the real path give the same token rows for the same bug and the same dice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swe_lightning.controller.stack import Stack
from swe_lightning.recipe import load_recipe
from swe_lightning.records import Rollout
from swe_lightning.rundir import RunDir
from swe_lightning.training.schedule import rollout_config
from swe_lightning.training.waiter import Waiter
from swe_lightning.trajectory import rows_of

pytestmark = [pytest.mark.train, pytest.mark.slow, pytest.mark.timeout(300)]
COUNT = 12


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from swe_lightning.training.warm import create_policy

    recipe = load_recipe("tiny_cpu.yaml")
    assert recipe.warm_start is not None
    return create_policy(recipe.warm_start, tmp_path_factory.mktemp("policy") / "m", recipe.model.max_context, 0)


def test_both_ways_give_the_same_rows(policy: Path, task: dict[str, Any], tmp_path: Path) -> None:
    from swe_lightning.policy.demonstrator import Demonstrator
    from swe_lightning.policy.demos import render, row_of
    from swe_lightning.policy.scripted import seed_of
    from swe_lightning.policy.standin import Bug, play
    from swe_lightning.training.warm import load_tokenizer

    recipe = load_recipe("tiny_cpu.yaml")
    planned = [
        Rollout(
            rollout_id=f"demo-{i}",
            group_id=f"demo-{i}",
            task=task,
            config=rollout_config(recipe, temperature=1.0),
            timeout_s=120,
        )
        for i in range(COUNT)
    ]
    run = RunDir(tmp_path / "run")
    with Stack(run, workers=1, concurrency=4, max_context=recipe.model.max_context) as stack:
        stack.serve_script("demonstrator", policy)
        stack.start_controller()
        done = Waiter(stack.gateway).run(planned, check=stack.supervisor.check)
        real = {r.rollout_id: rows_of(stack.gateway.calls(r.rollout_id, r.attempt)).rows for r in done}

    right, broken = "    return a + b", "    return a - b"
    bug = Bug("total", "shop.py", 2, "test_total", right, broken, tests=1, failure="1 failed\n")
    tokenizer = load_tokenizer(policy)
    solved = set()
    for rollout in done:
        messages, shell = play(bug, Demonstrator(), seed_of(None, rollout.rollout_id, []))
        ids = tokenizer.encode(render(tokenizer, messages), add_special_tokens=False)
        expected = row_of(tokenizer, ids, rollout.rollout_id)
        (row,) = real[rollout.rollout_id]
        assert row.ids.tolist() == expected.ids.tolist(), rollout.rollout_id
        assert row.mask.tolist() == expected.mask.tolist(), rollout.rollout_id
        assert rollout.outcome is not None
        assert rollout.outcome.reward == (1.0 if shell.solved and rollout.outcome.exit_status == "submitted" else 0.0)
        solved.add(shell.solved)
    assert solved == {True, False}, "the demonstrator must sometimes fail, or the comparison shows little"
