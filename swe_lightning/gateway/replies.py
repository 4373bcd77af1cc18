"""What the control plane answers, as models for its document (/openapi.json).

The answers themselves are written as plain JSON; the fuzz test holds every one of them against these.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from swe_lightning.records import Rollout


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Rollouts(Answer):
    rollouts: list[Rollout]


class Created(Answer):
    rollouts: list[Rollout]
    """As they stand, in the order of the request."""
    cursor: int
    """End of the completion log: those that are open end behind it."""


class Terminal(Answer):
    rollouts: list[Rollout]
    """Ended rollouts in the order in which they ended."""
    cursor: int
    """`after` of the next request."""


class Changed(Answer):
    rollout: Rollout


class Lease(Answer):
    """One attempt of a rollout, for the worker that claimed it."""

    rollout: Rollout
    path: str
    """OpenAI base path of this attempt; Anthropic clients take the same with /anthropic for /openai/v1."""
    agent_token: str
    grade_token: str


class Appended(Answer):
    sequence: int


class Events(Answer):
    events: list[dict[str, Any]]


class Calls(Answer):
    """With calls=plain."""

    calls: list[dict[str, Any]]


class Rows(Answer):
    """With calls=compact."""

    rows: list[dict[str, Any]]


class Model(Answer):
    url: str
    name: str
    version: int
    max_context: int | None


class ModelState(Model):
    model_config = ConfigDict(extra="allow")

    in_flight: int


class Models(Answer):
    models: list[ModelState]


class Removed(Answer):
    removed: bool


class GateState(BaseModel):
    model_config = ConfigDict(extra="allow")

    paused: bool
    in_flight: int
    waiting: int


class Health(Answer):
    status: Literal["ok", "stopping"]


class ErrorDetail(BaseModel):
    """Some codes add fields, for example `in_flight` to drain_timeout."""

    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    code: str
    param: None


class Error(Answer):
    """Every refusal of ours, in OpenAI's layout."""

    error: ErrorDetail


class AnthropicErrorDetail(Answer):
    type: str
    message: str
    code: str


class AnthropicError(Answer):
    """The same in Anthropic's layout, for everything below anthropic/."""

    type: Literal["error"]
    error: AnthropicErrorDetail
