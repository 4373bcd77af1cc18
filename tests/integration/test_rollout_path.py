"""Issue to training batch through every real room, with scripted strategies where the model would be.

Gateway, scripted model server, controller and worker are the processes `swel train` starts; boxes and verdicts are
real. A strategy that tries edits with tests must earn the reward, one that submits at once must not, and what the
gateway recorded must come out as one gap-free row per rollout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from swe_lightning.controller.stack import Stack
from swe_lightning.objective.batch import build_batch
from swe_lightning.recipe import Algorithm
from swe_lightning.records import Rollout, RolloutState
from swe_lightning.rundir import RunDir
from swe_lightning.trajectory import rows_of

HARNESS = {
    "step_limit": 8,
    "command_timeout_s": 30,
    "max_tokens": 200,
    "observation_chars": 120,
    "format_error_limit": 1,
    "system_template": "Fix the bug with bash.",
    "instance_template": "{{ test }} fails. Bug in {{ func }}, F={{ bug_file }} L={{ bug_line }}.",
    "observation_template": "{{ output[:120] }}",
    "agent_env": {"F": "{{ bug_file }}", "L": "{{ bug_line }}"},
    "agent_files": {
        "test.sh": "{{ test_cmd }} -p no:cacheprovider --tb=no {{ FAIL_TO_PASS | shell_quote }} 2>&1 "
        "| tail -n 1 | sed 's/ in .*//'\n",
        ".before": "{{ read(bug_file) }}",
        "undo.sh": 'cp .before "$F"\n',
    },
}
CONFIG: dict[str, Any] = {
    "harness": HARNESS,
    "sandbox": {"memory_mb": 512, "disk_mb": 64, "pids": 64, "show_tests": True},
    "grading": {"timeout_s": 60, "remember_verdicts": True},
    "sampling": {"temperature": 1.0, "top_p": 1.0},
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    run = RunDir(tmp_path_factory.mktemp("run"))
    with Stack(run, workers=1, concurrency=4, max_context=8192) as made:
        made.serve_script("enumerate", None)
        made.start_controller()
        yield made


def play(stack: Stack, task: dict[str, Any], group: str, count: int, config: dict[str, Any] = CONFIG) -> list[Rollout]:
    planned = [
        Rollout(rollout_id=f"{group}-{n}", group_id=group, task=task, config=config, timeout_s=120)
        for n in range(count)
    ]
    stack.gateway.create_rollouts(planned)
    ended: dict[str, Rollout] = {}
    cursor = 0
    while len(ended) < count:
        stack.supervisor.check()
        found, cursor = stack.gateway.terminal(after=cursor, wait_s=2)
        ended |= {r.rollout_id: r for r in found if r.group_id == group}
    return [ended[r.rollout_id] for r in planned]


def test_from_issue_to_batch(stack, task):
    solved = play(stack, task, "tries", 2)
    stack.serve_script("noop", None)
    gave_up = play(stack, task, "gives-up", 2)
    rollouts = solved + gave_up

    assert [r.state for r in rollouts] == [RolloutState.SUCCEEDED] * 4
    assert [r.outcome.reward for r in rollouts] == [1.0, 1.0, 0.0, 0.0]
    assert {r.outcome.exit_status for r in rollouts} == {"submitted"}
    assert {r.attempt for r in rollouts} == {1}
    verdict = solved[0].outcome.verdict
    assert (verdict["resolved"], verdict["dropped_paths"]) == (True, [])

    rows = []
    for rollout in rollouts:
        calls = stack.gateway.calls(rollout.rollout_id)
        report = rows_of(calls)
        assert (len(report.rows), sum(report.dropped.values())) == (1, 0)
        (row,) = report.rows
        # Token truth: the mask marks exactly what was sampled, in order, and the last prompt is a prefix of the row.
        sampled = np.concatenate([call.response_ids for call in calls])
        assert row.ids[row.mask == 1].tolist() == sampled.tolist()
        assert row.ids[: len(calls[-1].prompt_ids)].tolist() == list(calls[-1].prompt_ids)
        rows.append(row)
    assert [len(stack.gateway.calls(r.rollout_id)) for r in gave_up] == [1, 1]
    assert min(len(stack.gateway.calls(r.rollout_id)) for r in solved) >= 3

    # One group of a solved and an unsolved rollout: opposite advantages, each spread over its own tokens.
    pair = [rows[0], rows[2]]
    rewards = {row.rollout_id: rollout.outcome.reward for row, rollout in zip(pair, rollouts[::2], strict=True)}
    for row in pair:
        row.group_id = "pair"
    batch = build_batch(pair, rewards, dict.fromkeys(rewards, "pair"), Algorithm(advantage="grpo_no_std"))
    sums = sorted(float(w.sum()) for w in batch.weights)
    assert sums == pytest.approx([-0.25, 0.25], abs=1e-6)
    assert all(not w[row.mask == 0].any() for row, w in zip(batch.rows, batch.weights, strict=True))


def test_shaped_rewards_stay_beside_the_verdict(stack, task, monkeypatch):
    stack.serve_script("enumerate", None)
    monkeypatch.setitem(CONFIG, "reward", {"turn_penalty": 0.5, "free_turns": 0})
    (rollout,) = play(stack, task, "shaped", 1)
    outcome, turns = rollout.outcome, len(stack.gateway.calls(rollout.rollout_id))
    assert outcome.reward == 1.0
    assert outcome.shaped_reward == pytest.approx(1.0 - 0.5 * turns / HARNESS["step_limit"])
    assert outcome.verdict["shaping"]["longest_prompt_tokens"] > 0
    assert outcome.tampering == {}
    stack.serve_script("noop", None)


def test_the_run_directory_tells_the_story(stack, task):
    (rollout,) = play(stack, task, "story", 1)
    from swe_lightning.harness.episode_log import read_trajectory

    log = stack.run.logs / "rollouts" / rollout.rollout_id / "attempt1.jsonl"
    trajectory = read_trajectory(log)
    calls = stack.gateway.calls(rollout.rollout_id)
    said = [m["content"] for m in trajectory["messages"] if m["role"] == "assistant"]
    assert said == [call.response["choices"][0]["message"]["content"] for call in calls]
    assert trajectory["messages"][1]["content"] == "test_total fails. Bug in total, F=shop.py L=2."


def test_the_same_path_with_containers(stack, task, docker_image):
    """sandbox.backend docker: the episode and the grading each in a container of their own, nothing left behind."""
    from swe_lightning.sandbox.docker_engine import OWNER, connect
    from swe_lightning.sandbox.owners import owner_stamp

    stack.serve_script("enumerate", None)
    sandbox = {**CONFIG["sandbox"], "backend": "docker", "image": docker_image}
    (rollout,) = play(stack, task, "container", 1, {**CONFIG, "sandbox": sandbox})
    assert rollout.outcome.infra_reason is None, rollout.outcome.message
    assert (rollout.outcome.reward, rollout.outcome.exit_status) == (1.0, "submitted")
    (failed,) = play(stack, task, "no-image", 1, {**CONFIG, "sandbox": {**sandbox, "image": "no/such:1"}})
    assert (failed.outcome.reward, failed.outcome.infra_reason) == (None, "image_unavailable")
    ours = [rollout.rollout_id, failed.rollout_id]
    left = [c["Labels"] for c in connect().containers(all=True, filters={"label": OWNER})]
    assert [c for c in left if any(name in c.get("swel.label", "") for name in ours)] == []
    assert [c for c in left if c[OWNER] == owner_stamp()] == []
