"""Norms of rows from above, and numbers rounded upward into another dtype; and the bounds that rest on them."""

from __future__ import annotations

import math

import pytest
import torch

import wellposed as wp
from wellposed.errors import InvalidArgument
from wellposed.linalg.directed import round_up, row_norms_upper
from wellposed.nn.families import NormBound


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


@pytest.mark.parametrize("scale", [1.0, 1e-320, 1e-310, 1e-200, 1e200, 1e307])
def test_row_norms(scale: float) -> None:
    A = normal(20, 7) * scale
    A[3] = 0.0
    found = row_norms_upper(A)
    for row, bound in zip(A.tolist(), found.tolist(), strict=True):
        exact = math.hypot(*row)  # right to a rounding
        assert bound >= exact * (1 - 2.0**-52) and bound <= exact * (1 + 1e-13) + 1e-323
    assert found[3] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rounded_upward(dtype: torch.dtype) -> None:
    x = torch.cat([normal(200).abs(), torch.tensor([0.0, 1.0, math.inf, 1e-60, 1e60], dtype=torch.float64)])
    up = round_up(x, dtype)
    assert up.dtype == dtype and bool((up.double() >= x).all())
    assert bool((up[200:203].double() == x[200:203]).all())
    moderate = up[:200].double()
    assert bool((moderate <= x[:200] * (1 + torch.finfo(dtype).eps) + torch.finfo(dtype).tiny).all())


def test_error_bound_of_a_factor_that_float32_does_not_hold() -> None:
    q = 1 - 3.2e-8
    solution = wp.fixed_point(
        lambda z: (q * z.double() + (1 - q) * 1e9).float(), torch.zeros(1, 1), wp.Picard(), on_failure="ignore", max_steps=2
    )
    bound = float(solution.error_bound(q))
    assert bound >= float(solution.absolute_residual) / (1 - q)
    assert bound >= 1e9 - float(solution.value)
    for factor in (0.3, 0.99999997, 1 - 2.99e-8, torch.tensor([0.3], dtype=torch.float64)):
        exact = float(solution.absolute_residual) / (1 - float(factor))
        assert exact <= float(solution.error_bound(factor)) <= exact * (1 + 2 * torch.finfo(torch.float32).eps)
    with pytest.raises(InvalidArgument, match=r"in \[0, 1\); got 1.0"):
        solution.error_bound(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_change_that_is_tiny_is_a_change(dtype: torch.dtype) -> None:
    tiny = 1e-30 if dtype is torch.float32 else 1e-170
    model = wp.GaussianDEQ(2, 3, dtype=dtype, generator=generator())
    with torch.no_grad():
        model.W.zero_()
        assert model.contraction_upper() < tiny
        model.W.fill_(tiny)
    assert model.contraction_upper() >= 3 * float(model.W[0, 0].detach()) * (1 - 1e-12)


class Interrupted(NormBound):
    """Another thread decomposes `other` right after the first attribute is stored."""

    other: torch.Tensor | None = None

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name != "other" and self.other is not None:
            other = self.other
            self.other = None
            self(other, 0.0)


def test_a_bound_and_its_matrix_change_together() -> None:
    large, small = 2.0 * torch.eye(3, dtype=torch.float64), 0.1 * torch.eye(3, dtype=torch.float64)
    for first, second in ((small, large), (large, small)):
        bound = Interrupted()
        bound.other = second
        bound(first, 0.0)
        for V in (first, second):
            assert bound(V, 10.0) >= float(V[0, 0])


def test_the_error_of_an_unrolled_network_does_not_vanish() -> None:
    network = wp.GaussianDEQ(3, 20, generator=generator(), dtype=torch.float64)
    explicit = wp.nn.unrolled(network, 3)
    for scale in (1e-200, 1e-300, 1.0, 1e150):
        X = normal(2, 3, seed=1) * scale
        distance = row_norms_upper(explicit.equilibrium(X).detach() - network.solve(X).value)
        bound = explicit.error_bound(X)
        assert bool((bound >= distance).all()) and bool((bound > 0).all())
        assert bool((bound <= 1e3 * scale).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bound", [0.5, 0.95, 0.9999999, 1 - 2.0**-53])
def test_spectral_keeps_the_rounded_matrix_in_the_ball(dtype: torch.dtype, bound: float) -> None:
    for seed in range(20):
        for scale in (1.0, 3.0):
            W = wp.nn.Spectral(bound)((normal(6, 6, seed=seed) * scale).to(dtype))
            # float64 finds the norm of a matrix of low precision to 1e-15; in float64 itself its rounding is known
            slack = 0.0 if dtype is not torch.float64 else 6 * torch.finfo(torch.float64).eps
            assert float(torch.linalg.matrix_norm(W.double(), 2)) <= bound * (1 + slack)
    V = 2 * torch.eye(3).to(dtype)
    norm = float(wp.nn.Spectral(bound)(V).double().abs().max())
    assert bound * (1 - 20 * torch.finfo(dtype).eps) <= norm <= bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_spectral_at_the_ends_of_the_range(dtype: torch.dtype) -> None:
    for size in (0.9 * torch.finfo(dtype).max, torch.finfo(dtype).tiny):
        V = torch.full((4, 4), size, dtype=torch.float64).to(dtype).requires_grad_()
        W = wp.nn.Spectral(0.95)(V)
        norm = float(torch.linalg.matrix_norm(W.detach().double(), 2))
        if size < 1:
            assert torch.equal(W, V)
        else:
            assert 0.95 * (1 - 40 * torch.finfo(dtype).eps) <= norm <= 0.95
        (gradient,) = torch.autograd.grad(W.sum(), V)
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_spectral_of_a_matrix_that_is_not_finite(value: float) -> None:
    V = torch.eye(3)
    V[0, 1] = value
    with pytest.raises(InvalidArgument, match="Spectral: 1 of 9 entries of the matrix are NaN or infinite"):
        wp.nn.Spectral(0.95)(V)


def test_a_cell_at_the_edge_of_float32_has_one_equilibrium() -> None:
    cell = wp.nn.DenseCell(2, 3, weight=wp.nn.Spectral(bound=1 - 1e-9))
    with torch.no_grad():
        cell.W.copy_(2 * torch.eye(3))
    assert float(torch.linalg.matrix_norm(cell.recurrent().detach().double(), 2)) < 1
    assert wp.certify.lipschitz_upper(wp.EquilibriumLayer(cell)).contraction < 1


def test_spectral_under_transforms() -> None:
    V = normal(5, 4, 4)
    batched = torch.func.vmap(wp.nn.Spectral(0.9))(V)
    for one, W in zip(V, batched, strict=True):
        torch.testing.assert_close(W, wp.nn.Spectral(0.9)(one), rtol=1e-14, atol=0)
    torch.func.jacrev(wp.nn.Spectral(0.9))(V[0])


def test_spectral_is_the_identity_at_zero() -> None:
    V = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(wp.nn.Spectral(0.9)(V).sum(), V)
    assert torch.equal(gradient, torch.ones_like(V))
