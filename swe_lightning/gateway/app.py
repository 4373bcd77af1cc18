"""The control plane over HTTP, and the dispatch between it and the hot path.

Bodies we own are typed and closed (an unknown field is an error); every refusal is a Problem in one JSON layout. All
control calls are idempotent: repeating one changes nothing. Long polls wake on commits, nobody polls the store.
"""

from __future__ import annotations

import base64
import logging
import uuid
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from swe_lightning.gateway import compact, metrics
from swe_lightning.gateway.bodies import Change, NewEvent, NewModel, NewRollouts, Pause
from swe_lightning.gateway.changes import Changes
from swe_lightning.gateway.gate import Gate
from swe_lightning.gateway.health import HealthChecks, HealthLimits
from swe_lightning.gateway.jsonio import dumps
from swe_lightning.gateway.problems import Problem
from swe_lightning.gateway.proxy import Proxy
from swe_lightning.gateway.routes import PREFIX, base_path
from swe_lightning.gateway.store import CALL_KIND, Store
from swe_lightning.gateway.tokens import Claims, Keyring, bearer, require
from swe_lightning.gateway.upstream import Upstreams
from swe_lightning.records import Outcome, Rollout, RolloutState

log = logging.getLogger("swel.gateway")
RESERVED = {CALL_KIND, "claimed", "released", "cancelled", "reward"}


class Gateway:
    """ASGI application: model calls go straight to the proxy, everything else to the control plane."""

    def __init__(
        self,
        store: Store,
        gate: Gate,
        upstreams: Upstreams,
        keyring: Keyring,
        *,
        health: HealthLimits | None = None,
        max_body: int = 64 * 2**20,
    ) -> None:
        self.store, self.gate, self.upstreams, self.keyring = store, gate, upstreams, keyring
        self.changes = Changes()
        store.on_change, store.on_end = self.changes.notify, upstreams.forget
        self.health = HealthChecks(upstreams, health)
        self.proxy = Proxy(store, gate, upstreams, keyring, max_body=max_body)
        self.control = build_control(self)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith(PREFIX):
            await self.proxy(scope, receive, send)
        else:
            await self.control(scope, receive, send)

    @asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> Any:
        self.changes.bind()
        for model in self.store.models():
            self.upstreams.register(**model)
        await self.upstreams.start()
        self.health.start()
        try:
            yield
        finally:
            await self.health.stop()
            await self.upstreams.close()
            await run_in_threadpool(self.store.close)

    def stopping(self) -> None:
        """Refuse new calls and answer long polls; what is at a model server goes on."""
        self.gate.close()
        self.changes.close()

    def claims(self, request: Request) -> Claims:
        return self.keyring.verify(bearer(request.headers.get("authorization")))

    def control_only(self, request: Request) -> None:
        require(self.claims(request), "control")

    async def refuse(self, problem: Problem) -> Response:
        if problem.late:
            with suppress(Problem):  # a store that cannot count must not hide why the report is refused
                await self.store.writer.acall(self.store.count("late_reports"))
        return Response(problem.body(), problem.status, headers=problem.headers())


def build_control(gateway: Gateway) -> FastAPI:
    app = FastAPI(title="swe-lightning gateway", lifespan=gateway.lifespan, docs_url=None, redoc_url=None)
    _add_error_handlers(app, gateway)
    _add_rollouts(app, gateway)
    _add_events(app, gateway)
    _add_models_and_gate(app, gateway)
    return app


def _json(value: Any, status: int = 200) -> Response:
    return Response(dumps(value), status, media_type="application/json")


def _shown(rollout: Rollout) -> dict[str, Any]:
    return rollout.model_dump(mode="json")


