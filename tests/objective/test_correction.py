"""Off-policy factors and what is logged; staleness and late results."""

from __future__ import annotations

import math

import numpy as np
import pytest

from swe_lightning.errors import RecipeError
from swe_lightning.objective.batch import pad_row
from swe_lightning.objective.correction import correct, masked, truncate
from swe_lightning.objective.staleness import Arrivals, StalenessGate, fresh, oldest_version
from swe_lightning.recipe import OffPolicy, load_recipe, refuse_second_normalisation, validate_recipe
from tests.objective.conftest import make_row

LOG3 = math.log(3.0)


def factors(rows, deltas, **settings):
    new = [row.logprobs + np.array(d, dtype=np.float32) for row, d in zip(rows, deltas, strict=True)]
    found, stats = correct(rows, new, OffPolicy(**settings))
    return [f.tolist() for f in found], stats


def test_tis_cuts_the_token_ratio_at_the_cap() -> None:
    found, stats = factors([make_row("r", 3, prompt=1)], [[5.0, LOG3, 0.0, -LOG3]])
    assert found[0] == pytest.approx([0.0, 2.0, 1.0, 1 / 3], rel=1e-5)
    assert stats["off_policy_ratio_max"] == pytest.approx(3.0, rel=1e-5)
    assert stats["off_policy_ratio_mean"] == pytest.approx((3 + 1 + 1 / 3) / 3, rel=1e-5)
    assert stats["off_policy_clipped"] == pytest.approx(1 / 3)
    assert stats["off_policy_kl"] == pytest.approx(((3 - 1 - LOG3) + 0 + (1 / 3 - 1 + LOG3)) / 3, rel=1e-5)
    assert stats["off_policy_tokens"] == 3


def test_mask_switches_tokens_off_outside_the_band() -> None:
    found, stats = factors([make_row("r", 4, prompt=1)], [[0, LOG3, 0.0, -LOG3, 0.1]], kind="mask")
    assert found[0] == pytest.approx([0.0, 0.0, 1.0, 0.0, math.exp(0.1)], rel=1e-5)
    assert stats["off_policy_masked"] == 0.5


def test_sequence_level_does_not_depend_on_the_cut() -> None:
    whole, _ = factors([make_row("r", 4, prompt=0)], [[0.1, 0.2, 0.1, 0.1]], level="sequence")
    split, _ = factors([make_row("r", 2, prompt=0)] * 2, [[0.1, 0.2], [0.1, 0.1]], level="sequence")
    assert whole[0] == pytest.approx([math.exp(0.5)] * 4, rel=1e-6)
    assert split[0] + split[1] == pytest.approx(whole[0])
    other, _ = factors([make_row("r", 1), make_row("s", 1)], [[0, 0, 5], [0, 0, 0.2]], level="sequence")
    assert other[0][2] == 2.0
    assert other[1][2] == pytest.approx(math.exp(0.2))


def test_no_correction_is_one_on_trained_tokens() -> None:
    found, stats = factors([make_row("r", 1, prompt=1)], [[0.0, LOG3]], kind="none")
    assert found == [[0.0, 1.0]]
    assert stats["off_policy_ratio_max"] == pytest.approx(3.0, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["none", "tis", "mask"])
def test_what_the_trainer_says_of_masked_positions_and_padding_rows_counts_nowhere(kind: str, level: str) -> None:
    rows = [make_row("r", 2, prompt=1), pad_row()]
    good = [np.array([0.0, -0.4, -0.6], np.float32), np.zeros(2, np.float32)]
    bad = [np.array([np.nan, -0.4, -0.6], np.float32), np.array([np.nan, -np.inf], np.float32)]
    expected, wanted = correct(rows, good, OffPolicy(kind=kind, level=level))
    found, stats = correct(rows, bad, OffPolicy(kind=kind, level=level))
    assert [f.tolist() for f in found] == [f.tolist() for f in expected]
    assert stats == wanted
    assert stats["off_policy_tokens"] == 2
    assert found[1].tolist() == [0.0, 0.0]


