"""The wire format of the model servers: OpenAI requests in, vLLM's reply layout out. Pure functions on dictionaries.

Refuses, with an OpenAI error body, whatever would silently change the distribution (penalties, min_p, logit_bias) or
that no caller here needs (streaming, alternatives per token).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class RequestError(Exception):
    """A request that is answered with an error body: HTTP `status` and a typed `code`."""

    def __init__(self, status: int, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.status, self.code, self.details = status, code, details

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code, **self.details}}


@dataclass(slots=True)
class Options:
    """What a request asks for beside its prompt."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    n: int
    logprobs: bool
    return_token_ids: bool
    user: str | None


@dataclass(slots=True)
class Sample:
    """One sampled continuation. `ids` and `logprobs` are aligned; `text` leaves special tokens out."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    finish_reason: str


_NEUTRAL = {
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "length_penalty": 1,
    "stream": False,
    "echo": False,
    "best_of": 1,
    "top_logprobs": 0,
    "use_beam_search": False,
}


def parse_options(body: dict[str, Any], *, chat: bool) -> Options:
    for key, neutral in _NEUTRAL.items():
        if body.get(key) not in (None, neutral):
            raise RequestError(400, "unsupported_parameter", f"{key}={body[key]!r} is not supported by this server")
    if body.get("logit_bias"):
        raise RequestError(400, "unsupported_parameter", "logit_bias is not supported by this server")
    stop = body.get("stop") or []
    logprobs = body.get("logprobs")
    if chat:
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        wants_logprobs = bool(logprobs)
    else:
        limit = body.get("max_tokens", 16)
        wants_logprobs = logprobs is not None and logprobs is not False
        if wants_logprobs and int(logprobs or 0) > 1:
            raise RequestError(400, "unsupported_parameter", "logprobs > 1 (alternatives) is not supported")
    return Options(
        max_tokens=_number(body, "max_tokens", limit, int, 1, None),
        temperature=_number(body, "temperature", body.get("temperature"), float, 0.0, None, default=1.0),
        top_p=_number(body, "top_p", body.get("top_p"), float, 0.0, 1.0, default=1.0),
        top_k=_number(body, "top_k", body.get("top_k"), int, -1, None, default=-1),
        seed=_number(body, "seed", body.get("seed"), int, None, None),
        stop=[stop] if isinstance(stop, str) else list(stop),
        stop_token_ids=list(body.get("stop_token_ids") or []),
        ignore_eos=bool(body.get("ignore_eos")),
        n=_number(body, "n", body.get("n"), int, 1, 64, default=1),
        logprobs=wants_logprobs,
        return_token_ids=bool(body.get("return_token_ids")),
        user=body.get("user"),
    )


def _number(
    body: dict[str, Any], name: str, value: Any, kind: type, low: float | None, high: float | None, default: Any = None
) -> Any:
    if value is None:
        return default
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and kind(value) == value
    if not valid or (low is not None and value < low) or (high is not None and value > high):
        raise RequestError(400, "invalid_parameter", f"{name}={value!r} is out of range")
    return kind(value)


def parse_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages with text parts joined, everything else as the client sent it."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "invalid_messages", "messages must be a non-empty list")
    parsed = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(400, "invalid_messages", "each message needs a role")
        content = message.get("content")
        if isinstance(content, list):
            if any(part.get("type") != "text" for part in content):
                raise RequestError(400, "invalid_messages", "only text parts are supported")
            content = "".join(part["text"] for part in content)
        parsed.append({**message, "content": "" if content is None else content})
    return parsed


def room(prompt_tokens: int, max_context: int, max_tokens: int | None) -> int:
    """Tokens that may be sampled; RequestError where the prompt leaves none."""
    left = max_context - prompt_tokens
    if left < 1:
        raise RequestError(
            400,
            "context_length_exceeded",
            f"the prompt has {prompt_tokens} tokens and the context holds {max_context}: no room to answer",
            prompt_tokens=prompt_tokens,
            max_context=max_context,
        )
    return left if max_tokens is None else min(left, max_tokens)


def chat_reply(
    model: str, prompt_ids: Sequence[int], samples: Sequence[Sample], options: Options, token_text: Callable[[int], str]
) -> dict[str, Any]:
    choices = []
    for index, s in enumerate(samples):
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": s.text},
            "logprobs": {"content": _content(s, token_text)} if options.logprobs else None,
            "finish_reason": s.finish_reason,
            "stop_reason": None,
        }
        if options.return_token_ids:
            choice["token_ids"] = s.ids
        choices.append(choice)
    reply = _envelope("chatcmpl", "chat.completion", model, prompt_ids, samples, choices)
    if options.return_token_ids:
        reply["prompt_token_ids"] = prompt_ids
    return reply


def completion_reply(
    model: str, prompt_ids: Sequence[int], samples: Sequence[Sample], options: Options, token_text: Callable[[int], str]
) -> dict[str, Any]:
    choices = []
    for index, s in enumerate(samples):
        choice: dict[str, Any] = {"index": index, "text": s.text, "logprobs": None, "finish_reason": s.finish_reason}
        if options.logprobs:
            choice["logprobs"] = {
                "tokens": [token_text(i) for i in s.ids],
                "token_logprobs": s.logprobs,
                "top_logprobs": None,
                "text_offset": [],
            }
        if options.return_token_ids:
            choice |= {"prompt_token_ids": prompt_ids, "token_ids": s.ids}
        choices.append(choice)
    return _envelope("cmpl", "text_completion", model, prompt_ids, samples, choices)


def _content(s: Sample, token_text: Callable[[int], str]) -> list[dict[str, Any]]:
    return [
        {"token": token_text(i), "logprob": value, "bytes": None, "top_logprobs": []}
        for i, value in zip(s.ids, s.logprobs, strict=True)
    ]


def _envelope(
    prefix: str, kind: str, model: str, prompt_ids: Sequence[int], samples: Sequence[Sample], choices: list[Any]
) -> dict[str, Any]:
    sampled = sum(len(s.ids) for s in samples)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": sampled,
            "total_tokens": len(prompt_ids) + sampled,
        },
    }
