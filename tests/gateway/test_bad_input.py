"""Bad input and broken engines, for every protocol: the client hears it once, in its own protocol's error form."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import orjson
import pytest

from swe_lightning.gateway.client import Lease
from swe_lightning.gateway.fakes import chat_reply, completion_reply
from swe_lightning.gateway.protocols import ADAPTERS

from .conftest import EngineServer, GatewayProcess, code_of, http, running, until

PROTOCOLS = list(ADAPTERS)
BODIES: dict[str, dict[str, Any]] = {
    "openai/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "openai/v1/completions": {"prompt": "hi"},
    "openai/v1/responses": {"input": "hi"},
    "anthropic/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}


@pytest.fixture(scope="module")
def impatient(shared_engine: EngineServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway that gives an engine up soon."""
    options = ("--patience-s", "0.2", "--call-timeout-s", "0.5", "--max-resends", "1", "--health-interval-s", "0")
    with running(tmp_path_factory.mktemp("impatient"), *options) as gateway:
        gateway.client.register_model(shared_engine.url, version=1)
        yield gateway


def post(lease: Lease, protocol: str, *, token: str | None = None, **request: Any) -> httpx.Response:
    url = f"{lease.base_url.removesuffix('/openai/v1')}/{protocol}"
    token = lease.agent_token if token is None else token
    name, value = ("x-api-key", token) if "anthropic" in protocol else ("authorization", f"Bearer {token}".strip())
    request = request or {"json": BODIES[protocol]}
    return http.post(url, headers={name: value}, timeout=60, **request)


