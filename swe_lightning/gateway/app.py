"""The gateway as one ASGI application: model calls go to the proxy, everything else to the control plane.

Every refusal of the control plane is a Problem in one JSON layout, whatever raised it.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from swe_lightning.gateway import apidoc, control
from swe_lightning.gateway.changes import Changes
from swe_lightning.gateway.gate import Gate
from swe_lightning.gateway.health import HealthChecks, HealthLimits
from swe_lightning.gateway.problems import Problem
from swe_lightning.gateway.proxy import Proxy
from swe_lightning.gateway.routes import PREFIX
from swe_lightning.gateway.store import Store
from swe_lightning.gateway.tokens import Claims, Keyring, bearer, require
from swe_lightning.gateway.upstream import Upstreams

log = logging.getLogger("swel.gateway")


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
        self.max_body = max_body
        self.changes = Changes()
        store.on_change = self.changes.notify
        store.on_end = lambda rollout_id, attempt: self.changes.in_loop(self._let_go, rollout_id, attempt)
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
        await self.gate.start()
        self.health.start()
        try:
            yield
        finally:
            await self.health.stop()
            await self.gate.stop()
            await self.upstreams.close()
            await run_in_threadpool(self.store.close)

    def _let_go(self, rollout_id: str, attempt: int) -> None:
        """The attempt has ended: nothing of it stays in memory."""
        self.upstreams.forget(rollout_id)
        self.proxy.spellings.forget(rollout_id, attempt)

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
    control.add_routes(app, gateway)
    apidoc.install(app)
    return app


def _allowed(app: FastAPI, request: Request) -> str:
    """All methods of the path; the framework names those of the first route it finds."""
    paths, asked = app.openapi()["paths"], request.url.path
    found = [asked] if asked in paths else [path for path in paths if compile_path(path)[0].match(asked)]
    return ", ".join(sorted({method.upper() for path in found for method in paths[path]}))


def _add_error_handlers(app: FastAPI, gateway: Gateway) -> None:
    async def on_problem(_request: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return await gateway.refuse(error)

    async def on_invalid(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            why = first.get("ctx", {}).get("error", "")
            return await gateway.refuse(Problem(400, "bad_json", f"the body is not JSON: {why}"))
        where = ".".join(str(part) for part in first["loc"])
        return await gateway.refuse(Problem(422, "bad_request", f"{where}: {first['msg']}"))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "unknown_path", 405: "wrong_method"}.get(error.status_code, "bad_request")
        allow = _allowed(app, request) if error.status_code == 405 else ""
        return await gateway.refuse(Problem(error.status_code, code, str(error.detail), allow=allow))

    async def on_depth(_request: Request, _error: Exception) -> Response:
        return await gateway.refuse(Problem(400, "bad_json", "the body is nested too deeply"))

    async def on_bug(_request: Request, _error: Exception) -> Response:
        return await gateway.refuse(Problem(500, "internal_error", "the gateway failed; its log has the traceback"))

    app.add_exception_handler(Exception, on_bug)
    app.add_exception_handler(RecursionError, on_depth)
    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
