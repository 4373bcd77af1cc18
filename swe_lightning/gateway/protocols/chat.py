"""OpenAI chat/completions and completions: the engine's own protocol, passed through.

Messages, tools and whatever else a client sends reach the engine as they are, except for what recording.py fixes; the
reply goes back byte for byte, less what the client did not ask for. A stream is the whole reply in one delta.
"""

from __future__ import annotations

from typing import Any

from swe_lightning.gateway import recording
from swe_lightning.gateway.jsonio import dumps
from swe_lightning.gateway.protocols.base import Adapter, Body, Spellings, items, refuse, require_type
from swe_lightning.gateway.recording import CHAT, COMPLETION


def check_request(body: Body, protocol: str) -> Body:
    """The request if we can serve it, or Problem 400."""
    if protocol == CHAT:
        if not items(body.get("messages"), "messages"):
            refuse("messages must not be empty")
    elif not isinstance(body.get("prompt"), str | list) or not body["prompt"]:
        refuse("prompt must be a string or a list of token ids")
    elif isinstance(body["prompt"], list) and not all(_is_token(token) for token in body["prompt"]):
        refuse("one prompt per request: a string or a list of token ids")
    if body.get("n") not in (None, 1) or isinstance(body.get("n"), bool):
        refuse("n must be 1: one call is one sampled answer")
    check_limits(body, "max_tokens", "max_completion_tokens")
    return body


def check_limits(body: Body, *names: str) -> None:
    """The fields of every protocol whose type we rely on."""
    require_type(body, "stream", bool)
    require_type(body, "model", str)
    for name in names:
        value = body.get(name)
        if value is not None and (type(value) is not int or not 1 <= value < 2**31):
            refuse(f"{name} must be a positive integer")


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _adapter(name: str, route: str) -> Adapter:
    def translate(body: Body, _spellings: Spellings) -> tuple[Body, Body]:
        return check_request(body, route), {}

    def answer(reply: Body, asked: Body) -> Body:
        return recording.strip_reply(reply, asked, route)

    def stream(reply: Body, asked: Body) -> bytes:
        return events(answer(reply, asked), asked, route)

    return Adapter(name, route, translate, answer, stream)


def events(reply: dict[str, Any], asked: dict[str, Any], protocol: str) -> bytes:
    """The body of a text/event-stream response that says what `reply` says."""
    options = asked.get("stream_options")
    wants_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    base = {k: v for k, v in reply.items() if k not in ("choices", "usage", "object")}
    base["object"] = "chat.completion.chunk" if protocol == CHAT else "text_completion"
    chunks = [
        base | {"choices": [part]}
        for choice in reply["choices"]
        for part in (_chat_parts(choice) if protocol == CHAT else [choice])
    ]
    if wants_usage:
        chunks = [chunk | {"usage": None} for chunk in chunks]
        chunks.append(base | {"choices": [], "usage": reply.get("usage")})
    return b"".join(b"data: " + dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def _chat_parts(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """The message in one delta, then the finish reason."""
    message = choice.get("message") or {}
    delta = {k: v for k, v in message.items() if v is not None or k == "content"}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    else:
        delta.pop("tool_calls", None)
    rest = {k: v for k, v in choice.items() if k not in ("message", "finish_reason", "logprobs")}
    first = rest | {"delta": delta, "logprobs": choice.get("logprobs"), "finish_reason": None}
    last = {"index": choice.get("index", 0), "delta": {}, "finish_reason": choice.get("finish_reason")}
    return [first, last]


CHAT_ADAPTER, COMPLETION_ADAPTER = _adapter("chat", CHAT), _adapter("completions", COMPLETION)
