"""One episode of mini-SWE-agent's own DefaultAgent, unmodified: our model and our environment are all it is given.

`run_episode` never raises for what the policy or a machine did: both are in its result, kept apart. `infra_reason` set
means that a machine failed and the episode says nothing about the policy.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from swe_lightning.errors import InfraError
from swe_lightning.harness.budget import TimeBudget
from swe_lightning.harness.environment import Box, BoxEnvironment, EnvironmentConfig
from swe_lightning.harness.episode_log import EpisodeLog
from swe_lightning.harness.http import HttpPool
from swe_lightning.harness.mini import VERSION, DefaultAgent
from swe_lightning.harness.model import GatewayModel, ModelConfig
from swe_lightning.harness.templates import prompts
from swe_lightning.recipe import Harness
from swe_lightning.records import InfraReason, Task

EXIT_STATUS = {
    "Submitted": "submitted",
    "LimitsExceeded": "step_limit",
    "TimeExceeded": "wall_time",
    "RepeatedFormatError": "format_errors",
}
"""mini-SWE-agent's names for how an episode ends -> ours."""

_shared_pool = HttpPool()


@dataclass
class EpisodeResult:
    exit_status: str
    """submitted, step_limit, wall_time, context_overflow, format_errors, bad_history; or the infra reason."""
    n_calls: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    infra_reason: InfraReason | None = None
    message: str = ""
    longest_prompt_tokens: int = 0
    """Of all its model calls, as the engine counted."""

    @property
    def submitted(self) -> bool:
        return self.infra_reason is None and self.exit_status == "submitted"


def run_episode(
    task: Task,
    harness: Harness,
    box: Box,
    base_url: str,
    token: str,
    *,
    deadline: float,
    log_file: Path | None = None,
    extra_body: dict[str, Any] | None = None,
    pool: HttpPool | None = None,
) -> EpisodeResult:
    """Play one episode until it ends or `deadline` (on time.monotonic()) passes.

    Raises RecipeError for a template that cannot be rendered; everything else is in the result.
    """
    texts = prompts(harness, task)
    model_config = ModelConfig(
        max_tokens=harness.max_tokens,
        observation_chars=harness.observation_chars,
        observation_template=texts.observation,
        format_error_template=texts.format_error,
        extra_body=extra_body or {},
    )
    budget = TimeBudget(deadline)
    log = EpisodeLog(log_file)
    log.header(task=task.instance_id, **manifest(harness))
    model = GatewayModel(pool or _shared_pool, base_url, token, config=model_config, budget=budget, log=log)
    environment = EnvironmentConfig(timeout=harness.command_timeout_s)
    # The prompts are rendered above by our cached templates; the agent only puts them in place.
    agent = DefaultAgent(
        model,
        BoxEnvironment(box, config=environment, budget=budget, log=log),
        system_template="{{ system_prompt }}",
        instance_template="{{ instance_prompt }}",
        step_limit=harness.step_limit,
        cost_limit=0,
        max_consecutive_format_errors=harness.format_error_limit,
    )
    result = EpisodeResult("", 0)
    try:
        ended = agent.run(task.problem_statement or "", system_prompt=texts.system, instance_prompt=texts.instance)
        status = str(ended.get("exit_status", ""))
        result.exit_status = EXIT_STATUS.get(status, status)
        result.message = str(agent.messages[-1].get("content", ""))
    except InfraError as error:
        result.exit_status, result.infra_reason, result.message = error.reason.value, error.reason, str(error)
    finally:
        result.n_calls, result.messages = agent.n_calls, agent.messages
        result.longest_prompt_tokens = model.longest_prompt_tokens
        log.follow(agent.messages)
        log.end(exit_status=result.exit_status or "crashed", n_calls=agent.n_calls, message=result.message)
    return result


def manifest(harness: Harness) -> dict[str, Any]:
    """What played the episode: mini-SWE-agent's version and the configuration with its hash."""
    settings = harness.model_dump(mode="json", exclude_none=True)
    digest = hashlib.sha256(orjson.dumps(settings, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
    return {"mini_version": VERSION, "harness": settings, "harness_hash": digest}
