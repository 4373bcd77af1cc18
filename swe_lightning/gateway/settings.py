"""What an operator can set on a gateway process, in one flat, frozen place; every default is meant to be kept.

`swel serve gateway --help` shows the same fields. Secrets are not among them: the signing key lies in the run directory
or in SWEL_SIGNING_KEY.
"""

from __future__ import annotations

from dataclasses import dataclass

from swe_lightning.errors import UserError
from swe_lightning.gateway.gate import GateLimits
from swe_lightning.gateway.health import HealthLimits
from swe_lightning.gateway.upstream import UpstreamLimits


@dataclass(frozen=True)
class Settings:
    """Limits of one gateway process. UserError for values that cannot work."""

    pause_wait_s: float = GateLimits.pause_wait_s
    """How long a call waits (paused, or no place free) before it gets 503 with Retry-After."""
    max_in_flight: int = GateLimits.max_in_flight
    """Calls at the model servers at once."""
    max_waiting: int = GateLimits.max_waiting
    """Calls held back at once; the next one gets 429."""
    max_per_rollout: int = GateLimits.max_per_rollout
    """Calls of one rollout, held or in flight; the next one gets 429."""
    patience_s: float = UpstreamLimits.patience_s
    """How long a call waits for a model server that refuses connections or answers 503."""
    call_timeout_s: float = UpstreamLimits.call_timeout_s
    """Wall time of one generation."""
    max_resends: int = UpstreamLimits.max_resends
    """How often a request is sent again after a try that may have reached a server."""
    health_interval_s: float = HealthLimits.interval_s
    """Between two health checks of a model server; 0 = none."""
    health_timeout_s: float = HealthLimits.timeout_s
    """How long a health check may take."""
    health_failures: int = HealthLimits.fail_after
    """Failed checks in a row that take a model server out."""
    grace_s: float = 10.0
    """On SIGTERM: how long calls in flight may still take before they get 503."""
    linger_s: float = 0.002
    """How long a commit waits for company."""

    def __post_init__(self) -> None:
        for name in ("max_in_flight", "max_waiting", "max_per_rollout", "health_failures"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)} is less than 1; give at least 1")
        for name, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise UserError(f"--{name.replace('_', '-')} {value} is not a number from 0; choose one")

    @property
    def gate(self) -> GateLimits:
        return GateLimits(self.max_in_flight, self.max_waiting, self.max_per_rollout, self.pause_wait_s)

    @property
    def upstream(self) -> UpstreamLimits:
        return UpstreamLimits(self.patience_s, self.call_timeout_s, self.max_resends)

    @property
    def health(self) -> HealthLimits:
        return HealthLimits(self.health_interval_s, self.health_timeout_s, self.health_failures)
