"""A token-id engine that answers like a vLLM server, for tests and benchmarks: real HTTP, no model.

    python -m swe_lightning.gateway.fakes --port 9000 --latency-s 0.05

One byte of text is one token. A conversation is rendered append-only, reasoning and tool calls included, so a turn's
prompt begins with the prompt and answer of the turn before if (and only if) the client's history says what the engine
said. `behaviour` replaces single answers in tests; it never pretends to be a policy.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

START, END = 256, 257
ANSWER = "ok"
Answer = tuple[int, bytes, dict[str, str]]


def render(messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    """Prompt ids of a conversation, the opening of the next turn included."""
    ids: list[int] = [START, *f"tools:{orjson.dumps(tools).decode()}".encode(), END] if tools else []
    for message in messages:
        ids += [START, *f"{message['role']}:{said(message)}".encode(errors="replace"), END]
    return [*ids, START, *b"assistant:"]


def said(message: dict[str, Any]) -> str:
    """What a model writes to say `message`."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    calls = "".join(
        f"<tool>{c['function']['name']}{c['function']['arguments']}" for c in message.get("tool_calls") or []
    )
    thoughts = message.get("reasoning_content") or message.get("reasoning") or ""
    return (f"<think>{thoughts}</think>" if thoughts else "") + content + calls


def chat_reply(body: dict[str, Any], text: str = ANSWER, **message: Any) -> dict[str, Any]:
    """A reply in vLLM's layout with ids and log-probs."""
    prompt = render(body["messages"], body.get("tools"))
    sampled = [*said({"content": text, **message}).encode(errors="replace"), END]
    content = [{"token": chr(i), "logprob": -0.5, "bytes": [i], "top_logprobs": []} for i in sampled]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "tool_calls": [], **message},
        "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
        "stop_reason": None,
        "token_ids": sampled,
        "logprobs": {"content": content},
    }
    return _envelope("chat.completion", body, prompt, sampled) | {"prompt_token_ids": prompt, "choices": [choice]}


def completion_reply(body: dict[str, Any], text: str = ANSWER) -> dict[str, Any]:
    prompt = body["prompt"] if isinstance(body["prompt"], list) else list(body["prompt"].encode(errors="replace"))
    sampled = [*text.encode(), END]
    logprobs = {"tokens": [chr(i) for i in sampled], "token_logprobs": [-0.5] * len(sampled)}
    choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": logprobs}
    choice |= {"prompt_token_ids": prompt, "token_ids": sampled}
    return _envelope("text_completion", body, prompt, sampled) | {"choices": [choice]}


def _envelope(kind: str, body: dict[str, Any], prompt: list[int], sampled: list[int]) -> dict[str, Any]:
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)}
    usage["total_tokens"] = len(prompt) + len(sampled)
    return {"id": "cmpl-1", "object": kind, "created": 1, "model": body.get("model", "policy"), "usage": usage}


class FakeEngine:
    """ASGI application. `behaviour(path, body)` may return an Answer, or None for the usual one."""

    def __init__(self, latency_s: float = 0.0) -> None:
        self.latency_s = latency_s
        self.health = 200
        self.behaviour: Callable[[str, dict[str, Any]], Answer | None] | None = None
        self.headers: dict[str, str] = {}
        self.seen: list[dict[str, Any]] = []
        self.cancelled = 0
        self.active = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await _lifespan(receive, send)
        body = orjson.loads(await _read(receive) or b"{}")
        if scope["path"] == "/health":
            return await _answer_with(send, self.health, b"{}", {})
        self.seen.append(body)
        self.active += 1
        try:
            if self.latency_s and await _left_within(receive, self.latency_s):
                self.cancelled += 1
                return
        finally:
            self.active -= 1
        await _answer_with(send, *self._answer(scope["path"], body))

    def _answer(self, path: str, body: dict[str, Any]) -> Answer:
        special = self.behaviour(path, body) if self.behaviour else None
        if special is not None:
            return special
        try:
            return 200, orjson.dumps(_usual(path, body)), self.headers
        except (KeyError, TypeError, AttributeError) as error:
            return 400, orjson.dumps({"error": {"message": f"cannot read the request: {error!r}"}}), {}


def _usual(path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path == "/tokenize":
        return {"count": len(render(body["messages"], body.get("tools")))}
    return chat_reply(body) if path.endswith("chat/completions") else completion_reply(body)


async def _answer_with(send: Any, status: int, data: bytes, headers: dict[str, str]) -> None:
    sent = [(k.encode(), v.encode()) for k, v in ({"content-type": "application/json"} | headers).items()]
    sent.append((b"content-length", str(len(data)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": data})


async def _read(receive: Callable[[], Awaitable[dict[str, Any]]]) -> bytes:
    data = b""
    while True:
        message = await receive()
        data += message.get("body", b"")
        if not message.get("more_body"):
            return data


async def _left_within(receive: Callable[[], Awaitable[dict[str, Any]]], seconds: float) -> bool:
    """Whether the client disconnects within that time."""
    try:
        message = await asyncio.wait_for(receive(), seconds)
        return message["type"] == "http.disconnect"
    except TimeoutError:
        return False


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description="Serve the token-id engine.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--latency-s", type=float, default=0.0)
    options = parser.parse_args()
    engine: Any = FakeEngine(options.latency_s)
    uvicorn.run(engine, port=options.port, access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
