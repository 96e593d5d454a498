"""The bounds of a certificate: sound in random balls, and along training that was certified."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wellposed as wp
from equilibria import F64, normal
from wellposed.certify._radius_search import descent_radii, flow_radius, largest_descent, largest_flow
from wellposed.convex import L1
from wellposed.convex.sensitivity import OptEqSensitivity


def problem(seed=0, layers=1, alpha=1.0, n=4, width=12, norm_bound=None, activation=None):
    model = wp.DeepOptEq(
        6,
        (10, 12, 8)[:layers],
        width=width,
        alpha=alpha,
        norm_bound=norm_bound,
        activation=activation,
        dtype=F64,
        generator=torch.Generator().manual_seed(seed),
        rtol=1e-14,
        max_steps=3000,
        on_failure="ignore",
    )
    for b in model.b:
        b.data = normal(*b.shape, seed=seed + 1, scale=0.3)
    X = normal(n, 6, seed=seed + 2)
    return model, X


def moved(model, radius, seed):
    """A copy whose hidden parameters are moved by `radius` in a random direction."""
    other = copy.deepcopy(model)
    steps = [normal(*p.shape, seed=seed + 10 + k) for k, p in enumerate(other.parameters())]
    hidden = [(p, d) for (name, p), d in zip(other.named_parameters(), steps, strict=True) if name != "w"]
    total = math.sqrt(sum(float(d.square().sum()) for _, d in hidden))
    for p, d in hidden:
        p.data += radius / total * d
    return other


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    layers=st.integers(1, 3),
    alpha=st.sampled_from([0.4, 1.0]),
    radius=st.floats(1e-4, 0.2),
    activation=st.sampled_from([wp.nn.ReLU(), wp.nn.Tanh()]),
)
def test_equilibria_move_no_more_than_claimed(seed, layers, alpha, radius, activation):
    model, X = problem(seed, layers, alpha, activation=activation)
    bounds = OptEqSensitivity(model, X, torch.zeros(4, dtype=F64))
    least = bounds.least(radius, 1.0)
    other = moved(model, radius, seed)
    Z, Z2 = model.solve(X).value, other.solve(X).value
    claimed = bounds.least(0.0, 1.0) - least  # D
    assert float((Z2 - Z).norm()) <= claimed
    assert float(torch.linalg.svdvals(Z2).min()) >= least
    assert bounds.least(0.0, 1.0) == pytest.approx(float(torch.linalg.svdvals(Z).min()), rel=1e-8, abs=1e-9)
    # and per parameter, with gradients
    radii = {
        name: float((p - q).detach().norm()) for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True)
    }
    steps = bounds.descent(radii, 1.0)
    if steps is None:
        return
    assert float((Z2 - Z).norm()) <= steps.largest - float(torch.linalg.matrix_norm(Z, 2)) + 1e-9
    assert float(torch.linalg.matrix_norm(Z2, 2)) <= steps.largest
    for at in (model, other):
        at.zero_grad()
        r = at(X) - normal(4, seed=seed + 3)
        (r.square().sum() / 2).backward()
        for name, p in at.named_parameters():
            if name != "w":
                assert float(p.grad.norm()) <= steps.gradients[name] * float(r.detach().norm()) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["W.0", "U.0", "b.0"])
def test_the_worst_direction_nearly_attains_the_bound(name):
    """Random directions would not notice a forgotten term: one sample, one positive unit, and each parameter moved alone."""
    model = wp.DeepOptEq(1, (1,), width=1, norm_bound=None, dtype=F64, rtol=1e-14, on_failure="ignore")
    x = torch.full((1, 1), 2.0, dtype=F64)
    with torch.no_grad():
        model.W[0].fill_(0.1 if name == "W.0" else 0.5)
        model.U[0].fill_(1.0)
        model.b[0].fill_(1.0)
    bounds = OptEqSensitivity(model, x, torch.zeros(1, dtype=F64))
    radius = 1e-4
    radii = dict.fromkeys(("w", *bounds.hidden), 0.0) | {name: radius}
    claimed = bounds.least(0.0, 1.0) - bounds.descent(radii, 1.0).least
    z = model.solve(x).value
    with torch.no_grad():
        dict(model.named_parameters())[name].add_(radius)
    real = float((model.solve(x).value - z).norm())
    assert 0.99 * claimed <= real <= claimed


def test_beyond_the_contraction_nothing_is_known():
    model, X = problem()
    bounds = OptEqSensitivity(model, X, torch.zeros(4, dtype=F64))
    assert bounds.least(10.0, 1.0) == -math.inf
    assert bounds.descent(dict.fromkeys(("w", *bounds.hidden), 10.0), 1.0) is None
    assert bounds.hidden == ("W.0", "U.0", "b.0") and bounds.readout == ("w",)


def test_where_the_norm_bound_may_act_nothing_is_claimed():
    model, X = problem(norm_bound=0.8)
    norm = model.norms_upper()[0]
    bounds = OptEqSensitivity(model, X, torch.zeros(4, dtype=F64))
    assert bounds.least(0.9 * (0.8 - norm), 1.0) > -math.inf
    assert bounds.least(1.1 * (0.8 - norm), 1.0) == -math.inf


@pytest.mark.parametrize("layers", [1, 2])
def test_a_certified_flow_does_what_was_proved(layers):
    """As the residual shrinks the certificate begins to hold; from there every claimed bound holds."""
    model, X = problem(3, layers)
    y = model(X).detach() + 1e-3 * normal(4, seed=9)
    result = flow_radius(OptEqSensitivity(model, X, y), 1.0) or largest_flow(OptEqSensitivity(model, X, y))
    assert result is not None
    start = [p.detach().clone() for p in model.parameters()]
    rates = [1.0 if name == "w" else result.speed for name, _ in model.named_parameters()]
    r0 = float((model(X) - y).detach().norm())
    eta, t = 2e-3, 0.0
    for _ in range(25):
        loss = (model(X) - y).square().sum() / 2
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g, rate in zip(model.parameters(), gradients, rates, strict=True):
                p -= eta * rate * g
        t += eta
        r = float((model(X) - y).detach().norm())
        # Euler steps of this size follow the flow to second order in eta
        assert r <= math.exp(-(result.least**2) * t) * r0 * (1 + 1e-2)
        square = sum(
            float((p - q).detach().square().sum()) / rate for p, q, rate in zip(model.parameters(), start, rates, strict=True)
        )
        assert math.sqrt(square) <= result.radius


def test_a_certified_descent_does_what_was_proved():
    model, X = problem(4, 2)
    y = model(X).detach() + 1e-2 * normal(4, seed=9)
    bounds = OptEqSensitivity(model, X, y)
    result = largest_descent(bounds)
    assert result is not None and result.speed > 0
    assert descent_radii(bounds, result.speed) is not None
    start = [p.detach().clone() for p in model.parameters()]
    steps = [result.step if name == "w" else result.speed * result.step for name, _ in model.named_parameters()]
    r0 = float((model(X) - y).detach().norm())
    for k in range(1, 60):
        gradients = torch.autograd.grad((model(X) - y).square().sum() / 2, list(model.parameters()))
        with torch.no_grad():
            for p, g, step in zip(model.parameters(), gradients, steps, strict=True):
                p -= step * g
        assert float((model(X) - y).detach().norm()) <= result.rate**k * r0 * (1 + 1e-9)
        for (name, p), q in zip(model.named_parameters(), start, strict=True):
            assert float((p - q).detach().norm()) <= result.radii[name]


def test_what_is_not_covered_is_said():
    model, X = problem()
    with pytest.raises(wp.InvalidArgument, match=r"y must have shape \(4,\)"):
        OptEqSensitivity(model, X, torch.zeros(3, dtype=F64))
    with pytest.raises(wp.InvalidArgument, match="without a prior"):
        OptEqSensitivity(wp.OptEq(6, 5, prior=L1(), dtype=F64), X, torch.zeros(4, dtype=F64))
    with pytest.raises(wp.InvalidType, match="dense network"):
        OptEqSensitivity(torch.nn.Linear(6, 1), X, torch.zeros(4, dtype=F64))
    many = OptEqSensitivity(problem(width=10, n=11)[0], normal(11, 6), torch.zeros(11, dtype=F64))
    assert many.least(0.0, 1.0) <= 0.0  # more samples than units: no full rank, no claim