def test_broken_logprobs_stay_finite() -> None:
    found, stats = factors([make_row("r", 2, prompt=0)], [[-math.inf, 1e9]])
    assert np.isfinite(found).all()
    assert math.isfinite(stats["off_policy_ratio_max"])


def test_padding_is_in_no_statistic() -> None:
    rows = [make_row("r", 1, prompt=1), make_row("padding", 0)]
    _, stats = factors(rows, [[0, 0.0], [9.0, 9.0]])
    assert stats["off_policy_tokens"] == 1
    assert stats["off_policy_ratio_max"] == 1.0
    assert correct([make_row("padding", 0)], [np.zeros(2)], OffPolicy())[1] == {"off_policy_tokens": 0.0}


def test_numpy_and_torch_agree() -> None:
    torch = pytest.importorskip("torch")
    values = np.linspace(-3, 3, 13).astype(np.float32)
    for function in (truncate, masked):
        assert function(torch.tensor(values), 2.0).numpy() == pytest.approx(function(values, 2.0), rel=1e-6)


def test_w6_async_without_a_named_correction_is_refused() -> None:
    data = {
        "name": "x",
        "tasks": {"train": "a", "val": "b"},
        "model": {"path": "m"},
        "rollout": {"schedule": "async"},
        "algorithm": {"off_policy": {"kind": "none"}},
    }
    with pytest.raises(RecipeError, match="named correction"):
        validate_recipe(data, "recipe")
    data["algorithm"] = {"off_policy": {"kind": "mask"}}
    validate_recipe(data, "recipe")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("algorithm.norm_adv_by_std_in_grpo", "normalised once already"),
        ("actor.normalize_advantages", "normalised once already"),
        ("actor.use_kl_in_reward", "normalised once already"),
    ],
)
def test_a15_normalising_in_the_backend_too_is_a_recipe_error(option: str, words: str) -> None:
    with pytest.raises(RecipeError, match=f"{option} is on.*{words}"):
        load_recipe("tiny_cpu.yaml", [f"training.engine_options={{{option}: true}}"])


def test_a15_averaging_in_the_backend_too_is_a_recipe_error() -> None:
    with pytest.raises(RecipeError, match="loss_agg_mode token-mean would average again"):
        load_recipe("tiny_cpu.yaml", ["training.engine_options={actor.loss_agg_mode: token-mean}"])
    refuse_second_normalisation({"algorithm.norm_adv_by_std_in_grpo": False, "actor.loss_agg_mode": "sum"})


def test_backend_options_of_the_recipes_own_keys_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"optimizer.lr follows from the recipe's own keys"):
        load_recipe("tiny_cpu.yaml", ["training.engine_options={optimizer.lr: 1.0}"])
    with pytest.raises(RecipeError, match=r"names start with engine\. or optimizer\."):
        load_recipe("tiny_cpu.yaml", ["training.engine_options={rollout.n: 4}"])
    recipe = load_recipe("tiny_cpu.yaml", ["training.engine_options={engine.param_offload: true}"])
    assert recipe.training.engine_options == {"engine.param_offload": True}


def test_w10_staleness_bound_and_counted_requeues() -> None:
    assert fresh(3, 5, 2)
    assert not fresh(2, 5, 2)
    gate = StalenessGate(max_lag=2)
    assert gate.admit("g1", start=3, current=5)
    assert not gate.admit("g2", start=2, current=5)
    assert not gate.admit("g2", start=2, current=6)
    assert gate.requeues == {"g2": 2}
    assert gate.stats == {"groups_accepted": 1.0, "groups_requeued": 2.0, "staleness_max": 2.0}
    row = make_row("r", 2)
    row.spans = [(1, 2, 7), (2, 3, 5)]
    assert oldest_version([row], default=9) == 5
    assert oldest_version([], default=9) == 9


def test_w11_a_late_result_is_ignored_and_counted() -> None:
    arrivals = Arrivals()
    assert arrivals.take("r", attempt=2)
    assert not arrivals.take("r", attempt=1)
    assert len(arrivals) == 1
    assert arrivals.late == 1
