"""The control plane's routes. Bodies we own are typed and closed; every control call that carries its id is idempotent:
repeating it changes nothing. Long polls wake on commits, nobody polls the store.
"""

from __future__ import annotations

import base64
import logging
import uuid
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Path, Query, Request, Response

from swe_lightning.gateway import compact, metrics, replies
from swe_lightning.gateway.apidoc import answers
from swe_lightning.gateway.bodies import Cancel, Change, Claim, NewEvent, NewModel, NewRollouts, Pause, Reward
from swe_lightning.gateway.changes import MAX_WAIT_S
from swe_lightning.gateway.guards import guarded
from swe_lightning.gateway.jsonio import dumps
from swe_lightning.gateway.routes import base_path
from swe_lightning.gateway.tokens import Keyring, require
from swe_lightning.records import Outcome, Rollout, RolloutState

if TYPE_CHECKING:
    from swe_lightning.gateway.app import Gateway

log = logging.getLogger("swel.gateway")
MAX_EVENT = 8 * 2**20
"""Bytes of an event or a report, which agents and graders send: they are stored as they are."""
RolloutId = Annotated[str, Path(pattern=r"^[^\x00/]+$", max_length=200)]
AttemptId = Annotated[int, Path(ge=0, le=2**31 - 1)]
Attempt = Annotated[int, Query(ge=1, le=2**31 - 1)]
Calls = Literal["", "plain", "compact"]
NoNul = Annotated[str, Query(pattern=r"^[^\x00]*$")]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S)]
Limit = Annotated[int, Query(ge=1, le=10_000)]


def _json(value: Any, status: int = 200) -> Response:
    return Response(dumps(value), status, media_type="application/json")


def _shown(rollout: Rollout) -> dict[str, Any]:
    return rollout.model_dump(mode="json")


def add_routes(app: FastAPI, g: Gateway) -> None:
    for add in (_add_rollouts, _add_events, _add_models, _add_gate):
        control = APIRouter(route_class=guarded(g.control_only, g.max_body))
        bound = APIRouter(route_class=guarded(g.claims, min(g.max_body, MAX_EVENT)))
        add(control, bound, g)
        app.include_router(control)
        app.include_router(bound)

    @app.get(
        "/healthz", response_model=None, responses={200: {"model": replies.Health}, 503: {"model": replies.Health}}
    )
    async def healthz() -> Response:
        if g.gate.closed:
            return _json({"status": "stopping"}, 503)
        return _json({"status": "ok"})


def _add_rollouts(control: APIRouter, bound: APIRouter, g: Gateway) -> None:
    @control.post("/api/rollouts", **answers("control", 201, replies.Created, 409, write=True))
    async def create(body: NewRollouts) -> Response:
        wanted = [Rollout(**r.model_dump() | {"rollout_id": r.rollout_id or uuid.uuid4().hex}) for r in body.rollouts]
        created, cursor = await g.store.writer.acall(g.store.create_rollouts(wanted))
        return _json({"rollouts": [_shown(r) for r in created], "cursor": cursor}, 201)

    @control.get("/api/rollouts", **answers("control", 200, replies.Rollouts))
    async def list_rollouts(
        state: RolloutState | None = None,
        group_id: NoNul | None = None,
        limit: Limit = 1000,
        wait: Wait = 0,
    ) -> Response:
        found = await g.changes.poll(lambda: g.store.list_rollouts(state, group_id, limit), bool, wait)
        return _json({"rollouts": [_shown(r) for r in found]})

    @control.get("/api/rollouts/terminal", **answers("control", 200, replies.Terminal))
    async def terminal(
        after: Annotated[int, Query(ge=0, le=2**62)] = 0,
        wait: Wait = 0,
        limit: Limit = 1000,
    ) -> Response:
        found, cursor = await g.changes.poll(lambda: g.store.terminal(after, limit), lambda r: bool(r[0]), wait)
        return _json({"rollouts": [_shown(r) for r in found], "cursor": cursor})

    @bound.get("/api/rollouts/{rollout_id}", **answers("control grade", 200, Rollout, 404))
    def get_rollout(rollout_id: RolloutId, request: Request) -> Response:
        require(g.claims(request), "control", "grade", rollout_id=rollout_id)
        return _json(_shown(g.store.get_rollout(rollout_id)))

    @control.patch(
        "/api/rollouts/{rollout_id}", **answers("control", 200, replies.Changed | replies.Lease, 404, 409, write=True)
    )
    async def change(rollout_id: RolloutId, body: Change) -> Response:
        if isinstance(body, Claim):
            claimed = await g.store.writer.acall(g.store.claim(rollout_id, body.worker, body.claim_id))
            return _json(_lease(g.keyring, claimed))
        if isinstance(body, Cancel):
            rollout = await g.store.writer.acall(g.store.cancel(rollout_id, body.message))
        else:
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


