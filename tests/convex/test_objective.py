"""Equilibria are minimisers: against a convex solver that knows only the written function."""

from __future__ import annotations

import math

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wellposed as wp
from equilibria import F64, normal
from wellposed.convex import L1, Box, GradientStep, GroupL1, InverseNorm, SquaredL2, inclusion_residual, objective, wide_limit
from wellposed.convex.blocks import UnitBlock
from wellposed.convex.objectives import WideObjective, blocks


def network(kind=wp.OptEq, size=5, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    options = {"rtol": 1e-14, "max_steps": 5000, "on_failure": "ignore", "dtype": F64, "generator": generator} | options
    model = kind(4, size, **options)
    for unit in model.parameters_by_unit():
        unit.b.data = normal(*unit.b.shape, seed=seed + 1)
    return model


X = normal(3, 4, seed=9)


def phi_in_cvxpy(W, c, z, mu):
    """phi(z) = min over w >= 0 with W^T w = mu z of (|w|^2/2 - <c, w>)/mu, less |z|^2/2: as a function of w alone."""
    w = cp.Variable(W.shape[0], nonneg=True)
    value = (cp.sum_squares(w) / 2 - c @ w) / mu
    return w, value, [W.T @ w == mu * z]


@pytest.mark.parametrize("hidden", [3, 5, 8], ids=["fewer rows", "square", "more rows"])
@pytest.mark.parametrize("mu", [1.0, 2.5])
def test_value_against_a_convex_solver(hidden, mu):
    """psi* + const at reachable points, for W of every shape."""
    model = network(hidden_width=hidden, mu=mu, norm_bound=None)
    phi = objective(model, X)
    assert phi.blocks[0].is_closed_form == (hidden <= 5)
    W, C = model.W.detach(), X @ model.U.detach().t() + model.b.detach()
    z = torch.relu(normal(3, hidden, seed=5)) @ W / mu  # reachable: W^T w/mu with w >= 0
    for i in range(3):
        _, value, constraints = phi_in_cvxpy(W.numpy(), C[i].numpy(), z[i].numpy(), mu)
        best = cp.Problem(cp.Minimize(value), constraints).solve(solver=cp.CLARABEL)
        assert float(phi(z)[i]) == pytest.approx(best - float(z[i] @ z[i]) / 2, abs=1e-6)


@pytest.mark.parametrize("hidden", [3, 5, 8], ids=["fewer rows", "square", "more rows"])
@pytest.mark.parametrize("mu", [1.0, 2.5])
def test_equilibrium_against_a_convex_solver(hidden, mu):
    """With z = W^T w/mu the objective is |w|^2/(2 mu) - <c, w>/mu - |W^T w|^2/(2 mu^2), a convex QP in w >= 0."""
    model = network(hidden_width=hidden, mu=mu)
    W, C = model.matrices()[0].detach().numpy(), (X @ model.U.detach().t() + model.b.detach()).numpy()
    z = model.solve(X).value
    values = objective(model, X)(z)
    for i in range(3):
        w = cp.Variable(hidden, nonneg=True)
        Q = np.eye(hidden) / mu - W @ W.T / mu**2
        best = cp.Problem(cp.Minimize(cp.quad_form(w, cp.psd_wrap(Q)) / 2 - C[i] @ w / mu)).solve(solver=cp.CLARABEL)
        np.testing.assert_allclose(W.T @ w.value / mu, z[i].numpy(), atol=1e-4)
        assert float(values[i]) == pytest.approx(best, abs=1e-7)


@pytest.mark.parametrize(
    "activation", [wp.nn.Tanh(), wp.nn.Sigmoid(), wp.nn.SoftThreshold(0.2), wp.nn.LeakyReLU(0.1)], ids=repr
)
@pytest.mark.parametrize("hidden", [5, 8])
def test_no_point_nearby_is_better(activation, hidden):
    model = network(hidden_width=hidden, activation=activation)
    phi = objective(model, X)
    z = model.solve(X).value
    best = phi(z)
    assert best.isfinite().all()
    finite = 0
    for k in range(8):
        for scale in (1e-3, 1e-2, 1e-1):
            other = phi(z + normal(3, 5, seed=100 + k, scale=scale))
            assert (other >= best - 1e-12).all()
            finite += int(other.isfinite().sum())
    assert finite > 40  # the test must not pass because everything is infinite


def test_the_printed_inverse_would_not_be_minimised():
    """[xie2021] prints <Ux + b, W^(-1) z> in the objective."""
    model = network()
    W, C = model.matrices()[0].detach(), X @ model.U.detach().t() + model.b.detach()
    z = model.solve(X).value

    def printed(z):
        w = torch.linalg.solve(W.t(), z.t()).t().clamp(min=0)
        return w.square().sum(1) / 2 - (C * torch.linalg.solve(W, z.t()).t()).sum(1) - z.square().sum(1) / 2

    better = [printed(z + (torch.relu(normal(3, 5, seed=k)) * 0.01) @ W) < printed(z) - 1e-8 for k in range(100)]
    assert torch.stack(better).any()


@pytest.mark.parametrize("hidden", [3, 5, 8], ids=["fewer rows", "square", "more rows"])
def test_outside_of_the_domain_it_is_infinite(hidden):
    """With W > 0 entry by entry nothing but z >= 0 can be W^T w, w >= 0."""
    model = network(hidden_width=hidden)
    model.W.data.abs_()
    phi = objective(model, X)
    inside = torch.full((3, hidden), 0.5, dtype=F64) @ model.matrices()[0].detach()
    assert phi(inside).isfinite().all()
    assert (phi(-inside) == math.inf).all()
    if hidden < 5:  # and z must be in the range of W^T
        assert (phi(inside + 0.01 * normal(3, 5)) == math.inf).all()


def test_envelope_has_the_same_minimiser_and_the_residual_as_gradient():
    model = network(hidden_width=8)
    (block,) = blocks(model, X, skip=False)
    assert isinstance(block, UnitBlock)
    z = normal(3, 5, seed=3).requires_grad_()
    (g,) = torch.autograd.grad(block.envelope(z).sum(), z)
    torch.testing.assert_close(g, z - block.prox(z), rtol=1e-11, atol=1e-12)
    star = model.solve(X).value
    assert (block.envelope(star) <= block.envelope(star + 0.1 * normal(3, 5, seed=4))).all()
    torch.testing.assert_close(block.envelope(star), objective(model, X)(star), rtol=0, atol=1e-9)


@pytest.mark.parametrize("alpha", [0.35, 1.0])
@pytest.mark.parametrize("widths", [(5, 5), (4, 8)])
def test_two_blocks_against_a_convex_solver(alpha, widths):
    """Corollary 1 with both Moreau envelopes written out as minimisations, in cvxpy."""
    model = network(wp.DeepOptEq, widths, width=5, alpha=alpha, seed=2)
    phi = objective(model, X)
    z0 = model.solve(X).value
    z1, _ = phi.states(z0)
    values = phi(z1, z0)
    units = list(zip(model.matrices(), model.parameters_by_unit(), strict=True))
    for i in range(2):
        terms, states = [], []
        for W, raw in units:
            W, c = W.detach().numpy(), (X[i] @ raw.U.detach().t() + raw.b.detach()).numpy()
            w = cp.Variable(W.shape[0], nonneg=True)
            y, state = W.T @ w, cp.Variable(5)  # phi(y) = |w|^2/2 - c w - |y|^2/2
            Q = np.eye(W.shape[0]) - W @ W.T
            own = cp.quad_form(w, cp.psd_wrap(Q)) / 2 - c @ w
            if alpha == 1:
                terms += [own, 1e6 * cp.sum_squares(y - state)]  # y = state, as a penalty that keeps the problem easy
            else:
                terms.append(alpha * (own + cp.sum_squares(y - state) / (2 * (1 - alpha))))
            states.append(state)
        total = sum(terms) + cp.sum_squares(states[0] - states[1]) / 2
        best = cp.Problem(cp.Minimize(total)).solve(solver=cp.CLARABEL)
        np.testing.assert_allclose(states[1].value, z0[i].numpy(), atol=1e-3)
        np.testing.assert_allclose(states[0].value, z1[i].numpy(), atol=1e-3)
        assert float(values[i]) == pytest.approx(best, abs=2e-5)


@pytest.mark.parametrize("regularizer", [L1(0.2), SquaredL2(0.3), GroupL1(0.3, 5), Box(0.0, 0.4)], ids=repr)
def test_a_prior_is_a_new_block_and_not_a_new_term(regularizer):
    """prox_R o prox_phi minimises phi(z_1) + R(z_0) + |z_1 - z_0|^2/2, and not phi + R."""
    model = network(prior=regularizer, seed=3)
    z0 = model.solve(X).value
    phi = objective(model, X)
    z1, _ = phi.states(z0)
    W, C = model.matrices()[0].detach().numpy(), (X @ model.U.detach().t() + model.b.detach()).numpy()
    apart = 0.0
    for i in range(3):
        for joint in (True, False):
            w, z = cp.Variable(5, nonneg=True), cp.Variable(5)
            own = cp.quad_form(w, cp.psd_wrap(np.eye(5) - W @ W.T)) / 2 - C[i] @ w
            if isinstance(regularizer, L1):
                value, constraints = regularizer.weight * cp.norm1(z), []
            elif isinstance(regularizer, SquaredL2):
                value, constraints = regularizer.weight * cp.sum_squares(z), []
            elif isinstance(regularizer, GroupL1):
                value, constraints = regularizer.weight * cp.norm(z), []
            else:
                value, constraints = 0, [z >= regularizer.low, z <= regularizer.high]
            if joint:
                goal = own + value + cp.sum_squares(W.T @ w - z) / 2
            else:
                goal, constraints = own + value, [*constraints, z == W.T @ w]
            best = cp.Problem(cp.Minimize(goal), constraints).solve(solver=cp.CLARABEL)
            if joint:
                np.testing.assert_allclose(z.value, z0[i].numpy(), atol=1e-4)
                assert float(phi(z1, z0)[i]) == pytest.approx(best, abs=1e-6)
            else:
                apart = max(apart, float(np.abs(z.value - z0[i].numpy()).max()))
    assert apart > 0.01


@pytest.mark.parametrize("alpha", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("activation", [wp.nn.ReLU(), wp.nn.Tanh()], ids=repr)
def test_the_inclusion_holds_at_equilibria_and_nowhere_else(alpha, layers, activation):
    model = network(wp.DeepOptEq, [6, 4, 5, 7, 5][:layers], width=5, alpha=alpha, activation=activation, seed=layers)
    assert (inclusion_residual(model, X) <= 1e-12).all()
    z = model.solve(X).value
    assert (inclusion_residual(model, X, z + 1e-3 * normal(3, 5)) > 1e-5).all()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), alpha=st.floats(0.05, 0.95), hidden=st.integers(1, 9))
