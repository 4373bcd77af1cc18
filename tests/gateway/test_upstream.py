"""Engines that fail in every way, and clients that leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest

from swe_lightning.errors import UpstreamError
from swe_lightning.gateway.fakes import chat_reply
from swe_lightning.gateway.probe import probe_engine
from swe_lightning.records import ModelCall

from .conftest import EngineServer, GatewayProcess, ask, code_of, http

Behaviour = Callable[[str, dict[str, Any]], Any]


def reply_with(change: Callable[[dict[str, Any]], None], headers: dict[str, str] | None = None) -> Behaviour:
    """The usual answer after `change`."""

    def behaviour(_path: str, body: dict[str, Any]) -> Any:
        reply = chat_reply(body)
        change(reply)
        return 200, orjson.dumps(reply), headers or {}

    return behaviour


def only_call(gateway: GatewayProcess, name: str) -> ModelCall:
    calls = gateway.client.calls(name)
    assert len(calls) == 1
    return calls[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r["choices"][0]["token_ids"].pop(), "token_loss"),
        (lambda r: r.pop("prompt_token_ids"), "no_prompt_ids"),
        (lambda r: r["choices"][0].pop("token_ids"), "no_response_ids"),
        (lambda r: r["choices"][0]["logprobs"]["content"].pop(), "logprob_len_mismatch"),
        (lambda r: r["choices"][0].update(logprobs=None), "logprob_len_mismatch"),
    ],
)
def test_g1_g4_doubtful_replies_reach_the_client_but_never_training(
    gateway: GatewayProcess, engine: EngineServer, change: Any, reason: str
) -> None:
    engine.engine.behaviour = reply_with(change)
    lease = gateway.lease()
    assert ask(lease).json()["choices"][0]["message"]["content"] == "ok"
    call = only_call(gateway, lease.rollout.rollout_id)
    assert (call.trainable, call.reason) == (False, reason)


@pytest.mark.parametrize(
    ("answer", "status", "code", "reason"),
    [
        ((500, b'{"error": {"message": "boom"}}', {}), 502, "upstream_error", "upstream_error"),
        ((404, b"no such model", {}), 502, "upstream_error", "upstream_error"),
        ((200, b"{half", {}), 502, "upstream_error", "upstream_error"),
        ((200, b'{"choices": []}', {}), 502, "upstream_error", "upstream_error"),
        ((200, b"[]", {}), 502, "upstream_error", "upstream_error"),
        ((400, b'{"error": {"message": "odd"}}', {}), 400, "upstream_refused", "upstream_error"),
        ((400, b'{"message": "maximum context length is 5 tokens"}', {}), 400, "context_overflow", "context_overflow"),
        ((400, b'{"error": {"code": "context_length_exceeded"}}', {}), 400, "context_overflow", "context_overflow"),
    ],
)
def test_answers_that_are_errors_are_asked_for_once(
    gateway: GatewayProcess, engine: EngineServer, answer: Any, status: int, code: str, reason: str
) -> None:
    engine.engine.behaviour = lambda _path, _body: answer
    lease = gateway.lease()
    response = ask(lease)
    assert code_of(response) == (status, code)
    assert response.headers["x-should-retry"] == "false"
    assert len(engine.engine.seen) == 1
    call = only_call(gateway, lease.rollout.rollout_id)
    assert (call.trainable, call.reason) == (False, reason)
    assert call.response["error"]


def test_g8_max_tokens_is_clamped_to_the_space_left(gateway: GatewayProcess, engine: EngineServer) -> None:
    def behaviour(_path: str, body: dict[str, Any]) -> Any:
        if body.get("max_tokens", 0) <= 10:
            return None
        words = "This model's maximum context length is 100 tokens and your request has 90 input tokens"
        return 400, orjson.dumps({"error": {"message": words}}), {}

    engine.engine.behaviour = behaviour
    lease = gateway.lease()
    assert ask(lease, max_tokens=50).status_code == 200
    assert [b["max_tokens"] for b in engine.engine.seen] == [50, 10]
    assert only_call(gateway, lease.rollout.rollout_id).sampling["max_tokens"] == 10


def test_g8_a_prompt_of_ids_is_measured_here(gateway: GatewayProcess, engine: EngineServer) -> None:
    gateway.client.register_model(engine.url, version=1, max_context=100)
    lease = gateway.lease()
    headers = {"authorization": f"Bearer {lease.agent_token}"}

    def complete(size: int) -> httpx.Response:
        body = {"model": "m", "prompt": [7] * size, "max_tokens": 50}
        return http.post(f"{lease.base_url}/completions", json=body, headers=headers)

    assert complete(90).status_code == 200
    assert engine.engine.seen[-1]["max_tokens"] == 10
    assert code_of(complete(100)) == (400, "context_overflow")
    assert len(engine.engine.seen) == 1


def test_503_is_tried_again_and_recorded(gateway: GatewayProcess, engine: EngineServer) -> None:
    engine.engine.behaviour = lambda _p, _b: (503, b"loading", {}) if len(engine.engine.seen) < 3 else None
    lease = gateway.lease()
    assert ask(lease).status_code == 200
    assert only_call(gateway, lease.rollout.rollout_id).retries == 2


def test_an_engine_that_never_answers_ends_in_502(gateway: GatewayProcess, engine: EngineServer) -> None:
    engine.engine.behaviour = lambda _p, _b: (503, b"loading", {})
    started = time.monotonic()
    lease = gateway.lease()
    assert code_of(ask(lease)) == (502, "upstream_error")
    assert 3 < time.monotonic() - started < 15
    assert only_call(gateway, lease.rollout.rollout_id).reason == "upstream_error"


def test_a_restart_of_the_engine_is_only_a_slow_call(gateway: GatewayProcess) -> None:
    own = EngineServer()
    for model in gateway.client.models():
        gateway.client.delete_model(model["url"])
    lease = gateway.lease(register=own.url)
    assert ask(lease).status_code == 200
    own.stop()
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(ask(lease)))
    thread.start()
    time.sleep(0.7)
    assert not answers
    own.start()
    thread.join()
    own.stop()
    assert answers[0].status_code == 200
    assert [c.trainable for c in gateway.client.calls(lease.rollout.rollout_id)] == [True, True]


def test_rollouts_stick_to_an_engine_and_move_when_it_dies(gateway: GatewayProcess, engine: EngineServer) -> None:
    second = EngineServer()
    gateway.client.register_model(second.url, version=1)
    leases = [gateway.lease() for _ in range(6)]
    for _ in range(3):
        assert [ask(lease).status_code for lease in leases] == [200] * 6
    used = [{c.upstream for c in gateway.client.calls(lease.rollout.rollout_id)} for lease in leases]
    assert all(len(one) == 1 for one in used)
    assert set.union(*used) == {engine.url, second.url}
    second.stop()
    assert [ask(lease).status_code for lease in leases] == [200] * 6
    assert {gateway.client.calls(lease.rollout.rollout_id)[-1].upstream for lease in leases} == {engine.url}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: r.pop("prompt_token_ids"), "prompt_token_ids"),
        (lambda r: r["choices"][0].pop("token_ids"), "token_ids"),
        (lambda r: r["choices"][0].pop("logprobs"), "logprobs"),
        (lambda r: r.pop("choices"), "upstream_error"),
    ],
)
def test_g18_the_probe_names_what_an_engine_lacks(engine: EngineServer, change: Any, field: str) -> None:
    probe_engine(engine.url)
    engine.engine.behaviour = reply_with(change)
    with pytest.raises(UpstreamError, match=field):
        probe_engine(engine.url)


def test_no_model_registered(gateway: GatewayProcess, engine: EngineServer) -> None:
    gateway.client.delete_model(engine.url)
    assert code_of(ask(gateway.lease())) == (503, "no_model")


def test_weight_versions_at_admission_and_finish(gateway: GatewayProcess, engine: EngineServer) -> None:
    """The registry at admission, the engine's word at the end; a mixed answer is not trained."""
    gateway.client.register_model(engine.url, version=5)
    for header, expected, trainable in (("5", (5, 5), True), ("6", (5, 6), False), ("3-4", (3, 4), False)):
        engine.engine.behaviour = reply_with(lambda r: None, {"x-swel-weight-version": header})
        lease = gateway.lease()
        ask(lease)
        call = only_call(gateway, lease.rollout.rollout_id)
        assert (call.version_start, call.version_end, call.trainable) == (*expected, trainable)
        assert call.reason == (None if trainable else "mixed_weights")
