"""OpenAI responses: items in, items out, over the engine's chat/completions.

The items of one model turn (reasoning, message, function calls) become one chat message again when the client replays
them. A reasoning item carries field and text in `encrypted_content` too, because some clients replay nothing else of
it. The gateway keeps no conversation for the client: `previous_response_id` and the like are refused, and so are tools
that only OpenAI can run.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from typing import Any

from swe_lightning.gateway.jsonio import dumps, loads
from swe_lightning.gateway.protocols import base
from swe_lightning.gateway.protocols.base import Adapter, Body, Spellings, items, refuse, require_type
from swe_lightning.gateway.protocols.chat import check_limits
from swe_lightning.gateway.recording import CHAT

_SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user", "metadata", "seed")
_NOT_HONOURED = ("reasoning", "truncation", "text", "max_tool_calls")
_STATEFUL = ("previous_response_id", "conversation", "prompt", "background")
_TEXTS = ("input_text", "output_text", "text")
_DONE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def translate(body: Body, _spellings: Spellings) -> tuple[Body, Body]:
    check_limits(body, "max_output_tokens")
    for name in _STATEFUL:
        if body.get(name) is not None and not (name == "background" and body[name] is False):
            refuse(f"{name} is not served: the gateway keeps no conversation; send all items as input")
    chat: Body = {k: body[k] for k in _SAME if k in body}
    chat["messages"] = _messages(body)
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    if require_type(body, "tools", list):
        chat["tools"] = [_tool(tool, f"tools.{i}") for i, tool in enumerate(items(body["tools"], "tools"))]
    chat |= _tool_choice(require_type(body, "tool_choice", str, dict))
    return chat, {k: body[k] for k in _NOT_HONOURED if body.get(k) is not None}


def _messages(body: Body) -> list[Body]:
    messages: list[Body] = []
    instructions = require_type(body, "instructions", str)
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = require_type(body, "input", str, list, optional=False)
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        refuse("input must not be empty")
    turn: Body | None = None  # the model's turn that the next item may belong to
    for i, item in enumerate(items(given, "input")):
        turn = _add(messages, turn, item, f"input.{i}")
    return messages


def _add(messages: list[Body], turn: Body | None, item: Body, where: str) -> Body | None:
    """Append what the item says; returns the model's turn if it is still open."""
    kind = item.get("type") or "message"
    if kind == "reasoning":
        field, text = _reasoning(item)
        if turn is None or turn["content"] is not None or "tool_calls" in turn:
            turn = _open(messages)
        if text:
            turn[field] = turn.get(field, "") + text
        return turn
    if kind == "function_call":
        names = [item.get(name) for name in ("call_id", "name", "arguments")]
        if not all(isinstance(name, str) for name in names):
            refuse(f"{where}: a function_call needs call_id, name and arguments as strings")
        turn = turn or _open(messages)
        turn.setdefault("tool_calls", []).append(base.tool_call(*[str(name) for name in names]))
        return turn
    if kind == "message" and item.get("role") == "assistant":
        if turn is None or turn["content"] is not None or "tool_calls" in turn:
            turn = _open(messages)
        turn["content"] = _text(item.get("content"), where)
        return turn
    if kind == "message":
        if item.get("role") not in ("user", "system", "developer"):
            refuse(f"{where}: role must be user, assistant, system or developer")
        role = "system" if item["role"] == "developer" else item["role"]
        messages.append({"role": role, "content": _content(item.get("content"), where)})
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            refuse(f"{where}: a function_call_output needs its call_id")
        output = _content(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
    else:
        refuse(f"{where}: an item of type {kind!r} cannot be given to this model")
    return None


def _open(messages: list[Body]) -> Body:
    messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _content(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    return base.content_of([_part(part, where) for part in items(content, f"{where}.content")])


def _text(content: Any, where: str) -> str:
    """What the model said: its text parts joined, as they were one text."""
    if isinstance(content, str):
        return content
    parts = [_part(part, where) for part in items(content, f"{where}.content")]
    if any(part["type"] != "text" for part in parts):
        refuse(f"{where}: the model's own turns hold text only")
    return "".join(part["text"] for part in parts)


def _part(part: Body, where: str) -> Body:
    if part.get("type") in _TEXTS:
        return base.text_part(part, where)
    if part.get("type") == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    refuse(f"{where}: a part of type {part.get('type')!r} cannot be given to this model (text and images can)")


def _reasoning(item: Body) -> tuple[str, str]:
    kept = item.get("encrypted_content")
    if isinstance(kept, str):
        try:
            field, text = loads(base64.b64decode(kept, validate=True))
            if field in base.REASONING and isinstance(text, str):
                return field, text
        except (ValueError, TypeError):
            pass  # another server's: what it says in the open counts
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return base.REASONING[0], "".join(text for text in texts if isinstance(text, str))


def _tool(tool: Body, where: str) -> Body:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        refuse(f"{where}: {tool.get('type')!r} is unknown to this model (only functions); switch it off in the harness")
    kept = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {k: tool[k] for k in kept if tool.get(k) is not None}}


def _tool_choice(choice: Any) -> Body:
    if choice is None:
        return {}
    if choice in ("auto", "none", "required"):
        return {"tool_choice": choice}
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"tool_choice": {"type": "function", "function": {"name": choice["name"]}}}
    refuse("tool_choice must be auto, none, required or a function")