def test_gradient_of_a_block_is_the_gradient_of_its_value(seed, alpha, hidden):
    """And a/(1 - a) (z - prox of (1-a) phi), the form of Theorem 2."""
    model = network(hidden_width=hidden, alpha=alpha, seed=seed, norm_bound=0.9)
    (block,) = blocks(model, X)
    z, d = normal(3, 5, seed=seed + 2), normal(3, 5, seed=seed + 3)
    h = 1e-5
    slope = (block.value(z + h * d) - block.value(z - h * d)) / (2 * h)
    gradient = block.gradient(z)
    torch.testing.assert_close(slope, (gradient * d).sum(dim=1), rtol=1e-5, atol=1e-5)
    inner = (block.prox(z + gradient) - (1 - alpha) * (z + gradient)) / alpha  # prox of phi at f^(-1)(z)
    torch.testing.assert_close(gradient, alpha / (1 - alpha) * (z - inner), rtol=1e-8, atol=1e-9)


def test_more_than_two_blocks_have_no_objective():
    with pytest.raises(wp.InvalidArgument, match="3 blocks.*inclusion_residual"):
        objective(network(wp.DeepOptEq, (3, 4, 5)), X)
    with pytest.raises(wp.InvalidArgument, match="not the proximal operator of a known convex function"):
        objective(network(prior=GradientStep(InverseNorm(), 0.1)), X)
    with pytest.raises(wp.InvalidArgument, match=r"2 block\(s\) and needs one"):
        objective(network(wp.DeepOptEq, (3, 4)), X)(torch.zeros(3, 4, dtype=F64))
    with pytest.raises(wp.InvalidType, match="dense network"):
        objective(wp.convex.ConvOptEq(1, (2,), state_channels=2, feature_channels=2), torch.zeros(1, 1, 4, 4))
    for function in (objective, blocks, inclusion_residual):
        with pytest.raises(wp.InvalidType, match=r"dense network such as OptEq or DeepOptEq; got GaussianDEQ\.$"):
            function(wp.GaussianDEQ(4, 5, dtype=F64), X)


