"""The training worker against plain torch on the same model: gradients, steps, and what must not change them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from swe_lightning.errors import DataError, MissingPart, RecipeError
from swe_lightning.objective import build_batch
from swe_lightning.policy.worker import TrainWorker
from swe_lightning.recipe import Algorithm, OffPolicy, Training
from swe_lightning.records import Batch, Row

pytest.importorskip("verl")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.train

VOCAB = 160
NO_CORRECTION = OffPolicy(kind="none")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of about 50,000 parameters, large enough weights that gradients are not all alike."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def training(**changes: object) -> Training:
    return Training.model_validate({"lr": 1e-3, "steps": 10, "micro_batch_tokens": 400} | changes)


def rollouts(count: int, seed: int = 0) -> list[Row]:
    """One row per rollout with one to three sampled spans; two rollouts to a group."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(count):
        length = int(rng.integers(30, 90))
        mask = np.zeros(length, np.int8)
        for _ in range(int(rng.integers(1, 4))):
            start = int(rng.integers(4, length - 6))
            mask[start : start + int(rng.integers(2, 6))] = 1
        ids = rng.integers(0, VOCAB, length).astype(np.int32)
        rows.append(Row(ids, mask, np.zeros(length, np.float32), f"r{number}", f"g{number // 2}"))
    return rows


def even_weights(rows: list[Row], advantage: Callable[[str], float]) -> list[np.ndarray]:
    """Advantage / (R * trained tokens of the rollout) at every trained token, written out here on purpose."""
    total: dict[str, int] = {}
    for row in rows:
        total[row.rollout_id] = total.get(row.rollout_id, 0) + row.trained_tokens
    return [row.mask * np.float32(advantage(row.rollout_id) / (len(total) * total[row.rollout_id])) for row in rows]


def signed(rollout_id: str) -> float:
    number = int(rollout_id[1:])
    return (1.0 if number % 2 else -1.0) * (1 + number / 10)


def split(row: Row, rng: np.random.Generator) -> list[Row]:
    """The same sampled tokens in the same contexts, cut into rows at random span borders."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.mask, [0]])))
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    cuts = sorted([*rng.permutation(len(spans))[: int(rng.integers(1, len(spans) + 1))].tolist(), len(spans)])
    rows, first = [], 0
    for cut in dict.fromkeys(cuts):
        if cut == first:
            continue
        end = int(spans[cut - 1][1])
        mask = np.zeros(end, np.int8)
        for a, b in spans[first:cut]:
            mask[a:b] = 1
        rows.append(Row(row.ids[:end], mask, row.logprobs[:end] * mask, row.rollout_id, row.group_id))
        first = cut
    return rows


def plain_model(model_dir: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()


def plain_logp(model: torch.nn.Module, row: Row, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of ids[1:], and all log-probabilities; one row at a time, no padding, whole vocabulary."""
    ids = torch.from_numpy(row.ids.astype(np.int64))
    logp = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float() / temperature, -1)
    return logp.gather(-1, ids[1:, None]).squeeze(-1), logp


