"""What happens to a control request before its handler: the token is checked, then the query's names, then the body is
read, bounded and parsed.

In that order, so that nobody without the right token makes the gateway read or parse anything. An unknown parameter is
an error like an unknown field. Bodies are JSON in the strict sense (no NaN) and refused beyond `limit` bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from swe_lightning.gateway.jsonio import loads
from swe_lightning.gateway.problems import Problem
from swe_lightning.gateway.reading import read_body


def guarded(check: Callable[[Request], object], limit: int) -> type[APIRoute]:
    """A route class for routes that need `check` to pass."""

    class Guarded(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            known = {parameter.alias for parameter in self.dependant.query_params}

            async def handler(request: Request) -> Response:
                check(request)
                unknown = sorted(set(request.query_params) - known)
                if unknown:
                    raise Problem(422, "bad_request", f"query.{unknown[0]}: no such parameter here")
                body = await read_body(request.receive, limit)
                return await handle(_Read(request.scope, body))

            return handler

    return Guarded


class _Read(Request):
    """A request whose body is here already, and JSON whatever its content type says (curl -d calls it a form)."""

    def __init__(self, scope: Any, body: bytes) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        headers.append((b"content-type", b"application/json"))
        super().__init__(dict(scope) | {"headers": headers}, receive=self._replay)
        self._content = body

    async def _replay(self) -> dict[str, Any]:
        return {"type": "http.request", "body": self._content, "more_body": False}

    async def json(self) -> Any:
        try:
            return loads(self._content)
        except (ValueError, RecursionError) as error:
            raise json.JSONDecodeError(str(error)[:200], "", 0) from None
