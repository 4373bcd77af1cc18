"""Translation rules that a conversation does not show: what is refused, left out, restored and reported."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from swe_lightning.gateway import recording
from swe_lightning.gateway.fakes import chat_reply
from swe_lightning.gateway.problems import Problem
from swe_lightning.gateway.protocols import anthropic, responses
from swe_lightning.gateway.spellings import Spellings
from swe_lightning.gateway.store import Store
from swe_lightning.records import ModelCall, Rollout

from .conftest import EngineServer, GatewayProcess
from .test_bad_input import error_of, post
from .test_conversations import anthropic_client

HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def messages(**body: Any) -> dict[str, Any]:
    return anthropic.translate({"messages": HELLO, **body}, {})[0]


def test_the_account_header_of_claude_code_is_not_prompt() -> None:
    """It differs on every request, so with it no call would ever continue another."""
    header = "x-anthropic-billing-header: cc_version=2.1; cch=%s;"
    blocks = [[{"type": "text", "text": header % n}, {"type": "text", "text": "You help."}] for n in ("aa1", "bb2")]
    first, second = (messages(system=system)["messages"] for system in blocks)
    assert first == second == [{"role": "system", "content": "You help."}, *HELLO]
    assert messages(system=header % "c" + "\nYou help.")["messages"] == first
    kept = f"see {header}"
    assert messages(system=kept)["messages"][0]["content"] == kept


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "prefill"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"tool_choice": {"type": "magic"}}, "tool_choice"),
    ],
)
def test_what_this_model_cannot_do_is_refused_by_name(body: dict[str, Any], words: str) -> None:
    with pytest.raises(Problem, match=words):
        messages(**body)


@pytest.mark.parametrize("field", ["previous_response_id", "conversation", "background", "prompt"])
def test_the_gateway_keeps_no_conversation(field: str) -> None:
    with pytest.raises(Problem, match=field):
        responses.translate({"input": "hi", field: "x"}, {})


def test_g15_forced_tools_and_strict_arguments_are_left_to_the_model() -> None:
    """Engines force both by masking tokens, which the trainer's softmax knows nothing of."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": "required"}
    sent = recording.prepare(body, recording.CHAT, "train", {})
    assert sent.body["tool_choice"] == "auto"
    assert "strict" not in sent.body["tools"][0]["function"]
    assert sent.sampling["ignored"] == {"tool_choice": "required", "tools.strict": ["f"]}
    assert tool["function"]["strict"] is True  # type: ignore[index]
    assert recording.prepare(body, recording.CHAT, "val", {}).body["tool_choice"] == "required"


@pytest.mark.parametrize("written", ['{"cmd": "ls', "[1]", '"x"', "", " "])
def test_m5_arguments_that_are_no_object_come_back_as_they_were(written: str) -> None:
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": written}}
    reply = chat_reply({"messages": HELLO}, "", tool_calls=[call])
    block = anthropic.answer(reply, {})["content"][0]
    assert block["input"] == ({} if not written.strip() else {"INVALID_JSON": written})
    turn = {"role": "assistant", "content": [block]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "bad"}]}
    chat, _ = anthropic.translate({"messages": [*HELLO, turn, result]}, {"t": [written]})
    assert chat["messages"][1]["tool_calls"] == [call]


def test_a_spelling_is_used_only_for_the_same_value() -> None:
    def arguments(value: Any, *spellings: str) -> str:
        turn = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": value}]}
        chat, _ = anthropic.translate({"messages": [*HELLO, turn, *HELLO]}, {"t": list(spellings)})
        return str(chat["messages"][1]["tool_calls"][0]["function"]["arguments"])

    assert arguments({"a": 1}, '{"a":1.0}') == '{"a":1.0}'
    assert arguments({"a": 1}, '{"a":true}') == '{"a": 1}'
    assert arguments({"a": 2}, '{"a":1}', '{"a":2}', '{"a":3}') == '{"a":2}'
    assert arguments({"a": "é"}) == '{"a": "é"}'


def test_spellings_survive_a_restart(tmp_path: Any) -> None:
    import asyncio

    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{ "a":1}'}}
    reply = recording.stored_reply(chat_reply({"messages": HELLO}, "", tool_calls=[call]))
    url = f"sqlite:///{tmp_path}/store.db"
    store = Store(url)
    store.writer.call(store.create_rollouts([Rollout(rollout_id="r", group_id="g")]))
    store.writer.call(store.claim("r", "w", ""))
    store.writer.call(store.record_call(ModelCall("r", [1], [2], [-0.5], call_id="c", response=reply)))
    store.close()
    again = Store(url)
    assert asyncio.run(Spellings(again).of("r", 1)) == {"t": ['{ "a":1}']}
    again.close()


def test_spellings_are_kept_for_the_attempts_asked_of_last(tmp_path: Any) -> None:
    import asyncio

    store = Store(f"sqlite:///{tmp_path}/store.db")
    spellings = Spellings(store)

    async def ask_all() -> None:
        for attempt in range(4100):
            await spellings.of("r", attempt)

    asyncio.run(ask_all())
    assert len(spellings) == 4096
    store.close()


def test_tokens_are_counted_by_the_engine_and_not_recorded(gateway: GatewayProcess, engine: EngineServer) -> None:
    lease = gateway.lease()
    counted = anthropic_client(lease).messages.count_tokens(model="m", messages=HELLO)
    asked = anthropic_client(lease).messages.create(model="m", messages=HELLO, max_tokens=5)
    assert counted.input_tokens == asked.usage.input_tokens
    assert [m.id for m in anthropic_client(lease).models.list().data] == ["policy"]
    assert len(gateway.client.calls(lease.rollout.rollout_id)) == 1
    engine.engine.behaviour = lambda path, _body: (404, b"{}", {}) if path == "/tokenize" else None
    path = "anthropic/v1/messages/count_tokens"
    assert error_of(post(lease, path, json={"messages": HELLO}), path) == (501, "count_unavailable")


def test_what_is_not_honoured_is_reported(gateway: GatewayProcess, engine: EngineServer) -> None:
    lease = gateway.lease()
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"messages": HELLO, "max_tokens": 9, "thinking": thinking, "temperature": 0.1, "stop_sequences": ["ok"]}
    assert post(lease, "anthropic/v1/messages", json=body).status_code == 200
    (call,) = gateway.client.calls(lease.rollout.rollout_id)
    assert call.sampling["ignored"] == {"thinking": thinking, "temperature": 0.1}
    assert (call.sampling["temperature"], call.sampling["max_tokens"]) == (1.0, 9)
    assert orjson.loads(orjson.dumps(call.request["stop"])) == ["ok"]
