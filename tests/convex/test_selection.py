"""Which equilibrium the averaging picks when there are many."""

from __future__ import annotations

import math

import cvxpy as cp
import numpy as np
import pytest
import torch

import wellposed as wp
from equilibria import F64, normal
from wellposed.convex import L1, Decorrelation, InverseNorm, SquaredL2, line_of_equilibria, objective, select_equilibrium
from wellposed.convex.selection import Schedule, sequential_averaging

X = torch.zeros(1, 1, dtype=F64)


def test_the_segment_is_a_segment_of_equilibria():
    model, a, b = line_of_equilibria()
    f = model.bind(X)
    t = torch.linspace(0, 1, 11, dtype=F64)[:, None]
    points = (1 - t) * a + t * b
    torch.testing.assert_close(torch.cat([f(z[None]) for z in points]), points, rtol=0, atol=1e-14)
    beyond = torch.stack([a - 0.1 * (b - a), b + 0.1 * (b - a)])
    assert all(float((f(z[None]) - z).norm()) > 1e-3 for z in beyond)
    assert model.norms_upper()[0] == pytest.approx(1.0)
    values = torch.cat([objective(model, X)(z[None]) for z in points])
    torch.testing.assert_close(values, values[:1].expand(11), rtol=0, atol=1e-12)


def test_the_point_of_least_norm_by_a_convex_solver():
    """Least |z| among the minimisers of the objective, a QP in two stages; r t p by hand."""
    model, _, _ = line_of_equilibria()
    W, c = model.W.detach().numpy(), model.b.detach().numpy()
    Q = np.eye(2) - W @ W.T
    u = cp.Variable(2, nonneg=True)
    goal = cp.quad_form(u, cp.psd_wrap(Q)) / 2 - c @ u
    best = cp.Problem(cp.Minimize(goal)).solve(solver=cp.CLARABEL)
    cp.Problem(cp.Minimize(cp.sum_squares(W.T @ u)), [goal <= best + 1e-9]).solve(solver=cp.CLARABEL)
    by_hand = 0.6 / (1 - 0.36) * c
    np.testing.assert_allclose(W.T @ u.value, by_hand, atol=1e-3)


@pytest.mark.parametrize("end", [0, 1], ids=["one end", "the other"])
def test_averaging_finds_the_smallest_and_plain_iteration_does_not(end):
    model, a, b = line_of_equilibria()
    start = (a, b)[end][None]
    smallest = 0.6 / (1 - 0.36) * model.b.detach()
    assert torch.equal(model.solve(X, start).value, start)  # plain iteration stays where it is
    with torch.no_grad():
        errors = [
            float((select_equilibrium(model, X, SquaredL2(0.5), steps=steps, z0=start).value - smallest).norm())
            for steps in (30, 300, 3000)
        ]
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.05
    slope = math.log(errors[2] / errors[1]) / math.log(10)
    assert -0.45 < slope < -0.2  # -min(rho, c) = -0.3


def test_another_preference_picks_another_point():
    """The least |z - (1, 1)|^2: the projection onto the segment."""
    model, a, b = line_of_equilibria()
    z = cp.Variable(2)
    t = cp.Variable()
    line = [z == a.numpy() + t * (b - a).numpy(), t >= 0, t <= 1]
    cp.Problem(cp.Minimize(cp.sum_squares(z - 1)), line).solve(solver=cp.CLARABEL)
    with torch.no_grad():
        found = select_equilibrium(model, X, SquaredL2(0.5, center=1.0), steps=4000)
    # lambda_k shrinks to 0 while it is at work, so both errors of order k^-0.3 are in here
    assert float((found.value[0] - torch.tensor(z.value)).norm()) < 0.06
    assert found.is_proved and found.num_steps == 4000
    assert float(found.residual) == pytest.approx(float((model.bind(X)(found.value) - found.value).norm()))


def test_the_schedule_of_theorem_4():
    s = Schedule(1.0, rho=0.2, c=0.35)
    assert s.eta == 0.5 and s.gamma == 0.5
    assert s.beta(1) == 0.5 and s.beta(32) == pytest.approx(0.5 / 2) and s.shrinkage(16) == pytest.approx(0.5 / 16**0.35)
    assert Schedule(0.1).eta == 0.05  # L_z/2
    assert Schedule(0.005).eta == pytest.approx(0.0025)
    with pytest.raises(wp.InvalidArgument, match=r"rho \+ 2 c < 1"):
        Schedule(1.0, rho=0.4, c=0.3)
    with pytest.raises(wp.InvalidArgument, match="'c' parameter"):
        Schedule(1.0, c=0.6)


