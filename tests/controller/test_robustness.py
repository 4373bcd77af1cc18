"""What one rollout brings along (file names, a broken config, a fault that comes back) is its own trouble only."""

from __future__ import annotations

import queue

import psutil
import pytest

from swe_lightning.controller.claimer import back_off_s
from swe_lightning.controller.process import WorkerProcess
from swe_lightning.controller.runner import sendable
from swe_lightning.records import InfraReason, Outcome, Rollout

FIX = "sed -i 's/a - b/a + b/' calc.py"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.fixture(scope="module")
def controller(machine):
    process = machine.start_controller()
    yield process
    machine.stop(process)


def test_file_names_that_are_not_utf8_do_not_turn_a_failure_into_a_broken_machine(machine, controller):
    """Such names reach the verdict; an outcome that cannot be sent would count as a lost worker."""
    name = r"tests/$'\xff'_test.py"
    ids = machine.submit(
        {"rawbad": [f"mkdir -p tests; touch {name}", SUBMIT], "rawgood": [f"touch {name}; {FIX}", SUBMIT]}
    )
    bad, good = machine.wait(ids)
    assert [r.attempt for r in (bad, good)] == [1, 1]
    assert [r.outcome.reward for r in (bad, good)] == [0.0, 1.0]
    assert good.outcome.verdict["dropped_paths"] == [r"tests/\xff_test.py"]


def test_text_in_an_outcome_can_always_be_sent():
    name = b"\xff\xc3\xa9".decode("utf-8", "surrogateescape")
    given = {"why": name, name: [name, (1, None, True, "\ud800")], "seconds": {"grading": 0.5}}
    made = sendable(given)
    assert made == {"why": r"\xffé", r"\xffé": [r"\xffé", [1, None, True, r"\ud800"]], "seconds": {"grading": 0.5}}
    Outcome(verdict=made).model_dump_json().encode()


def test_a_config_that_is_none_fails_its_rollout_and_the_controller_goes_on(machine, controller):
    broken = [
        Rollout(rollout_id=f"broken{n}", group_id="g", task=machine.task("x"), config=config, max_attempts=1)
        for n, config in enumerate([{"grading": {"timeout_s": "soon"}}, {"sandbox": {"backend": 7}}] * 3)
    ]
    machine.client.create_rollouts(broken)
    failed = machine.wait([r.rollout_id for r in broken])
    assert {r.outcome.infra_reason for r in failed} == {InfraReason.HARNESS_CRASH}
    assert "timeout_s" in failed[0].outcome.message
    assert "backend" in failed[1].outcome.message
    # Six of four places were given back, or nothing could run now.
    (good,) = machine.wait(machine.submit({"after": [FIX, SUBMIT]}))
    assert good.outcome.reward == 1.0
    assert controller.poll() is None


def test_a_rollout_that_failed_is_left_alone_for_a_while_and_holds_nobody_up(machine, controller):
    task = machine.task("x") | {"instance_id": "calc.none"}
    # As many as there are places, and all before the good one: none may be held by one that only waits.
    many = [Rollout(rollout_id=f"again{n}", group_id="g", task=task, max_attempts=2) for n in range(4)]
    machine.client.create_rollouts(many)
    (good_id,) = machine.submit({"meanwhile": [FIX, SUBMIT]})
    good, *failed = machine.wait([good_id, *(r.rollout_id for r in many)])
    assert good.outcome.reward == 1.0
    for rollout in failed:
        assert rollout.attempt == 2
        first_end = next(e["at"] for e in machine.client.events(rollout.rollout_id) if "infra_reason" in str(e))
        assert rollout.started_at - first_end > back_off_s(1) - 0.1
        assert rollout.started_at > good.started_at


def test_the_back_off_grows_and_is_bounded():
    assert [back_off_s(n) for n in (0, 1, 2, 3, 9, 10_000)] == [0, 2, 4, 8, 30, 30]


def test_workers_do_not_inherit_the_signing_key(monkeypatch, tmp_path):
    monkeypatch.setenv("SWEL_SIGNING_KEY", "k" * 40)
    monkeypatch.setenv("SWEL_OTHER", "kept")
    options = {"gateway_url": "http://127.0.0.1:9", "run_dir": tmp_path, "slots": 1, "label": "run-none"}
    worker = WorkerProcess(1, events=queue.Queue(), **options)
    try:
        environment = psutil.Process(worker.process.pid).environ()
    finally:
        worker.end(grace_s=0)
    assert "k" * 40 not in environment.values()
    assert environment["SWEL_OTHER"] == "kept"
