"""Regularizers: prox and gradient against their definitions."""

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
from wellposed.convex import L1, Box, Decorrelation, GradientStep, GroupL1, InverseNorm, ProxStep, SquaredL2

WITH_PROX = [L1(0.4), SquaredL2(0.7), SquaredL2(0.7, center=0.5), GroupL1(0.6, 3), Box(-0.3, 0.8)]
WITH_GRADIENT = [SquaredL2(0.7), SquaredL2(0.7, center=0.5), InverseNorm(2.0, 0.5), Decorrelation(0.8)]


def in_cvxpy(regularizer, y):
    if isinstance(regularizer, L1):
        return regularizer.weight * cp.norm1(y), []
    if isinstance(regularizer, SquaredL2):
        return regularizer.weight * cp.sum_squares(y - regularizer.center), []
    if isinstance(regularizer, GroupL1):
        size = regularizer.group_size
        return regularizer.weight * sum(cp.norm(y[i : i + size]) for i in range(0, y.size, size)), []
    return 0, [y >= regularizer.low, y <= regularizer.high]


@pytest.mark.parametrize("regularizer", WITH_PROX, ids=repr)
@pytest.mark.parametrize("step_size", [1.0, 0.3])
def test_prox_against_a_convex_solver(regularizer, step_size):
    z = normal(3, 6, seed=1)
    found = regularizer.prox(z, step_size)
    for row, expected in zip(found, z, strict=True):
        y = cp.Variable(6)
        value, constraints = in_cvxpy(regularizer, y)
        goal = step_size * value + cp.sum_squares(y - expected.numpy()) / 2
        cp.Problem(cp.Minimize(goal), constraints).solve(solver=cp.CLARABEL)
        np.testing.assert_allclose(row.numpy(), y.value, atol=1e-6)


@pytest.mark.parametrize("regularizer", WITH_PROX, ids=repr)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3))
def test_prox_is_firmly_nonexpansive_and_minimal(regularizer, seed, scale):
    a, b = normal(2, 6, seed=seed, scale=scale), normal(2, 6, seed=seed + 1, scale=scale)
    pa, pb = regularizer.prox(a), regularizer.prox(b)
    inner = ((pa - pb) * (a - b)).sum(dim=1)
    assert (inner >= (pa - pb).square().sum(dim=1) * (1 - 1e-12)).all()

    def goal(y):
        return regularizer.value(y) + (y - a).square().sum(dim=1) / 2

    best = goal(pa)
    for k in range(5):
        other = goal(pa + normal(2, 6, seed=seed + k, scale=0.1 * scale))
        assert (other >= best - 1e-12 * best.abs()).all()


@pytest.mark.parametrize("regularizer", WITH_GRADIENT, ids=repr)
def test_gradient_against_autograd(regularizer):
    z = normal(5, 4, seed=2).requires_grad_()
    (expected,) = torch.autograd.grad(regularizer.value(z).sum(), z)
    torch.testing.assert_close(regularizer.gradient(z.detach()), expected, rtol=1e-11, atol=1e-12)