def gradients_of(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, np.ndarray]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None}


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Relative L2 distance over all parameters."""
    assert a.keys() == b.keys()
    difference = sum(float(((a[k].astype(np.float64) - b[k]) ** 2).sum()) for k in a)
    return (difference / sum(float((b[k].astype(np.float64) ** 2).sum()) for k in b)) ** 0.5


def on_policy(model_dir: Path, rows: list[Row]) -> list[Row]:
    with torch.no_grad():
        model = plain_model(model_dir)
        for row in rows:
            row.logprobs[1:] = plain_logp(model, row)[0].numpy()
            row.logprobs *= row.mask
    return rows


def test_gradient_is_that_of_plain_torch_for_every_cut(model_dir: Path) -> None:
    rows = on_policy(model_dir, rollouts(12))
    model, loss = plain_model(model_dir), torch.zeros(())
    for row, weight in zip(rows, even_weights(rows, signed), strict=True):
        loss = loss - (plain_logp(model, row)[0] * torch.from_numpy(weight[1:])).sum()
    expected = gradients_of(model, loss)
    rng = np.random.default_rng(1)
    for budget, cut in ((100_000, False), (400, False), (400, True), (90, True), (1_000, True)):
        worker = TrainWorker(model_dir, training(micro_batch_tokens=budget), Algorithm())
        pieces = [part for row in rows for part in split(row, rng)] if cut else rows
        pieces = [pieces[i] for i in rng.permutation(len(pieces))]
        assert not cut or len(pieces) > len(rows)
        found = worker.gradients(Batch(pieces, even_weights(pieces, signed)))
        assert distance(found, expected) <= 1e-6, (budget, cut)


def test_ratio_clip_and_temperature_match_the_formula(model_dir: Path) -> None:
    rows, rng = rollouts(6), np.random.default_rng(2)
    model, loss, clipped = plain_model(model_dir), torch.zeros(()), 0
    weights = even_weights(rows, signed)
    for row, weight in zip(rows, weights, strict=True):
        logp = plain_logp(model, row, temperature=0.8)[0]
        noise = rng.normal(0, 0.3, len(row.ids)).astype(np.float32)
        row.logprobs = np.insert(logp.detach().numpy(), 0, 0) * row.mask + noise * row.mask
        ratio = (logp - torch.from_numpy(row.logprobs[1:])).exp()
        w = torch.from_numpy(weight[1:])
        term = torch.min(ratio * w, ratio.clamp(0.8, 1.28) * w)
        clipped += int(((term < ratio * w) & (w != 0)).sum())
        loss = loss - term[w != 0].sum()
    assert clipped > 3
    algorithm = Algorithm(off_policy=NO_CORRECTION)
    worker = TrainWorker(model_dir, training(), algorithm, temperature=0.8)
    batch = Batch(rows, weights)
    assert distance(worker.gradients(batch), gradients_of(model, loss)) <= 1e-6
    metrics = worker.update(batch)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["clipped_share"] * metrics["trained_tokens"] == pytest.approx(clipped)
    assert metrics["off_policy_kl"] > 0.01


def test_truncated_importance_sampling_weighs_by_the_distance_to_the_sampler(model_dir: Path) -> None:
    rows, rng = rollouts(6), np.random.default_rng(3)
    model, loss, weights = plain_model(model_dir), torch.zeros(()), even_weights(rows, signed)
    for row, weight in zip(rows, weights, strict=True):
        logp = plain_logp(model, row)[0]
        noise = rng.normal(0, 1.0, len(row.ids)).astype(np.float32)
        row.logprobs = (np.insert(logp.detach().numpy(), 0, 0) + noise) * row.mask
        correction = (logp.detach() - torch.from_numpy(row.logprobs[1:])).exp().clamp(max=1.5)
        loss = loss - (logp * torch.from_numpy(weight[1:]) * correction).sum()
    expected, batch = gradients_of(model, loss), Batch(rows, weights)
    worker = TrainWorker(model_dir, training(), Algorithm(off_policy=OffPolicy(kind="tis", cap=1.5)))
    assert distance(worker.gradients(batch), expected) <= 1e-6
    metrics = worker.update(batch)
    assert metrics["off_policy_weight_mean"] < metrics["off_policy_ratio_mean"]
    assert metrics["off_policy_ratio_max"] > 1.5
    assert 0 < metrics["off_policy_clipped_share"] < 1
    assert metrics["ratio_max"] == 1.0


def test_sequence_correction_is_one_factor_per_rollout_over_all_its_rows(model_dir: Path) -> None:
    rows, rng = rollouts(6), np.random.default_rng(4)
    model, loss, weights = plain_model(model_dir), torch.zeros(()), even_weights(rows, signed)
    for row, weight in zip(rows, weights, strict=True):
        logp = plain_logp(model, row)[0]
        noise = rng.normal(0, 0.2, len(row.ids)).astype(np.float32)
        row.logprobs = (np.insert(logp.detach().numpy(), 0, 0) + noise) * row.mask
        delta = (logp.detach() - torch.from_numpy(row.logprobs[1:]))[torch.from_numpy(row.mask[1:]) == 1]
        loss = loss - (logp * torch.from_numpy(weight[1:])).sum() * delta.sum().exp().clamp(max=2.0)
    expected = gradients_of(model, loss)
    worker = TrainWorker(model_dir, training(), Algorithm(off_policy=OffPolicy(level="sequence")))
    pieces = [part for row in rows for part in split(row, rng)]
    assert len(pieces) > len(rows)
    assert distance(worker.gradients(Batch(pieces, even_weights(pieces, signed))), expected) <= 1e-5


@pytest.mark.parametrize(("kind", "level", "mini_batches"), [("tis", "sequence", 1), ("mask", "token", 2)])
def test_only_what_the_correction_cut_counts_as_cut(model_dir: Path, kind: str, level: str, mini_batches: int) -> None:
    """One rollout in six (one token of it) is far from the sampler, all others a little."""
    rows = on_policy(model_dir, rollouts(6))
    for row in rows:
        row.logprobs -= np.float32(0.001) * row.mask
    rows[2].logprobs[np.flatnonzero(rows[2].mask)[0]] -= 3
    off_policy = OffPolicy.model_validate({"kind": kind, "level": level})
    algorithm = Algorithm(off_policy=off_policy, advantage="grpo_no_std")
    worker = TrainWorker(model_dir, training(mini_batches=mini_batches, lr=1e-4), algorithm)
    groups = {row.rollout_id: row.group_id for row in rows}
    metrics = worker.update(build_batch(rows, {name: signed(name) for name in groups}, groups, algorithm))
    cut = rows[2].trained_tokens if level == "sequence" else 1
    assert metrics["off_policy_clipped_share"] * metrics["trained_tokens"] == pytest.approx(cut)


def test_kl_to_the_reference_and_entropy(model_dir: Path) -> None:
    rows = on_policy(model_dir, rollouts(6))
    algorithm = Algorithm(kl_coef=0.5, entropy_coef=0.3, off_policy=NO_CORRECTION)
    worker = TrainWorker(model_dir, training(lr=1e-2), algorithm, reference=True)
    batch = Batch(rows, even_weights(rows, signed))
    assert worker.update(batch)["ref_kl"] == pytest.approx(0, abs=1e-5)  # policy and reference start equal

    exported = model_dir.parent / "moved"
    worker.export_weights(exported)
    (exported / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    moved, start, loss, divergence = plain_model(exported), plain_model(model_dir), torch.zeros(()), 0.0
    even, tokens = even_weights(rows, lambda _: 1.0), 0
    for row, weight, uniform in zip(rows, batch.weights, even, strict=True):
        logp, all_logp = plain_logp(moved, row)
        u, w = torch.from_numpy(uniform[1:]), torch.from_numpy(weight[1:])
        with torch.no_grad():
            delta_old = plain_logp(start, row)[0]
        delta = delta_old - logp
        k3 = delta.exp() - 1 - delta
        entropy = -(all_logp.exp() * all_logp).sum(-1)
        ratio = (logp - delta_old).exp()
        loss = loss - torch.min(ratio * w, ratio.clamp(0.8, 1.28) * w).sum()
        loss = loss + 0.5 * (k3 * u).sum() - 0.3 * (entropy * u).sum()
        on = torch.from_numpy(row.mask[1:]).bool()
        divergence, tokens = divergence + float(k3[on].sum().detach()), tokens + int(on.sum())
    assert distance(worker.gradients(batch), gradients_of(moved, loss)) <= 1e-5
    assert worker.update(batch)["ref_kl"] == pytest.approx(divergence / tokens, rel=1e-3)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_is_that_of_the_sampled_distribution_at_any_temperature(model_dir: Path, estimator: str) -> None:
    """Reference and policy are both read at the sampler's temperature; the policy has moved, so the KL is not zero."""
    rows = on_policy(model_dir, rollouts(6))
    algorithm = Algorithm(kl_coef=0.5, kl_estimator=estimator, off_policy=NO_CORRECTION)
    worker = TrainWorker(model_dir, training(lr=1e-2), algorithm, reference=True, temperature=0.6)
    worker.update(Batch(rows, even_weights(rows, signed)))
    exported = model_dir.parent / f"moved-{estimator}"
    worker.export_weights(exported)
    (exported / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    moved, start, loss = plain_model(exported), plain_model(model_dir), torch.zeros(())
    for row, uniform in zip(rows, even_weights(rows, lambda _: 1.0), strict=True):
        logp = plain_logp(moved, row, temperature=0.6)[0]
        with torch.no_grad():
            delta = plain_logp(start, row, temperature=0.6)[0]
        delta = delta - logp
        value = {"k1": -delta, "k2": delta.square() / 2, "k3": delta.exp() - 1 - delta}[estimator]
        loss = loss + 0.5 * (value * torch.from_numpy(uniform[1:])).sum()
    silent = [np.zeros(len(row.ids), np.float32) for row in rows]
    assert distance(worker.gradients(Batch(rows, silent)), gradients_of(moved, loss)) <= 1e-5


def test_groups_of_equal_rewards_still_pull_towards_the_reference(model_dir: Path) -> None:
    """No advantage anywhere: the KL term alone makes the step, with the weights that the batch brings along."""
    rows = on_policy(model_dir, rollouts(6))
    algorithm = Algorithm(kl_coef=0.5, off_policy=NO_CORRECTION)
    worker = TrainWorker(model_dir, training(lr=1e-2), algorithm, reference=True)
    worker.update(Batch(rows, even_weights(rows, signed)))
    groups = {row.rollout_id: row.group_id for row in rows}
    flat = build_batch(rows, dict.fromkeys(groups, 1.0), groups, algorithm)
    assert not any(w.any() for w in flat.weights)
    found = worker.gradients(flat)
    assert sum(float(np.abs(g).sum()) for g in found.values()) > 0
    double = Batch(flat.rows, flat.weights, kl_weights=[2 * w for w in flat.kl_weights])
    twice = worker.gradients(double)
    assert distance(twice, {name: 2 * g for name, g in found.items()}) <= 1e-6
    metrics = worker.update(flat)
    assert (metrics["optimizer_steps"], metrics["rows"]) == (1, len(rows))
    assert metrics["grad_norm"] > 0


def test_gspo_knows_replies_that_touch(model_dir: Path) -> None:
    """Two replies without a token between them are two sequences, whether one row holds both or each has its own."""
    rng = np.random.default_rng(7)
    ids = rng.integers(0, VOCAB, 20).astype(np.int32)
    spans = [(5, 9, 0), (9, 14, 0)]
    logprobs = np.where(np.arange(20) >= 5, rng.uniform(-6, -3, 20), 0).astype(np.float32)
    mask = np.zeros(20, np.int8)
    mask[5:14] = 1
    other = Row(ids[:16], np.roll(mask, 1)[:16], np.roll(logprobs * mask, 1)[:16], "r1", "g", spans=[(6, 15, 0)])
    one = [Row(ids, mask, logprobs * mask, "r0", "g", spans=spans), other]
    two = [other]
    for start, end, version in spans:
        part = np.zeros(20, np.int8)
        part[start:end] = 1
        two.append(Row(ids[:end], part[:end], (logprobs * part)[:end], "r0", "g", spans=[(start, end, version)]))
    algorithm = Algorithm(policy_loss="gspo", clip_low=0.9, clip_high=9.0, off_policy=NO_CORRECTION)
    worker = TrainWorker(model_dir, training(), algorithm)
    found = [
        worker.gradients(build_batch(rows, {"r0": 1.0, "r1": 0.0}, {"r0": "g", "r1": "g"}, algorithm))
        for rows in (one, two)
    ]
    assert distance(*found) <= 1e-6


def test_mini_batches_are_dealt_anew_in_every_update(model_dir: Path) -> None:
    rows = on_policy(model_dir, rollouts(12))
    groups = {row.rollout_id: row.group_id for row in rows}
    batch = build_batch(rows, {name: signed(name) for name in groups}, groups, Algorithm())
    worker = TrainWorker(model_dir, training(mini_batches=3, lr=1e-9), Algorithm())
    dealt = []
    for _ in range(3):
        parts = worker._prepare(batch)
        dealt.append([sorted({row.group_id for row in part}) for part, _ in parts])
        worker.update(batch)
    assert len({str(one) for one in dealt}) > 1


def test_backend_options_reach_verl(model_dir: Path) -> None:
    options = {"engine.entropy_checkpointing": True, "optimizer.min_lr_ratio": 0.5}
    worker = TrainWorker(model_dir, training(engine_options=options), Algorithm())
    assert worker.worker.engine_config.entropy_checkpointing is True
    assert worker.worker.optimizer_config.min_lr_ratio == 0.5
    with pytest.raises(RecipeError, match=r"no option engine.param_ofload, did you mean engine.param_offload"):
        TrainWorker(model_dir, training(engine_options={"engine.param_ofload": True}), Algorithm())


def test_an_update_is_one_adamw_step(model_dir: Path, tmp_path: Path) -> None:
    rows = on_policy(model_dir, rollouts(8))
    weights = even_weights(rows, signed)
    settings = training(betas=(0.8, 0.95), weight_decay=0.1, grad_clip=0.05, lr_warmup_steps=1)
    worker = TrainWorker(model_dir, settings, Algorithm())
    model = plain_model(model_dir)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.8, 0.95), weight_decay=0.1)
    for step, rate in enumerate((5e-4, 1e-3, 1e-3)):
        loss = torch.zeros(())
        for row, weight in zip(rows, weights, strict=True):
            loss = loss - (plain_logp(model, row)[0] * torch.from_numpy(weight[1:])).sum()
        if step:
            for row, now in zip(rows, worker.logprobs(rows), strict=True):
                row.logprobs = now
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        metrics = worker.update(Batch(rows, weights))
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert metrics["optimizer_steps"] == 1
    worker.export_weights(tmp_path)
    from safetensors.numpy import load_file

    expected = {n: p.detach().numpy() for n, p in model.named_parameters()}
    assert distance(load_file(tmp_path / "model.safetensors"), expected) <= 1e-5


