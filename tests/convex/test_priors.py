"""Convex priors against a convex solver: proximal operators, equilibria with a prior, and the equilibrium that is selected."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
import torch

import wellposed as wp
from equilibria import F64
from wellposed.convex import L1, Box, GroupL1, SquaredL2
from wellposed.convex.selection import sequential_averaging


def few_or_all(few: int):
    return pytest.mark.parametrize("cases", [range(few), pytest.param(range(200), marks=pytest.mark.slow)], ids=["few", "all"])


def drawn(seed: int):
    """A regularizer of each kind in turn, and its terms for cvxpy."""
    u = torch.rand(3, generator=torch.Generator().manual_seed(seed), dtype=F64)
    weight = float(10 ** (2 * u[0] - 1.5))
    kinds = [L1(weight), SquaredL2(weight, center=float(2 * u[1] - 1)), GroupL1(weight, 3), Box(float(-u[1]), float(u[2]))]
    return kinds[seed % 4]


def in_cvxpy(R, y):
    if isinstance(R, L1):
        return R.weight * cp.norm1(y), []
    if isinstance(R, SquaredL2):
        return R.weight * cp.sum_squares(y - R.center), []
    if isinstance(R, GroupL1):
        return R.weight * sum(cp.norm(y[i : i + R.group_size]) for i in range(0, y.size, R.group_size)), []
    return 0, [y >= R.low, y <= R.high]


def solved(goal, constraints, y, gap: float = 1e-12) -> np.ndarray:
    """Clarabel stops at this gap, which leaves sqrt(2 gap/c) in the minimiser of a c-strongly convex function."""
    tight = {"tol_gap_abs": gap, "tol_gap_rel": gap, "tol_feas": gap}
    cp.Problem(cp.Minimize(goal), constraints).solve(solver=cp.CLARABEL, **tight)
    return y.value


@few_or_all(12)
def test_proximal_operators(cases):
    for seed in cases:
        R = drawn(seed)
        g = torch.Generator().manual_seed(seed)
        z = torch.randn(1, 6, generator=g, dtype=F64) * 10 ** (2 * torch.rand((), generator=g, dtype=F64) - 1)
        step = float(10 ** (2 * torch.rand((), generator=g, dtype=F64) - 1))
        y = cp.Variable(6)
        value, constraints = in_cvxpy(R, y)
        expected = solved(step * value + cp.sum_squares(y - z[0].numpy()) / 2, constraints, y)
        np.testing.assert_allclose(R.prox(z, step)[0].numpy(), expected, rtol=0, atol=2e-6 * (1 + float(z.norm())))


@few_or_all(8)
def test_equilibria_with_a_prior_minimise_their_objective(cases):
    r"""z = prox_R((1/mu) W^T relu(W z + c)) against its joint problem in u = relu(W z + c) and z,

    min |u - W z|^2/(2 mu) + <z, (I - W^T W/mu) z>/2 - <c, u>/mu + R(z),  u >= 0, whose stationary points it is.
    """
    for seed in cases:
        R, g = drawn(seed), torch.Generator().manual_seed(seed)
        mu = float(0.5 + torch.rand((), generator=g, dtype=F64))
        model = wp.OptEq(3, 6, hidden_width=5, mu=mu, alpha=1.0, norm_bound=None, prior=R, generator=g, dtype=F64)
        with torch.no_grad():
            model.W.mul_(0.8 * mu**0.5 / torch.linalg.matrix_norm(model.W, 2))
        x = torch.randn(1, 3, generator=g, dtype=F64)
        z = model.solve(x).value[0].numpy()
        W = model.W.detach().numpy()
        c = (x @ model.U.T + model.b).detach().numpy()[0]
        u, y = cp.Variable(5, nonneg=True), cp.Variable(6)
        value, constraints = in_cvxpy(R, y)
        curvature = cp.psd_wrap(np.eye(6) - W.T @ W / mu)
        goal = cp.sum_squares(u - W @ y) / (2 * mu) + cp.quad_form(y, curvature) / 2 - c @ u / mu + value
        expected = solved(goal, constraints, y, gap=1e-10)
        # the curvature in z is at least 1 - 0.8^2
        np.testing.assert_allclose(z, expected, rtol=0, atol=(2e-10 / 0.36) ** 0.5 * (1 + float(np.linalg.norm(expected))))


@few_or_all(4)
def test_the_equilibrium_selected_is_the_one_of_least_regularizer(cases):
    """Among the fixed points {A z = b} of a projection: the projection of the center onto them, by cvxpy."""
    for seed in cases:
        g = torch.Generator().manual_seed(seed)
        A, b = torch.randn(2, 5, generator=g, dtype=F64), torch.randn(2, 1, generator=g, dtype=F64)
        inverse = torch.linalg.pinv(A)
        R = SquaredL2(0.5, center=float(torch.randn((), generator=g, dtype=F64)))
        y = cp.Variable(5)
        expected = solved(cp.sum_squares(y - R.center), [A.numpy() @ y == b[:, 0].numpy()], y)
        start = 3 * torch.randn(1, 5, generator=g, dtype=F64)
        errors = []

        def project(z, A=A, b=b, inverse=inverse):
            return z - (z @ A.T - b.T) @ inverse.T

        for steps in (200, 2000):
            found = sequential_averaging(project, start, R, steps=steps)
            errors.append(float(np.linalg.norm(found.value[0].numpy() - expected)))
        # [xie2021, Theorem 4]: like k^-0.3, from an error of the size of the center's distance
        distance = float(np.linalg.norm(expected)) + abs(R.center) * 5**0.5
        assert errors[1] < errors[0] or errors[1] <= 1e-6
        assert errors[1] <= 2 * distance * (steps**-0.3)
