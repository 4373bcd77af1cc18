"""Which replies of the gateway are asked again, and what the others mean."""

from __future__ import annotations

import threading
import time

import pytest

from swe_lightning.harness import model
from swe_lightning.records import InfraReason


def test_a_closed_gate_is_waited_for(play, scripted):
    start = time.monotonic()
    result, gateway = play([scripted.Refuse(503, "paused", {"Retry-After": "0.2"})] * 2 + [scripted.SUBMIT])
    assert result.exit_status == "submitted"
    assert len(gateway.requests) == 3
    assert time.monotonic() - start >= 0.4
    assert result.n_calls == 1


def test_a_gate_that_stays_closed_is_not_the_policys_fault(play, scripted):
    result, _ = play([scripted.Refuse(503, "paused", {"Retry-After": "0.1"})] * 50, seconds=0.5)
    assert result.infra_reason is InfraReason.UPSTREAM_ERROR


@pytest.mark.parametrize("status", [500, 502, 504])
def test_an_upstream_error_is_asked_again_and_then_typed(play, scripted, status):
    result, gateway = play([scripted.Refuse(status, "upstream_error")] * 9)
    assert result.infra_reason is InfraReason.UPSTREAM_ERROR
    assert len(gateway.requests) == 1 + model.UPSTREAM_RETRIES


def test_context_overflow_ends_the_episode_without_a_second_call(play, scripted):
    result, gateway = play([scripted.bash("true"), scripted.Refuse(400, "context_overflow"), scripted.SUBMIT])
    assert (result.exit_status, result.infra_reason) == ("context_overflow", None)
    assert len(gateway.requests) == 2


def test_a_history_the_engine_refuses_ends_the_episode_once(play, scripted):
    result, gateway = play([scripted.bash("true"), scripted.Refuse(400, "bad_history"), scripted.SUBMIT])
    assert (result.exit_status, result.infra_reason) == ("bad_history", None)
    assert len(gateway.requests) == 2


def test_a_refusal_the_history_does_not_explain_is_not_the_policys_fault(play, scripted):
    result, gateway = play([scripted.bash("true"), scripted.Refuse(400, "upstream_refused"), scripted.SUBMIT])
    assert result.infra_reason is InfraReason.UPSTREAM_ERROR
    assert len(gateway.requests) == 2


def test_a_first_request_that_is_refused_is_our_mistake(play, scripted):
    result, gateway = play([scripted.Refuse(400, "upstream_refused")])
    assert result.infra_reason is InfraReason.HARNESS_CRASH
    assert len(gateway.requests) == 1


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (409, "rollout_ended", InfraReason.CANCELLED),
        (403, "rollout_ended", InfraReason.CANCELLED),
        (401, "bad_token", InfraReason.GATEWAY_LOST),
        (404, "not_found", InfraReason.GATEWAY_LOST),
    ],
)
def test_a_refused_rollout_stops_at_once(play, scripted, status, code, reason):
    result, gateway = play([scripted.Refuse(status, code)] * 3)
    assert result.infra_reason is reason
    assert len(gateway.requests) == 1


def test_a_broken_connection_is_asked_again(play, scripted):
    result, gateway = play([scripted.bash("true"), scripted.Drop(), scripted.SUBMIT])
    assert result.exit_status == "submitted"
    assert len(gateway.requests) == 3


def test_a_gateway_that_restarts_is_not_noticed(play, scripted):
    """The first gateway goes away after one turn; another one takes its port half a second later."""
    first = scripted.ScriptedGateway([scripted.bash("sleep 0.3")])
    later: list = []

    def restart() -> None:
        while not first.requests:
            time.sleep(0.01)
        first.close()
        time.sleep(0.8)
        later.append(scripted.ScriptedGateway([scripted.SUBMIT], port=first.port))

    thread = threading.Thread(target=restart)
    thread.start()
    result, _ = play([], url=lambda _: first.url)
    thread.join()
    later[0].close()
    assert result.exit_status == "submitted"
    assert [len(g.requests) for g in (first, later[0])] == [1, 1]


def test_nobody_at_the_address(play):
    result, _ = play([], url=lambda _: "http://127.0.0.1:9/v1", seconds=1)
    assert result.infra_reason is not None


def test_a_good_answer_is_never_asked_for_again(play, scripted):
    result, gateway = play([b'{"choices": []}', scripted.SUBMIT])
    assert result.infra_reason is InfraReason.UPSTREAM_ERROR
    assert len(gateway.requests) == 1


def test_time_that_runs_out_in_a_call_is_wall_time(play, scripted):
    """The agent's command took most of the time."""
    result, _ = play([scripted.bash("sleep 1.5"), scripted.Hang(5)], seconds=2)
    assert (result.exit_status, result.infra_reason) == ("wall_time", None)


def test_many_calls_that_are_all_a_little_slow_are_not_the_policys_fault(play, scripted):
    """None of the calls takes half of the time, all together do; the time may run out in a call or in a command."""
    result, gateway = play([scripted.Slow(0.3, scripted.bash("true"))] * 9, seconds=1.2)
    assert result.infra_reason is InfraReason.UPSTREAM_ERROR
    assert 3 <= len(gateway.requests) < 9
    result, _ = play([scripted.Slow(0.5, scripted.bash("true"))] * 2 + [scripted.bash("sleep 9")], seconds=1.5)
    assert result.infra_reason is InfraReason.UPSTREAM_ERROR


def test_slow_commands_between_slow_calls_are_the_agents_own_time(play, scripted):
    result, _ = play([scripted.Slow(0.2, scripted.bash("sleep 0.8"))] * 9, seconds=2.5)
    assert (result.exit_status, result.infra_reason) == ("wall_time", None)