def test_rows_without_weight_change_nothing(model_dir: Path, tmp_path: Path) -> None:
    rows = on_policy(model_dir, rollouts(6))
    weights = even_weights(rows, signed)
    idle = on_policy(model_dir, rollouts(5, seed=9))
    for name, extra in (("without", 0), ("with", 5)):
        worker = TrainWorker(model_dir, training(), Algorithm())
        silent = [np.zeros(len(r.ids), np.float32) for r in idle[:extra]]
        metrics = worker.update(Batch(idle[:extra] + rows, silent + weights))
        assert metrics["rows"] == 6
        assert metrics["rows_without_weight"] == extra
        worker.export_weights(tmp_path / name)
    assert (tmp_path / "with/model.safetensors").read_bytes() == (tmp_path / "without/model.safetensors").read_bytes()
    before = (tmp_path / "with/model.safetensors").read_bytes()
    assert worker.update(Batch(idle, [np.zeros(len(r.ids), np.float32) for r in idle]))["optimizer_steps"] == 0
    worker.export_weights(tmp_path / "with")
    assert (tmp_path / "with/model.safetensors").read_bytes() == before


@pytest.mark.parametrize("cut", [False, True])
def test_optimizer_steps_depend_on_groups_not_on_rows(model_dir: Path, cut: bool) -> None:
    rows = on_policy(model_dir, rollouts(8))
    if cut:
        rows = [part for row in rows for part in split(row, np.random.default_rng(5))]
        assert len(rows) > 8
    worker = TrainWorker(model_dir, training(mini_batches=2), Algorithm())
    groups = {f"r{i}": f"g{i // 2}" for i in range(8)}
    metrics = worker.update(build_batch(rows, {name: signed(name) for name in groups}, groups, Algorithm()))
    assert metrics["optimizer_steps"] == 2
    assert metrics["ratio_max"] > 1.0  # the second part sees a policy that has moved


