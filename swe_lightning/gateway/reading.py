"""How the body of a request is read: bounded in bytes, in values, and over the open calls of a rollout.

Whoever asks is an agent under training, and what it sends is kept and parsed in the one process that serves everybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swe_lightning.gateway.problems import Problem

MAX_VALUES = 2_000_000
"""Commas and brackets in a body, in texts too. Each may become an object of 100 bytes, and parsing them stops the rest
of the gateway for a while; a conversation of a million tokens stays far below."""


class BodyBudget:
    """How many bytes the open calls of each rollout may hold together: what one agent can make the gateway keep."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        """Rollouts that hold something."""
        return len(self._held)

    @contextmanager
    def reading(self, rollout_id: str, receive: Any) -> Iterator[Any]:
        """`receive`, counted; what came is held until the block ends. It raises Problem 429 above the limit."""
        mine = 0

        async def counted() -> Any:
            nonlocal mine
            message = await receive()
            size = len(message.get("body", b""))
            mine += size
            self._held[rollout_id] = held = self._held.get(rollout_id, 0) + size
            if held > self._limit:
                message = f"the open calls of rollout {rollout_id} hold more than {self._limit} bytes"
                raise Problem(429, "rollout_busy", message, retry_after_s=1)
            return message

        try:
            yield counted
        finally:
            left = self._held.get(rollout_id, 0) - mine
            if left:
                self._held[rollout_id] = left
            else:
                self._held.pop(rollout_id, None)


async def read_body(receive: Any, limit: int) -> bytes:
    """The whole request body; Problem 413 as soon as it is larger than `limit` bytes, or if it holds too much."""
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Problem(400, "bad_request", "the client left before the body was complete")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise Problem(413, "body_too_large", f"the body is larger than {limit} bytes")
        chunks.append(chunk)
        if not message.get("more_body"):
            break
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if size > MAX_VALUES and sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise Problem(413, "body_too_large", f"the body holds more than {MAX_VALUES} commas and brackets")
    return body
