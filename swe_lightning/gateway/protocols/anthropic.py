"""Anthropic messages: blocks in, blocks out, over the engine's chat/completions.

A turn of the model becomes thinking, text and tool_use blocks in that order, and these become the same chat message
again when the client replays them. Tool input travels as a JSON value here, so the model's own spelling comes from
`spellings`; arguments that are no JSON object are shown as {"INVALID_JSON": text}. A thinking block's signature names
the engine's field it came from. Tools that only Anthropic can run are refused: this model was never told of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from swe_lightning.gateway.jsonio import dumps, loads
from swe_lightning.gateway.protocols import base
from swe_lightning.gateway.protocols.base import Adapter, Body, Spellings, items, refuse, require_type, text_part
from swe_lightning.gateway.protocols.chat import check_limits
from swe_lightning.gateway.recording import CHAT

# Claude Code opens its system prompt with a line that differs on every request: an account's header, not prompt.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*(?:\n|$)")
_INVALID = "INVALID_JSON"
_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SAME = ("model", "temperature", "top_p", "top_k", "stream")
_NOT_HONOURED = ("thinking", "output_config", "context_management", "mcp_servers", "container")


def translate(body: Body, spellings: Spellings) -> tuple[Body, Body]:
    check_limits(body, "max_tokens")
    turns = items(body.get("messages"), "messages")
    if not turns:
        refuse("messages must not be empty")
    chat: Body = {k: body[k] for k in _SAME if k in body}
    messages = _system(body.get("system"))
    for i, turn in enumerate(turns):
        messages += _turn(turn, f"messages.{i}", spellings)
    if messages[-1]["role"] == "assistant":
        refuse("the last message is the assistant's: this model begins its answers itself (no prefill)")
    chat["messages"] = messages
    if body.get("max_tokens") is not None:
        chat["max_tokens"] = body["max_tokens"]
    if require_type(body, "stop_sequences", list):
        chat["stop"] = body["stop_sequences"]
    if require_type(body, "tools", list):
        chat["tools"] = [_tool(tool, f"tools.{i}") for i, tool in enumerate(items(body["tools"], "tools"))]
    chat |= _tool_choice(require_type(body, "tool_choice", dict))
    return chat, {k: body[k] for k in _NOT_HONOURED if body.get(k) is not None}


def _system(system: Any) -> list[Body]:
    if system is None:
        return []
    if isinstance(system, str):
        parts = [{"type": "text", "text": system}]
    else:
        parts = [text_part(block, "system") for block in items(system, "system")]
    parts = [
        part | {"text": _BILLING.sub("", part["text"]) if _BILLING.match(part["text"]) else part["text"]}
        for part in parts
    ]
    parts = [part for part in parts if part["text"]]
    return [{"role": "system", "content": base.content_of(parts)}] if parts else []


def _turn(turn: Body, where: str, spellings: Spellings) -> list[Body]:
    role, content = turn.get("role"), turn.get("content")
    if role not in ("user", "assistant", "system"):
        refuse(f"{where}: role must be user or assistant")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else items(content, f"{where}.content")
    if role == "assistant":
        return [_assistant(blocks, where, spellings)]
    if role == "system":
        return [{"role": role, "content": base.content_of([text_part(block, where) for block in blocks])}]
    return _user(blocks, where)


def _assistant(blocks: list[Body], where: str, spellings: Spellings) -> Body:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Body] = []
    field = base.REASONING[0]
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(text_part(block, where)["text"])
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
            field = block["signature"] if block.get("signature") in base.REASONING else field
        elif kind == "tool_use" and isinstance(block.get("id"), str) and isinstance(block.get("name"), str):
            arguments = _arguments(block.get("input"), spellings.get(block["id"], []), where)
            calls.append(base.tool_call(block["id"], block["name"], arguments))
        elif kind != "redacted_thinking":  # it holds nothing that this model wrote
            refuse(f"{where}: a block of type {kind!r} cannot be part of this model's turn")
    text = "".join(texts)
    return base.assistant(text if text or not calls else None, (field, "".join(thoughts)), calls)


def _user(blocks: list[Body], where: str) -> list[Body]:
    """Tool results become messages of their own; what stands between them stays one user message, in order."""
    messages: list[Body] = []
    parts: list[Body] = []

    def close() -> None:
        if parts:
            messages.append({"role": "user", "content": base.content_of(parts[:])})
            parts.clear()

    for block in blocks:
        if block.get("type") == "tool_result":
            close()
            messages.append(_result(block, where))
        else:
            parts.append(_part(block, where))
    close()
    return messages or [{"role": "user", "content": ""}]


def _result(block: Body, where: str) -> Body:
    if not isinstance(block.get("tool_use_id"), str):
        refuse(f"{where}: a tool_result needs its tool_use_id")
    content = block.get("content")
    if content is None or isinstance(content, str):
        shown: Any = content or ""
    else:
        shown = base.content_of([_part(part, where) for part in items(content, f"{where}.content")])
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": shown}


def _part(block: Body, where: str) -> Body:
    if block.get("type") == "text":
        return text_part(block, where)
    source = block.get("source")
    if block.get("type") == "image" and isinstance(source, dict):
        if source.get("type") == "base64":
            return _image(f"data:{source.get('media_type')};base64,{source.get('data')}")
        if source.get("type") == "url":
            return _image(str(source.get("url")))
    refuse(
        f"{where}: a block of type {block.get('type')!r} cannot be given to this model (text, image, tool_result can)"
    )


def _image(url: str) -> Body:
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(tool: Body, where: str) -> Body:
    name, kind = tool.get("name"), tool.get("type")
    if kind not in (None, "custom"):
        message = f"{where}: {kind!r} is defined by Anthropic and unknown to this model; switch it off in the harness"
        refuse(message)
    if not isinstance(name, str) or not isinstance(tool.get("input_schema"), dict):
        refuse(f"{where}: a tool needs a name and an input_schema")
    function: Body = {"name": name, "parameters": tool["input_schema"]}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Body | None) -> Body:
    if choice is None:
        return {}
    kind, name = choice.get("type"), choice.get("name")
    if kind == "tool" and isinstance(name, str):
        made: Body = {"tool_choice": {"type": "function", "function": {"name": name}}}
    elif isinstance(kind, str) and kind in _CHOICES:
        made = {"tool_choice": _CHOICES[kind]}
    else:
        refuse("tool_choice.type must be auto, any, none, or tool with a name")
    if choice.get("disable_parallel_tool_use") is True:
        made["parallel_tool_calls"] = False
    return made


def _arguments(value: Any, spellings: list[str], where: str) -> str:
    """The text of a tool's input: as the model wrote it if that says the same, else as chat templates write JSON."""
    if value is not None and not isinstance(value, dict):
        refuse(f"{where}: the input of a tool_use must be an object")
    value = value or {}
    for written in reversed(spellings):
        if _same(tool_input(written), value):
            return written
    return json.dumps(value, ensure_ascii=False)


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON values; 1 and 1.0 are (JavaScript knows one number), 1 and true are not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def tool_input(written: str) -> Body:
    """Arguments as the JSON object that a tool_use block carries."""
    try:
        value = loads(written.encode(errors="surrogatepass")) if written.strip() else {}
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {_INVALID: written}