def test_one_step_by_hand():
    z0 = torch.tensor([[2.0, -1.0]], dtype=F64)
    found = sequential_averaging(lambda z: z / 2 + 1, z0, SquaredL2(0.5), steps=1).value
    # L_z = 1, gamma = eta = beta_1 = lambda_1 = 1/2: beta [(1 - 1/4) z - z/2] + (1 - beta) T(z)
    torch.testing.assert_close(found, 0.5 * (0.25 * z0) + 0.5 * (z0 / 2 + 1))


def test_lemma_9_the_averaged_operator_contracts():
    """With gamma = 1/(2 L_z): |x - y|/4 <= |S x - S y| <= (1 - gamma lambda/2) |x - y| for 0 <= lambda <= L_z/2."""
    R, L = SquaredL2(0.7), 1.4
    gamma = Schedule(L).gamma
    x, y = normal(20, 4), normal(20, 4, seed=1)
    for shrink in (0.0, 0.2, L / 2):

        def S(z, shrink=shrink):
            return (1 - gamma * shrink) * z - gamma * R.gradient(z)

        ratio = (S(x) - S(y)).norm(dim=1) / (x - y).norm(dim=1)
        assert (ratio >= 0.25 - 1e-12).all() and (ratio <= 1 - gamma * shrink / 2 + 1e-12).all()


def test_a_regularizer_that_is_not_convex_is_warned_about():
    model = wp.OptEq(3, 5, dtype=F64)
    with pytest.warns(wp.errors.WellposedWarning, match="not convex"):
        found = select_equilibrium(model, normal(2, 3), InverseNorm(), steps=5)
    assert not found.is_proved
    with pytest.warns(wp.errors.WellposedWarning, match="not convex"):
        coupled = select_equilibrium(model, normal(2, 3), Decorrelation(), steps=5, schedule=Schedule(1.0))
    assert coupled.regularizer.shape == ()


def test_with_one_equilibrium_the_regularizer_cannot_move_it():
    model = wp.DeepOptEq(3, (4, 5), dtype=F64, generator=torch.Generator().manual_seed(0))
    x = normal(2, 3)
    with torch.no_grad():
        found = select_equilibrium(model, x, SquaredL2(0.5), steps=3000)
    z = model.solve(x).value
    assert float((found.value - z).norm() / z.norm()) < 0.1
    assert float(found.residual.max()) < 0.1


def test_twenty_steps_can_be_trained_through():
    model = wp.OptEq(3, 4, activation=wp.nn.Tanh(), dtype=F64, generator=torch.Generator().manual_seed(0))
    x = normal(2, 3)

    def f(W):
        z = torch.func.functional_call(_Selecting(model), {"model.W": W}, (x,))
        return z.square().sum()

    assert torch.autograd.gradcheck(f, model.W.detach().clone().requires_grad_())


class _Selecting(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return select_equilibrium(self.model, x, SquaredL2(0.5), steps=20).value


def test_what_cannot_be_selected_by_is_explained():
    model = wp.OptEq(3, 5, dtype=F64)
    with pytest.raises(wp.InvalidArgument, match="not differentiable"):
        select_equilibrium(model, normal(2, 3), L1(), steps=2)
    with pytest.raises(wp.InvalidArgument, match=r"schedule=Schedule\(smoothness"):
        select_equilibrium(model, normal(2, 3), Decorrelation(), steps=2)
    with pytest.raises(wp.InvalidType, match="must be a regularizer"):
        select_equilibrium(model, normal(2, 3), "l2", steps=2)
    with pytest.raises(wp.InvalidType, match="needs an OptEq network"):
        select_equilibrium(torch.nn.Linear(3, 3), normal(2, 3), SquaredL2(), steps=2)
    with pytest.raises(wp.InvalidArgument, match=r"shape of the state, \(2, 5\)"):
        select_equilibrium(model, normal(2, 3), SquaredL2(), z0=normal(2, 4))
    with pytest.raises(wp.InvalidArgument, match="'shrinkage'"):
        line_of_equilibria(shrinkage=1.0)
