"""Both vendors' clients hold a tool-using conversation, plain and streaming, in every protocol we serve.

Each replays history as that vendor's documents say. The engine's render is append-only, so the calls of a faithful
translation merge into one row, and a translation that changes one byte of what the model said does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import orjson
import pytest

from swe_lightning.gateway.client import Lease
from swe_lightning.gateway.fakes import chat_reply
from swe_lightning.trajectory import merge

from .conftest import EngineServer, GatewayProcess

ARGUMENTS = '{"cmd":"ls  -la",\n "n":1.0, "deep": {"b":[true,null],"a":"\\u00e9"}}'
SECOND = '{ "cmd" : "pwd" }'
THOUGHT = "  first I look\n"
TEXT = "let me look: é\n\n"
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}
FUNCTION: Any = {"name": "bash", "description": "runs", "parameters": SCHEMA}


def two_tools(_path: str, body: dict[str, Any]) -> Any:
    """Two parallel calls for a user, a word for a tool's result."""
    if body["messages"][-1]["role"] != "user":
        return None
    turn = len(body["messages"])
    written = {f"c{turn}a": ARGUMENTS, f"c{turn}b": SECOND}
    calls = [{"id": k, "type": "function", "function": {"name": "bash", "arguments": v}} for k, v in written.items()]
    reply = chat_reply(body, TEXT, tool_calls=calls, reasoning_content=THOUGHT)
    return 200, orjson.dumps(reply), {}


def chat(lease: Lease, stream: bool) -> None:
    client = openai.OpenAI(base_url=lease.base_url, api_key=lease.agent_token)
    tools: Any = [{"type": "function", "function": FUNCTION}]
    history: list[Any] = [{"role": "system", "content": "be brief"}]
    for question in ("look", "again"):
        history.append({"role": "user", "content": question})
        for _ in range(2):
            if stream:
                with client.chat.completions.stream(model="m", messages=history, tools=tools) as events:
                    choice: Any = events.get_final_completion().choices[0]
            else:
                choice = client.chat.completions.create(model="m", messages=history, tools=tools).choices[0]
            message = choice.message.model_dump(exclude_none=True, exclude={"parsed", "tool_calls"})
            calls = choice.message.tool_calls or []
            if calls:
                assert choice.finish_reason == "tool_calls"
                assert [c.function.arguments for c in calls] == [ARGUMENTS, SECOND]
                kept = [c.model_dump(include={"id", "type", "function"}) for c in calls]
                for call in kept:
                    call["function"].pop("parsed_arguments", None)
                message["tool_calls"] = kept
            history.append(message)
            history += [{"role": "tool", "tool_call_id": c.id, "content": f"out {c.id}"} for c in calls]
    assert history[-1]["content"] == "ok"


def responses(lease: Lease, stream: bool) -> None:
    client = openai.OpenAI(base_url=lease.base_url, api_key=lease.agent_token)
    tools: Any = [{"type": "function", **FUNCTION, "strict": None}]
    items: list[Any] = []
    for question in ("look", "again"):
        items.append({"role": "user", "content": question})
        for _ in range(2):
            asked: Any = {"model": "m", "input": items, "tools": tools, "instructions": "be brief"}
            if stream:
                with client.responses.stream(**asked) as events:
                    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
                    reply: Any = events.get_final_response()
                assert deltas in ([ARGUMENTS, SECOND], [])
            else:
                reply = client.responses.create(**asked)
            assert reply.status == "completed"
            items += [item.model_dump(warnings=False) for item in reply.output]
            calls = [item for item in reply.output if item.type == "function_call"]
            assert [c.arguments for c in calls] in ([ARGUMENTS, SECOND], [])
            items += [{"type": "function_call_output", "call_id": c.call_id, "output": "out"} for c in calls]
    assert reply.output_text == "ok"


def anthropic_client(lease: Lease) -> anthropic.Anthropic:
    """Sends the token as x-api-key."""
    base_url = lease.base_url.removesuffix("/openai/v1") + "/anthropic"
    return anthropic.Anthropic(base_url=base_url, api_key=lease.agent_token)


def messages(lease: Lease, stream: bool) -> None:
    client = anthropic_client(lease)
    tools: Any = [{"name": "bash", "description": "runs", "input_schema": SCHEMA}]
    history: list[Any] = []
    for question in ("look", "again"):
        history.append({"role": "user", "content": question})
        for _ in range(2):
            asked: Any = {"model": "m", "max_tokens": 100, "messages": history, "tools": tools, "system": "be brief"}
            if stream:
                with client.messages.stream(**asked) as events:
                    deltas = [e.partial_json for e in events if e.type == "input_json"]
                    reply = events.get_final_message()
                assert deltas in ([ARGUMENTS, SECOND], [])
            else:
                reply = client.messages.create(**asked)
            history.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in reply.content]})
            calls = [b for b in reply.content if b.type == "tool_use"]
            if calls:
                assert reply.stop_reason == "tool_use"
                assert calls[0].input == {"cmd": "ls  -la", "n": 1, "deep": {"b": [True, None], "a": "é"}}
                results = [{"type": "tool_result", "tool_use_id": c.id, "content": "out"} for c in calls]
                history.append({"role": "user", "content": results})
    assert reply.content[0].text == "ok"  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("talk", [chat, responses, messages])
def test_a_conversation_merges_into_one_row(
    gateway: GatewayProcess, engine: EngineServer, talk: Callable[[Lease, bool], None], stream: bool
) -> None:
    engine.engine.behaviour = two_tools
    lease = gateway.lease()
    talk(lease, stream)
    calls = gateway.client.calls(lease.rollout.rollout_id)
    assert [c.trainable for c in calls] == [True] * 4
    rows = merge(calls)
    assert len(rows) == 1
    assert rows[0].trained_tokens == sum(len(c.response_ids) for c in calls)
    assert calls[0].response_ids[:-1].tobytes() == calls[2].response_ids[:-1].tobytes()


@pytest.mark.parametrize("talk", [chat, responses, messages])
def test_g2_what_is_recorded_does_not_depend_on_streaming(
    gateway: GatewayProcess, engine: EngineServer, talk: Callable[[Lease, bool], None]
) -> None:
    engine.engine.behaviour = two_tools
    recorded = []
    for stream in (False, True):
        lease = gateway.lease()
        talk(lease, stream)
        calls = gateway.client.calls(lease.rollout.rollout_id)
        ids = [(c.prompt_ids.tolist(), c.response_ids.tolist(), c.logprobs.tolist()) for c in calls]
        recorded.append((ids, [(c.request, c.response, c.sampling) for c in calls]))
    assert recorded[0] == recorded[1]
