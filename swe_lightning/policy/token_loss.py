"""What verl minimises: a sum over tokens whose weights the batch brings along.

`TokenLoss` is handed to verl's TrainingWorker by `set_loss_fn`. It reads only log-probabilities and the batch's own
per-token columns, so it works behind any verl engine. The ratio and its clipping are `objective.losses`; advantage,
normalisation and coefficients are already inside the weights.
Refuses to average: every metric is a sum or a maximum, and `summarise` divides once, over the whole batch.

Columns (jagged, one value per token; position t speaks of token t + 1): `loss_mask`, `weights`, `sampler_logprobs`;
optional `old_logprobs`, `is_weights`, `ref_logprobs` with `kl_weights`, `entropy_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from swe_lightning.objective import losses

if TYPE_CHECKING:
    from swe_lightning.recipe import Algorithm

SUPERVISED = "supervised"


@dataclass(frozen=True)
class TokenLoss:
    """loss_fn(model_output, data, dp_group) -> (loss, metrics) for verl; `kind` supervised is plain cross-entropy."""

    kind: str = SUPERVISED
    clip_low: float = 0.2
    clip_high: float = 0.28
    correction: str = "none"
    """none: the ratio is taken against the sampler. tis | mask: against the policy as it was before the update, and
    the distance to the sampler becomes a constant weight."""
    cap: float = 2.0

    @classmethod
    def of(cls, algorithm: Algorithm) -> TokenLoss:
        return cls(
            kind=algorithm.policy_loss,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            correction=algorithm.off_policy.kind,
            cap=algorithm.off_policy.cap,
        )

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, float]]:
        logprob = model_output["log_probs"].values()
        mask = data["loss_mask"].values().bool()
        weights = data["weights"].values()
        if self.kind == SUPERVISED:
            loss = -losses.weighted_sum(logprob, weights, mask)
            return loss, {"loss_sum": float(loss.detach()), "trained_tokens": float(mask.sum())}
        now, sampler = logprob.detach(), data["sampler_logprobs"].values()
        old, is_weights = self._reference_point(data, now, sampler)
        loss, sums = losses.policy_loss(
            logprob,
            old,
            weights,
            mask,
            kind=self.kind,  # type: ignore[arg-type]
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            is_weights=is_weights,
        )
        metrics = {key: float(value) for key, value in sums.items() if key not in ("loss", "tokens")}
        metrics["trained_tokens"] = float(mask.sum())
        metrics |= _sampler_metrics(now, sampler, is_weights, mask)
        if "kl_weights" in data.keys():
            penalty = losses.kl_penalty(logprob, data["ref_logprobs"].values())
            loss = loss + losses.weighted_sum(penalty, data["kl_weights"].values(), mask)
            metrics["ref_kl_sum"] = float(penalty.detach()[mask].sum())
        if "entropy_weights" in data.keys():
            entropy = model_output["entropy"].values()
            loss = loss - losses.weighted_sum(entropy, data["entropy_weights"].values(), mask)
            metrics["entropy_sum"] = float(entropy.detach()[mask].sum())
        return loss, metrics | {"loss_sum": float(loss.detach())}

    def _reference_point(
        self, data: Any, now: torch.Tensor, sampler: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Old log-probabilities and the off-policy weight. Without columns for them this is the first update of the
        batch, so the current policy *is* the old one: no extra forward pass."""
        if self.correction == "none":
            return sampler, None
        if "is_weights" in data.keys():
            return data["old_logprobs"].values(), data["is_weights"].values()
        return now, off_policy_weights(now - sampler, self.correction, self.cap)


def off_policy_weights(log_ratio: torch.Tensor, kind: str, cap: float) -> torch.Tensor:
    """Per value of log(trainer / sampler): tis cuts the ratio at `cap`; mask keeps [1/cap, cap] and zeroes the rest."""
    ratio = log_ratio.clamp(-losses.LOG_RATIO_LIMIT, losses.LOG_RATIO_LIMIT).exp()
    if kind == "tis":
        return ratio.clamp(max=cap)
    return torch.where((ratio >= 1 / cap) & (ratio <= cap), ratio, torch.zeros_like(ratio))


def _sampler_metrics(
    now: torch.Tensor, sampler: torch.Tensor, is_weights: torch.Tensor | None, mask: torch.Tensor
) -> dict[str, float]:
    """How far the trainer's policy is from what the inference engine reported, on trained tokens."""
    delta = (now - sampler)[mask]
    ratio = delta.clamp(-losses.LOG_RATIO_LIMIT, losses.LOG_RATIO_LIMIT).exp()
    found = {
        "sampler_kl_sum": float((ratio - 1 - delta).sum()),
        "sampler_diff_max": float(delta.abs().max()) if delta.numel() else 0.0,
    }
    if is_weights is not None:
        kept = is_weights[mask]
        found["is_weight_sum"] = float(kept.sum())
        found["is_weight_max"] = float(kept.max()) if kept.numel() else 0.0
        found["is_clipped"] = float((kept != ratio).sum())
    return found


def summarise(parts: Mapping[str, list[float]]) -> dict[str, float]:
    """Sums and maxima of micro-batches -> means over trained tokens, maxima, and counts."""
    total = {key: max(values) if key.endswith("_max") else sum(values) for key, values in parts.items()}
    tokens = total.pop("trained_tokens", 0.0)
    result = {"loss": total.pop("loss_sum", 0.0), "trained_tokens": tokens}
    for key, value in total.items():
        if key.endswith("_max"):
            result[key] = value
        elif key.endswith("_sum"):
            result[f"{key[:-4]}_mean" if key[:-4] in ("ratio", "is_weight") else key[:-4]] = value / max(tokens, 1.0)
        else:
            result[f"{key}_share"] = value / max(tokens, 1.0)
    return result
