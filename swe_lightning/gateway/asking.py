"""One question to the engine: clamped to its context, sent, and answered with one choice or a typed Problem.

An error of the engine is asked for once: whatever a repetition cannot cure says so to the client. Only a max_tokens
that does not fit is corrected here, by the engine's own numbers, and sent again.
"""

from __future__ import annotations

from typing import Any

from swe_lightning.gateway import recording
from swe_lightning.gateway.problems import Problem
from swe_lightning.gateway.recording import Sent
from swe_lightning.gateway.upstream import Reply, Upstreams


async def ask(upstreams: Upstreams, rollout_id: str, route: str, sent: Sent) -> Reply:
    """A 200 reply with one readable choice, or a Problem. A max_tokens that does not fit is clamped, once."""
    endpoint = upstreams.endpoint_of(rollout_id)
    prompt = sent.body.get("prompt")
    if endpoint.max_context is not None and isinstance(prompt, list):
        _clamp(sent, endpoint.max_context - len(prompt), f"the prompt has {len(prompt)} tokens")
    elif endpoint.max_context is not None and sent.body.get("max_tokens", 0) >= endpoint.max_context:
        _clamp(sent, endpoint.max_context - 1, "")
    reply = await upstreams.post(rollout_id, route, sent.body)
    if reply.status == 400:
        left = recording.space_left(_message(reply))
        if left is not None and 0 < left < sent.body.get("max_tokens", 0):
            _clamp(sent, left, "")
            reply = await upstreams.post(rollout_id, route, sent.body)
    if reply.status != 200:
        raise refusal(reply, sent.body)
    choices = reply.body.get("choices") if isinstance(reply.body, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        start = reply.text[:200] or str(reply.body)[:200]
        raise Problem(502, "upstream_error", f"{reply.endpoint.url} answered 200 without one choice: {start}")
    return reply


async def count(upstreams: Upstreams, rollout_id: str, chat: dict[str, Any]) -> int:
    """Prompt tokens of a chat request by the engine's own tokenizer (vLLM's /tokenize); nothing is sampled."""
    asked = {k: chat[k] for k in ("messages", "tools") if k in chat} | {"add_generation_prompt": True}
    reply = await upstreams.post(rollout_id, "/tokenize", asked)
    if reply.status in (404, 405):
        message = f"{reply.endpoint.url} has no /tokenize, so prompts cannot be counted without sampling"
        raise Problem(501, "count_unavailable", message)
    if reply.status != 200:
        raise refusal(reply, chat)
    counted = reply.body.get("count") if isinstance(reply.body, dict) else None
    if type(counted) is not int:
        raise Problem(502, "upstream_error", f"{reply.endpoint.url} answered /tokenize without a count")
    return counted


def refusal(reply: Reply, body: dict[str, Any]) -> Problem:
    """The client's version of an engine's error: typed, once, never to be retried by the client."""
    message = _message(reply)
    if reply.status in (400, 413, 422):
        error = reply.body.get("error") if isinstance(reply.body, dict) else None
        code = error.get("code") if isinstance(error, dict) and isinstance(error.get("code"), str) else None
        if recording.is_overflow(code, message):
            return Problem(400, "context_overflow", message)
        if recording.broken_history(body):
            return Problem(400, "bad_history", message)
        return Problem(400, "upstream_refused", f"the model server refused the request ({reply.status}): {message}")
    return Problem(502, "upstream_error", f"{reply.endpoint.url} answered {reply.status}: {message[:500]}")


def _clamp(sent: Sent, space: int, why: str) -> None:
    if space <= 0:
        raise Problem(400, "context_overflow", f"{why}, which leaves no space in the model's context")
    if sent.body.get("max_tokens", space) >= space:
        sent.body["max_tokens"] = sent.sampling["max_tokens"] = space


def _message(reply: Reply) -> str:
    """The engine's own words about an error."""
    body = reply.body
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            return str(error.get("message") or error.get("detail") or error)
        return str(error)
    return reply.text or str(body)