@pytest.mark.parametrize("size", [5, (5, 4)])
def test_states_that_do_not_fit_are_refused(size):
    model = network(wp.OptEq if size == 5 else wp.DeepOptEq, size)
    phi, m = objective(model, X), model.width
    z = model.solve(X).value
    calls = [
        lambda z: phi(*[z] * len(phi.blocks)),
        phi.states,
        lambda z: inclusion_residual(model, X, z),
        WideObjective(model, X),
    ]
    calls.append(lambda z: phi.along(phi.states(model.solve(X).value), [z] * len(phi.blocks), torch.zeros(1, dtype=F64)))
    for call in calls:
        for wrong in (z[:2], z[:1], z[:, 1:]):
            seen = rf"\({wrong.shape[0]}, {wrong.shape[1]}\)"
            with pytest.raises(wp.InvalidArgument, match=rf"made for 3 sample.*shape \(3, {m}\); got {seen}\. Make a new one"):
                call(wrong)
        with pytest.raises(wp.InvalidType, match=r"has torch.float64 parameters and got a state of torch.float32; convert it"):
            call(z.float())
        call(z)


def test_states_of_different_shapes_are_refused():
    z = torch.zeros(3, 5, dtype=F64)
    with pytest.raises(wp.InvalidArgument, match=r"must have one shape; got \[\(3, 5\), \(2, 5\)\]. See `states\(z\)`"):
        objective(network(prior=L1()), X[:1])(z, z[:2])


