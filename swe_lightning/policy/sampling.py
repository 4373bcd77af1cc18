"""Draw one token per sequence and report the log-probability under the very distribution it was drawn from.

Each sequence owns its source of uniform numbers, so a seeded request does not depend on what shares its batch.
Temperature 0 means greedy; its log-probabilities are those of temperature 1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Sampling:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0: off."""
    seed: int | None = None
    uniform: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.uniform = random.Random(self.seed)


def draw(logits: torch.Tensor, settings: Sequence[Sampling]) -> tuple[list[int], list[float]]:
    """Token ids and log-probabilities, one per row of `logits` (rows, vocabulary)."""
    logits = logits.float()
    scales = [s.temperature or 1.0 for s in settings]
    if any(scale != 1.0 for scale in scales):
        logits = logits / torch.tensor(scales)[:, None]
    if any(s.top_p < 1.0 or s.top_k > 0 for s in settings):
        logits = torch.stack([_restrict(row, s) for row, s in zip(logits, settings, strict=True)])
    logprobs = torch.log_softmax(logits, -1)
    greedy = [i for i, s in enumerate(settings) if s.temperature == 0.0]
    if len(greedy) == len(settings):
        tokens = logprobs.argmax(-1)
    else:
        mass = logprobs.exp().to(torch.float64).cumsum_(-1)
        # random() < 1, so the target lies below the total mass and never on a token of probability zero behind it.
        target = torch.tensor([s.uniform.random() for s in settings], dtype=torch.float64) * mass[:, -1]
        tokens = torch.searchsorted(mass, target[:, None], right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
        if greedy:
            tokens[greedy] = logprobs[greedy].argmax(-1)
    return tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()


def _restrict(logits: torch.Tensor, s: Sampling) -> torch.Tensor:
    """Logits with everything outside the top k, then outside the smallest set of mass top_p, at minus infinity."""
    if 0 < s.top_k < len(logits):
        kth = logits.topk(s.top_k).values[-1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if s.top_p < 1.0:
        ordered, order = logits.sort(descending=True)
        mass = ordered.softmax(-1)
        outside = mass.cumsum(-1) - mass >= s.top_p
        outside[0] = False
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(0, order, outside), -torch.inf)
    return logits
