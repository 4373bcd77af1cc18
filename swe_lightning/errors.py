"""Every error swel raises on purpose, in one tree.

    SwelError                      exit 1
    |-- UserError                  exit 2   one sentence: what, where, what to do
    |   |-- RecipeError                     a recipe key or value
    |   |-- DataError                       a task file or row
    |   |-- MissingPart                     an extra, a binary or a kernel feature is absent
    |   `-- BusyError                       port, run directory or lock in use
    |-- InfraError                 exit 1   a broken machine; carries a typed reason, is retried, is never a reward
    |   |-- SandboxStartError
    |   |-- SandboxLost
    |   `-- GradingError
    |-- GatewayError               exit 1   a reply of the gateway, with status and code
    |-- UpstreamError              exit 1   a model server failed (weight sync, pause, health)
    |-- NoTrainingRows             exit 1   a training step has nothing to train on; carries why, by rollout
    `-- Interrupted                exit 130 Ctrl-C, after the state was saved

The command line turns a SwelError into one line on stderr and its exit code; anything else is a bug and shows a
traceback. Catch to retry or to attribute, never to hide.
"""

from __future__ import annotations

from swe_lightning.records import InfraReason


class SwelError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class UserError(SwelError):
    """Something the user can mend. The message says what is wrong, where, and what to do."""

    exit_code = 2


class RecipeError(UserError):
    """A recipe (or a `--set` override) that cannot be accepted."""


class DataError(UserError):
    """A task file or row that cannot be accepted."""


class MissingPart(UserError):
    """An optional dependency, a program or a kernel feature is missing."""


class BusyError(UserError):
    """A port, run directory or lock is held by another process."""


class InfraError(SwelError):
    """A broken machine. `reason` goes into the rollout's Outcome; there is never a reward beside it."""

    def __init__(self, reason: InfraReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class SandboxStartError(InfraError):
    """A sandbox could not be created. `permanent`: another try on this machine would end the same way."""

    def __init__(
        self, message: str, reason: InfraReason = InfraReason.SANDBOX_START, *, permanent: bool = False
    ) -> None:
        super().__init__(reason, message)
        self.permanent = permanent


class SandboxLost(InfraError):
    """A sandbox stopped answering while in use (killed, out of memory, daemon gone)."""

    def __init__(self, message: str, reason: InfraReason = InfraReason.SANDBOX_LOST) -> None:
        super().__init__(reason, message)


class GradingError(InfraError):
    """No verdict could be taken; says nothing about the patch."""

    def __init__(self, message: str, reason: InfraReason = InfraReason.GRADING_ERROR) -> None:
        super().__init__(reason, message)


class GatewayError(SwelError):
    """The gateway answered with an error: HTTP `status` and its typed `code` (for example `context_overflow`)."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"gateway answered {status} {code}: {message}")
        self.status = status
        self.code = code


class UpstreamError(SwelError):
    """A model server failed a control call; the message carries the server's own words."""


class NoTrainingRows(SwelError):
    """A step without a single row: the message counts every reason, `by_rollout` says why each rollout has none."""

    def __init__(self, message: str, by_rollout: dict[str, str]) -> None:
        super().__init__(message)
        self.by_rollout = by_rollout


class Interrupted(SwelError):
    """Stopped by the user after the state was saved."""

    exit_code = 130
