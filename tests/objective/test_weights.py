"""The paper's worked examples (Eq. 14-16) and what must change no denominator."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swe_lightning.objective import token_weights, uniform_weights
from swe_lightning.objective.batch import pad_row
from swe_lightning.records import Row
from tests.objective.conftest import make_row, masked_row

ONES = {"A": 1.0, "B": 1.0, "C": 1.0}


def paper_rows() -> list[Row]:
    """A in two rows of 50 and 100 tokens, B in three of 30, C in one of 40."""
    shape = [("A", 50), ("A", 100), ("B", 30), ("B", 30), ("B", 30), ("C", 40)]
    return [make_row(name, n) for name, n in shape]


def share(rows: list[Row], weights: list[np.ndarray], name: str) -> float:
    return sum(float(w.sum()) for r, w in zip(rows, weights, strict=True) if r.rollout_id == name)


@pytest.mark.parametrize(
    ("normalisation", "expected"),
    [
        ("rollout_token_mean", [1 / 3, 1 / 3, 1 / 3]),
        ("token_mean", [150 / 280, 90 / 280, 40 / 280]),
        ("sample_mean", [2 / 6, 3 / 6, 1 / 6]),
        ("constant", [150 / 3000, 90 / 3000, 40 / 3000]),
    ],
)
def test_paper_shares(normalisation: str, expected: list[float]) -> None:
    rows = paper_rows()
    weights = token_weights(rows, ONES, normalisation, constant_tokens=1000)
    assert [share(rows, weights, name) for name in "ABC"] == pytest.approx(expected, rel=1e-12)


def test_loss_of_one_everywhere_is_one_however_many_rows() -> None:
    weights = token_weights(paper_rows(), ONES)
    total = sum(float(w.sum()) for w in weights)
    assert total == pytest.approx(1.0)
    assert total != pytest.approx(0.5)  # divided by 6 rows instead of 3 rollouts


def test_loss_on_one_rollout_only() -> None:
    only_a = {"A": 1.0, "B": 0.0, "C": 0.0}
    split = sum(float(w.sum()) for w in token_weights(paper_rows(), only_a))
    whole = [make_row("A", 150), make_row("B", 90), make_row("C", 40)]
    assert split == pytest.approx(1 / 3)
    assert split != pytest.approx(150 / 280)
    assert sum(float(w.sum()) for w in token_weights(whole, only_a)) == pytest.approx(split)


def test_broadcast_times_own_mask() -> None:
    rows = [masked_row("r", [1, 1, 0, 0]), masked_row("r", [0, 0, 1, 1])]
    weights = token_weights(rows, {"r": 8.0})
    assert [w.tolist() for w in weights] == [[2, 2, 0, 0], [0, 0, 2, 2]]


def test_rollout_in_three_rows_weighs_what_it_weighs_in_one() -> None:
    three = [make_row("r", 10), make_row("r", 20), make_row("r", 30), make_row("s", 60)]
    one = [make_row("r", 60), make_row("s", 60)]
    adv = {"r": -0.5, "s": 0.5}
    assert share(three, token_weights(three, adv), "r") == pytest.approx(share(one, token_weights(one, adv), "r"))
    sample = token_weights(three, adv, "sample_mean")
    assert share(three, sample, "r") == pytest.approx(-3 / 8)  # what Eq. 15 does, and the default must not


def test_sum_is_advantage_over_rollouts() -> None:
    rows = paper_rows()
    adv = {"A": 0.7, "B": -0.2, "C": None}
    weights = token_weights(rows, adv)
    assert [share(rows, weights, n) for n in "ABC"] == pytest.approx([0.35, -0.1, 0.0])
    assert all(len(w) == len(r.ids) for w, r in zip(weights, rows, strict=True))
    assert all(not w[r.mask == 0].any() for w, r in zip(weights, rows, strict=True))


@pytest.mark.parametrize("normalisation", ["rollout_token_mean", "token_mean", "sample_mean", "constant"])
def test_failures_padding_and_untrained_branches_change_nothing(normalisation: str) -> None:
    rows, adv = paper_rows(), {"A": 0.7, "B": -0.2, "C": 0.1}
    base = token_weights(rows, adv, normalisation)
    extra = [make_row("dead", 500), pad_row(), make_row("A", 0, prompt=40), make_row("empty", 0)]
    more = token_weights(rows + extra, {**adv, "dead": None, "empty": 3.0, "no rows": 1.0}, normalisation)
    assert all(np.array_equal(a, b) for a, b in zip(base, more, strict=False))
    assert not any(w.any() for w in more[len(rows) :])


def test_unknown_rollout_and_unknown_option_are_refused() -> None:
    with pytest.raises(ValueError, match="rollout B"):
        token_weights(paper_rows(), {"A": 1.0, "C": 1.0})
    with pytest.raises(ValueError, match="rollout_token_mean"):
        token_weights([], {}, "rollout_mean")


def test_uniform_weights_are_the_weights_of_advantage_one() -> None:
    rows = paper_rows()
    assert [w.tolist() for w in uniform_weights(rows)] == [w.tolist() for w in token_weights(rows, ONES)]


def test_nothing_to_train_is_not_an_error() -> None:
    assert token_weights([], {}) == []
    assert not token_weights([make_row("r", 0)], {"r": 1.0})[0].any()


@given(st.integers(0, 2**32))
def test_total_weight_per_rollout_does_not_depend_on_the_cut(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {f"r{i}": rng.randint(1, 60) for i in range(rng.randint(1, 6))}
    adv = {name: rng.choice([-1.0, 0.0, 0.5, None]) for name in sizes}

    def cut() -> list[Row]:
        rows = []
        for name, size in sizes.items():
            while size:
                piece = rng.randint(1, size)
                rows.append(make_row(name, piece, prompt=rng.randint(0, 5)))
                size -= piece
        rng.shuffle(rows)
        return rows

    a, b = cut(), cut()
    counted = sum(v is not None for v in adv.values())
    for normalisation in ("rollout_token_mean", "token_mean", "constant"):
        wa, wb = token_weights(a, adv, normalisation), token_weights(b, adv, normalisation)
        for name in sizes:
            assert share(a, wa, name) == pytest.approx(share(b, wb, name), rel=1e-12, abs=1e-15)
    for name, value in adv.items():
        expected = value / counted if value is not None else 0.0
        assert share(a, token_weights(a, adv), name) == pytest.approx(expected, rel=1e-12, abs=1e-15)
