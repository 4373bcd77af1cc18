"""The hot path: one model call from the agent's request to the recorded, durable call and the answer.

A bare ASGI application without framework or body models, because every token of a run passes here. Order matters:
token, rollout state, method, body, translation, gate, upstream, check, commit, answer. The client is answered only
after its call is committed; a client that disconnects cancels the upstream generation and leaves an `aborted` record.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from swe_lightning.gateway import asking, reading, recording, routes
from swe_lightning.gateway.gate import Gate
from swe_lightning.gateway.jsonio import dumps, loads
from swe_lightning.gateway.meter import CALL_S, Histogram
from swe_lightning.gateway.problems import Problem
from swe_lightning.gateway.protocols import ADAPTERS, COUNT_TOKENS, MODELS, anthropic
from swe_lightning.gateway.protocols.base import Adapter
from swe_lightning.gateway.routes import Route
from swe_lightning.gateway.spellings import Spellings
from swe_lightning.gateway.store import Live, Store
from swe_lightning.gateway.tokens import Keyring, require
from swe_lightning.gateway.upstream import Reply, Upstreams
from swe_lightning.records import ModelCall, Untrainable

log = logging.getLogger("swel.gateway")
_FAILED = {"context_overflow": Untrainable.CONTEXT_OVERFLOW, "shutting_down": Untrainable.ABORTED}
_JSON = (b"content-type", b"application/json")
_SSE = (b"content-type", b"text/event-stream; charset=utf-8")


@dataclass(slots=True)
class Request:
    """One call on its way. Its id is chosen on arrival, so that it is recorded once however it ends."""

    route: Route
    live: Live
    asked: dict[str, Any]
    """What the client sent."""
    body: dict[str, Any]
    """The same as a request of the engine's route: what is recorded."""
    not_honoured: dict[str, Any]
    started: float
    call_id: str
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def adapter(self) -> Adapter:
        return ADAPTERS[self.route.protocol]


