"""However a rollout is cut into rows, micro-batches or ranks, a real gradient is the same (<= 1e-6 relative, fp32).

A small causal network in plain torch stands for the policy: a token's log-prob depends on its whole prefix.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from swe_lightning.objective import build_batch  # noqa: E402
from swe_lightning.objective.balance import PAD, plan  # noqa: E402
from swe_lightning.objective.batch import pad_row  # noqa: E402
from swe_lightning.objective.losses import kl_penalty, policy_loss, weighted_sum  # noqa: E402
from swe_lightning.objective.tensors import padded, segments  # noqa: E402
from swe_lightning.recipe import Algorithm  # noqa: E402
from swe_lightning.records import Batch, ModelCall, Row  # noqa: E402
from swe_lightning.trajectory import merge  # noqa: E402
from tests.ranks import in_ranks  # noqa: E402

pytestmark = pytest.mark.train
VOCAB, WIDTH = 23, 12


class Policy(torch.nn.Module):
    """Next-token logits from a decayed sum over the prefix: causal, cheap, sensitive to every token."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = torch.nn.Parameter(torch.randn(VOCAB, WIDTH, generator=generator) * 0.5)
        self.out = torch.nn.Parameter(torch.randn(WIDTH, VOCAB, generator=generator) * 0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(rows, tokens) ids -> log-probs of ids[:, t] given the tokens before, 0 at t = 0."""
        n = ids.shape[1]
        lag = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        decay = torch.where(lag >= 0, 0.9 ** lag.clamp(min=0), torch.zeros(())).to(self.embed.dtype)
        logp = torch.log_softmax(torch.tanh(decay @ self.embed[ids]) @ self.out, -1)
        chosen = logp[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        return torch.cat([chosen.new_zeros(len(ids), 1), chosen], 1)


def conversations(rng: random.Random) -> tuple[list[ModelCall], dict, dict]:
    """Calls of a few groups with failures; turns, rollbacks, sub-agents, replies that touch."""
    calls, rewards, groups = [], {}, {}
    for r in range(rng.randint(2, 6)):
        name = f"r{r}"
        groups[name] = f"g{r % 2}"
        rewards[name] = rng.choice([0.0, 0.5, 1.0])
        seen: list[list[int]] = [[rng.randrange(VOCAB)]]
        for i in range(rng.randint(1, 5)):
            prompt = [*rng.choice(seen), *(rng.randrange(VOCAB) for _ in range(rng.randint(0, 3)))]
            response = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
            logprobs = [rng.uniform(-4, -2) for _ in response]
            calls.append(ModelCall(name, prompt, response, logprobs, sequence=i))
            seen.append([*prompt, *response])
    return calls, rewards, groups


def gradient(batch: Batch, algorithm: Algorithm, ranks: int, budget: int, dtype=torch.float32) -> np.ndarray:
    """Gradient summed over micro-batches of every rank, one rank after the other in this process."""
    plans = plan([len(r.ids) for r in batch.rows], ranks, budget)
    return sum(rank_gradient(batch, algorithm, passes, dtype) for passes in plans)


def rank_gradient(batch: Batch, algorithm: Algorithm, passes: list[list[int]], dtype=torch.float32) -> np.ndarray:
    """What one rank's micro-batches add up to."""
    policy = Policy().to(dtype)
    rows = [*batch.rows, pad_row()]
    nothing = np.zeros(2, np.float32)
    labels = [*segments(batch.rows), np.zeros(2, np.int64)]
    for one in passes:
        chosen = [len(batch.rows) if i == PAD else i for i in one]
        part = [rows[i] for i in chosen]
        data = padded(part, [[*batch.weights, nothing][i] for i in chosen])
        even = padded(part, [[*batch.kl_weights, nothing][i] for i in chosen])["weights"]
        label = np.zeros(data["ids"].shape, np.int64)
        for k, i in enumerate(chosen):
            label[k, : len(labels[i])] = labels[i]
        logprob = policy(torch.from_numpy(data["ids"]).long())
        mask, old = torch.from_numpy(data["mask"]), torch.from_numpy(data["logprobs"]).to(dtype)
        loss, _ = policy_loss(
            logprob,
            old,
            torch.from_numpy(data["weights"]),
            mask,
            kind=algorithm.policy_loss,
            clip_low=0.2,
            clip_high=0.28,
            segments=torch.from_numpy(label),
        )
        loss = loss + 0.1 * weighted_sum(kl_penalty(logprob, old), torch.from_numpy(even).to(dtype), mask)
        loss.backward()
    if policy.embed.grad is None:
        return np.zeros(2 * VOCAB * WIDTH)
    return torch.cat([policy.embed.grad.flatten(), policy.out.grad.flatten()]).numpy().astype(np.float64)


def alone(calls: list[ModelCall]) -> list[Row]:
    """Every call a row of its own: the worst cut."""
    return [row for call in calls for row in merge([call])]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-12))


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo", "cispo"])
@pytest.mark.parametrize("normalisation", ["rollout_token_mean", "token_mean", "constant"])
def test_cut_order_micro_batch_and_ranks_change_nothing(kind: str, normalisation: str) -> None:
    algorithm = Algorithm(policy_loss=kind, normalisation=normalisation)
    rng = random.Random(f"{kind} {normalisation}")
    for _ in range(2):
        calls, rewards, groups = conversations(rng)
        base = gradient(build_batch(merge(calls), rewards, groups, algorithm), algorithm, 1, 10_000)
        assert np.linalg.norm(base) > 1e-6
        rows = alone(calls)
        rng.shuffle(rows)
        batch = build_batch(rows, rewards, groups, algorithm)
        for ranks, budget in ((1, 1), (2, 40), (4, 15)):
            assert distance(base, gradient(batch, algorithm, ranks, budget)) <= 1e-6