def answer(reply: Body, asked: Body) -> Body:
    choice, message = reply["choices"][0], base.message_of(reply)
    reply_id = str(reply.get("id") or "reply")
    missing = _DONE.get(str(choice.get("finish_reason")))
    prompt, sampled = base.usage_of(reply)
    created = reply.get("created")
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": created if isinstance(created, int) else int(time.time()),
        "status": "incomplete" if missing else "completed",
        "incomplete_details": {"reason": missing} if missing else None,
        "error": None,
        "model": asked.get("model") or reply.get("model") or "",
        "instructions": asked.get("instructions"),
        "output": list(_output(message, reply_id)),
        "parallel_tool_calls": asked.get("parallel_tool_calls", True) is not False,
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "metadata": asked.get("metadata") or {},
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def _output(message: Body, reply_id: str) -> Iterator[Body]:
    field, thoughts = base.reasoning_of(message)
    if thoughts:
        kept = base64.b64encode(dumps([field, thoughts])).decode()
        content = [{"type": "reasoning_text", "text": thoughts}]
        yield {
            "id": f"rs_{reply_id}",
            "type": "reasoning",
            "summary": [],
            "content": content,
            "encrypted_content": kept,
            "status": "completed",
        }
    text = base.text_of(message)
    calls = base.calls_of(message, reply_id)
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        yield {
            "id": f"msg_{reply_id}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }
    for i, (call_id, name, written) in enumerate(calls):
        item = {"id": f"fc_{reply_id}_{i}", "type": "function_call", "call_id": call_id, "name": name}
        yield item | {"arguments": written, "status": "completed"}


def events(reply: Body, asked: Body) -> bytes:
    numbered = (event | {"sequence_number": i} for i, event in enumerate(_events(answer(reply, asked))))
    return base.named_events(numbered)


def _events(shown: Body) -> Iterator[Body]:
    started = shown | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for index, item in enumerate(shown["output"]):
        yield from _item_events(index, item)
    yield {"type": f"response.{shown['status']}", "response": shown}


def _item_events(index: int, item: Body) -> Iterator[Body]:
    at: Body = {"output_index": index, "item_id": item["id"]}
    call = item["type"] == "function_call"
    empty: Body = {"arguments": ""} if call else {"content": []}
    opened = item | {"status": "in_progress"} | empty
    yield {"type": "response.output_item.added", "output_index": index, "item": opened}
    if call:
        kind = "response.function_call_arguments"
        yield {"type": f"{kind}.delta", **at, "delta": item["arguments"]}
        yield {"type": f"{kind}.done", **at, "name": item["name"], "arguments": item["arguments"]}
    else:
        for i, part in enumerate(item["content"]):
            yield from _part_events(at | {"content_index": i}, part)
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _part_events(at: Body, part: Body) -> Iterator[Body]:
    kind = "response.output_text" if part["type"] == "output_text" else "response.reasoning_text"
    extra: Body = {"logprobs": []} if part["type"] == "output_text" else {}
    yield {"type": "response.content_part.added", **at, "part": part | {"text": ""}}
    yield {"type": f"{kind}.delta", **at, "delta": part["text"], **extra}
    yield {"type": f"{kind}.done", **at, "text": part["text"], **extra}
    yield {"type": "response.content_part.done", **at, "part": part}


ADAPTER = Adapter("responses", CHAT, translate, answer, events)
