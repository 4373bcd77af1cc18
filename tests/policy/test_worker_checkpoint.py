"""Checkpoints: exact resume in a new process, whole or absent, readable by transformers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from swe_lightning.errors import DataError
from swe_lightning.policy.sft import warm_start
from swe_lightning.policy.worker import TrainWorker
from swe_lightning.recipe import Algorithm, Recipe, Training
from swe_lightning.records import Batch, Row

pytest.importorskip("verl")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.train

TRAINING = Training(lr=1e-3, lr_warmup_steps=3, steps=10, micro_batch_tokens=300)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        tie_word_embeddings=request.param,
        max_position_embeddings=128,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer_config.json").write_text('{"made": "for this test"}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def batch(step: int) -> Batch:
    rng, rows, weights = np.random.default_rng(step), [], []
    for number in range(6):
        length = int(rng.integers(20, 60))
        mask = (rng.random(length) < 0.3).astype(np.int8)
        mask[0], mask[-1] = 0, 1
        rows.append(Row(rng.integers(0, 96, length).astype(np.int32), mask, np.zeros(length, np.float32), f"r{number}"))
        weights.append(mask * np.float32(rng.normal() / 60))
    return Batch(rows, weights)


CONTINUE = """
from verl.plugin.platform import get_platform
device = get_platform().device_name
import sys, json
from pathlib import Path
sys.path.insert(0, {here!r})
import test_worker_checkpoint as t
import torch, random, numpy
worker = t.TrainWorker(Path({model!r}), t.TRAINING, t.Algorithm())
state = worker.load(Path({saved!r}))
print(json.dumps([device, state, worker.optimizer_steps, torch.rand(1).item(), random.random(), numpy.random.rand()]))
for step in (2, 3):
    worker.update(t.batch(step))
worker.save(Path({out!r}), state={{"step": 4}})
"""


@pytest.mark.timeout(600)  # a new process imports torch and verl; slow where the machine is shared
def test_resume_is_bit_identical(model_dir: Path, tmp_path: Path) -> None:
    """Two steps, a checkpoint, two more; against the last two again from the checkpoint, in a new process (for the
    untied model in a new worker of this one, to save time)."""
    worker = TrainWorker(model_dir, TRAINING, Algorithm())
    for step in (0, 1):
        worker.update(batch(step))
    torch.manual_seed(5), random.seed(6), np.random.seed(7)
    torch.rand(3), random.gauss(0, 1), np.random.randn()
    saved, out = tmp_path / "step2", tmp_path / "resumed"
    worker.save(saved, state={"step": 2, "order": ["a", "b"]})
    drawn = [torch.rand(1).item(), random.random(), np.random.rand()]
    for step in (2, 3):
        worker.update(batch(step))
    worker.save(tmp_path / "straight", state={"step": 4})

    expected = [{"step": 2, "order": ["a", "b"]}, 2, *drawn]
    device = "cuda" if torch.cuda.is_available() else "cpu"  # which verl finds by itself, through our entry point
    if json.loads((model_dir / "config.json").read_text())["tie_word_embeddings"]:
        code = CONTINUE.format(here=str(Path(__file__).parent), model=str(model_dir), saved=str(saved), out=str(out))
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout) == [device, *expected]  # and verl printed nothing
        assert result.stderr == ""
    else:
        again = TrainWorker(model_dir, TRAINING, Algorithm())
        state = again.load(saved)
        assert [state, again.optimizer_steps, torch.rand(1).item(), random.random(), np.random.rand()] == expected
        for step in (2, 3):
            again.update(batch(step))
        again.save(out, state={})
    for file in ("model.safetensors", "optimizer.safetensors"):
        straight, resumed = _tensors(tmp_path / "straight" / file), _tensors(out / file)
        assert straight.keys() == resumed.keys()
        for name in straight.keys() - {"torch_random", "numpy_random", "numpy_random_rest"}:
            assert torch.equal(straight[name], resumed[name]), name
    assert any(name.endswith("|exp_avg_sq") for name in _tensors(out / "optimizer.safetensors"))


def test_checkpoint_is_a_hugging_face_directory(model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    worker = TrainWorker(model_dir, TRAINING, Algorithm())
    worker.update(batch(0))
    where = tmp_path / "deep" / "step1"
    worker.save(where, state={})
    names = {p.name for p in where.iterdir()}
    assert {"config.json", "tokenizer_config.json", "chat_template.jinja", "complete"} <= names
    assert [p.name for p in where.parent.iterdir()] == ["step1"]
    model, loading = AutoModelForCausalLM.from_pretrained(where, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    row = batch(1).rows[0]
    ids = torch.from_numpy(row.ids.astype(np.int64))
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None]).squeeze(-1)
    np.testing.assert_allclose(worker.logprobs([row])[0][1:], logp.numpy() * row.mask[1:], atol=1e-5)

    again = TrainWorker(where, TRAINING, Algorithm())  # a checkpoint is a model like any other
    again.save(tmp_path / "copy", state={})
    assert (tmp_path / "copy/model.safetensors").read_bytes() == (where / "model.safetensors").read_bytes()
    assert "weight" in " ".join(_tensors(where / "model.safetensors"))
    worker.export_weights(tmp_path / "export")
    assert (tmp_path / "export/model.safetensors").read_bytes() == (where / "model.safetensors").read_bytes()


def test_whole_or_absent(model_dir: Path, tmp_path: Path) -> None:
    worker = TrainWorker(model_dir, TRAINING, Algorithm())
    with pytest.raises(TypeError):
        worker.save(tmp_path / "broken", state={"not json": object()})
    assert list(tmp_path.iterdir()) == []
    torn = tmp_path / "step1"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    with pytest.raises(DataError, match="not a complete checkpoint"):
        worker.load(torn)
    worker.save(torn, state={"step": 1})
    assert worker.load(torn) == {"step": 1}
    with pytest.raises(DataError, match="already holds a complete checkpoint"):
        worker.save(torn, state={})
    with pytest.raises(DataError, match="cannot write checkpoint"):
        worker.save(torn / "config.json" / "below", state={})


def test_warm_start_writes_a_policy_that_fits_better(model_dir: Path, tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "t",
            "tasks": {"train": "a.jsonl", "val": "b.jsonl"},
            "model": {"max_context": 128},
            "warm_start": {"steps": 30, "lr": 0.01, "batch_tokens": 300},
            "algorithm": {"kl_coef": 0.1},
            "training": {"micro_batch_tokens": 300},
        }
    )
    rows, heard = batch(3).rows, []
    report = warm_start(recipe, model_dir=model_dir, out=tmp_path / "sft", rows=rows, progress=lambda: heard.append(1))
    assert len(heard) == 30
    assert report["loss_last"] < report["loss_first"] - 0.5
    after = TrainWorker(tmp_path / "sft", TRAINING, Algorithm()).logprobs(rows)
    before = TrainWorker(model_dir, TRAINING, Algorithm()).logprobs(rows)
    assert sum(map(np.sum, after)) > sum(map(np.sum, before)) + 20


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)
