"""The gateway as the rest of the program sees it: one synchronous, thread-safe client.

A restart of the gateway is invisible: connection errors and 503 are retried with backoff for up to `patience_s`. That
is safe because every call is idempotent; calls that append carry an id chosen here. Other refusals raise GatewayError
with the gateway's status and code.
"""

from __future__ import annotations

import base64
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from swe_lightning.errors import GatewayError
from swe_lightning.records import InfraReason, ModelCall, Outcome, Rollout

_BYTES = ("prompt", "response", "logprobs", "body")
_LONG_POLL_S = 30.0


@dataclass(frozen=True, slots=True)
class Lease:
    """One attempt of a rollout, handed to one worker."""

    rollout: Rollout
    agent_token: str
    grade_token: str
    base_url: str
    """OpenAI base URL for the harness, valid for this attempt only."""


def join_url(base: str, path: str) -> str:
    """The one place where a gateway address and a path meet: exactly one slash between them."""
    return f"{base.rstrip('/')}/{path.lstrip('/')}"


class GatewayClient:
    """`agent_url`: the gateway as seen from where agents run, if that differs from `url`."""

    def __init__(self, url: str, token: str, *, patience_s: float = 60, agent_url: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.agent_url = (agent_url or url).rstrip("/")
        self.patience_s = patience_s
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=64, keepalive_expiry=30)
        timeout = httpx.Timeout(60, connect=10, pool=60)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        verify = self.url.startswith("https")  # reading the system's certificates takes longer than the whole exchange
        self._http = httpx.Client(headers=headers, limits=limits, timeout=timeout, trust_env=False, verify=verify)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> GatewayClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- rollouts -------------------------------------------------------------------------------------------------

    def create_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Create all or none; ids that exist with the same content are returned as they stand."""
        return self.create_to_follow(rollouts)[0]

    def create_to_follow(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], int]:
        """`create_rollouts`, and the cursor behind which `terminal` tells the end of those that are open."""
        names = {"rollout_id", "group_id", "mode", "max_attempts", "timeout_s", "task", "config"}
        body = {"rollouts": [r.model_dump(mode="json", include=names) for r in rollouts]}
        reply = self._call("POST", "/api/rollouts", json=body)
        return _rollouts(reply), int(reply["cursor"])

    def list_rollouts(
        self, *, state: str | None = None, group_id: str | None = None, limit: int = 1000, wait_s: float = 0
    ) -> list[Rollout]:
        """Rollouts in order of creation. `wait_s`: wait up to that long until at least one matches."""
        query = {"state": state, "group_id": group_id, "limit": limit}
        return _rollouts(self._long_poll("/api/rollouts", query, wait_s))

    def get_rollout(self, rollout_id: str) -> Rollout:
        return Rollout.model_validate(self._call("GET", f"/api/rollouts/{rollout_id}"))

    def claim(self, rollout_id: str, worker: str) -> Lease:
        """Start the next attempt; GatewayError 409 `not_queuing` if somebody else has it or it has ended."""
        body = {"state": "running", "worker": worker, "claim_id": uuid.uuid4().hex}
        reply = self._call("PATCH", f"/api/rollouts/{rollout_id}", json=body)
        rollout = Rollout.model_validate(reply["rollout"])
        base_url = join_url(self.agent_url, reply["path"])
        return Lease(rollout, reply["agent_token"], reply["grade_token"], base_url)

    def release(self, rollout_id: str, attempt: int, reason: InfraReason, message: str = "") -> Rollout:
        """The attempt is lost: back to queuing, or failed when no attempt is left."""
        body = {"state": "queuing", "attempt": attempt, "reason": reason, "message": message}
        reply = self._call("PATCH", f"/api/rollouts/{rollout_id}", json=body | {"event_id": uuid.uuid4().hex})
        return Rollout.model_validate(reply["rollout"])

    def report(self, rollout_id: str, attempt: int, outcome: Outcome, token: str | None = None) -> Rollout:
        """End the attempt with a reward or an infrastructure reason; GatewayError 409 `rollout_ended` if it is late."""
        body = {"type": "reward", "outcome": outcome.model_dump(mode="json"), "event_id": uuid.uuid4().hex}
        reply = self._call("POST", f"/api/rollouts/{rollout_id}/attempt/{attempt}/events", json=body, token=token)
        return Rollout.model_validate(reply["rollout"])

    def add_event(
        self, rollout_id: str, attempt: int, kind: str, data: dict[str, Any], token: str | None = None
    ) -> int:
        """Append a custom event; returns its sequence number."""
        body = {"type": kind, "data": data, "event_id": uuid.uuid4().hex}
        reply = self._call("POST", f"/api/rollouts/{rollout_id}/attempt/{attempt}/events", json=body, token=token)
        return int(reply["sequence"])

    def cancel(self, rollout_ids: Sequence[str], message: str = "cancelled") -> None:
        """Give rollouts up; those that have ended already stay as they are."""
        for rollout_id in rollout_ids:
            try:
                self._call("PATCH", f"/api/rollouts/{rollout_id}", json={"state": "failed", "message": message})
            except GatewayError as error:
                if error.code != "rollout_ended":
                    raise

    def events(self, rollout_id: str) -> list[dict[str, Any]]:
        return list(self._call("GET", f"/api/rollouts/{rollout_id}/events")["events"])

    def calls(self, rollout_id: str, attempt: int | None = None, *, deltas: bool = False) -> list[ModelCall]:
        """Model calls of an attempt (default: the last), in order, with ids as numpy arrays; `deltas`: see decode."""
        from swe_lightning.gateway.compact import decode

        query = {"attempt": attempt, "calls": "compact"}
        reply = self._call("GET", f"/api/rollouts/{rollout_id}/events", params=query)
        return list(decode([{k: _bytes(k, v) for k, v in row.items()} for row in reply["rows"]], deltas=deltas))

    def terminal(self, *, after: int = 0, wait_s: float = 0) -> tuple[list[Rollout], int]:
        """What ended after cursor `after` (waiting for the first one up to `wait_s`), and the next cursor."""
        reply = self._long_poll("/api/rollouts/terminal", {"after": after}, wait_s)
        return _rollouts(reply), int(reply["cursor"])

    # ---- gate and models ------------------------------------------------------------------------------------------

    def pause(self, drain_s: float | None = 60.0) -> dict[str, Any]:
        """Stop admitting model calls and wait for those in flight; GatewayError 504 `drain_timeout` (still paused)."""
        timeout = (drain_s or 0) + 60
        return dict(self._call("POST", "/proxy/pause", json={"drain_s": drain_s}, timeout_s=timeout))

    def resume(self) -> dict[str, Any]:
        return dict(self._call("POST", "/proxy/resume"))

    def state(self) -> dict[str, Any]:
        return dict(self._call("GET", "/proxy/state"))

    def register_model(self, url: str, *, version: int, name: str = "policy", max_context: int | None = None) -> None:
        """Add a model server, or change what is known of it (after a weight update: before resume())."""
        body = {"url": url, "version": version, "name": name, "max_context": max_context}
        self._call("POST", "/api/models", json=body)

    def models(self) -> list[dict[str, Any]]:
        return list(self._call("GET", "/api/models")["models"])

    def delete_model(self, url: str) -> None:
        self._call("DELETE", "/api/models", params={"url": url})

    def wait_ready(self) -> None:
        """Return once the gateway answers; GatewayError after `patience_s`."""
        self._call("GET", "/healthz")

    # ---- transport ------------------------------------------------------------------------------------------------

    def _long_poll(self, path: str, query: dict[str, Any], wait_s: float) -> Any:
        """One request per _LONG_POLL_S, until there is something or the time is over."""
        deadline = time.monotonic() + wait_s
        while True:
            wait = max(0.0, min(_LONG_POLL_S, deadline - time.monotonic()))
            reply = self._call("GET", path, params=query | {"wait": wait}, timeout_s=wait + 30)
            if reply["rollouts"] or time.monotonic() >= deadline:
                return reply

    def _call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: dict[str, Any] | None = None,
        token: str | None = None,
        timeout_s: float = 60,
    ) -> Any:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        content = None
        if json is not None:
            content = orjson.dumps(json)
            headers["content-type"] = "application/json"
        query = {k: v for k, v in (params or {}).items() if v is not None}
        timeout = httpx.Timeout(timeout_s, connect=10, pool=60)
        deadline = time.monotonic() + self.patience_s
        for attempt in range(1_000_000):
            try:
                url = join_url(self.url, path)
                response = self._http.request(
                    method, url, content=content, params=query, headers=headers, timeout=timeout
                )
                if response.status_code != 503:
                    return _result(response)
                failure = _error(response)
            except httpx.TransportError as error:
                failure = GatewayError(0, "unreachable", f"{method} {self.url}{path}: {error or type(error).__name__}")
            if time.monotonic() >= deadline:
                raise failure
            time.sleep(min(2.0, 0.05 * 2 ** min(attempt, 6)) * (0.5 + random.random() / 2))
        raise AssertionError("unreachable")


def _result(response: httpx.Response) -> Any:
    if response.is_success:
        return orjson.loads(response.content)
    raise _error(response)


def _error(response: httpx.Response) -> GatewayError:
    try:
        error = response.json()["error"]
        return GatewayError(response.status_code, str(error["code"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return GatewayError(response.status_code, "unknown", response.text[:300])


def _rollouts(reply: Any) -> list[Rollout]:
    return [Rollout.model_validate(r) for r in reply["rollouts"]]


def _bytes(name: str, value: Any) -> Any:
    return base64.b64decode(value) if name in _BYTES and isinstance(value, str) else value