def _add_error_handlers(app: FastAPI, gateway: Gateway) -> None:
    async def on_problem(_request: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return await gateway.refuse(error)

    async def on_invalid(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return await gateway.refuse(Problem(422, "bad_request", f"{where}: {first['msg']}"))

    async def on_http(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "unknown_path", 405: "wrong_method"}.get(error.status_code, "bad_request")
        return await gateway.refuse(Problem(error.status_code, code, str(error.detail)))

    async def on_bug(_request: Request, _error: Exception) -> Response:
        return await gateway.refuse(Problem(500, "internal_error", "the gateway failed; its log has the traceback"))

    app.add_exception_handler(Exception, on_bug)
    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)


def _add_rollouts(app: FastAPI, g: Gateway) -> None:
    control = [Depends(g.control_only)]

    @app.post("/api/rollouts", dependencies=control)
    async def create(body: NewRollouts) -> Response:
        wanted = [Rollout(**r.model_dump() | {"rollout_id": r.rollout_id or uuid.uuid4().hex}) for r in body.rollouts]
        created = await g.store.writer.acall(g.store.create_rollouts(wanted))
        return _json({"rollouts": [_shown(r) for r in created]}, 201)

    @app.get("/api/rollouts", dependencies=control)
    async def list_rollouts(
        state: RolloutState | None = None,
        group_id: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
        wait: Annotated[float, Query(ge=0)] = 0,
    ) -> Response:
        found = await g.changes.poll(lambda: g.store.list_rollouts(state, group_id, limit), bool, wait)
        return _json({"rollouts": [_shown(r) for r in found]})

    @app.get("/api/rollouts/terminal", dependencies=control)
    async def terminal(
        after: Annotated[int, Query(ge=0, le=2**62)] = 0,
        wait: Annotated[float, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> Response:
        found, cursor = await g.changes.poll(lambda: g.store.terminal(after, limit), lambda r: bool(r[0]), wait)
        return _json({"rollouts": [_shown(r) for r in found], "cursor": cursor})

    @app.get("/api/rollouts/{rollout_id}")
    def get_rollout(rollout_id: str, request: Request) -> Response:
        require(g.claims(request), "control", "grade", rollout_id=rollout_id)
        return _json(_shown(g.store.get_rollout(rollout_id)))

    @app.patch("/api/rollouts/{rollout_id}", dependencies=control)
    async def change(rollout_id: str, body: Change) -> Response:
        if body.state == "running":
            claimed = await g.store.writer.acall(g.store.claim(rollout_id, body.worker, body.claim_id))
            return _json(_lease(g.keyring, claimed))
        if body.state == "failed":
            rollout = await g.store.writer.acall(g.store.cancel(rollout_id, body.message))
        else:
            if body.attempt is None:
                raise Problem(422, "bad_request", "releasing a rollout needs the attempt that was lost")
            outcome = Outcome(infra_reason=body.reason, message=body.message, reported_by="controller")
            operation = g.store.report(rollout_id, body.attempt, outcome, kind="released", event_id=body.event_id)
            rollout = await g.store.writer.acall(operation)
        return _json({"rollout": _shown(rollout)})


def _lease(keyring: Keyring, rollout: Rollout) -> dict[str, Any]:
    """What the worker of one attempt gets. Tokens outlive the wall time by an hour, for grading and retries."""
    bound = {"rollout_id": rollout.rollout_id, "attempt": rollout.attempt, "ttl_s": rollout.timeout_s + 3600}
    path = base_path(rollout.rollout_id, rollout.attempt, str(rollout.mode)) + "/openai/v1"
    tokens = {f"{scope}_token": keyring.mint(scope, **bound) for scope in ("agent", "grade")}  # type: ignore[arg-type]
    return {"rollout": _shown(rollout), "path": path, **tokens}


def _add_events(app: FastAPI, g: Gateway) -> None:
    @app.post("/api/rollouts/{rollout_id}/attempt/{attempt}/events")
    async def add_event(rollout_id: str, attempt: int, body: NewEvent, request: Request) -> Response:
        claims = g.claims(request)
        if body.type == "reward":
            require(claims, "grade", "control", rollout_id=rollout_id, attempt=attempt)
            if body.outcome is None:
                raise Problem(422, "bad_request", "a reward event needs an outcome")
            operation = g.store.report(rollout_id, attempt, body.outcome, event_id=body.event_id)
            return _json({"rollout": _shown(await g.store.writer.acall(operation))}, 201)
        require(claims, "agent", "grade", "control", rollout_id=rollout_id, attempt=attempt)
        if body.type in RESERVED or body.outcome is not None:
            raise Problem(422, "bad_request", f"type {body.type!r} cannot be posted with these fields")
        event = g.store.add_event(rollout_id, attempt, body.type, body.data, body.event_id)
        return _json({"sequence": await g.store.writer.acall(event)}, 201)

    @app.get("/api/rollouts/{rollout_id}/events", dependencies=[Depends(g.control_only)])
    def events(rollout_id: str, attempt: int | None = None, calls: Literal["", "plain", "compact"] = "") -> Response:
        """All events, model calls without ids. `calls`: instead the model calls of one attempt (default: the last),
        plain with ids, log-probs and messages in full, or as compact rows (see compact.py) with base64 bytes."""
        g.store.get_rollout(rollout_id)
        if not calls:
            return _json({"events": g.store.events(rollout_id, attempt)})
        rows = g.store.call_rows(rollout_id, attempt)
        if calls == "compact":
            return _json({"rows": [{k: _text(v) for k, v in row.items()} for row in rows]})
        return _json({"calls": [compact.plain(call) for call in compact.decode(rows)]})


def _text(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _add_models_and_gate(app: FastAPI, g: Gateway) -> None:
    control = [Depends(g.control_only)]

    @app.post("/api/models", dependencies=control)
    async def register(body: NewModel) -> Response:
        values = body.model_dump()
        await g.store.writer.acall(g.store.save_model(values))
        g.upstreams.register(**values)
        log.info("model registered", extra={"upstream": body.url, "version": body.version})
        return _json(values, 201)

    @app.get("/api/models", dependencies=control)
    async def list_models() -> Response:
        return _json({"models": metrics.models(g.upstreams)})

    @app.delete("/api/models", dependencies=control)
    async def delete(url: str) -> Response:
        removed = await g.store.writer.acall(g.store.delete_model(url))
        g.upstreams.remove(url)
        log.info("model removed", extra={"upstream": url})
        return _json({"removed": removed})

    @app.post("/proxy/pause", dependencies=control)
    async def pause(body: Pause | None = None) -> Response:
        """Durable: a gateway that restarts while paused is still paused."""
        g.gate.pause()
        await g.store.writer.acall(g.store.set_meta("paused", "1"))
        if body is not None and body.drain_s is not None:
            await g.gate.drain(body.drain_s)
        log.info("paused", extra={"in_flight": g.gate.in_flight, "waiting": g.gate.waiting})
        return _json(g.gate.state())

    @app.post("/proxy/resume", dependencies=control)
    async def resume() -> Response:
        await g.store.writer.acall(g.store.set_meta("paused", "0"))
        log.info("resumed", extra={"waiting": g.gate.waiting})
        g.gate.resume()
        return _json(g.gate.state())

    @app.get("/proxy/state", dependencies=control)
    def state() -> Response:
        return _json(metrics.state(g))

    @app.get("/metrics", dependencies=control)
    def prometheus() -> Response:
        return Response(metrics.exposition(g), media_type="text/plain; version=0.0.4")

    @app.get("/healthz")
    async def healthz() -> Response:
        if g.gate.closed:
            return _json({"status": "stopping"}, 503)
        return _json({"status": "ok"})
