"""A stock OpenAI client notices neither recording, nor a pause, nor that streams are made from whole replies."""

from __future__ import annotations

import threading
from typing import Any

import openai
import orjson
import pytest

from swe_lightning.errors import GatewayError
from swe_lightning.gateway.client import Lease
from swe_lightning.gateway.fakes import chat_reply

from .conftest import EngineServer, GatewayProcess, ask, code_of, until

HELLO: Any = [{"role": "user", "content": "hello"}]
ARGUMENTS = '{"cmd":"ls  -la", "n":1}'


def sdk(lease: Lease) -> openai.OpenAI:
    return openai.OpenAI(base_url=lease.base_url, api_key=lease.agent_token)


def call_a_tool(_path: str, body: dict[str, Any]) -> Any:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "bash", "arguments": ARGUMENTS}} for i in range(2)
    ]
    reply = chat_reply(body, "let me look", tool_calls=calls)
    return (200, orjson.dumps(reply), {}) if body["messages"][-1]["role"] == "user" else None


def test_tools_plain_and_streaming(gateway: GatewayProcess, engine: EngineServer) -> None:
    engine.engine.behaviour = call_a_tool
    lease = gateway.lease()
    client = sdk(lease)
    plain = client.chat.completions.create(model="m", messages=HELLO).choices[0]
    assert plain.finish_reason == "tool_calls"
    assert [c.function.arguments for c in plain.message.tool_calls or []] == [ARGUMENTS] * 2  # type: ignore[union-attr]
    with client.chat.completions.stream(model="m", messages=HELLO, stream_options={"include_usage": True}) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.content == "let me look"
    calls = streamed.choices[0].message.tool_calls or []
    assert [(c.id, c.function.arguments) for c in calls] == [("c0", ARGUMENTS), ("c1", ARGUMENTS)]
    assert streamed.usage is not None
    first, second = gateway.client.calls(lease.rollout.rollout_id)
    assert first.response_ids.tolist() == second.response_ids.tolist()
    assert first.logprobs.tolist() == second.logprobs.tolist()
    assert second.trainable


def test_completions_and_models(gateway: GatewayProcess) -> None:
    client = sdk(gateway.lease())
    assert client.completions.create(model="m", prompt="ab").choices[0].text == "ok"
    chunks = list(client.completions.create(model="m", prompt="ab", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "ok"
    assert [m.id for m in client.models.list().data] == ["policy"]


def test_async_streaming(gateway: GatewayProcess) -> None:
    import asyncio

    lease = gateway.lease()

    async def stream() -> str:
        client = openai.AsyncOpenAI(base_url=lease.base_url, api_key=lease.agent_token)
        chunks = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in chunks])

    assert asyncio.run(stream()) == "ok"


def test_a_pause_is_only_a_slow_call(gateway: GatewayProcess, engine: EngineServer) -> None:
    lease = gateway.lease()
    gateway.client.pause()
    answers: list[Any] = []

    def talk() -> None:
        answers.append(sdk(lease).chat.completions.create(model="m", messages=HELLO))

    threads = [threading.Thread(target=talk) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: gateway.client.state()["waiting"] == 3)
    assert (len(answers), len(engine.engine.seen)) == (0, 0)
    gateway.client.register_model(engine.url, version=2)
    gateway.client.resume()
    for thread in threads:
        thread.join()
    assert len(answers) == 3
    assert len(engine.engine.seen) == 3
    versions = {(c.version_start, c.version_end) for c in gateway.client.calls(lease.rollout.rollout_id)}
    assert versions == {(2, 2)}


def test_a_drain_that_takes_too_long_is_typed(gateway: GatewayProcess, engine: EngineServer) -> None:
    engine.engine.latency_s = 1.5
    lease = gateway.lease()
    thread = threading.Thread(target=lambda: ask(lease))
    thread.start()
    until(lambda: engine.engine.active == 1)
    with pytest.raises(GatewayError) as e:
        gateway.client.pause(drain_s=0.1)
    assert (e.value.status, e.value.code) == (504, "drain_timeout")
    assert gateway.client.state()["paused"]
    assert gateway.client.pause(drain_s=10)["in_flight"] == 0
    assert len(gateway.client.calls(lease.rollout.rollout_id)) == 1  # drained means recorded
    thread.join()


def test_too_many_calls_of_one_rollout_are_429(gateway: GatewayProcess) -> None:
    lease, other = gateway.lease(), gateway.lease()
    gateway.client.pause()
    codes: list[tuple[int, str] | int] = []

    def talk(to: Lease) -> None:
        response = ask(to)
        codes.append(200 if response.status_code == 200 else code_of(response))

    threads = [threading.Thread(target=talk, args=(lease,)) for _ in range(5)]
    threads.append(threading.Thread(target=talk, args=(other,)))
    for thread in threads:
        thread.start()
    until(lambda: gateway.client.state()["waiting"] == 4 and len(codes) == 2)
    gateway.client.resume()
    for thread in threads:
        thread.join()
    assert codes.count((429, "rollout_busy")) == 2
    assert codes.count(200) == 4


def test_the_sdk_stops_at_an_ended_rollout(gateway: GatewayProcess) -> None:
    lease = gateway.lease()
    gateway.client.cancel([lease.rollout.rollout_id])
    before = gateway.client.state()["late"]["calls"]
    with pytest.raises(openai.ConflictError, match="is over"):
        sdk(lease).chat.completions.create(model="m", messages=HELLO)
    assert gateway.client.state()["late"]["calls"] == before + 1  # asked once, no retry storm
