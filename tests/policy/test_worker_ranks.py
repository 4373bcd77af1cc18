"""One, two or four ranks: the gradient and the step of verl's real worker are the same, however rows are cut.

The ranks are processes of their own in a gloo group; each picks its share of the rows. What they find is compared with
plain torch (the gradient) and with one rank (a step with clipping, correction, KL and entropy).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from swe_lightning.objective import build_batch
from swe_lightning.recipe import Algorithm, OffPolicy
from swe_lightning.records import Row
from tests.policy.test_worker import (
    distance,
    gradients_of,
    model_dir,
    on_policy,
    plain_logp,
    plain_model,
    rollouts,
    split,
    training,
)
from tests.ranks import in_ranks

pytest.importorskip("verl")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.train, pytest.mark.slow, pytest.mark.timeout(300)]

__all__ = ["model_dir"]  # the fixture of test_worker
ROLLOUTS = 10
REWARDS = {f"r{i}": (float(i % 3) if i != 5 else None) for i in range(ROLLOUTS)}
GROUPS = {f"r{i}": f"g{i // 2}" for i in range(ROLLOUTS)}
ALGORITHM = Algorithm(advantage="grpo_no_std")
EVERYTHING = Algorithm(
    advantage="grpo_no_std", kl_coef=0.3, entropy_coef=0.1, off_policy=OffPolicy(kind="tis", level="sequence")
)


def cut(rows: list[Row], seed: int) -> list[Row]:
    """Rows at random borders and in random order, beside branches that repeat sampled tokens without training them."""
    rng = np.random.default_rng(seed)
    pieces = [part for row in rows for part in split(row, rng)]
    for row in rows[:2]:
        pieces.append(Row(row.ids, row.mask * 0, row.logprobs * 0, row.rollout_id, row.group_id))
    return [pieces[i] for i in rng.permutation(len(pieces))]


def trials(model: Path, engine: str) -> dict[str, np.ndarray]:
    """What one member of the group finds: gradients of several cuts and micro-batch sizes, and one full update."""
    from swe_lightning.policy.worker import TrainWorker

    rows = on_policy(model, rollouts(ROLLOUTS))
    found: dict[str, np.ndarray] = {}
    for trial, budget in enumerate((100_000, 90)):
        worker = TrainWorker(model, training(engine=engine, micro_batch_tokens=budget), ALGORITHM)
        for again in range(2):
            batch = build_batch(cut(rows, 10 * trial + again), REWARDS, GROUPS, ALGORITHM)
            for name, value in worker.gradients(batch).items():
                found[f"{trial}{again}:{name}"] = value
    one = build_batch([rows[0]], {"r0": 1.0, "r1": 0.0}, {"r0": "g", "r1": "g"}, ALGORITHM)
    found |= {f"single:{name}": value for name, value in worker.gradients(one).items()}

    settings = training(engine=engine, micro_batch_tokens=150, mini_batches=2)
    worker = TrainWorker(model, settings, EVERYTHING, reference=True)
    for row in rows:
        row.logprobs += np.float32(0.02) * row.mask
    metrics = worker.update(build_batch(cut(rows, 77), REWARDS, GROUPS, EVERYTHING))
    names = ("loss", "grad_norm", "ratio_max", "ref_kl", "entropy", "off_policy_ratio_mean", "trained_tokens")
    found["update"] = np.array([metrics[name] for name in names] + [metrics["optimizer_steps"]])
    after = worker.logprobs(rows)
    found["after"] = np.concatenate(after)
    return found


def before_ranks() -> None:

    import swe_lightning.policy.worker  # noqa: F401


def in_group(model: str) -> dict[str, np.ndarray]:
    return trials(Path(model), engine="verl")


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> dict[str, np.ndarray]:
    return trials(model_dir, engine="embedded")


def expected(model: Path) -> dict[str, np.ndarray]:
    """Plain torch: sum over rollouts of -A/R times the mean log-probability of the rollout's sampled tokens."""
    rows = on_policy(model, rollouts(ROLLOUTS))
    plain, loss = plain_model(model), torch.zeros(())
    graded = [row for row in rows if REWARDS[row.rollout_id] is not None]
    for row in graded:
        peers = [REWARDS[n] for n, g in GROUPS.items() if g == row.group_id and REWARDS[n] is not None]
        advantage = REWARDS[row.rollout_id] - sum(peers) / len(peers)
        logp = plain_logp(plain, row)[0][torch.from_numpy(row.mask[1:] == 1)]
        loss = loss - advantage * logp.mean() / len(graded)
    return gradients_of(plain, loss)


def check(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], alone: dict[str, np.ndarray]) -> None:
    for trial in ("00", "01", "10", "11"):
        mine = {name: found[f"{trial}:{name}"] for name in wanted}
        assert distance(mine, wanted) <= 1e-6, trial
    single = {k: v for k, v in alone.items() if k.startswith("single:")}
    assert distance({k: found[k] for k in single}, single) <= 1e-6
    np.testing.assert_allclose(found["update"], alone["update"], rtol=1e-4)
    np.testing.assert_allclose(found["after"], alone["after"], atol=2e-3)


def test_one_rank(alone: dict[str, np.ndarray], model_dir: Path) -> None:
    check(alone, expected(model_dir), alone)


def test_several_ranks(alone: dict[str, np.ndarray], model_dir: Path, tmp_path: Path) -> None:
    for found in in_ranks((2, 4), tmp_path, __name__, str(model_dir)).values():
        check(found, expected(model_dir), alone)
