"""What a difficulty probe calls itself, so that outcomes of two different ones are never put together."""

from __future__ import annotations

from pathlib import Path

import pytest

from swe_lightning.errors import UserError
from swe_lightning.evaluation.probing import make_prober


def identity(model: str, out: Path, *overrides: str) -> str:
    return make_prober("tiny_cpu.yaml", list(overrides), model, out).identity


def test_the_identity_follows_model_weights_and_recipe(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    seen = {identity("script:noop", tmp_path), identity("script:enumerate", tmp_path)}
    for weights in (b"one", b"two"):
        (model / "model.safetensors").write_bytes(weights)
        seen.add(identity(str(model), tmp_path))
    seen.add(identity(str(model), tmp_path, "rollout.temperature=0.5"))
    assert len(seen) == 5
    assert identity(str(model), tmp_path, "rollout.temperature=0.5") in seen


def test_what_cannot_be_probed_is_refused(tmp_path: Path) -> None:
    for model in ("script:nosuch", str(tmp_path)):
        with pytest.raises(UserError, match="--probe-model"):
            identity(model, tmp_path)