def test_decorrelation_of_images_is_a_matter_of_each_sample():
    R = Decorrelation(0.8, across="pixels")
    z = normal(3, 4, 5, 2, seed=3).requires_grad_()
    value = R.value(z)
    assert value.shape == (3,) and not R.couples_samples
    (expected,) = torch.autograd.grad(value.sum(), z)
    torch.testing.assert_close(R.gradient(z.detach()), expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(R.value(z[1:2]), value[1:2])


def test_decorrelation_by_hand():
    """Orthogonal features cost nothing; two equal ones cost (1/2) (1 + 1)."""
    R = Decorrelation()
    assert R.couples_samples
    assert float(R.value(torch.eye(3, dtype=F64))) == pytest.approx(0.0, abs=1e-15)
    assert float(R.value(torch.tensor([[2.0, 1.0], [4.0, 2.0]], dtype=F64))) == pytest.approx(1.0)


def test_decorrelation_with_frozen_norms_would_be_another_gradient():
    """The likeliest bug: D held constant."""
    z = normal(5, 4, seed=2)
    Z = z.t()
    D = torch.diag(1 / Z.norm(dim=1))
    Y = D @ Z
    frozen = (2 * D @ (Y @ Y.t() - torch.eye(4, dtype=F64)) @ Y).t()
    exact = Decorrelation().gradient(z)
    assert float((frozen - exact).norm() / exact.norm()) > 0.1


def test_decorrelation_at_a_dead_feature_is_finite():
    z = normal(5, 4, seed=2)
    z[:, 1] = 0
    assert Decorrelation().gradient(z).isfinite().all()
    assert not Decorrelation().gradient(z)[:, 1].any()


@pytest.mark.parametrize("regularizer", [SquaredL2(0.7), InverseNorm(2.0, 0.5)], ids=repr)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(1e-3, 10.0))
def test_smoothness_bounds_the_gradient(regularizer, seed, scale):
    a, b = normal(1, 4, seed=seed, scale=scale), normal(1, 4, seed=seed + 1, scale=scale)
    difference = float((regularizer.gradient(a) - regularizer.gradient(b)).norm())
    assert difference <= regularizer.smoothness() * float((a - b).norm()) * (1 + 1e-12)


def test_smoothness_of_the_inverse_norm_is_attained_at_zero():
    R = InverseNorm(2.0, 0.5)
    z = torch.full((1, 1), 1e-6, dtype=F64)
    assert float(R.gradient(z).abs() / z) == pytest.approx(R.smoothness(), rel=1e-9)


def test_the_inverse_norm_is_not_convex_and_says_so():
    R = InverseNorm()
    a, b = torch.tensor([[1.0]], dtype=F64), torch.tensor([[-1.0]], dtype=F64)
    assert R.value((a + b) / 2) > (R.value(a) + R.value(b)) / 2
    assert not R.is_convex and not Decorrelation().is_convex and L1().is_convex


def test_zero_groups_have_a_derivative():
    z = torch.zeros(2, 6, dtype=F64, requires_grad=True)
    (g,) = torch.autograd.grad(GroupL1(0.5, 3).prox(z).sum(), z)
    assert torch.equal(g, torch.zeros_like(g))


def test_what_is_missing_is_explained():
    z = normal(2, 6)
    with pytest.raises(wp.InvalidArgument, match="not differentiable"):
        L1().gradient(z)
    with pytest.raises(wp.InvalidArgument, match="GradientStep"):
        Decorrelation().prox(z)
    with pytest.raises(wp.InvalidArgument, match="GradientStep"):
        ProxStep(InverseNorm())
    with pytest.raises(wp.InvalidArgument, match="not differentiable"):
        GradientStep(Box(), 0.1)
    with pytest.raises(wp.InvalidArgument, match="does not divide the 6 features"):
        GroupL1(1.0, 4).prox(z)
    with pytest.raises(wp.InvalidArgument, match="low <= high"):
        Box(1.0, 0.0)
    with pytest.raises(wp.InvalidArgument, match="'across'"):
        Decorrelation(across="rows")
    with pytest.raises(wp.InvalidArgument, match="across='samples'"):
        Decorrelation(across="pixels").value(z)
    with pytest.raises(wp.InvalidType, match="needs a regularizer"):
        ProxStep("l1")
    for weight in (0.0, -1.0, math.nan, "1"):
        with pytest.raises(wp.InvalidArgument, match="'weight' parameter of L1"):
            L1(weight)


def test_gradient_steps_know_when_they_are_nonexpansive():
    assert GradientStep(SquaredL2(1.0), 1.0).is_nonexpansive
    assert not GradientStep(SquaredL2(1.0), 1.1).is_nonexpansive
    assert not GradientStep(InverseNorm(), 0.01).is_nonexpansive
    assert ProxStep(L1()).is_nonexpansive