def test_logprobs_are_aligned_to_ids(model_dir: Path) -> None:
    rows = rollouts(7)
    found = TrainWorker(model_dir, training(micro_batch_tokens=120), Algorithm()).logprobs(rows)
    for row, expected in zip(on_policy(model_dir, rows), found, strict=True):
        assert expected.shape == row.ids.shape
        np.testing.assert_allclose(expected, row.logprobs, atol=1e-5)
        assert not expected[row.mask == 0].any()


def test_sft_learns_and_leaves_a_fresh_optimizer(model_dir: Path) -> None:
    rng, rows = np.random.default_rng(0), []
    for number in range(60):  # the sampled token is a function of the one before it
        ids = rng.integers(0, 20, 24).astype(np.int32)
        ids[1::2] = (ids[0::2] * 7 + 3) % 20
        mask = np.tile(np.array([0, 1], np.int8), 12)
        rows.append(Row(ids, mask, np.zeros(24, np.float32), f"d{number}"))
    worker = TrainWorker(model_dir, training(micro_batch_tokens=4096), Algorithm())
    model = plain_model(model_dir)
    seen: list[int] = []
    report = worker.sft(
        rows, steps=60, lr=5e-2, batch_tokens=24 * 60, seed=1, on_step=lambda step, loss: seen.append(step)
    )
    with torch.no_grad():  # the first batch holds every row once
        first = np.mean([-plain_logp(model, row)[0].numpy()[row.mask[1:] == 1].mean() for row in rows])
    assert report["loss"][0] == pytest.approx(first, rel=1e-4)
    assert report["loss"][-1] < 0.1 * report["loss"][0]
    assert seen == list(range(1, 61))
    assert not worker.engine.optimizer.state
    with pytest.raises(DataError, match="no row holds a trained token"):
        worker.sft([Row(r.ids, r.mask * 0, r.logprobs, "x") for r in rows], steps=1, lr=1e-3, batch_tokens=100)


def test_user_mistakes_are_one_sentence(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="holds no model"):
        TrainWorker(tmp_path, training(), Algorithm())
    (row,) = rollouts(1)
    row.mask[0] = 1
    with pytest.raises(DataError, match="r0 trains its first token"):
        TrainWorker(model_dir, training(), Algorithm()).logprobs([row])
    with pytest.raises(DataError, match="reference=True"):
        TrainWorker(model_dir, training(), Algorithm(kl_coef=0.1))
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(MissingPart, match=r"needs verl.*pip install 'swe-lightning\[train\]'"):
        TrainWorker(model_dir, training(), Algorithm())


def test_a_larger_process_group_is_refused() -> None:
    code = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from swe_lightning.policy.engine_room import _join_process_group
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
try:
    _join_process_group("cpu", "gloo")
except Exception as error:
    print(type(error).__name__, error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.startswith("UserError this process belongs to a torch.distributed group of 2")


def test_importing_the_worker_is_light() -> None:
    code = "import sys, swe_lightning.policy.worker, swe_lightning.policy.sft; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
