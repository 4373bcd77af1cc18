"""Bodies and parameters of the control plane: typed and closed, so that a misspelt field is an error and never silence.

Numbers fit the store's columns and texts hold no NUL, because either would be a failure of the store instead of a
sentence to the client.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator

from swe_lightning.records import InfraReason, Outcome

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=~-]{0,199}")
_NO_NUL = r"^[^\x00]*$"
Text = Annotated[str, Field(pattern=_NO_NUL, max_length=10_000)]
Name = Annotated[str, Field(pattern=r"^[^\x00]+$", max_length=200)]
RequestId = Annotated[str, Field(pattern=_NO_NUL, max_length=100)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NewRollout(Body):
    """A rollout to run. Without `rollout_id` the gateway chooses one (and the call is then not repeatable)."""

    rollout_id: str = Field("", pattern=f"^({_ID.pattern})?$")
    group_id: Name
    mode: Literal["train", "val"] = "train"
    max_attempts: int = Field(3, ge=1, le=1000)
    timeout_s: float = Field(5400.0, gt=0, le=1e9)
    task: dict[str, Any] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)


class NewRollouts(Body):
    rollouts: list[NewRollout] = Field(max_length=10_000)


class Claim(Body):
    """Start the next attempt. The same `claim_id` again returns the attempt it started."""

    state: Literal["running"]
    worker: Text = ""
    claim_id: RequestId = ""


class Release(Body):
    """The attempt is lost: back to queuing, or failed when none is left."""

    state: Literal["queuing"]
    attempt: Count
    reason: InfraReason = InfraReason.WORKER_LOST
    message: Text = ""
    event_id: RequestId = ""


class Cancel(Body):
    """Give the rollout up."""

    state: Literal["failed"]
    message: Text = ""


Change = Annotated[Claim | Release | Cancel, Field(discriminator="state")]
RESERVED = ("model_call", "claimed", "released", "cancelled", "reward")
_NULL, _NUMBER = {"type": "null"}, {"type": "number"}
_EITHER: list[Any] = [
    {"required": ["reward"], "properties": {"reward": _NUMBER, "infra_reason": _NULL}},
    {
        "required": ["infra_reason"],
        "properties": {"infra_reason": {"type": "string"}, "reward": _NULL, "shaped_reward": _NULL},
    },
]


class CustomEvent(Body):
    """Whatever an agent, a grader or the controller wants to note."""

    type: Annotated[
        str, Field(pattern=r"^[^\x00]+$", max_length=100, json_schema_extra={"not": {"enum": list(RESERVED)}})
    ]
    data: dict[str, Any] = Field(default_factory=dict)
    event_id: RequestId = ""

    @field_validator("type")
    @classmethod
    def _free(cls, value: str) -> str:
        if value in RESERVED:
            raise ValueError(f"type {value!r} is the gateway's own")
        return value


class Reward(Body):
    """The end of the attempt (grade scope): a reward, or the reason why there is none."""

    type: Literal["reward"]
    outcome: Annotated[Outcome, Field(json_schema_extra={"oneOf": _EITHER})]
    event_id: RequestId = ""


def _event_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "reward" if kind == "reward" else "custom"


NewEvent = Annotated[
    Annotated[Reward, Tag("reward")] | Annotated[CustomEvent, Tag("custom")], Discriminator(_event_kind)
]


class NewModel(Body):
    url: str = Field(pattern=r"^https?://[^\s\x00]+$", max_length=2000)
    name: Name = "policy"
    version: int = Field(0, ge=0, le=2**31 - 1)
    max_context: Count | None = None


class Pause(Body):
    drain_s: float | None = Field(None, ge=0, le=86400)
    """Wait this long for calls in flight; None: do not wait."""
