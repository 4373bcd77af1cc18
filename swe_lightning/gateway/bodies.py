"""Bodies and parameters of the control plane: typed and closed, so that a misspelt field is an error and never silence.

Numbers are numbers (true and "3" are not) and fit the store's columns, and texts hold no NUL: what the store cannot
keep becomes a sentence to the client instead of a failure.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator

from swe_lightning.records import InfraReason, Outcome

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=~-]{0,199}")
_NO_NUL = r"^[^\x00]*$"
Text = Annotated[str, Field(pattern=_NO_NUL, max_length=10_000)]
Name = Annotated[str, Field(pattern=r"^[^\x00]+$", max_length=200)]
RequestId = Annotated[str, Field(pattern=_NO_NUL, max_length=100)]


def _number(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError("should be a number")
    return value


# The check of the type stands last and so runs first; bounds before it stay in the document.
_Number = BeforeValidator(_number)
Count = Annotated[int, Field(ge=1, le=2**31 - 1), _Number]
Version = Annotated[int, Field(ge=0, le=2**31 - 1), _Number]
Attempts = Annotated[int, Field(ge=1, le=1000), _Number]
Seconds = Annotated[float, Field(gt=0, le=1e9), _Number]
Drain = Annotated[float, Field(ge=0, le=86400), _Number]
Real = Annotated[float, Field(allow_inf_nan=False), _Number]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NewRollout(Body):
    """A rollout to run. Without `rollout_id` the gateway chooses one (and the call is then not repeatable)."""

    rollout_id: str = Field("", pattern=f"^({_ID.pattern})?$")
    group_id: Name
    mode: Literal["train", "val"] = "train"
    max_attempts: Attempts = 3
    timeout_s: Seconds = 5400.0
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
    """The attempt is lost: back to queuing, or failed when none is left. The same `event_id` again changes nothing."""

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
    """Whatever an agent, a grader or the controller wants to note. The same `event_id` again changes nothing; without
    one a repetition is a further event."""

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


class GivenOutcome(Outcome):
    """An Outcome whose numbers are numbers: true is not 1.0 here."""

    model_config = ConfigDict(json_schema_extra={"oneOf": _EITHER})

    reward: Real | None = None
    shaped_reward: Real | None = None


class Reward(Body):
    """The end of the attempt (grade scope): a reward, or the reason why there is none. The same `event_id` again
    changes nothing."""

    type: Literal["reward"]
    outcome: GivenOutcome
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
    version: Version = 0
    max_context: Count | None = None


class Pause(Body):
    drain_s: Drain | None = None
    """Wait this long for calls in flight; None: do not wait."""
