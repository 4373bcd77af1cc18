"""Policy losses over weighted tokens: every function only multiplies and sums.

Invariant: the weights already hold advantage and normalisation (A / (R * T) by default), so a loss over a batch is the
plain sum of the losses over any partition of its tokens: rows, micro-batches, ranks. There is no denominator here.
Positions with mask 0 add exactly 0 to value, gradient and metrics, whatever they hold (also NaN).
Refuses to average, and to compute advantages.

All tensors of one call have the same shape: (rows, tokens), or flat (tokens,). torch is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

PolicyLossKind = Literal["ppo_clip", "gspo", "cispo"]
KLKind = Literal["k1", "k2", "k3"]
LOG_RATIO_LIMIT = 20.0
"""|log ratio| beyond this is cut before exp: e^20 is far outside any clip range and still finite in fp32 sums."""


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    kind: PolicyLossKind = "ppo_clip",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    is_weights: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to minimise, summed over trained tokens, and detached sums to log.

    ppo_clip  -min(r w, clip(r, 1 - low, 1 + high) w); `dual_clip` c > 1 bounds it by -c w where w < 0
    gspo      the same with r = exp(mean log ratio of the token's sampled sequence); gradient per token (GSPO-token)
    cispo     -stop_gradient(clip(r)) w log p: clipped tokens keep their gradient

    `is_weights`: off-policy correction per token (constant). `segments`: integer label of each token's sequence for
    gspo; default: each run of consecutive mask 1 in a row, that is one model reply, which no cut into rows divides.
    Metrics ending in `_max` combine by maximum, all others by sum; divide by `tokens` for means.
    """
    import torch

    if kind not in get_args(PolicyLossKind):
        raise ValueError(f"unknown policy loss {kind!r}: use one of {', '.join(get_args(PolicyLossKind))}")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    on = mask.bool()
    logprob = torch.where(on, logprob, torch.zeros_like(logprob))
    delta = logprob - torch.where(on, old_logprob, torch.zeros_like(old_logprob)).detach()
    weights = torch.where(on, weights, torch.zeros_like(weights)).to(logprob.dtype)
    if kind == "gspo":
        sequence = _mean_by_segment(delta.detach(), on, segments)
        delta = sequence + (logprob - logprob.detach())
    ratio = delta.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    hit = torch.zeros_like(on)
    if kind == "cispo":
        loss = -clipped.detach() * weights * logprob
        cut = on & (clipped != ratio)
    else:
        loss = torch.maximum(-ratio * weights, -clipped * weights)
        cut = on & (-clipped * weights > -ratio * weights)
        if dual_clip is not None:
            bound = -dual_clip * weights
            hit = on & (weights < 0) & (loss > bound)
            loss = torch.where(weights < 0, torch.minimum(loss, bound), loss)
    if is_weights is not None:
        loss = loss * torch.where(on, is_weights, torch.zeros_like(is_weights)).to(loss.dtype).detach()
    total = torch.where(on, loss, torch.zeros_like(loss)).sum()
    return total, _metrics(ratio, delta, on, cut, hit, total)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kind: KLKind = "k3") -> Tensor:
    """Per-token estimate of KL(policy || reference) at sampled tokens; multiply by `kl_weights` and sum.

    k1 = log p - log q (unbiased, may be negative; as a loss its expected gradient is 0), k2 = k1^2 / 2,
    k3 = q/p - 1 - log(q/p) (unbiased, never negative). Source: Schulman, "Approximating KL divergence".
    """
    # The clamp passes no gradient to NaN either, so what stands at masked positions stays without effect.
    delta = (ref_logprob - logprob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        return -delta
    if kind == "k2":
        return delta.square() / 2
    if kind == "k3":
        return delta.exp() - 1 - delta
    raise ValueError(f"unknown KL estimator {kind!r}: use k1, k2 or k3")


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of the next-token distribution, shape of `logits` (..., vocab) without its last axis.

    A token that cannot be (-inf) adds 0.
    """
    import torch

    logp = torch.log_softmax(logits.float(), dim=-1)
    return -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)


def weighted_sum(values: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """sum of weights * values where mask is 1: KL and entropy terms under the same per-rollout weighting."""
    import torch

    on = mask.bool()
    return (
        torch.where(on, values, torch.zeros_like(values)) * torch.where(on, weights, torch.zeros_like(weights))
    ).sum()


def _mean_by_segment(values: Tensor, on: Tensor, segments: Tensor | None) -> Tensor:
    """Each masked token's value replaced by the mean over its segment; 0 elsewhere."""
    import torch

    if segments is None:
        starts = on.clone()
        starts[..., 1:] &= ~on[..., :-1]
        labels = starts.flatten().cumsum(0).reshape(on.shape)
    else:
        labels = torch.unique(segments, return_inverse=True)[1].reshape(on.shape) + 1
    labels = torch.where(on, labels, torch.zeros_like(labels)).flatten()
    size = int(labels.max()) + 1 if labels.numel() else 1
    sums = values.new_zeros(size).index_add_(0, labels, values.flatten())
    counts = values.new_zeros(size).index_add_(0, labels, on.flatten().to(values.dtype)).clamp(min=1)
    means = (sums / counts)[labels].reshape(on.shape)
    return torch.where(on, means, torch.zeros_like(means))


def _metrics(ratio: Tensor, delta: Tensor, on: Tensor, cut: Tensor, hit: Tensor, total: Tensor) -> dict[str, Tensor]:
    import torch

    ratio, delta = ratio.detach(), delta.detach()
    zero = torch.zeros_like(ratio)
    return {
        "loss": total.detach(),
        "tokens": on.sum(),
        "ratio_sum": torch.where(on, ratio, zero).sum(),
        "ratio_max": torch.where(on, ratio, zero).max() if ratio.numel() else ratio.new_zeros(()),
        "kl_sum": torch.where(on, ratio - 1 - delta, zero).sum(),
        "clipped": cut.sum(),
        "clipped_low": (cut & (ratio < 1)).sum(),
        "clipped_high": (cut & (ratio > 1)).sum(),
        "dual_clipped": hit.sum(),
    }
