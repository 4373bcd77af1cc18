"""The hot path: one model call from the agent's request to the recorded, durable call and the answer.

A bare ASGI application without framework or body models, because every token of a run passes here. Order matters:
token, rollout state, body, gate, upstream, check, commit, answer. The client is answered only after its call is
committed; a client that disconnects cancels the upstream generation and leaves an `aborted` record.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from swe_lightning.gateway import recording, sse
from swe_lightning.gateway.gate import Gate
from swe_lightning.gateway.jsonio import dumps, loads
from swe_lightning.gateway.problems import Problem
from swe_lightning.gateway.store import Live, Store
from swe_lightning.gateway.tokens import Keyring, bearer, require
from swe_lightning.gateway.upstream import Reply, Upstreams
from swe_lightning.records import ModelCall, Untrainable

log = logging.getLogger("swel.gateway")
PREFIX = "/proxy/rollout/"
_FAILED = {"context_overflow": Untrainable.CONTEXT_OVERFLOW, "shutting_down": Untrainable.ABORTED}
_JSON = (b"content-type", b"application/json")
_SSE = (b"content-type", b"text/event-stream; charset=utf-8")


@dataclass(frozen=True, slots=True)
class Route:
    """What the path says."""

    rollout_id: str
    attempt: int
    mode: str
    protocol: str


@dataclass(slots=True)
class Request:
    """One call on its way. Its id is chosen on arrival, so that it is recorded once however it ends."""

    route: Route
    live: Live
    body: dict[str, Any]
    started: float
    call_id: str
    sampling: dict[str, Any] = field(default_factory=dict)


class Proxy:
    """ASGI application for /proxy/rollout/{id}/attempt/{n}/mode/{mode}/openai/v1/..."""

    def __init__(self, store: Store, gate: Gate, upstreams: Upstreams, keyring: Keyring, *, max_body: int) -> None:
        self.store, self.gate, self.upstreams, self.keyring = store, gate, upstreams, keyring
        self.max_body = max_body
        self.results: Counter[str] = Counter()
        """Calls by result: ok, an Untrainable reason, or a Problem's code."""
        self.seconds = 0.0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        started = time.time()
        try:
            route = parse_path(scope["path"])
            self._authorise(scope, route)
            live = await self._live(route)
            if scope["method"] != ("GET" if route.protocol == "models" else "POST"):
                raise Problem(405, "wrong_method", f"{route.protocol} is not served for {scope['method']}")
            if route.protocol == "models":
                return await _send(send, 200, _JSON, self._models(route.rollout_id))
            body = recording.check_request(_parse(await self._read(scope, receive)), route.protocol)
            request = Request(route, live, body, started, uuid.uuid4().hex)
            result = await _unless_gone(self._serve(request), receive)
            if result is None:
                self.results["aborted"] += 1
                return await self._record_failure(request, Untrainable.ABORTED, "the client disconnected")
            await _send(send, 200, *result)
        except Problem as problem:
            await self._refuse(send, problem)
        except Exception:
            log.exception("call failed inside the gateway")
            message = "the gateway failed on this call; its log has the traceback"
            await self._refuse(send, Problem(500, "internal_error", message))

    async def _refuse(self, send: Any, problem: Problem) -> None:
        self.results[problem.code] += 1
        if problem.late:
            with contextlib.suppress(Problem):  # a store that cannot count must not hide why the call is refused
                await self.store.writer.acall(self.store.count("late_calls"))
        headers = [(k.encode(), v.encode()) for k, v in problem.headers().items()]
        await _send(send, problem.status, *headers, problem.body())

    def _authorise(self, scope: dict[str, Any], route: Route) -> None:
        """OpenAI clients send Authorization, Anthropic clients x-api-key."""
        token = ""
        for name, value in scope["headers"]:
            if name == b"authorization":
                token = bearer(value.decode("latin-1"))
            elif name == b"x-api-key" and not token:
                token = value.decode("latin-1")
        require(self.keyring.verify(token), "agent", rollout_id=route.rollout_id, attempt=route.attempt)

    async def _live(self, route: Route) -> Live:
        live = self.store.cached_live(route.rollout_id, route.attempt)
        if live is None:
            live = await asyncio.to_thread(self.store.live, route.rollout_id, route.attempt)
        if live.mode != route.mode:
            raise Problem(403, "wrong_mode", f"rollout {route.rollout_id} runs in mode {live.mode}, not {route.mode}")
        return live

    async def _read(self, scope: dict[str, Any], receive: Any) -> bytes:
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Problem(400, "bad_request", "the client left before the body was complete")
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self.max_body:
                raise Problem(413, "body_too_large", f"the body is larger than {self.max_body} bytes")
            chunks.append(chunk)
            if not message.get("more_body"):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _models(self, rollout_id: str) -> bytes:
        endpoint = self.upstreams.endpoint_of(rollout_id)
        model = {"id": endpoint.name, "object": "model", "created": 0, "owned_by": "swe-lightning"}
        return dumps({"object": "list", "data": [model | {"max_model_len": endpoint.max_context}]})

    async def _serve(self, request: Request) -> tuple[Any, bytes]:
        """Content-type header and body of the answer, after the call is durable."""
        route, body = request.route, request.body
        sent = recording.prepare(body, route.protocol, route.mode, request.live.sampling)
        request.sampling = sent.sampling
        # Who asks is the rollout of the path, whatever the client says: scripted engines throw their dice by it.
        sent.body["user"] = route.rollout_id
        async with self.gate.admit(route.rollout_id):
            if self.store.cached_live(route.rollout_id, route.attempt) is None:  # it may have ended while we waited
                await asyncio.to_thread(self.store.live, route.rollout_id, route.attempt)
            try:
                reply = await self._ask(route, sent)
            except Problem as problem:
                reason = _FAILED.get(problem.code, Untrainable.UPSTREAM_ERROR)
                tries = int(problem.details.get("tries", 1))
                about = {"rollout": route.rollout_id, "attempt": route.attempt, "call": request.call_id}
                log.warning("model call failed", extra=about | {"code": problem.code, "tries": tries})
                log.debug("the model server said: %s", problem.message, extra=about)
                await self._record_failure(request, reason, problem.message, retries=max(0, tries - 1))
                raise
            call = _call(request, reply)
            await self.store.writer.acall(self.store.record_call(call))
        self.results[call.reason or "ok"] += 1
        self.seconds += call.ended_at - request.started
        shown = recording.strip_reply(reply.body, body, route.protocol)
        if body.get("stream"):
            return _SSE, sse.events(shown, body, route.protocol)
        return _JSON, dumps(shown)

    async def _ask(self, route: Route, sent: recording.Sent) -> Reply:
        """A 200 reply with one readable choice, or a Problem. A max_tokens that does not fit is clamped, once."""
        endpoint = self.upstreams.endpoint_of(route.rollout_id)
        prompt = sent.body.get("prompt")
        if endpoint.max_context is not None and isinstance(prompt, list):
            _clamp(sent, endpoint.max_context - len(prompt), f"the prompt has {len(prompt)} tokens")
        elif endpoint.max_context is not None and sent.body.get("max_tokens", 0) >= endpoint.max_context:
            _clamp(sent, endpoint.max_context - 1, "")
        reply = await self.upstreams.post(route.rollout_id, route.protocol, sent.body)
        if reply.status == 400:
            left = recording.space_left(_message(reply))
            if left is not None and 0 < left < sent.body.get("max_tokens", 0):
                _clamp(sent, left, "")
                reply = await self.upstreams.post(route.rollout_id, route.protocol, sent.body)
        if reply.status != 200:
            raise _refusal(reply, sent.body)
        choices = reply.body.get("choices") if isinstance(reply.body, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            start = reply.text[:200] or str(reply.body)[:200]
            raise Problem(502, "upstream_error", f"{reply.endpoint.url} answered 200 without one choice: {start}")
        return reply

    async def _record_failure(self, request: Request, reason: Untrainable, message: str, *, retries: int = 0) -> None:
        """A call that brought nothing to train on is still part of the history; never in the way of its own error."""
        call = _unanswered(request)
        call.response, call.reason, call.retries = {"error": message}, reason, retries
        try:
            await self.store.writer.acall(self.store.record_call(call, unless_known=True))
        except Problem as problem:
            log.info("a failed call was not recorded: %s", problem.message)


def _unanswered(request: Request) -> ModelCall:
    return ModelCall(
        rollout_id=request.route.rollout_id,
        call_id=request.call_id,
        attempt=request.route.attempt,
        request=request.body,
        sampling=request.sampling,
        started_at=request.started,
        ended_at=time.time(),
        trainable=False,
    )


def _call(request: Request, reply: Reply) -> ModelCall:
    """The record of an answered call."""
    recorded = recording.check_reply(reply.body, request.route.protocol, request.route.mode)
    call = _unanswered(request)
    call.prompt_ids, call.response_ids, call.logprobs = recorded.prompt_ids, recorded.response_ids, recorded.logprobs
    call.response, call.finish_reason = recording.stored_reply(reply.body), recorded.finish_reason
    call.version_start, call.version_end = reply.version_start, reply.version_end
    call.upstream, call.retries = reply.endpoint.url, reply.retries
    call.reason = recorded.reason
    if call.reason is None and reply.version_start != reply.version_end:
        call.reason = Untrainable.MIXED_WEIGHTS
    call.trainable = call.reason is None
    return call


_PATH = re.compile(r"/proxy/rollout/([^/]+)/attempt/([0-9]{1,6})/mode/(train|val)/openai/v1/(.+)")


def parse_path(path: str) -> Route:
    """Exactly /proxy/rollout/{id}/attempt/{n}/mode/{mode}/openai/v1/{protocol}, or Problem 404."""
    match = _PATH.fullmatch(path)
    if match is None or match[4] not in (recording.CHAT, recording.COMPLETION, "models"):
        raise Problem(404, "unknown_path", f"nothing is served at {path[:300]}")
    return Route(match[1], int(match[2]), match[3], match[4])


async def _unless_gone(work: Any, receive: Any) -> Any:
    """The result of `work`, or None after cancelling it because the client disconnected."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen: the client is gone, nobody wants to hear it
        return None
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _clamp(sent: recording.Sent, space: int, why: str) -> None:
    if space <= 0:
        raise Problem(400, "context_overflow", f"{why}, which leaves no space in the model's context")
    if sent.body.get("max_tokens", space) >= space:
        sent.body["max_tokens"] = sent.sampling["max_tokens"] = space


def _parse(raw: bytes) -> Any:
    try:
        return loads(raw)
    except (ValueError, RecursionError) as error:
        raise Problem(400, "bad_json", f"the body is not JSON: {str(error)[:200]}") from None


def _message(reply: Reply) -> str:
    """The engine's own words about an error."""
    body = reply.body
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            return str(error.get("message") or error.get("detail") or error)
        return str(error)
    return reply.text or str(body)


def _refusal(reply: Reply, body: dict[str, Any]) -> Problem:
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


async def _send(send: Any, status: int, *headers_then_body: Any) -> None:
    *headers, body = headers_then_body
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
