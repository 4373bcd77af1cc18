"""What verl minimises: a sum over tokens whose weights the batch brings along.

`TokenLoss` is handed to verl's TrainingWorker by `set_loss_fn`. It reads only log-probabilities and the batch's own
per-token columns, so it works behind any verl engine. The ratio and its clipping are `objective.losses`; advantage,
normalisation and coefficients are already inside the weights.
Refuses to average: every metric is a sum or a maximum, and `summarise` divides once, over the whole batch.

Columns (jagged, one value per token; position t speaks of token t + 1): `loss_mask`, `weights`, `sampler_logprobs`;
optional `old_logprobs`, `is_weights`, `ref_logprobs` with `kl_weights`, `entropy_weights`, `segments` (gspo's replies).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from swe_lightning.objective import correction, losses

if TYPE_CHECKING:
    from swe_lightning.recipe import Algorithm

SUPERVISED = "supervised"


@dataclass(frozen=True)
class TokenLoss:
    """loss_fn(model_output, data, dp_group) -> (loss, metrics) for verl; `kind` supervised is plain cross-entropy."""

    kind: str = SUPERVISED
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    correction: str = "none"
    """none: the ratio is taken against the sampler. tis | mask: against the policy as it was before the update, and
    the distance to the sampler becomes a constant weight."""
    cap: float = 2.0
    kl_estimator: str = "k3"

    @classmethod
    def of(cls, algorithm: Algorithm) -> TokenLoss:
        return cls(
            kind=algorithm.policy_loss,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            correction=algorithm.off_policy.kind,
            cap=algorithm.off_policy.cap,
            kl_estimator=algorithm.kl_estimator,
        )

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, float]]:
        logprob = model_output["log_probs"].values()
        mask = data["loss_mask"].values().bool()
        weights = data["weights"].values()
        ranks = _ranks(data)
        if self.kind == SUPERVISED:
            loss = -losses.weighted_sum(logprob, weights, mask)
            return loss * ranks, {"loss_sum": float(loss.detach()), "trained_tokens": float(mask.sum())}
        columns, now, sampler = set(data.keys()), logprob.detach(), data["sampler_logprobs"].values()
        old, is_weights = self._reference_point(data, now, sampler)
        loss, sums = losses.policy_loss(
            logprob,
            old,
            weights,
            mask,
            kind=self.kind,  # type: ignore[arg-type]
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            is_weights=is_weights,
            segments=data["segments"].values() if "segments" in columns else None,
        )
        metrics = {key: float(value) for key, value in sums.items() if key not in ("loss", "tokens")}
        metrics["trained_tokens"] = float(mask.sum())
        metrics |= _sampler_metrics(now, sampler, mask)
        if is_weights is not None:
            metrics |= self._correction_metrics(is_weights[mask])
        if "kl_weights" in columns:
            penalty = losses.kl_penalty(logprob, data["ref_logprobs"].values(), self.kl_estimator)  # type: ignore[arg-type]
            loss = loss + losses.weighted_sum(penalty, data["kl_weights"].values(), mask)
            metrics["ref_kl_sum"] = float(penalty.detach()[mask].sum())
        if "entropy_weights" in columns:
            entropy = model_output["entropy"].values()
            loss = loss - losses.weighted_sum(entropy, data["entropy_weights"].values(), mask)
            metrics["entropy_sum"] = float(entropy.detach()[mask].sum())
        return loss * ranks, metrics | {"loss_sum": float(loss.detach())}

    def _reference_point(
        self, data: Any, now: torch.Tensor, sampler: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Old log-probabilities and the off-policy weight. Without columns for them this is the first update of the
        batch, so the current policy *is* the old one: no extra forward pass."""
        if self.correction == "none":
            return sampler, None
        if "is_weights" in set(data.keys()):
            return data["old_logprobs"].values(), data["is_weights"].values()
        weigh = correction.truncate if self.correction == "tis" else correction.masked
        return now, weigh(now - sampler, self.cap)

    def _correction_metrics(self, factors: torch.Tensor) -> dict[str, float]:
        """Read off the factors of trained tokens themselves, because theirs may be the ratio of a whole rollout, or of
        the policy before an earlier mini-batch: tis cuts to the cap, mask to 0, and no other ratio is either."""
        cut = factors >= self.cap * (1 - 1e-6) if self.correction == "tis" else factors == 0
        return {"off_policy_weight_sum": float(factors.sum()), "off_policy_clipped": float(cut.sum())}


def _ranks(data: Any) -> int:
    """Data-parallel ranks: FSDP averages gradients over them, and ours are to be summed."""
    from verl.utils import tensordict_utils as tu

    return int(tu.get_non_tensor_data(data=data, key="dp_size", default=1))


def _sampler_metrics(now: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """How far the trainer's policy is from what the inference engine reported, on trained tokens."""
    delta = (now - sampler)[mask]
    ratio = correction.ratio(delta)
    return {
        "off_policy_kl_sum": float((ratio - 1 - delta).sum()),
        "off_policy_ratio_sum": float(ratio.sum()),
        "off_policy_ratio_max": float(ratio.max()) if ratio.numel() else 0.0,
        "off_policy_diff_max": float(delta.abs().max()) if delta.numel() else 0.0,
    }


def summarise(parts: Mapping[str, list[float]]) -> dict[str, float]:
    """Sums and maxima of micro-batches -> means over trained tokens, maxima, and counts."""
    total = {key: max(values) if key.endswith("_max") else sum(values) for key, values in parts.items()}
    tokens = total.pop("trained_tokens", 0.0)
    result: dict[str, float] = {"loss": total.pop("loss_sum", 0.0), "trained_tokens": round(tokens)}
    for key, value in total.items():
        if key.endswith("_max"):
            result[key] = value
        elif key.endswith("_sum"):
            name = key[:-4]
            result[f"{name}_mean" if name.endswith(("ratio", "weight")) else name] = value / max(tokens, 1.0)
        else:
            result[f"{key}_share"] = value / max(tokens, 1.0)
    return result
