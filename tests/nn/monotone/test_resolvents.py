"""Resolvents of zero-padded convolutions, by a matrix and by conjugate gradients, against dense solves in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import wellposed as wp
from wellposed.linalg import GMRES
from wellposed.nn.maps.operator import AbstractOperator
from wellposed.nn.monotone import TierWeights, _zero_padded, conjugate_gradients

F64 = torch.float64
#: channels of the tiers, (height, width)
SHAPES = [((3,), (6, 5)), ((2, 2), (4, 6))]
CORNERS = list(itertools.product([1.0, 3.0, 8.0], [0.01, 1.0], [0.01, 1.0, 100.0]))
FEW_CORNERS = [(1.0, 0.01, 100.0), (3.0, 0.01, 1.0), (3.0, 1.0, 100.0), (8.0, 0.1, 0.01), (8.0, 1.0, 1.0)]
by_both_ways = pytest.mark.parametrize("largest_dense", [0, 2048], ids=["iterated", "matrix"])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def operator_of(channels, size, *, dtype=F64, seed=0, **options) -> AbstractOperator:
    weights = TierWeights(channels, padding="zeros", dtype=dtype, generator=generator(seed), **options)
    return weights.operator(*size)


def shifted(operator: AbstractOperator, features: int, a: float) -> Tensor:
    """I + a(I - W) in float64."""
    return (1 + a) * torch.eye(features, dtype=F64) - a * operator.dense(features).double()


def worst_error(operator: AbstractOperator, v: Tensor, a: float) -> float:
    """The largest relative error of both resolvents, in roundings times the condition number."""
    M = shifted(operator, v.shape[1], a)
    eps = torch.finfo(v.dtype).eps
    worst = 0.0
    for transpose in (False, True):
        exact = torch.linalg.solve(M.T if transpose else M, v.double().T).T
        error = (operator.resolvent(v, a, transpose=transpose) - exact).norm(dim=1) / exact.norm(dim=1)
        worst = max(worst, float(error.max()))
    return worst / (eps * float(torch.linalg.cond(M)))


def features(channels, size) -> int:
    return sum(c * (size[0] // 2**i) * (size[1] // 2**i) for i, c in enumerate(channels))


@by_both_ways
@pytest.mark.parametrize(("channels", "size"), SHAPES)
def test_at_the_corners_of_scales_margins_and_steps(channels, size, largest_dense, monkeypatch):
    monkeypatch.setattr(_zero_padded, "LARGEST_DENSE", largest_dense)
    v = torch.randn(2, features(channels, size), dtype=F64, generator=generator(1))
    for scale, margin, a in CORNERS if largest_dense else FEW_CORNERS:
        operator = operator_of(channels, size, scale=scale, margin=margin)
        # sqrt(n) roundings in sums of n terms; a NaN (not solved) is not below either
        assert worst_error(operator, v, a) <= 4 * v.shape[1] ** 0.5, (scale, margin, a)


@pytest.mark.slow
@by_both_ways
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_at_random(largest_dense, dtype, monkeypatch):
    """100 cases: scales 1 to 8, margins 0.01 to 1, steps 0.01 to 100."""
    monkeypatch.setattr(_zero_padded, "LARGEST_DENSE", largest_dense)
    for seed in range(100):
        u = torch.rand(3, generator=generator(seed), dtype=F64)
        scale, margin, a = 8 ** float(u[0]), 10 ** (-2 * float(u[1])), 10 ** (4 * float(u[2]) - 2)
        channels, size = SHAPES[seed % 2]
        operator = operator_of(channels, size, scale=scale, margin=margin, seed=seed, dtype=dtype)
        v = torch.randn(3, features(channels, size), dtype=dtype, generator=generator(seed))
        assert worst_error(operator, v, a) <= 4 * v.shape[1] ** 0.5, (seed, scale, margin, a)


@by_both_ways
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_rows_of_any_size_and_their_neighbours(largest_dense, dtype, monkeypatch):
    """A row of 1e-30, whose square vanishes in float32, is solved; zero gives zero; NaN stays in its row."""
    monkeypatch.setattr(_zero_padded, "LARGEST_DENSE", largest_dense)
    operator = operator_of((3,), (6, 5), dtype=dtype, scale=2.0)
    v = torch.randn(1, 90, dtype=dtype, generator=generator(2)).repeat(4, 1)
    v[1], v[2], v[3] = 1e-30 * v[1], 0.0, torch.nan
    z = operator.resolvent(v, 1.0)
    assert worst_error(operator, v[:2], 1.0) <= 4 * 90**0.5
    assert not z[2].any() and z[3].isnan().all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_what_is_not_solved_is_nan(symmetric, monkeypatch):
    monkeypatch.setattr(_zero_padded, "LARGEST_DENSE", 0)
    monkeypatch.setattr(conjugate_gradients, "MOST_STEPS", 5)
    weights = TierWeights((3,), padding="zeros", dtype=F64, scale=4.0, generator=generator(0))
    with torch.no_grad():
        weights.B[0].mul_(0.0 if symmetric else 1.0)
    operator = weights.operator(6, 5)
    v = torch.zeros(2, 90, dtype=F64)
    v[0] = torch.randn(90, dtype=F64, generator=generator(1))
    z = operator.resolvent(v, 1.0)
    assert z[0].isnan().all() and not z[1].any()


def test_a_resolvent_that_is_not_solved_ends_the_sample_with_the_reason(monkeypatch):
    monkeypatch.setattr(_zero_padded, "LARGEST_DENSE", 0)
    monkeypatch.setattr(conjugate_gradients, "MOST_STEPS", 5)
    cell = wp.nn.MonotoneConvCell(1, 2, padding="zeros", scale=4.0, dtype=F64, generator=generator(0))
    layer = wp.EquilibriumLayer(cell, wp.PeacemanRachford(), on_failure="raise")
    x = torch.randn(2, 1, 5, 5, dtype=F64, generator=generator(1))
    with pytest.raises(wp.NotConverged, match=r"the resolvent was not solved .* take a smaller step_size, or ForwardBackward"):
        layer(x)
    status = layer.last_solution.status
    assert status.tolist() == [wp.Status.NOT_FINITE] * 2
    assert layer.last_solution.value.isfinite().all()


@pytest.mark.parametrize("scale", [1.0, 4.0, 8.0])
def test_reflections_converge_at_large_scales(scale):
    """To the equilibrium that Newton's method finds without a resolvent, and so do their gradients."""
    cell = wp.nn.MonotoneConvCell(1, 4, padding="zeros", scale=scale, dtype=F64, generator=generator(0))
    x = torch.randn(3, 1, 8, 8, dtype=F64, generator=generator(1))
    found = []
    for solver, gradient in (
        (wp.PeacemanRachford(), wp.ImplicitGradient(wp.PeacemanRachford())),
        (wp.NewtonKrylov(), wp.ImplicitGradient(GMRES())),
    ):
        layer = wp.EquilibriumLayer(cell, solver, gradient, on_failure="raise", max_steps=5000)
        cell.zero_grad()
        z = layer(x)
        z.square().sum().backward()
        found.append((z.detach(), [p.grad.clone() for p in cell.parameters()]))
        assert bool(layer.last_adjoint.converged.all())
    (z, gradients), (z_newton, gradients_newton) = found
    # residuals are at most rtol |f(z)|, errors at most (1 + |W|)/m times that; a gradient has those of z and of the adjoint
    m, L = cell.bind(x).monotonicity()
    error = 2 * (2 + L) / m * 1e-12
    assert float((z - z_newton).norm()) <= error * float(z.norm())
    for p, q in zip(gradients, gradients_newton, strict=True):
        assert float((p - q).norm()) <= 2 * (2 + L) / m * error * float(q.norm())
