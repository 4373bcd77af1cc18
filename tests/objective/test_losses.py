"""Policy losses: hand values, clipping, and what masked positions may hold."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from swe_lightning.objective.losses import entropy, kl_penalty, policy_loss, weighted_sum  # noqa: E402

pytestmark = pytest.mark.train


def loss_of(ratios, weights, kind="ppo_clip", mask=None, **more):
    """(loss, gradient by log-prob, metrics) of one row whose old log-probs are -1."""
    old = torch.full((1, len(ratios)), -1.0, dtype=torch.float64)
    new = (old + torch.tensor([[math.log(r) for r in ratios]], dtype=torch.float64)).requires_grad_()
    w = torch.tensor([weights], dtype=torch.float64)
    m = torch.tensor([mask or [1] * len(ratios)])
    loss, metrics = policy_loss(new, old, w, m, kind=kind, **{"clip_low": 0.2, "clip_high": 0.28, **more})
    loss.backward()
    return float(loss.detach()), new.grad[0].tolist(), {k: float(v) for k, v in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "weight", "loss", "grad"),
    [
        (1.0, 0.5, -0.5, -0.5),
        (1.2, 0.5, -0.6, -0.6),
        (1.5, 0.5, -0.64, 0.0),  # above 1.28: no more to gain
        (0.5, 0.5, -0.25, -0.25),  # below the band with a positive weight: pulled back
        (0.5, -0.5, 0.4, 0.0),  # below 0.8: no more to gain
        (1.5, -0.5, 0.75, 0.75),
    ],
)
def test_ppo_clip_by_hand(ratio: float, weight: float, loss: float, grad: float) -> None:
    value, gradient, metrics = loss_of([ratio], [weight])
    assert value == pytest.approx(loss)
    assert gradient == pytest.approx([grad])
    assert metrics["clipped"] == (grad == 0.0)
    assert metrics["ratio_sum"] == pytest.approx(ratio)
    assert metrics["kl_sum"] == pytest.approx(ratio - 1 - math.log(ratio))


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    value, gradient, metrics = loss_of([5.0, 2.0], [-0.5, -0.5], dual_clip=3.0)
    assert value == pytest.approx(1.5 + 1.0)
    assert gradient == pytest.approx([0.0, 1.0])
    assert metrics["dual_clipped"] == 1
    with pytest.raises(ValueError, match="above 1"):
        loss_of([1.0], [1.0], dual_clip=1.0)


def test_gspo_uses_one_ratio_per_reply() -> None:
    # replies {1, 2} and {4}: mean log ratios (log 1.2 + log 0.9) / 2 and log 1.1
    ratio = math.sqrt(1.2 * 0.9)
    value, gradient, _ = loss_of([9.0, 1.2, 0.9, 9.0, 1.1], [7, 0.25, 0.25, 7, 0.5], "gspo", [0, 1, 1, 0, 1])
    assert value == pytest.approx(-(0.5 * ratio + 0.5 * 1.1))
    assert gradient == pytest.approx([0, -0.25 * ratio, -0.25 * ratio, 0, -0.55])


def test_gspo_labels_part_replies_that_touch() -> None:
    labels = torch.tensor([[1, 1, 2]])
    value, _, _ = loss_of([1.2, 0.9, 1.1], [0.25, 0.25, 0.5], "gspo", segments=labels)
    assert value == pytest.approx(-(0.5 * math.sqrt(1.2 * 0.9) + 0.55))


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    value, gradient, metrics = loss_of([1.5, 0.5, 1.0], [0.5, 0.5, -1.0], "cispo")
    assert gradient == pytest.approx([-1.28 * 0.5, -0.8 * 0.5, 1.0])
    assert metrics["clipped"] == 2
    logp = [-1 + math.log(1.5), -1 + math.log(0.5), -1.0]
    assert value == pytest.approx(-1.28 * 0.5 * logp[0] - 0.8 * 0.5 * logp[1] + logp[2])


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo", "cispo"])
def test_masked_positions_may_hold_anything(kind: str) -> None:
    old = torch.tensor([[float("nan"), -1.0, -float("inf")]])
    new = torch.tensor([[float("inf"), -1.0, float("nan")]], requires_grad=True)
    weights = torch.tensor([[float("nan"), 0.5, 9.0]])
    loss, metrics = policy_loss(new, old, weights, torch.tensor([[0, 1, 0]]), kind=kind, clip_low=0.2, clip_high=0.28)
    loss.backward()
    assert new.grad[0].tolist() == [0.0, -0.5, 0.0]
    assert all(math.isfinite(float(v)) for v in metrics.values())
    assert float(metrics["tokens"]) == 1


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_of_masked_positions_and_of_padding_rows_is_nothing(kind: str, broken: float) -> None:
    """In value and gradient, whichever side holds it: a product with 0 would give NaN."""
    weights, mask = torch.tensor([[0.5, 0.5, 0.5], [0.0, 0.0, 0.0]]), torch.tensor([[1, 0, 0], [0, 0, 0]])
    new = torch.tensor([[-1.0, broken, -2.0], [broken, broken, -1.0]], requires_grad=True)
    ref = torch.tensor([[-1.5, -1.0, broken], [broken, -1.0, -1.0]])
    total = weighted_sum(kl_penalty(new, ref, kind), weights, mask)
    total.backward()
    alone = torch.tensor(-1.0, requires_grad=True)
    expected = 0.5 * kl_penalty(alone, torch.tensor(-1.5), kind)
    expected.backward()
    assert total.item() == pytest.approx(expected.item())
    assert new.grad.flatten().tolist() == pytest.approx([alone.grad.item(), 0, 0, 0, 0, 0])


def test_entropy_of_masked_positions_is_nothing_and_of_impossible_tokens_too() -> None:
    values = torch.tensor([0.7, float("nan"), -float("inf")], requires_grad=True)
    total = weighted_sum(values, torch.tensor([0.5, 0.5, float("nan")]), torch.tensor([1, 0, 0]))
    total.backward()
    assert total.item() == pytest.approx(0.35)
    assert values.grad.tolist() == [0.5, 0, 0]
    logits = torch.tensor([[1.0, 0.5, -float("inf")], [1.0, 0.5, -1e30]], requires_grad=True)
    both = entropy(logits)
    both.sum().backward()
    assert both[0].item() == pytest.approx(both[1].item())
    assert logits.grad[0].tolist() == pytest.approx(logits.grad[1].tolist())
    assert all(math.isfinite(g) for g in logits.grad.flatten().tolist())


def test_padding_rows_are_in_no_statistic() -> None:
    _, _, one = loss_of([1.1, 0.9], [0.5, -0.5])
    old = torch.tensor([[-1.0, -1.0], [0.0, 0.0]], dtype=torch.float64)
    new = old + torch.tensor([[math.log(1.1), math.log(0.9)], [3.0, 3.0]], dtype=torch.float64)
    weights = torch.tensor([[0.5, -0.5], [0.0, 0.0]], dtype=torch.float64)
    _, two = policy_loss(new, old, weights, torch.tensor([[1, 1], [0, 0]]), clip_low=0.2, clip_high=0.28)
    assert {k: float(v) for k, v in two.items()} == pytest.approx(one)


def test_off_policy_factor_is_a_constant() -> None:
    value, gradient, _ = loss_of([1.1], [0.5], is_weights=torch.tensor([[2.0]], dtype=torch.float64))
    assert value == pytest.approx(-1.1)
    assert gradient == pytest.approx([-1.1])


def test_sums_do_not_depend_on_micro_batches() -> None:
    """10 tokens of loss 1 and 90 of loss 0: 0.10, however they are divided (means of means give 0.5)."""
    weights = torch.cat([torch.full((10,), -0.01), torch.zeros(90)]).double()
    logprob = torch.full((100,), -1.0, dtype=torch.float64)
    mask = torch.ones(100)
    for size in (100, 50, 10, 7):
        parts = [
            policy_loss(a, a, w, m, clip_low=0.2, clip_high=0.28)[0]
            for a, w, m in zip(logprob.split(size), weights.split(size), mask.split(size), strict=True)
        ]
        assert float(sum(parts)) == pytest.approx(0.10)


def test_kl_estimators_by_hand() -> None:
    p = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([-1.5], dtype=torch.float64)
    assert kl_penalty(p, q, "k1").item() == pytest.approx(0.5)
    assert kl_penalty(p, q, "k2").item() == pytest.approx(0.125)
    assert kl_penalty(p, q, "k3").item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    (gradient,) = torch.autograd.grad(kl_penalty(p, q, "k3").sum(), p)
    assert gradient.item() == pytest.approx(1 - math.exp(-0.5))
    assert kl_penalty(p, p.detach()).item() == 0.0
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_penalty(p, q, "k4")


def test_entropy_and_weighted_sum() -> None:
    values = entropy(torch.zeros(2, 3, 8))
    assert values.shape == (2, 3)
    assert values[0, 0].item() == pytest.approx(math.log(8))
    values = torch.tensor([1.0, float("nan"), 2.0])
    assert weighted_sum(values, torch.tensor([0.5, 1.0, 0.25]), torch.tensor([1, 0, 1])).item() == 1.0


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="ppo_clip, gspo, cispo"):
        loss_of([1.0], [1.0], "ppo")