@pytest.mark.parametrize("hidden", [5, 8])
def test_one_sample_has_an_objective_of_many_states(hidden):
    model = network(hidden_width=hidden)
    z = model.solve(X).value.abs()
    many = objective(model, X[:1])(z)
    torch.testing.assert_close(many, objective(model, X[:1].expand(3, 4))(z))


@pytest.mark.parametrize("widths", [(5,), (8,), (5, 4)])
def test_a_line_is_the_same_as_its_points(widths):
    model = network(wp.DeepOptEq, widths, width=5)
    phi = objective(model, X)
    states = phi.states(model.solve(X).value)
    unit = [normal(3, block._W.shape[0], seed=k).relu() @ block._W for k, block in enumerate(phi.blocks)]
    t = torch.linspace(0, 1, 7, dtype=F64)
    values = phi.along(states, unit, t)
    for k, step in enumerate(t.tolist()):
        expected = phi(*(z + step * d for z, d in zip(states, unit, strict=True)))
        torch.testing.assert_close(values[:, k], expected, rtol=1e-11, atol=1e-11)


def test_a_line_reuses_the_factorization(monkeypatch):
    model = network()
    phi = objective(model, X)
    calls = []
    for name in ("qr", "solve_triangular"):
        original = getattr(torch.linalg, name)
        monkeypatch.setattr(torch.linalg, name, lambda *a, f=original, n=name, **k: calls.append(n) or f(*a, **k))
    z = model.solve(X).value
    assert phi.along((z,), (normal(3, 5),), torch.linspace(-1, 1, 51, dtype=F64)).shape == (3, 51)
    assert calls == ["solve_triangular"] * 2


def test_the_wide_limit_is_approached_at_rate_alpha():
    """Theorem 3: the difference shrinks tenfold with alpha."""
    errors = []
    for alpha in (1e-1, 1e-2, 1e-3):
        model = network(wp.DeepOptEq, (6, 5, 4), width=5, alpha=alpha, seed=4)
        wide = wide_limit(model)
        wide.layer.rtol = 1e-13
        errors.append(float((model.solve(X).value - wide.solve(X).value).norm()))
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.2)
    assert errors[2] == pytest.approx(errors[1] / 10, rel=0.1)


def test_the_wide_limit_minimises_its_problem():
    model = network(wp.DeepOptEq, (6, 5, 4), width=5, seed=4)
    wide = wide_limit(model)
    wide.layer.rtol = 1e-14
    y = wide.solve(X).value
    E = WideObjective(model, X)
    assert all((E(y + normal(3, 5, seed=k, scale=s)) >= E(y) - 1e-13).all() for k in range(50) for s in (1e-3, 0.1))
    total = sum(unit.without_skip()(y) for unit in model.units(X))
    torch.testing.assert_close(3 * y, total.detach(), rtol=1e-12, atol=1e-12)
    # and the same value as the joint problem over (x_1, .., x_L, y) at x_l = prox(y)
    parts = blocks(model, X, skip=False)
    joint = sum(block.value(block.prox(y)) + (block.prox(y) - y).square().sum(dim=1) / 2 for block in parts)
    torch.testing.assert_close(E(y), joint, rtol=0, atol=1e-8)
    with pytest.raises(wp.InvalidArgument, match="without a prior"):
        wide_limit(network(prior=L1()))
