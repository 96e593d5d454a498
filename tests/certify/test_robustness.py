"""Certified radii: attacked with gradients inside the radius, never broken; exact where the network is affine."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

import wellposed as wp
from wellposed.certify import lipschitz_upper, robustness
from wellposed.nn import MonotoneClassifier

F64 = torch.float64


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def attacked(model: MonotoneClassifier, x: Tensor, y: Tensor, radius: Tensor, *, steps: int = 8) -> Tensor:
    """(n,) bool: whether projected gradient descent on the least gap finds another class within the radius."""
    shape = (-1,) + (1,) * (x.dim() - 1)
    r = radius.reshape(shape).to(x)
    broken = torch.zeros(len(x), dtype=torch.bool)
    for restart in range(2):
        d = torch.randn(x.shape, dtype=x.dtype, generator=generator(restart))
        d = d / d.flatten(1).norm(dim=1).reshape(shape) * r
        for _ in range(steps):
            d.requires_grad_()
            logits = model(x + d)
            broken |= logits.argmax(dim=1) != y
            own = logits.gather(1, y[:, None])
            gap = own - logits.scatter(1, y[:, None], -torch.inf).amax(dim=1, keepdim=True)
            (g,) = torch.autograd.grad(gap.sum(), d)
            g = g / g.flatten(1).norm(dim=1).reshape(shape).clamp(min=1e-30)
            d = d.detach() - 0.5 * r * g
            length = d.flatten(1).norm(dim=1).reshape(shape)
            d = d * torch.minimum(torch.ones_like(length), r / length.clamp(min=1e-30))
        broken |= model(x + d).argmax(dim=1) != y
    return broken


def make(kind: str, seed: int) -> tuple[MonotoneClassifier, Tensor]:
    options = {
        "dtype": F64,
        "generator": generator(seed),
        "rtol": 1e-9,
        "max_steps": 5000,
        "on_failure": "raise",
        "margin": 0.5,
    }
    if kind == "dense":
        return MonotoneClassifier.dense(4, 12, 3, **options), torch.randn(8, 4, dtype=F64, generator=generator(seed + 1))
    x = torch.randn(8, 1, 4, 4, dtype=F64, generator=generator(seed + 1))
    if kind == "conv":
        return MonotoneClassifier.conv((1, 4, 4), 2, 3, grid=2, **options), x
    return MonotoneClassifier.multitier((1, 4, 4), (2, 2), 3, grid=2, **options), x


@pytest.mark.parametrize(("kind", "seed"), [("dense", 0), ("dense", 1), ("conv", 0), ("tiers", 0)])
def test_attacks_never_succeed_inside_the_radius(kind, seed):
    model, x = make(kind, seed)
    y = model(x).argmax(dim=1)
    result = robustness(model, x, y)
    assert bool(result.correct.all()) and bool((result.radius > 0).all())
    assert bool((result.radius >= result.global_radius).all())
    assert not bool(attacked(model, x, y, result.radius * (1 - 1e-7)).any())
    # The attack is a real one: far outside it does succeed.
    assert bool(attacked(model, x, y, 100 * result.radius + 10).any())


def test_the_active_set_sharpens():
    model, x = make("dense", 0)
    y = model(x).argmax(dim=1)
    sharp, plain = robustness(model, x, y), robustness(model, x, y, local=False)
    assert torch.equal(plain.radius, plain.global_radius)
    assert bool((sharp.radius >= plain.radius).all()) and float((sharp.radius / plain.radius).max()) > 1.05


def test_the_global_radius_is_the_formula():
    model, x = make("conv", 3)
    y = model(x).argmax(dim=1)
    logits, bounds = model(x).detach(), lipschitz_upper(model)
    expected = [
        min(float((logits[i, y[i]] - logits[i, j]) / bounds.pairs[y[i], j]) for j in range(3) if j != y[i]) for i in range(8)
    ]
    torch.testing.assert_close(robustness(model, x, y).radius, torch.tensor(expected, dtype=F64), rtol=1e-6, atol=1e-9)


def test_exact_in_a_linear_region():
    """All units far on: the network is affine, the boundary a hyperplane, and the radius its distance."""
    model, x = make("dense", 5)
    with torch.no_grad():
        model.cell.b.fill_(200.0)
        model.head.bias.copy_(-model.head(model.readout(model.equilibrium(x))).mean(dim=0) + model.head.bias)
    y = model(x).argmax(dim=1)
    result = robustness(model, x, y)
    for i in range(8):
        J = torch.autograd.functional.jacobian(lambda v: model(v[None])[0], x[i]).detach()
        logits = model(x[i : i + 1])[0].detach()
        distance = min(float((logits[y[i]] - logits[j]) / (J[y[i]] - J[j]).norm()) for j in range(3) if j != int(y[i]))
        assert float(result.radius[i]) == pytest.approx(distance, rel=1e-4)
        nearest = min(
            (j for j in range(3) if j != int(y[i])), key=lambda j: float((logits[y[i]] - logits[j]) / (J[y[i]] - J[j]).norm())
        )
        direction = (J[nearest] - J[y[i]]) / (J[nearest] - J[y[i]]).norm()
        assert int(model((x[i] + 1.001 * distance * direction)[None]).argmax()) != int(y[i])


def test_wrong_predictions_have_no_radius():
    model, x = make("dense", 1)
    y = (model(x).argmax(dim=1) + 1) % 3
    result = robustness(model, x, y)
    assert not bool(result.correct.any()) and bool((result.radius == 0).all()) and bool((result.margin < 0).all())
    assert result.certified_accuracy(0.0) == 0.0


def test_an_unsolved_equilibrium_proves_less(monkeypatch):
    """The error of the solve is taken from the margin: with a poor solve the radius shrinks and is still not broken."""
    module = sys.modules["wellposed.certify.robust_balls"]  # as an attribute of the package it is the function
    model, x = make("dense", 2)
    y = model(x).argmax(dim=1)
    good = robustness(model, x, y)
    monkeypatch.setattr(module, "MAX_STEPS", 6)
    poor = robustness(model, x, y)
    assert bool((poor.margin <= good.margin + 1e-9).all()) and bool((poor.margin < good.margin - 1e-6).any())
    right = poor.correct
    assert not bool(attacked(model, x, y, poor.radius * (1 - 1e-7))[right].any())


def test_certified_accuracy_falls_with_the_radius():
    model, x = make("dense", 0)
    result = robustness(model, x, model(x).argmax(dim=1))
    values = [result.certified_accuracy(r) for r in (0.0, float(result.radius.median()), 1e9)]
    assert values[0] == 1.0 and 0 < values[1] < 1 and values[2] == 0.0


def test_bad_labels():
    model, x = make("dense", 0)
    with pytest.raises(wp.InvalidArgument, match=r"one class per sample, int64 of shape \(8,\)"):
        robustness(model, x, torch.zeros(8))
    with pytest.raises(wp.InvalidArgument, match=r"y must be in 0\.\.2; got values in 0\.\.5"):
        robustness(model, x, torch.tensor([0, 1, 2, 5, 0, 0, 0, 0]))
