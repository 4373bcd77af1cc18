"""The nouns every room shares: Task, Rollout, ModelCall, Outcome, Row, Batch.

Pydantic where a record crosses a process boundary, plain dataclasses where millions of tokens pass through.
Nothing here does work: no I/O, no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

Mode = str  # "train" | "val"


class InfraReason(StrEnum):
    """Why a rollout has no verdict. None of these says anything about the policy."""

    SANDBOX_START = "sandbox_start"
    SANDBOX_LOST = "sandbox_lost"
    IMAGE_UNAVAILABLE = "image_unavailable"
    HARNESS_CRASH = "harness_crash"
    WORKER_LOST = "worker_lost"
    GATEWAY_LOST = "gateway_lost"
    UPSTREAM_ERROR = "upstream_error"
    GRADING_ERROR = "grading_error"
    GRADING_TIMEOUT = "grading_timeout"
    PARSE_ERROR = "parse_error"
    CANCELLED = "cancelled"


class Untrainable(StrEnum):
    """Why a recorded call may not be trained on."""

    TOKEN_LOSS = "token_loss"
    NO_PROMPT_IDS = "no_prompt_ids"
    NO_RESPONSE_IDS = "no_response_ids"
    LOGPROB_LEN_MISMATCH = "logprob_len_mismatch"
    ABORTED = "aborted"
    UPSTREAM_ERROR = "upstream_error"
    CONTEXT_OVERFLOW = "context_overflow"
    VAL_MODE = "val_mode"
    MIXED_WEIGHTS = "mixed_weights"


class RolloutState(StrEnum):
    QUEUING = "queuing"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        return self in (RolloutState.SUCCEEDED, RolloutState.FAILED)


class Task(BaseModel):
    """One SWE-smith / SWE-bench row as published; unknown columns survive a round trip.

    In SWE-smith rows `patch` *introduces* the bug, so the gold fix is its reverse; a branch named `instance_id` holds
    the commits `Bug Patch` and then `Remove F2P Tests`. In SWE-bench rows `patch` is the fix and `test_patch` adds the
    tests.
    """

    model_config = ConfigDict(extra="allow")

    instance_id: str
    repo: str
    problem_statement: str | None = None
    patch: str = ""
    FAIL_TO_PASS: list[str] = Field(default_factory=list)
    PASS_TO_PASS: list[str] = Field(default_factory=list)
    base_commit: str | None = None
    test_patch: str | None = None
    image_name: str | None = None

    # Columns of `swel data synth`; absent from published sets.
    repo_path: str | None = None
    """Local git repository (bare or not) that holds the branch `instance_id`. Relative paths: to the task file."""
    test_cmd: str | None = None
    """Command that runs the tests; test ids are appended. Run from the tree's root by bash."""
    test_env: dict[str, str] = Field(default_factory=dict)
    """Environment of the test command (for example PYTHONPATH=src)."""
    bug_file: str | None = None
    bug_line: int | None = None
    bug_func: str | None = None
    """Where the bug was put. Reaches the agent only if the recipe's templates say so."""

    @field_validator("FAIL_TO_PASS", "PASS_TO_PASS", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        """SWE-bench publishes these lists as JSON strings."""
        return json.loads(value) if isinstance(value, str) else value


class Outcome(BaseModel):
    """How a rollout ended: a reward *or* a reason why there is none."""

    model_config = ConfigDict(extra="forbid")

    reward: float | None = None
    """The raw verdict's: what evaluation and every rate use."""
    shaped_reward: float | None = None
    """What training uses instead where the recipe shapes rewards; never set for validation."""
    infra_reason: InfraReason | None = None
    message: str = ""
    """One sentence for a person (the error's text, or why the verdict is what it is)."""
    exit_status: str = ""
    """How the harness ended: submitted, step_limit, wall_time, context_overflow, format_errors, ..."""
    verdict: dict[str, Any] = Field(default_factory=dict)
    """Details of grading: resolved, per-test status, filtered paths, tampering, apply method, seconds."""
    reported_by: str = ""

    @property
    def training_reward(self) -> float | None:
        return self.reward if self.shaped_reward is None else self.shaped_reward

    @property
    def tampering(self) -> dict[str, str]:
        """Path -> why the filter took it out of the model's patch: what an audit lists."""
        return dict(self.verdict.get("tampering") or {})


def is_resolved(reward: float | None) -> bool:
    """Solved means the full reward: a partial one teaches, and it solves nothing. No reward (None) is no verdict."""
    return reward is not None and reward >= 1.0


class Rollout(BaseModel):
    """One attempt-counted run of the harness on one task."""

    model_config = ConfigDict(extra="forbid")

    rollout_id: str
    group_id: str
    mode: Mode = "train"
    state: RolloutState = RolloutState.QUEUING
    attempt: int = 0
    max_attempts: int = 3
    task: dict[str, Any] = Field(default_factory=dict)
    """The Task row."""
    config: dict[str, Any] = Field(default_factory=dict)
    """What the controller needs beside the task: harness, sandbox, grading, sampling sections of the recipe."""
    timeout_s: float = 5400.0
    created_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    outcome: Outcome | None = None
    weight_versions: list[int] = Field(default_factory=list)
    """Weight versions seen by its calls, ascending."""


@dataclass(slots=True)
class ModelCall:
    """One request to the model and what the engine reported.

    `prompt_ids` (p,), `response_ids` (r,), `logprobs` (r,) are the engine's own; nothing is re-tokenised.
    """

    rollout_id: str
    prompt_ids: Any = field(default_factory=list)
    response_ids: Any = field(default_factory=list)
    logprobs: Any = field(default_factory=list)
    call_id: str = ""
    attempt: int = 1
    sequence: int = 0
    protocol: str = ""
    """What the client spoke: chat, completions, responses or messages; empty if that was not recorded."""
    request: dict[str, Any] = field(default_factory=dict)
    """What the engine was asked, as a request of its own route, whatever the client spoke."""
    response: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    version_start: int = 0
    version_end: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    upstream: str = ""
    retries: int = 0
    trainable: bool = True
    reason: str | None = None
    superseded: bool = False


@dataclass(slots=True)
class Row:
    """One training sample. `ids`, `mask`, `logprobs` are aligned, shape (tokens,).

    mask 1 = sampled by the policy and trained; logprobs are 0.0 where mask is 0.
    """

    ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    rollout_id: str
    group_id: str = ""
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, end, weight version) of each sampled span, in order."""
    calls: list[int] = field(default_factory=list)
    """Sequence numbers of the calls merged into this row."""

    @property
    def trained_tokens(self) -> int:
        return int(self.mask.sum())


@dataclass(slots=True)
class Batch:
    """Rows of whole groups with one weight per token: all an engine has to sum.

    `weights[i]` (tokens of row i,) folds advantage and normalisation; zero where mask is 0.
    """

    rows: list[Row]
    weights: list[np.ndarray]
    rewards: dict[str, float | None] = field(default_factory=dict)
    advantages: dict[str, float | None] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)
    kl_weights: list[np.ndarray] = field(default_factory=list)
    """Like `weights` with advantage 1 for every rollout: for KL and entropy terms."""
    groups: dict[str, str] = field(default_factory=dict)
    """Group of each rollout, those without rows included."""
