"""The OpenAPI document, kept true: the fuzz test sends what it allows and forbids, and holds every answer against it.

The control plane's part comes from its typed routes; the proxy's paths are written here, because the hot path has no
framework. What belongs to a model protocol is passed through and left open; only what the gateway itself relies on is
typed.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from swe_lightning.gateway import replies
from swe_lightning.gateway.protocols import COUNT_TOKENS, MODELS
from swe_lightning.gateway.routes import METHODS, base_path

_MEANING = {
    400: "the request cannot be served as it is (bad_json, bad_request, context_overflow, bad_history, ...)",
    401: "no token, or one that is expired or not of this run",
    403: "the token lacks the scope that the message names, or the mode is not the rollout's",
    404: "no such rollout or attempt",
    409: "the state forbids it (rollout_ended, not_queuing, rollout_differs)",
    413: "the body is too large",
    422: "a field or parameter is not as documented",
    429: "too many calls are open; Retry-After says when to ask again",
    500: "the store failed, or the gateway has a bug",
    501: "the model server cannot count tokens",
    502: "the model server failed",
    503: "paused for longer than a call may wait, no model registered, or shutting down; ask again",
    504: "the model server, or what is in flight, took too long",
    507: "the store cannot grow: disk full",
}
_PROXY_ERRORS = (400, 401, 403, 404, 409, 413, 429, 500, 502, 503, 504, 507)
_CONTROL_ERRORS = (401, 403, 422, 500, 503)
_WRITE_ERRORS = (400, 413, 507)


def answers(scope: str, status: int, model: Any, *errors: int, write: bool = False) -> dict[str, Any]:
    """Keyword arguments of a route: its answer, its refusals and the scope it needs."""
    statuses = sorted({*_CONTROL_ERRORS, *errors, *(_WRITE_ERRORS if write else ())})
    documented: dict[int, dict[str, Any]] = {s: {"model": replies.Error, "description": _MEANING[s]} for s in statuses}
    plain = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    documented[status] = plain if model is str else {"model": model}
    return {
        "status_code": status,
        "response_model": None,
        "responses": documented,
        "openapi_extra": {"security": [{name: []} for name in scope.split()]},
    }


def install(app: FastAPI) -> None:
    """Make `app` describe itself and the proxy."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes, description=__doc__)
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            for model in (replies.Error, replies.AnthropicError):
                shape = model.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas.update(shape.pop("$defs", {}))
                schemas[model.__name__] = shape
            made["components"]["securitySchemes"] = _SECURITY
            made["paths"].update(proxy_paths())
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


_BEARER = "a capability token of this run with scope "
_SECURITY = {
    name: {"type": "http", "scheme": "bearer", "description": _BEARER + name} for name in ("control", "grade", "agent")
} | {"agent_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "the agent token"}}


def proxy_paths() -> dict[str, Any]:
    base = base_path("{rollout_id}", "{attempt_id}", "{mode}")
    return {f"{base}/{protocol}": {method.lower(): _operation(protocol)} for protocol, method in METHODS.items()}


def _operation(protocol: str) -> dict[str, Any]:
    error = "AnthropicError" if protocol.startswith("anthropic/") else "Error"
    shape = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    errors = [s for s in _PROXY_ERRORS if protocol not in MODELS or s not in (400, 413, 429, 502, 504, 507)]
    if protocol == COUNT_TOKENS:
        errors.append(501)
    answer: dict[str, Any] = {"application/json": {"schema": _ANSWERS[protocol]}}
    operation: dict[str, Any] = {
        "summary": f"{protocol.split('/', 2)[2]} for the agent of one attempt",
        "operationId": "proxy_" + protocol.replace("/", "_"),
        "tags": ["proxy"],
        "security": [{"agent": []}, {"agent_key": []}],
        "parameters": _PARAMETERS,
        "responses": {str(s): {"description": _MEANING[s], "content": shape} for s in errors},
    }
    if protocol in _BODIES:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _BODIES[protocol]}}}
        if protocol != COUNT_TOKENS:
            answer["text/event-stream"] = {"schema": _EVENT}
    operation["responses"]["200"] = {"description": "the model's answer, in the client's protocol", "content": answer}
    return operation


def _parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _nullable(type: str, **rules: Any) -> dict[str, Any]:
    return {"anyOf": [{"type": type, **rules}, {"type": "null"}]}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    """Open on purpose: all else belongs to the model protocol and is passed through."""
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": True}


_PARAMETERS = [
    _parameter("rollout_id", {"type": "string", "pattern": "^[^/]+$"}),
    _parameter("attempt_id", {"type": "integer", "minimum": 1, "maximum": 999_999}),
    _parameter("mode", {"enum": ["train", "val"]}),
]
_LIMIT = _nullable("integer", minimum=1, maximum=2**31 - 1)
_COMMON = {"model": _nullable("string"), "stream": _nullable("boolean")}
_OBJECTS: dict[str, Any] = {"type": "array", "items": {"type": "object"}}
_TURN = _object(
    ["role", "content"], role={"enum": ["user", "assistant", "system"]}, content={"type": ["string", "array"]}
)
_MESSAGES: dict[str, Any] = _COMMON | {
    "messages": {"type": "array", "minItems": 1, "items": _TURN},
    "max_tokens": _LIMIT,
    "tools": _nullable(**_OBJECTS),
    "stop_sequences": _nullable("array"),
    "tool_choice": _nullable("object"),
}
_ONE = {"anyOf": [{"const": 1}, {"type": "null"}]}
_LIMITS = {"max_tokens": _LIMIT, "max_completion_tokens": _LIMIT, "n": _ONE}
_BODIES: dict[str, dict[str, Any]] = {
    "openai/v1/chat/completions": _object(["messages"], messages=_OBJECTS | {"minItems": 1}, **_COMMON, **_LIMITS),
    "openai/v1/completions": _object(
        ["prompt"],
        prompt={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
            ]
        },
        **_COMMON,
        **_LIMITS,
    ),
    "openai/v1/responses": _object(
        ["input"],
        input={"anyOf": [{"type": "string"}, _OBJECTS | {"minItems": 1}]},
        instructions=_nullable("string"),
        max_output_tokens=_LIMIT,
        tools=_nullable(**_OBJECTS),
        previous_response_id={"type": "null"},
        conversation={"type": "null"},
        prompt={"type": "null"},
        background={"enum": [False, None]},
        **_COMMON,
    ),
    "anthropic/v1/messages": _object(["messages"], **_MESSAGES),
    COUNT_TOKENS: _object(["messages"], **_MESSAGES),
}
_EVENT = _object(["data"], event={"type": "string"}, data={"type": "string"})
_CHOICES = _object(["choices"], choices=_OBJECTS | {"minItems": 1, "maxItems": 1})
_LIST = _object(["data"], data=_OBJECTS)
_ANSWERS: dict[str, dict[str, Any]] = {
    "openai/v1/chat/completions": _CHOICES,
    "openai/v1/completions": _CHOICES,
    "openai/v1/responses": _object(
        ["id", "object", "status", "output", "usage"],
        object={"const": "response"},
        status={"enum": ["completed", "incomplete"]},
        output=_OBJECTS,
    ),
    "anthropic/v1/messages": _object(
        ["id", "type", "role", "content", "stop_reason", "usage"], type={"const": "message"}, content=_OBJECTS
    ),
    COUNT_TOKENS: _object(["input_tokens"], input_tokens={"type": "integer", "minimum": 0}),
    **dict.fromkeys(MODELS, _LIST),
}