def error_of(response: httpx.Response, protocol: str) -> tuple[int, str]:
    """(status, code) of an error body that has exactly the form of its protocol."""
    body = response.json()
    if "anthropic" in protocol:
        assert set(body) == {"type", "error"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message", "code"}
        assert body["error"]["type"].endswith(("_error", "_too_large"))
    else:
        assert set(body) == {"error"}
        assert {"message", "type", "code", "param"} <= set(body["error"])
    return response.status_code, body["error"]["code"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_bodies_and_tokens(gateway: GatewayProcess, engine: EngineServer, protocol: str) -> None:
    lease = gateway.lease()
    name = lease.rollout.rollout_id
    for content, expected in (
        (b"{", (400, "bad_json")),
        (b"", (400, "bad_json")),
        (b'{"a": NaN}', (400, "bad_json")),
        (b"[" * 50_000, (400, "bad_json")),
        (b"[1]", (400, "bad_request")),
        (b"{}", (400, "bad_request")),
        (orjson.dumps(BODIES[protocol] | {"stream": "yes"}), (400, "bad_request")),
    ):
        assert error_of(post(lease, protocol, content=content), protocol) == expected, content[:20]
    deep = b'{"x": ' + b"[" * 900 + b"]" * 900 + b", " + orjson.dumps(BODIES[protocol])[1:]
    assert post(lease, protocol, content=deep).status_code in (200, 400)
    bound: dict[str, Any] = {"rollout_id": name, "attempt": 1}
    expired = gateway.keyring.mint("agent", **bound, ttl_s=-1)
    second = gateway.keyring.mint("agent", **bound | {"attempt": 2})
    for token, expected in (
        ("", (401, "token_missing")),
        (expired, (401, "token_expired")),
        (lease.agent_token[:-4] + "AAAA", (401, "token_invalid")),
        (lease.grade_token, (403, "missing_scope")),
        (second, (403, "missing_scope")),
    ):
        assert error_of(post(lease, protocol, token=token), protocol) == expected
    assert error_of(post(lease, protocol + "/..%2fx", content=b"{}"), protocol) == (404, "unknown_path")
    gateway.client.cancel([name])
    late = post(lease, protocol)
    assert error_of(late, protocol) == (409, "rollout_ended")
    assert late.headers["x-should-retry"] == "false"


def test_a_hundred_megabytes(gateway: GatewayProcess) -> None:
    lease, huge = gateway.lease(), b" " * (100 * 2**20)
    assert error_of(post(lease, PROTOCOLS[3], content=huge), PROTOCOLS[3]) == (413, "body_too_large")
    control = {"authorization": f"Bearer {gateway.keyring.mint('control')}"}
    refused = http.post(f"{gateway.url}/api/rollouts", content=huge, headers=control, timeout=60)
    assert error_of(refused, "") == (413, "body_too_large")
    unread = http.post(f"{gateway.url}/api/rollouts", content=b"{", timeout=60)
    assert error_of(unread, "") == (401, "token_missing")  # the token comes before the body


def test_a_body_of_millions_of_values_is_not_parsed(gateway: GatewayProcess) -> None:
    """60 MB of brackets would stop everybody else for ten seconds and take 2 GB."""
    lease, started = gateway.lease(), time.monotonic()
    nested = b'{"x": [' + b"[]," * 15_000_000 + b"0]}"
    assert error_of(post(lease, PROTOCOLS[0], content=nested), "") == (413, "body_too_large")
    events = f"{gateway.url}/api/rollouts/{lease.rollout.rollout_id}/attempt/1/events"
    event = b'{"type": "note", "data": {"x": "' + b"x" * 9_000_000 + b'"}}'
    refused = http.post(events, content=event, headers={"authorization": f"Bearer {lease.agent_token}"}, timeout=60)
    assert error_of(refused, "") == (413, "body_too_large")
    assert time.monotonic() - started < 5
    words = orjson.dumps({"messages": [{"role": "user", "content": "f(a, b[0], {c})\n" * 100_000}]})
    assert post(lease, PROTOCOLS[0], content=words).status_code == 200


def test_the_open_calls_of_a_rollout_hold_so_many_bytes(gateway: GatewayProcess) -> None:
    """128 MiB; an agent that sends more at once is refused, and nobody else is."""
    lease, other = gateway.lease(), gateway.lease()
    host, port = gateway.url.removeprefix("http://").split(":")
    path = f"{lease.base_url.removeprefix(gateway.url)}/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {lease.agent_token}\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            connection.sendall(f"{head}content-length: {60 * 2**20}\r\n\r\n".encode())
            connection.sendall(b" " * (50 * 2**20))
        assert b"429" in connection.recv(100)
        assert post(other, PROTOCOLS[0]).status_code == 200
        assert code_of(post(lease, PROTOCOLS[0], content=b" " * (50 * 2**20))) == (429, "rollout_busy")
    until(lambda: gateway.client.state()["tables"]["bodies"] == 0)
    assert post(lease, PROTOCOLS[0]).status_code == 200


def without_ids(reply: dict[str, Any]) -> None:
    reply.pop("prompt_token_ids", None)
    reply["choices"][0].pop("prompt_token_ids", None)


def short_logprobs(reply: dict[str, Any]) -> None:
    logprobs = reply["choices"][0]["logprobs"]
    logprobs["content" if "content" in logprobs else "token_logprobs"].pop()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("change", "reason"), [(without_ids, "no_prompt_ids"), (short_logprobs, "logprob_len_mismatch")]
)
def test_doubtful_replies_are_answered_and_not_trained(
    gateway: GatewayProcess, engine: EngineServer, protocol: str, change: Callable[[Any], None], reason: str
) -> None:
    def behaviour(path: str, body: dict[str, Any]) -> Any:
        reply = chat_reply(body) if "chat" in path else completion_reply(body)
        change(reply)
        return 200, orjson.dumps(reply), {}

    engine.engine.behaviour = behaviour
    lease = gateway.lease()
    assert b"ok" in post(lease, protocol).content
    (call,) = gateway.client.calls(lease.rollout.rollout_id)
    assert (call.trainable, call.reason) == (False, reason)
    (event,) = [e["data"] for e in gateway.client.events(lease.rollout.rollout_id) if e["kind"] == "model_call"]
    assert call.protocol == event["protocol"] == protocol.split("/")[2]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_engines_that_fail(impatient: GatewayProcess, engine: EngineServer, protocol: str) -> None:
    answers: list[tuple[Any, tuple[int, str]]] = [
        ((500, b'{"error": {"message": "boom"}}', {}), (502, "upstream_error")),
        ((200, b'{"choices": [', {}), (502, "upstream_error")),
        ((200, b'{"choices": []}', {}), (502, "upstream_error")),
        ((400, b'{"error": {"message": "maximum context length is 5 tokens"}}', {}), (400, "context_overflow")),
        ((400, b'{"error": {"message": "odd"}}', {}), (400, "upstream_refused")),
    ]
    for answer, expected in answers:
        engine.engine.behaviour = lambda _path, _body, a=answer: a  # type: ignore[misc]
        lease = impatient.lease()
        asked = len(engine.engine.seen)
        response = post(lease, protocol)
        assert error_of(response, protocol) == expected
        assert len(engine.engine.seen) == asked + 1
        assert response.headers["x-should-retry"] == "false"
        (call,) = impatient.client.calls(lease.rollout.rollout_id)
        assert (call.trainable, bool(call.reason)) == (False, True)
    engine.engine.behaviour, engine.engine.latency_s = None, 5
    assert error_of(post(impatient.lease(), protocol), protocol) == (504, "upstream_timeout")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_refused_connections_and_half_answers(impatient: GatewayProcess, engine: EngineServer, protocol: str) -> None:
    with half_an_answer() as url:
        impatient.client.register_model(url, version=1)
        impatient.client.delete_model(engine.url)
        broken = error_of(post(impatient.lease(), protocol), protocol)
    refused = error_of(post(impatient.lease(), protocol), protocol)
    impatient.client.register_model(engine.url, version=1)
    impatient.client.delete_model(url)
    assert broken == refused == (502, "upstream_error")


@contextlib.contextmanager
def half_an_answer() -> Iterator[str]:
    """A server that closes the connection in the middle of its answer."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + b'{"choices": [')
                connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