def answer(reply: Body, asked: Body) -> Body:
    choice, message = reply["choices"][0], base.message_of(reply)
    reply_id = str(reply.get("id") or "reply")
    blocks: list[Body] = []
    field, thoughts = base.reasoning_of(message)
    if thoughts:
        blocks.append({"type": "thinking", "thinking": thoughts, "signature": field})
    if base.text_of(message):
        blocks.append({"type": "text", "text": base.text_of(message)})
    for call_id, name, written in base.calls_of(message, reply_id):
        blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": tool_input(written)})
    stop, sequence = _stop(choice, asked, bool(message.get("tool_calls")))
    prompt, sampled = base.usage_of(reply)
    return {
        "id": reply_id,
        "type": "message",
        "role": "assistant",
        "model": asked.get("model") or reply.get("model") or "",
        "content": blocks,
        "stop_reason": stop,
        "stop_sequence": sequence,
        "usage": {"input_tokens": prompt, "output_tokens": sampled},
    }


def _stop(choice: Body, asked: Body, has_calls: bool) -> tuple[str, str | None]:
    finish, matched = choice.get("finish_reason"), choice.get("stop_reason")
    if finish == "stop" and isinstance(matched, str) and matched in (asked.get("stop_sequences") or []):
        return "stop_sequence", matched
    if finish == "stop" and has_calls:
        return "tool_use", None
    return _STOP.get(str(finish), "end_turn"), None


def events(reply: Body, asked: Body) -> bytes:
    shown = answer(reply, asked)
    written = {c[0]: c[2] for c in base.calls_of(base.message_of(reply), shown["id"])}
    return base.named_events(_events(shown, written))


def _events(shown: Body, written: dict[str, str]) -> Iterator[Body]:
    usage = shown["usage"]
    start = shown | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(shown["content"]):
        empty, deltas = _deltas(block, written)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {"stop_reason": shown["stop_reason"], "stop_sequence": shown["stop_sequence"]}
    yield {"type": "message_delta", "delta": ending, "usage": usage}
    yield {"type": "message_stop"}


def _deltas(block: Body, written: dict[str, str]) -> tuple[Body, list[Body]]:
    """The block as it opens, and what fills it."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        signed = {"type": "signature_delta", "signature": block["signature"]}
        empty = {"type": "thinking", "thinking": "", "signature": ""}
        return empty, [{"type": "thinking_delta", "thinking": block["thinking"]}, signed]
    text = written[block["id"]]
    if _INVALID in block["input"] or not text.strip():
        text = dumps(block["input"]).decode()
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]


ADAPTER = Adapter("messages", CHAT, translate, answer, events, spells_arguments=False)
