"""What the gateway answers when it refuses: a status, a typed code, one sentence.

Every refusal is a `Problem`, raised where the rule is and turned into JSON at the edge. The body is the OpenAI error
layout, so a stock client raises its own exceptions and code that knows us reads `error.code`. A refusal that another
try cannot cure carries `x-should-retry: false`, which OpenAI clients honour.
"""

from __future__ import annotations

from typing import Any

import orjson

from swe_lightning.errors import GatewayError

RETRYABLE = {408, 429, 503, 507}


class Problem(GatewayError):
    """A refusal. `late` marks what arrives after its attempt ended: refused and counted, nothing more."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        late: bool = False,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(status, code, message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.late = late
        self.details = details or {}

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "code": self.code, "param": None, **self.details}
        return orjson.dumps({"error": error})

    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
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