class Proxy:
    """ASGI application for everything below /proxy/rollout/."""

    def __init__(self, store: Store, gate: Gate, upstreams: Upstreams, keyring: Keyring, *, max_body: int) -> None:
        self.store, self.gate, self.upstreams, self.keyring = store, gate, upstreams, keyring
        self.spellings = Spellings(store)
        self.max_body = max_body
        self.bodies = reading.BodyBudget(2 * max_body)
        self.results: Counter[str] = Counter()
        """Calls by result: ok, an Untrainable reason, or a Problem's code."""
        self.untrainable: Counter[str] = Counter()
        """Recorded calls that may not be trained on, by reason."""
        self.seconds = Histogram(CALL_S)
        """From arrival to commit, of answered calls."""
        self.tokens: Counter[str] = Counter()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        try:
            await self._handle(scope, receive, send, time.time())
        except Problem as problem:
            await self._refuse(scope, send, problem)
        except RecursionError:
            await self._refuse(scope, send, Problem(400, "bad_json", "the body is nested too deeply"))
        except Exception:
            log.exception("call failed inside the gateway")
            message = "the gateway failed on this call; its log has the traceback"
            await self._refuse(scope, send, Problem(500, "internal_error", message))

    async def _handle(self, scope: dict[str, Any], receive: Any, send: Any, started: float) -> None:
        route = routes.parse_path(scope["path"])
        claims = self.keyring.verify(routes.agent_token(scope["headers"]))
        require(claims, "agent", rollout_id=route.rollout_id, attempt=route.attempt)
        live = await self._live(route)
        routes.check_method(scope["method"], route)
        if route.protocol in MODELS:
            return await _send(send, 200, _JSON, self._models(route))
        with self.bodies.reading(route.rollout_id, receive) as counted:
            asked = _parse(await reading.read_body(counted, self.max_body))
            await self._answer(route, live, asked, receive, send, started)

    async def _answer(
        self, route: Route, live: Live, asked: dict[str, Any], receive: Any, send: Any, started: float
    ) -> None:
        if route.protocol == COUNT_TOKENS:
            return await _send(send, 200, _JSON, await self._count(route, asked))
        body, not_honoured = await self._translate(route, asked)
        request = Request(route, live, asked, body, not_honoured, started, uuid.uuid4().hex)
        result = await _unless_gone(self._serve(request), receive)
        if result is None:
            self.results["aborted"] += 1
            return await self._record_failure(request, Untrainable.ABORTED, "the client disconnected")
        await _send(send, 200, *result)

    async def _refuse(self, scope: dict[str, Any], send: Any, problem: Problem) -> None:
        self.results[problem.code] += 1
        if problem.late:
            with contextlib.suppress(Problem):  # a store that cannot count must not hide why the call is refused
                await self.store.writer.acall(self.store.count("late_calls"))
        headers = [(k.encode(), v.encode()) for k, v in problem.headers().items()]
        anthropic_client = routes.speaks_anthropic(scope["path"])
        body = problem.anthropic_body() if anthropic_client else problem.body()
        await _send(send, problem.status, *headers, body)

    async def _live(self, route: Route) -> Live:
        live = self.store.cached_live(route.rollout_id, route.attempt)
        if live is None:
            live = await asyncio.to_thread(self.store.live, route.rollout_id, route.attempt)
        if live.mode != route.mode:
            raise Problem(403, "wrong_mode", f"rollout {route.rollout_id} runs in mode {live.mode}, not {route.mode}")
        return live

    def _models(self, route: Route) -> bytes:
        endpoint = self.upstreams.endpoint_of(route.rollout_id)
        if route.protocol.startswith("anthropic/"):
            model: dict[str, Any] = {"id": endpoint.name, "type": "model", "display_name": endpoint.name}
            only = model | {"created_at": "1970-01-01T00:00:00Z"}
            return dumps({"data": [only], "first_id": endpoint.name, "last_id": endpoint.name, "has_more": False})
        model = {"id": endpoint.name, "object": "model", "created": 0, "owned_by": "swe-lightning"}
        return dumps({"object": "list", "data": [model | {"max_model_len": endpoint.max_context}]})

    async def _translate(self, route: Route, asked: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        adapter = ADAPTERS[route.protocol]
        spellings = {} if adapter.spells_arguments else await self.spellings.of(route.rollout_id, route.attempt)
        return adapter.translate(asked, spellings)

    async def _count(self, route: Route, asked: dict[str, Any]) -> bytes:
        """Prompt tokens of what the client would ask. It samples nothing, so nothing is recorded."""
        spellings = await self.spellings.of(route.rollout_id, route.attempt)
        chat, _ = anthropic.translate(asked, spellings)
        async with self.gate.admit(route.rollout_id):
            return dumps({"input_tokens": await asking.count(self.upstreams, route.rollout_id, chat)})

    async def _serve(self, request: Request) -> tuple[Any, bytes]:
        """Content-type header and body of the answer, after the call is durable."""
        route, adapter = request.route, request.adapter
        sent = recording.prepare(request.body, adapter.upstream, route.mode, request.live.sampling)
        if request.not_honoured:
            sent.sampling["ignored"] = sent.sampling.get("ignored", {}) | request.not_honoured
        request.sampling = sent.sampling
        # Who asks is the rollout of the path, whatever the client says: scripted engines throw their dice by it.
        sent.body["user"] = route.rollout_id
        async with self.gate.admit(route.rollout_id):
            if self.store.cached_live(route.rollout_id, route.attempt) is None:  # it may have ended while we waited
                await asyncio.to_thread(self.store.live, route.rollout_id, route.attempt)
            try:
                reply = await asking.ask(self.upstreams, route.rollout_id, adapter.upstream, sent)
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
        self._count_answer(call)
        self.spellings.note(route.rollout_id, route.attempt, reply.body)
        if request.asked.get("stream"):
            return _SSE, adapter.events(reply.body, request.asked)
        return _JSON, dumps(adapter.answer(reply.body, request.asked))

    def _count_answer(self, call: ModelCall) -> None:
        self.results[call.reason or "ok"] += 1
        if call.reason is not None:
            self.untrainable[call.reason] += 1
        self.seconds.observe(time.time() - call.started_at)
        self.tokens["prompt"] += len(call.prompt_ids)
        self.tokens["response"] += len(call.response_ids)

    async def _record_failure(self, request: Request, reason: Untrainable, message: str, *, retries: int = 0) -> None:
        """A call that brought nothing to train on is still part of the history; never in the way of its own error."""
        call = _unanswered(request)
        call.response, call.reason, call.retries = {"error": message}, reason, retries
        self.untrainable[reason] += 1
        try:
            await self.store.writer.acall(self.store.record_call(call, unless_known=True))
        except Problem as problem:
            log.info("a failed call was not recorded: %s", problem.message)


def _unanswered(request: Request) -> ModelCall:
    return ModelCall(
        rollout_id=request.route.rollout_id,
        call_id=request.call_id,
        attempt=request.route.attempt,
        protocol=request.adapter.name,
        request={k: v for k, v in request.body.items() if k not in ("stream", "stream_options")},
        sampling=request.sampling,
        started_at=request.started,
        ended_at=time.time(),
        trainable=False,
    )


def _call(request: Request, reply: Reply) -> ModelCall:
    """The record of an answered call."""
    recorded = recording.check_reply(reply.body, request.adapter.upstream, request.route.mode)
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


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        body = loads(raw)
    except (ValueError, RecursionError) as error:
        raise Problem(400, "bad_json", f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise Problem(400, "bad_request", "the body must be a JSON object")
    return body


async def _send(send: Any, status: int, *headers_then_body: Any) -> None:
    *headers, body = headers_then_body
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
