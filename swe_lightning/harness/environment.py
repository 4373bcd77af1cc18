"""The shell as mini-SWE-agent sees it: commands go into a sandbox, text comes out.

Submission is recognised the way mini-SWE-agent's own environments do it (the marker is the first line of a command that
succeeded), and also when a shell's start-up noise precedes the marker, provided that the command itself names the
marker. What the agent prints after it is ignored: the patch is taken from the tree, outside the box.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from swe_lightning.harness.budget import TimeBudget
from swe_lightning.harness.episode_log import EpisodeLog
from swe_lightning.harness.mini import Submitted
from swe_lightning.harness.templates import SUBMIT_MARKER

MAX_COMMAND_BYTES = 120_000
"""Linux refuses a single argument of 128 KiB; such a command is the agent's mistake, not a broken machine."""


class ExecResult(Protocol):
    @property
    def output(self) -> bytes: ...
    @property
    def exit_code(self) -> int: ...
    @property
    def timed_out(self) -> bool: ...


class Box(Protocol):
    """The part of a sandbox that the harness may touch."""

    def run(self, command: str, *, timeout_s: float) -> ExecResult: ...


@dataclass
class EnvironmentConfig:
    """Serialised into mini-SWE-agent's trajectory."""

    cwd: str = "/testbed"
    timeout: float = 120.0


class BoxEnvironment:
    """mini-SWE-agent's Environment protocol over a sandbox. Raises SandboxLost when the box is gone."""

    def __init__(self, box: Box, *, config: EnvironmentConfig, budget: TimeBudget, log: EpisodeLog) -> None:
        self.config = config
        self._box = box
        self._budget = budget
        self._log = log

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        self._log.flush()
        command = action.get("command", "")
        if refused := _refusal(command):
            return {"output": "", "returncode": 126, "exception_info": refused}
        limit_s = timeout or self.config.timeout
        left_s = self._budget.left_s
        if left_s <= 0:
            raise self._budget.out_of_time("before a command")
        result = self._box.run(command, timeout_s=min(limit_s, left_s))
        text = result.output.decode("utf-8", errors="replace")
        if result.timed_out:
            if limit_s > left_s:
                raise self._budget.out_of_time("during a command")
            info = f"An error occurred while executing the command: it timed out after {limit_s:g} seconds"
            return {"output": text, "returncode": -1, "exception_info": info}
        if result.exit_code == 0 and submits(command, text):
            raise Submitted(
                {"role": "exit", "content": "", "extra": {"exit_status": "Submitted", "submission": ""}},
            )
        return {"output": text, "returncode": result.exit_code, "exception_info": ""}

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        return {}

    def serialize(self) -> dict[str, Any]:
        kind = f"{__name__}.{type(self).__name__}"
        return {"info": {"config": {"environment": vars(self.config), "environment_type": kind}}}


def submits(command: str, output: str) -> bool:
    """Does this output of a successful command hand in the work?"""
    if SUBMIT_MARKER not in output:
        return False
    lines = [line.strip() for line in output.lstrip().splitlines()]
    return lines[0] == SUBMIT_MARKER or (SUBMIT_MARKER in command and SUBMIT_MARKER in lines)


def _refusal(command: str) -> str:
    if "\0" in command:
        return "bash: a command cannot contain NUL characters"
    if len(command.encode("utf-8", "replace")) > MAX_COMMAND_BYTES:
        return f"bash: argument list too long (a command may have {MAX_COMMAND_BYTES} bytes)"
    return ""