def _add_events(control: APIRouter, bound: APIRouter, g: Gateway) -> None:
    @bound.post(
        "/api/rollouts/{rollout_id}/attempt/{attempt_id}/events",
        **answers("agent grade control", 201, replies.Appended | replies.Changed, 404, 409, write=True),
    )
    async def add_event(rollout_id: RolloutId, attempt_id: AttemptId, body: NewEvent, request: Request) -> Response:
        claims = g.claims(request)
        if isinstance(body, Reward):
            require(claims, "grade", "control", rollout_id=rollout_id, attempt=attempt_id)
            operation = g.store.report(rollout_id, attempt_id, body.outcome, event_id=body.event_id)
            return _json({"rollout": _shown(await g.store.writer.acall(operation))}, 201)
        require(claims, "agent", "grade", "control", rollout_id=rollout_id, attempt=attempt_id)
        event = g.store.add_event(rollout_id, attempt_id, body.type, body.data, body.event_id)
        return _json({"sequence": await g.store.writer.acall(event)}, 201)

    @control.get(
        "/api/rollouts/{rollout_id}/events",
        **answers("control", 200, replies.Events | replies.Calls | replies.Rows, 404),
    )
    def events(
        rollout_id: RolloutId,
        attempt: Attempt | None = None,
        calls: Calls = "",
    ) -> Response:
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


def _add_models(control: APIRouter, bound: APIRouter, g: Gateway) -> None:
    @control.post("/api/models", **answers("control", 201, replies.Model, write=True))
    async def register(body: NewModel) -> Response:
        values = body.model_dump()
        await g.store.writer.acall(g.store.save_model(values))
        g.upstreams.register(**values)
        log.info("model registered", extra={"upstream": body.url, "version": body.version})
        return _json(values, 201)

    @control.get("/api/models", **answers("control", 200, replies.Models))
    async def list_models() -> Response:
        return _json({"models": metrics.models(g.upstreams)})

    @control.delete("/api/models", **answers("control", 200, replies.Removed, 507))
    async def delete(url: NoNul) -> Response:
        removed = await g.store.writer.acall(g.store.delete_model(url))
        g.upstreams.remove(url)
        log.info("model removed", extra={"upstream": url})
        return _json({"removed": removed})


def _add_gate(control: APIRouter, bound: APIRouter, g: Gateway) -> None:
    @control.post("/proxy/pause", **answers("control", 200, replies.GateState, 504, write=True))
    async def pause(body: Pause | None = None) -> Response:
        """Durable: a gateway that restarts while paused is still paused."""
        g.gate.pause()
        await g.store.writer.acall(g.store.set_meta("paused", "1"))
        if body is not None and body.drain_s is not None:
            await g.gate.drain(body.drain_s)
        log.info("paused", extra={"in_flight": g.gate.in_flight, "waiting": g.gate.waiting})
        return _json(g.gate.state())

    @control.post("/proxy/resume", **answers("control", 200, replies.GateState, 507))
    async def resume() -> Response:
        await g.store.writer.acall(g.store.set_meta("paused", "0"))
        log.info("resumed", extra={"waiting": g.gate.waiting})
        g.gate.resume()
        return _json(g.gate.state())

    @control.get("/proxy/state", **answers("control", 200, replies.GateState))
    def state() -> Response:
        return _json(metrics.state(g))

    @control.get("/metrics", response_class=Response, **answers("control", 200, str))
    def prometheus() -> Response:
        return Response(metrics.exposition(g), media_type="text/plain; version=0.0.4")
