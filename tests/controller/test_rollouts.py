"""Rollouts through real gateway, worker, sandbox and grader: what they end with."""

from __future__ import annotations

import pytest

from swe_lightning.harness.episode_log import read_trajectory
from swe_lightning.records import InfraReason, Rollout, RolloutState

FIX = "sed -i 's/a - b/a + b/' calc.py"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.fixture(scope="module", autouse=True)
def controller(machine):
    process = machine.start_controller()
    yield process
    machine.stop(process)


def test_from_issue_to_reward(machine):
    good, bad, cheat, raw, limit = machine.wait(
        machine.submit(
            {
                "good": ["cat calc.py", f"{FIX}; ls tests", SUBMIT],
                "bad": ["true", SUBMIT],
                "cheat": ["mkdir -p tests; echo 'def test_add(): pass' > tests/test_add.py", SUBMIT],
                "bytes": [r"printf 'ok\xff'", f"{FIX}; {SUBMIT}"],
                "endless": ["true"] * 20,
            }
        )
    )
    assert (good.state, good.attempt, good.outcome.reward) == (RolloutState.SUCCEEDED, 1, 1.0)
    assert good.outcome.exit_status == "submitted"
    assert good.outcome.verdict["resolved"] is True
    assert set(good.outcome.verdict["seconds"]) == {"start", "episode", "close", "grading"}
    assert (bad.outcome.reward, cheat.outcome.reward, raw.outcome.reward) == (0.0, 0.0, 1.0)
    assert cheat.outcome.verdict["dropped_paths"] == ["tests/test_add.py"]
    assert (limit.outcome.reward, limit.outcome.exit_status) == (0.0, "step_limit")
    assert [len(machine.client.calls(r.rollout_id)) for r in (good, bad, limit)] == [3, 2, 10]

    attempt = machine.run_dir / "logs" / "rollouts" / good.rollout_id / "attempt1"
    shown = [message["content"] for message in read_trajectory(attempt.with_suffix(".jsonl"))["messages"]]
    assert "return a - b" in shown[3]
    assert "test_zero.py" in shown[5]
    assert "test_add.py" not in shown[5]
    assert "-    return a - b\n+    return a + b\n" in attempt.with_suffix(".patch").read_text()
    log = machine.run_dir / "logs" / "rollouts" / raw.rollout_id / "attempt1.jsonl"
    assert "ok\ufffd" in str(read_trajectory(log))


def test_one_crash_of_four_is_one_typed_failure(machine):
    broken = machine.task("good") | {"instance_id": "calc.none"}
    machine.client.create_rollouts([Rollout(rollout_id="crash", group_id="g", task=broken, max_attempts=2)])
    ids = machine.submit({f"fine{n}": [FIX, SUBMIT] for n in range(3)})
    failed, *good = machine.wait(["crash", *ids])
    assert [r.outcome.reward for r in good] == [1.0, 1.0, 1.0]
    assert (failed.state, failed.attempt, failed.outcome.reward) == (RolloutState.FAILED, 2, None)
    assert failed.outcome.infra_reason is InfraReason.HARNESS_CRASH
    assert "calc.none" in failed.outcome.message
    assert "Traceback" in (machine.run_dir / "logs" / "rollouts" / "crash" / "attempt2.error.txt").read_text()


def test_a_template_mistake_is_told_in_the_outcome(machine):
    config = {"harness": {"instance_template": "{{ isue }}"}}
    rollout = Rollout(rollout_id="typo", group_id="g", task=machine.task("good"), config=config, max_attempts=1)
    machine.client.create_rollouts([rollout])
    (failed,) = machine.wait(["typo"])
    assert failed.outcome.infra_reason is InfraReason.HARNESS_CRASH
    assert "harness.instance_template" in failed.outcome.message


def test_a_rollout_out_of_time_is_worth_nothing(machine):
    (rollout,) = machine.wait(machine.submit({"slow": ["sleep 50"]}, timeout_s=1.0))
    assert (rollout.outcome.reward, rollout.outcome.exit_status) == (0.0, "wall_time")


def test_the_recipes_files_and_variables_are_the_agents_and_never_part_of_its_patch(machine):
    harness = {
        "agent_env": {"F": "{{ missing_in_real_rows | default('calc.py') }}"},
        "agent_files": {
            "test.sh": "{{ test_cmd }} -p no:cacheprovider {{ FAIL_TO_PASS | shell_quote }} | tail -n 1\n",
            ".before": "{{ read('calc.py') }}",
        },
    }
    ids = machine.submit(
        {"tools": ["sed -i 's/a - b/a + b/' $F; sh test.sh", "cat .before; echo broken > test.sh", SUBMIT]},
        harness=harness,
        show_tests=True,
    )
    (rollout,) = machine.wait(ids)
    assert rollout.outcome.reward == 1.0
    log = read_trajectory(machine.run_dir / "logs" / "rollouts" / rollout.rollout_id / "attempt1.jsonl")
    assert "1 passed" in log["messages"][3]["content"]
    assert "return a - b" in log["messages"][5]["content"]
    assert rollout.outcome.verdict["dropped_paths"] == ["test.sh"]
    patch = machine.run_dir / "logs" / "rollouts" / rollout.rollout_id / "attempt1.patch"
    assert "test.sh" not in patch.read_text()
