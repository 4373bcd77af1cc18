"""What an adapter between a client's protocol and chat/completions consists of, and what adapters share.

Translation is a pure function of the client's body, so that a history replayed is a history repeated: the prompt of a
turn is the same text however often it is sent. What a protocol cannot carry (the model's own spelling of tool
arguments, the name of the engine's reasoning field) is handed back from where it was kept, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from swe_lightning.gateway.jsonio import dumps
from swe_lightning.gateway.problems import Problem

Body = dict[str, Any]
Spellings = Mapping[str, list[str]]
"""Texts of tool arguments as the model wrote them, by tool call id."""
REASONING = ("reasoning_content", "reasoning")
"""Fields in which engines report what the model thought, older name first."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One way of asking the model."""

    name: str
    """How the record calls it."""
    upstream: str
    """The engine's route this becomes."""
    translate: Callable[[Body, Spellings], tuple[Body, Body]]
    """(client's body, spellings) -> (engine's request, what of the client's is not honoured); Problem 400."""
    answer: Callable[[Body, Body], Body]
    """(engine's reply, client's body) -> the client's answer."""
    events: Callable[[Body, Body], bytes]
    """(engine's reply, client's body) -> the same answer as server-sent events."""
    spells_arguments: bool = True
    """False where tool arguments travel as JSON values, so that their text has to be kept here."""


def refuse(message: str) -> NoReturn:
    raise Problem(400, "bad_request", message)


def require_type(body: Mapping[str, Any], name: str, *kinds: type, optional: bool = True) -> Any:
    """The field's value if it has one of those types; Problem 400 naming the field otherwise."""
    value = body.get(name)
    if value is None and optional:
        return None
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
        return value
    words = {str: "a string", list: "a list", dict: "an object", int: "an integer", bool: "true or false"}
    refuse(f"{name} must be {' or '.join(words[kind] for kind in kinds)}")


def items(value: Any, where: str) -> list[Body]:
    """`value` as a list of objects, or Problem 400."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        refuse(f"{where} must be a list of objects")
    return value


def content_of(parts: list[Body]) -> Any:
    """Content of a chat message: one text as a string, which every chat template takes; else the list of parts."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0].get("type") == "text":
        return parts[0]["text"]
    return parts


def text_part(block: Body, where: str) -> Body:
    text = block.get("text")
    if not isinstance(text, str):
        refuse(f"{where}: a text block needs its text as a string")
    return {"type": "text", "text": text}


def message_of(reply: Body) -> Body:
    message = reply["choices"][0].get("message")
    return message if isinstance(message, dict) else {}


def text_of(message: Body) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def reasoning_of(message: Body) -> tuple[str, str]:
    """(field, text) of what the engine reported as reasoning; empty text if it reported none."""
    for field in REASONING:
        if isinstance(message.get(field), str) and message[field]:
            return field, message[field]
    return "", ""


def calls_of(message: Body, fallback_id: str) -> list[tuple[str, str, str]]:
    """(id, function name, arguments as written) of each tool call. An engine that gives no id gets a steady one."""
    found = []
    calls = message.get("tool_calls")
    for i, call in enumerate(calls if isinstance(calls, list) else []):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = function.get("arguments")
            written = arguments if isinstance(arguments, str) else dumps(arguments or {}).decode()
            found.append((str(call.get("id") or f"call_{fallback_id}_{i}"), str(function.get("name") or ""), written))
    return found


def tool_call(call_id: str, name: str, arguments: str) -> Body:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(text: str | None, reasoning: tuple[str, str], calls: list[Body]) -> Body:
    """The chat message of one model turn, in the shape in which engines report it."""
    message: Body = {"role": "assistant", "content": text}
    if reasoning[1]:
        message[reasoning[0]] = reasoning[1]
    if calls:
        message["tool_calls"] = calls
    return message


def usage_of(reply: Body) -> tuple[int, int]:
    """(prompt tokens, sampled tokens) by the engine's count."""
    usage = reply.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    prompt, sampled = counts.get("prompt_tokens"), counts.get("completion_tokens")
    return prompt if isinstance(prompt, int) else 0, sampled if isinstance(sampled, int) else 0


def named_events(events: Iterable[Body]) -> bytes:
    """Server-sent events that repeat their `type` as the event's name."""
    return b"".join(b"event: " + event["type"].encode() + b"\ndata: " + dumps(event) + b"\n\n" for event in events)
