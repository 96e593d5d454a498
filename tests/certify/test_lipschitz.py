"""Lipschitz bounds of monotone classifiers: against dense algebra; upper bounds never broken, lower ones really found."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import wellposed as wp
from wellposed.certify import lipschitz_lower, lipschitz_upper
from wellposed.nn import DenseCell, MonotoneClassifier, ReLU, Sigmoid, SoftThreshold, Tanh

F64 = torch.float64


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(
    kind: str, seed: int = 0, *, margin: float = 0.4, activation=None, spread: float = 1.0
) -> tuple[MonotoneClassifier, Tensor]:
    options = {
        "margin": margin,
        "activation": activation,
        "dtype": F64,
        "generator": generator(seed),
        "on_failure": "raise",
        "rtol": 1e-12,
        "max_steps": 5000,
    }
    if kind == "dense":
        model = MonotoneClassifier.dense(3, 6, 3, **options)
        shape: tuple[int, ...] = (3,)
    elif kind == "conv":
        model = MonotoneClassifier.conv((1, 4, 4), 2, 3, grid=2, **options)
        shape = (1, 4, 4)
    elif kind == "zeros":
        model = MonotoneClassifier.conv((1, 4, 4), 2, 3, grid=2, padding="zeros", **options)
        shape = (1, 4, 4)
    else:
        model = MonotoneClassifier.multitier((1, 4, 4), (2, 2), 3, grid=2, **options)
        shape = (1, 4, 4)
    with torch.no_grad():
        for parameter in model.layer.parameters():
            parameter.mul_(spread)
    return model, torch.randn(6, *shape, dtype=F64, generator=generator(seed + 1))


KINDS = ["dense", "conv", "zeros", "tiers"]


def dense_parts(model: MonotoneClassifier, x: Tensor) -> tuple[Tensor, Tensor]:
    """W and U as matrices, from the maps themselves."""
    cell = model.cell
    one = x[:1]
    c0 = cell.bind(model.prepared(0 * one)).inputs()[-1].detach()
    units = torch.eye(one.numel(), dtype=F64).reshape(-1, *one.shape[1:])
    U = (cell.bind(model.prepared(units)).inputs()[-1].detach() - c0).T
    return cell.bind(model.prepared(one)).operator.dense(c0.shape[1]).detach(), U


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", [ReLU(), Sigmoid()], ids=repr)
def test_formulas(kind, activation):
    """Each field against the dense matrices: |U|, M^(-1/2) by eigenvectors, and never worse than |U|/m."""
    model, x = make(kind, activation=activation)
    bounds = lipschitz_upper(model)
    W, U = dense_parts(model, x)
    n = W.shape[0]
    shift = 3.0 if isinstance(activation, Sigmoid) else 0.0
    M = (1 + shift) * torch.eye(n, dtype=F64) - (W + W.T) / 2
    values, Q = torch.linalg.eigh(M)
    root = (Q / values.sqrt()) @ Q.T
    assert bounds.margin <= float(values[0]) and bounds.margin >= 0.4 + shift - 1e-9
    norm_U = float(torch.linalg.matrix_norm(U, 2))
    loose = 1.0 if kind == "dense" else 2.0  # other paddings and tiers bound |U| through larger tori
    assert norm_U <= bounds.input_norm <= loose * norm_U * 1.05
    w = model.directions()
    torch.testing.assert_close(model.head.weight.detach() @ model.readout(torch.eye(n, dtype=F64)).T, w)
    expected = ((w.unsqueeze(1) - w.unsqueeze(0)) @ root).norm(dim=2)
    torch.testing.assert_close(bounds.weighted_readout, expected, rtol=1e-5, atol=1e-9)
    weighted = float(torch.linalg.matrix_norm(root @ U, 2))
    assert weighted <= bounds.weighted_input_norm
    if kind == "dense":
        assert bounds.weighted_input_norm == pytest.approx(weighted, rel=1e-5)
    plain = (w.unsqueeze(1) - w.unsqueeze(0)).norm(dim=2) * bounds.input_norm / bounds.margin
    assert bool((bounds.pairs <= plain * (1 + 1e-6)).all())
    assert bounds.equilibrium == pytest.approx(bounds.input_norm / bounds.margin, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=5)
@given(
    seed=st.integers(0, 2**16),
    margin=st.floats(0.3, 1.5),
    spread=st.floats(0.3, 1.5),
    activation=st.sampled_from([ReLU(), Tanh(), Sigmoid(), SoftThreshold(0.3)]),
    distance=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_no_pair_of_inputs_breaks_the_bounds(kind, seed, margin, spread, activation, distance):
    model, x = make(kind, seed, margin=margin, activation=activation, spread=spread)
    bounds = lipschitz_upper(model)
    other = x + distance * torch.randn(x.shape, dtype=F64, generator=generator(seed + 2))
    with torch.no_grad():
        z = (model.equilibrium(x) - model.equilibrium(other)).flatten(1)
        logits = model(x) - model(other)
    moved = (x - other).flatten(1).norm(dim=1)
    rounding = 1e-9
    assert bool((z.norm(dim=1) <= bounds.equilibrium * moved + rounding).all())
    assert bool((logits.norm(dim=1) <= bounds.logits * moved + rounding).all())
    differences = (logits.unsqueeze(2) - logits.unsqueeze(1)).abs()
    assert bool((differences <= bounds.pairs * moved[:, None, None] + rounding).all())


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_the_lower_bound_is_found_and_is_below(kind):
    """It beats the largest Jacobian norm at the starting points, nearly, and stays below the upper bound."""
    model, x = make(kind)
    model.layer.rtol = 1e-8
    upper = lipschitz_upper(model).logits
    lower = lipschitz_lower(model, x, steps=12, generator=generator(3))
    assert lower.shape == (6,) and bool((lower > 0).all()) and float(lower.max()) <= upper
    jacobians = [torch.autograd.functional.jacobian(lambda v: model(v[None])[0], row) for row in x]
    norms = [float(torch.linalg.matrix_norm(J.reshape(3, -1), 2)) for J in jacobians]
    assert float(lower.max()) >= 0.8 * max(norms)
    none = lipschitz_lower(model, x, steps=0, generator=generator(3))
    assert bool((none <= lower).all())


def test_float32_parameters_are_bounded_as_stored():
    model, _ = make("dense")
    bounds, same = lipschitz_upper(model.float()), lipschitz_upper(model.double())
    assert bounds.logits == pytest.approx(same.logits, rel=1e-9)
    assert model.cell.U.dtype == F64


def test_other_models_are_refused():
    with pytest.raises(wp.InvalidType, match="MonotoneClassifier.*; got Linear"):
        lipschitz_upper(torch.nn.Linear(2, 2))
    with pytest.raises(wp.InvalidType, match=r"DenseCell with weight=Monotone\(margin\); got weight=None"):
        MonotoneClassifier(DenseCell(2, 3), None, 2)
