"""What controller and worker say to each other: JSON lines over the worker's stdin and stdout.

controller -> worker   run (a lease), cancel (rollout id and attempt); end of input means stop
worker -> controller   ready, done (rollout id, attempt, reported, how it ended)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import orjson

from swe_lightning.records import Rollout


@dataclass(frozen=True)
class Job:
    """A claimed rollout: what to run and the tokens for exactly this attempt."""

    rollout: Rollout
    attempt: int
    agent_token: str
    grade_token: str
    base_url: str

    @property
    def key(self) -> tuple[str, int]:
        return self.rollout.rollout_id, self.attempt

    def encode(self) -> bytes:
        fields = {"attempt": self.attempt, "agent_token": self.agent_token, "grade_token": self.grade_token}
        return line("run", rollout=self.rollout.model_dump(mode="json"), base_url=self.base_url, **fields)

    @classmethod
    def decode(cls, message: dict[str, Any]) -> Job:
        fields = {k: message[k] for k in ("attempt", "agent_token", "grade_token", "base_url")}
        return cls(rollout=Rollout.model_validate(message["rollout"]), **fields)


@dataclass(frozen=True)
class Done:
    """A worker is through with an attempt. `reported`: the gateway has its outcome, or did not want it."""

    rollout_id: str
    attempt: int
    reported: bool
    ended: str
    seconds: float

    def encode(self) -> bytes:
        return line("done", **asdict(self))


def line(kind: str, **fields: Any) -> bytes:
    return orjson.dumps({"type": kind, **fields}, option=orjson.OPT_APPEND_NEWLINE)


def parse(data: bytes) -> dict[str, Any]:
    message = orjson.loads(data)
    if not isinstance(message, dict) or "type" not in message:
        raise ValueError(f"not a message: {data[:100]!r}")
    return message
