"""Bodies of the control plane: typed and closed, so that a misspelt field is an error and never silence."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from swe_lightning.records import InfraReason, Outcome

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=~-]{0,199}")


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NewRollout(Body):
    """A rollout to run. Without `rollout_id` the gateway chooses one (and the call is then not repeatable)."""

    rollout_id: str = Field("", pattern=f"^({_ID.pattern})?$")
    group_id: str = Field(min_length=1, max_length=200)
    mode: Literal["train", "val"] = "train"
    max_attempts: int = Field(3, ge=1, le=1000)
    timeout_s: float = Field(5400.0, gt=0)
    task: dict[str, Any] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)


class NewRollouts(Body):
    rollouts: list[NewRollout] = Field(max_length=10_000)


class Change(Body):
    """running = claim it; queuing = its attempt is lost (release); failed = give it up (cancel)."""

    state: Literal["running", "queuing", "failed"]
    worker: str = ""
    claim_id: str = Field("", max_length=100)
    attempt: int | None = None
    reason: InfraReason = InfraReason.WORKER_LOST
    message: str = ""
    event_id: str = Field("", max_length=100)


class NewEvent(Body):
    """A custom event, or `type` reward with the outcome that ends the attempt (grade scope)."""

    type: str = Field(min_length=1, max_length=100)
    data: dict[str, Any] = Field(default_factory=dict)
    outcome: Outcome | None = None
    event_id: str = Field("", max_length=100)


class NewModel(Body):
    url: str = Field(pattern=r"^https?://\S+$", max_length=2000)
    name: str = Field("policy", min_length=1, max_length=200)
    version: int = Field(0, ge=0)
    max_context: int | None = Field(None, ge=1)


class Pause(Body):
    drain_s: float | None = Field(None, ge=0, le=86400)
    """Wait this long for calls in flight; None: do not wait."""
