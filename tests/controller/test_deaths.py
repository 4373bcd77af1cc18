"""Processes that die, hang or are stopped in the middle: every rollout still ends with exactly one outcome."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from swe_lightning.records import InfraReason, RolloutState

FIX = "sed -i 's/a - b/a + b/' calc.py"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SLEEP = "exec -a swel-marker-sleep sleep 300"


class Pause:
    """A scripted turn that holds the rollout until the test lets it go."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self) -> str:
        self.reached.set()
        self.go_on.wait(120)
        return self.command


class FirstTime:
    """One command the first time the turn is reached, another one afterwards."""

    def __init__(self, first: str, later: str) -> None:
        self.commands = [later, first]

    def __call__(self) -> str:
        return self.commands.pop() if len(self.commands) > 1 else self.commands[0]


@pytest.fixture
def start(machine):
    """start(**options) -> a controller that is stopped when the test ends."""
    started = []

    def start(**options):
        started.append(machine.start_controller(**options))
        return started[-1]

    yield start
    for process in started:
        machine.stop(process)


def rewards(machine, rollout_id):
    return [e for e in machine.client.events(rollout_id) if '"reward": 1.0' in str(e).replace("'", '"')]


def wait_until(condition, seconds=90.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def sleepers() -> set[int]:
    """Processes that sleep inside a sandbox."""
    return {p.pid for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0] == "swel-marker-sleep"}


def test_a_killed_worker_costs_an_attempt_and_nothing_else(machine, start):
    pause = Pause(FIX)
    controller = start()
    ids = machine.submit({"paused": [pause, SUBMIT]})
    assert pause.reached.wait(90), machine.logs()
    (worker,) = machine.workers(controller)
    os.kill(worker, signal.SIGKILL)
    pause.go_on.set()
    (rollout,) = machine.wait(ids)
    assert (rollout.state, rollout.attempt, rollout.outcome.reward) == (RolloutState.SUCCEEDED, 2, 1.0)
    assert len(rewards(machine, ids[0])) == 1
    assert worker not in machine.workers(controller)


def test_a_killed_controller_takes_its_workers_along_and_the_next_one_resumes(machine, start):
    controller = start()
    ids = machine.submit({"stuck": [FirstTime(SLEEP, FIX), SUBMIT]})
    wait_until(sleepers)
    workers = machine.workers(controller)
    controller.kill()
    controller.wait()
    wait_until(lambda: not any(psutil.pid_exists(w) for w in workers))
    wait_until(lambda: not sleepers())
    assert machine.client.get_rollout(ids[0]).state is RolloutState.RUNNING

    start()
    resumed, other = machine.wait([*ids, *machine.submit({"good": [FIX, SUBMIT]})])
    assert (resumed.attempt, resumed.outcome.reward) == (2, 1.0)
    assert (other.attempt, other.outcome.reward) == (1, 1.0)
    assert len(rewards(machine, ids[0])) == 1


def test_sigterm_releases_what_is_unfinished(machine, start):
    controller = start()
    ids = machine.submit({"stuck": [SLEEP]})
    wait_until(sleepers)
    began = time.monotonic()
    controller.terminate()
    assert controller.wait(30) == 0
    assert time.monotonic() - began < 20
    assert not sleepers()
    rollout = machine.client.get_rollout(ids[0])
    assert (rollout.state, rollout.attempt) == (RolloutState.QUEUING, 1)
    machine.client.cancel(ids)


@pytest.mark.slow
def test_a_cancelled_rollout_loses_its_box_and_a_hanging_worker_is_replaced(machine, start):
    controller = start(overdue_margin_s=-110, reconcile_s=0.5)
    cancelled = machine.submit({"unwanted": [SLEEP]})
    wait_until(sleepers)
    machine.client.cancel(cancelled)
    wait_until(lambda: not sleepers())
    assert machine.client.get_rollout(cancelled[0]).outcome.infra_reason is InfraReason.CANCELLED

    ids = machine.submit({"hanging": [FirstTime(SLEEP, FIX), SUBMIT]})
    wait_until(sleepers)
    (worker,) = machine.workers(controller)
    os.kill(worker, signal.SIGSTOP)
    (rollout,) = machine.wait(ids)
    assert rollout.outcome.reward == 1.0
    assert rollout.attempt >= 2
    wait_until(lambda: not psutil.pid_exists(worker))
    wait_until(lambda: not sleepers())


def test_the_gateway_restarts_under_a_rollout(machine, start):
    pause = Pause(FIX)
    start()
    ids = machine.submit({"restarted": [pause, SUBMIT]})
    assert pause.reached.wait(90), machine.logs()
    gateway = machine.processes[0]
    gateway.kill()
    gateway.wait()
    pause.go_on.set()
    machine.start_gateway(int(machine.url.rpartition(":")[2]))
    (rollout,) = machine.wait(ids)
    assert (rollout.attempt, rollout.outcome.reward) == (1, 1.0)
