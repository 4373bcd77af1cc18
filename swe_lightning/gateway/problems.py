"""What the gateway answers when it refuses: a status, a typed code, one sentence.

Every refusal is a `Problem`, raised where the rule is and turned into JSON at the edge. The body is the OpenAI error
layout (Anthropic's envelope for Anthropic clients), so a stock client raises its own exceptions and code that knows us
reads `error.code`. A refusal that another try cannot cure carries `x-should-retry: false`, which both vendors' clients
honour.
"""

from __future__ import annotations

from typing import Any

import orjson

from swe_lightning.errors import GatewayError

RETRYABLE = {408, 429, 503, 507}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Problem(GatewayError):
    """A refusal. `late` marks what arrives after its attempt ended: refused and counted, nothing more."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        allow: str = "",
        late: bool = False,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(status, code, message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.allow = allow
        self.late = late
        self.details = details or {}

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "code": self.code, "param": None, **self.details}
        return orjson.dumps({"error": error})

    def anthropic_body(self) -> bytes:
        kind = _ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        # The words by which Anthropic's clients know that they have to make their history shorter.
        message = f"prompt is too long: {self.message}" if self.code == "context_overflow" else self.message
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": message, "code": self.code}})

    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        if self.allow:
            headers["allow"] = self.allow
        if self.status not in RETRYABLE:
            headers["x-should-retry"] = "false"
        return headers


def forbidden(needed: str, held: str) -> Problem:
    return Problem(403, "missing_scope", f"this needs a token with scope {needed}; the token sent is for {held}")


def unknown_rollout(rollout_id: str) -> Problem:
    return Problem(404, "unknown_rollout", f"no rollout {rollout_id!r}; create it with POST /api/rollouts")


def shutting_down(**details: Any) -> Problem:
    message = "the gateway is shutting down; ask again in a moment"
    return Problem(503, "shutting_down", message, retry_after_s=2, details=details)
