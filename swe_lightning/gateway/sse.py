"""A whole reply as the server-sent events a streaming client expects.

The upstream call is never streamed: only a whole reply keeps ids, log-probs and text together. Text and tool arguments
arrive in one delta, byte for byte what the engine said.
"""

from __future__ import annotations

from typing import Any

from swe_lightning.gateway.jsonio import dumps
from swe_lightning.gateway.recording import CHAT


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
