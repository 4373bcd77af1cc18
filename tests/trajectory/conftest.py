"""Model calls as small integer tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from swe_lightning.records import ModelCall

Pair = tuple[Sequence[int], Sequence[int]]


def make_calls(pairs: Sequence[Pair], rollout_id: str = "r") -> list[ModelCall]:
    """One call per (prompt ids, response ids), one after the other in time; log-probs tell tokens apart."""
    return [
        ModelCall(
            rollout_id=rollout_id,
            prompt_ids=list(prompt),
            response_ids=list(response),
            logprobs=[-(i + 1) - j / 64 for j in range(len(response))],
            sequence=i,
            started_at=10.0 * i + 1,
            ended_at=10.0 * i + 5,
        )
        for i, (prompt, response) in enumerate(pairs)
    ]


@pytest.fixture
def calls_of() -> Callable[..., list[ModelCall]]:
    return make_calls