KINDS = [(k, n) for k in ("ppo_clip", "gspo", "cispo") for n in ("rollout_token_mean", "token_mean", "constant")]


def in_group() -> dict[str, np.ndarray]:
    """In each process of a gloo group: gradients of this rank's share, summed over the ranks."""
    import torch.distributed as dist

    found = {}
    for number, (kind, normalisation) in enumerate(KINDS):
        algorithm = Algorithm(policy_loss=kind, normalisation=normalisation)
        for trial in range(12):
            rng = random.Random(1000 * number + trial)
            calls, rewards, groups = conversations(rng)
            rows = alone(calls) if trial % 2 else merge(calls)
            rng.shuffle(rows)
            batch = build_batch(rows, rewards, groups, algorithm)
            passes = plan([len(r.ids) for r in rows], dist.get_world_size(), rng.choice((1, 20, 200)))
            total = torch.from_numpy(rank_gradient(batch, algorithm, passes[dist.get_rank()]).astype(np.float32))
            dist.all_reduce(total)
            found[f"{number}-{trial}"] = total.numpy()
    return found


@pytest.mark.slow
def test_a12_real_ranks_sum_to_the_gradient_of_one(tmp_path: Path) -> None:
    """Processes of gloo groups against one process in double precision that sees every rollout merged."""
    found = in_ranks((1, 2, 4), tmp_path, __name__)
    for number, (kind, normalisation) in enumerate(KINDS):
        algorithm = Algorithm(policy_loss=kind, normalisation=normalisation)
        for trial in range(12):
            calls, rewards, groups = conversations(random.Random(1000 * number + trial))
            batch = build_batch(merge(calls), rewards, groups, algorithm)
            wanted = gradient(batch, algorithm, 1, 10_000, torch.float64)
            for ranks, sums in found.items():
                assert distance(wanted, sums[f"{number}-{trial}"]) <= 1e-6, (ranks, kind, normalisation, trial)


def test_sample_mean_does_depend_on_the_cut() -> None:
    """The control: Eq. 15 is not invariant, so the test above can fail."""
    algorithm = Algorithm(normalisation="sample_mean")
    calls, rewards, groups = conversations(random.Random(5))
    a = gradient(build_batch(merge(calls), rewards, groups, algorithm), algorithm, 1, 10_000)
    b = gradient(build_batch(alone(calls), rewards, groups, algorithm), algorithm, 1, 10_000)
    assert distance(a, b) > 1e-3


def test_failures_padding_and_duplicate_branches_change_nothing() -> None:
    algorithm, rng = Algorithm(), random.Random(9)
    for _ in range(6):
        calls, rewards, groups = conversations(rng)
        rows = merge(calls)
        base = gradient(build_batch(rows, rewards, groups, algorithm), algorithm, 1, 10_000)
        dead = merge([ModelCall("dead", [1, 2], [3, 4], [-1.0, -1.0])])
        branch = Row(rows[0].ids, np.zeros_like(rows[0].mask), np.zeros_like(rows[0].logprobs), rows[0].rollout_id)
        more = build_batch([*dead, *rows, branch], {**rewards, "dead": None}, {**groups, "dead": "g0"}, algorithm)
        assert distance(base, gradient(more, algorithm, 2, 30)) <= 1e-6
