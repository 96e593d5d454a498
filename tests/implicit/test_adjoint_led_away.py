"""Adjoints whose plain steps lead away although those of the solve did not, alone and beside others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import wellposed as wp

CONVERGED = wp.Status.CONVERGED


def gradient(W: Tensor, c: Tensor, v: Tensor, **options: object) -> tuple[Tensor, wp.Solution]:
    """Of <v, z>, z = W z + c, with respect to c; and the solve behind it."""

    def cell(z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        return (x[0] @ z.unsqueeze(2)).squeeze(2) + x[1]

    layer = wp.EquilibriumLayer(cell, state_shape=c.shape[1:], **options)  # type: ignore[arg-type]
    c = c.clone().requires_grad_()
    (found,) = torch.autograd.grad(layer((W, c)), c, v)
    assert layer.last_adjoint is not None
    return found, layer.last_adjoint


def exact(W: Tensor, v: Tensor) -> Tensor:
    eye = torch.eye(W.shape[1], dtype=W.dtype)
    return torch.linalg.solve((eye - W).mT, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("expanding", [-3.0, 11.0, 300.0])
def test_a_solve_that_stays_where_the_map_contracts(dtype: torch.dtype, expanding: float) -> None:
    """Its factor says nothing about the directions that the cotangent reaches."""
    W = torch.diag(torch.tensor([0.1, expanding], dtype=dtype)).unsqueeze(0)
    found, adjoint = gradient(W, torch.tensor([[1.0, 0.0]], dtype=dtype), torch.ones(1, 2, dtype=dtype))
    assert adjoint.converged.all()
    assert torch.allclose(found, exact(W, torch.ones(1, 2, dtype=dtype)), rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), factors=st.lists(st.sampled_from([0.3, 0.9, 0.97, 0.99, 2.0, 5.0]), min_size=2, max_size=6))
def test_neighbours_change_nothing(seed: int, factors: list[float]) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, batch = 10, len(factors)
    draws = torch.randn(batch, n, n, generator=generator, dtype=torch.float64)
    W = torch.linalg.qr(draws)[0] * torch.tensor(factors, dtype=torch.float64)[:, None, None]
    c, v = torch.randn(2, batch, n, generator=generator, dtype=torch.float64)
    found, adjoint = gradient(W, c, v, rtol=1e-8)
    assert adjoint.converged.all()
    scale = exact(W, v).norm(dim=1)
    least = torch.linalg.svdvals(torch.eye(n, dtype=torch.float64) - W)[:, -1]
    assert ((found - exact(W, v)).norm(dim=1) <= (1.01e-8 / least + 1e-12) * scale).all()  # the residual is relative to |u|
    for i in range(batch):
        alone, of_one = gradient(W[i : i + 1], c[i : i + 1], v[i : i + 1], rtol=1e-8)
        assert of_one.converged.all()
        assert ((alone[0] - found[i]).norm() <= (2.02e-8 / least[i] + 1e-12) * scale[i]).all()


def test_a_budget_is_spent_alike_beside_a_neighbour_that_leads_away() -> None:
    def status(*factors: float) -> wp.Status:
        W = torch.tensor(factors, dtype=torch.float64)[:, None, None]
        ones = torch.ones(len(factors), 1, dtype=torch.float64)
        return gradient(W, ones, ones, max_steps=8, on_failure="ignore")[1].status[0]

    assert status(0.5) is status(0.5, 3.0) is CONVERGED


@pytest.mark.parametrize("solver", [None, wp.GMRES(), wp.Neumann(), wp.BiCGStab()])
def test_a_nan_that_the_loss_omits_leaves_other_gradients_alone(solver: object) -> None:
    generator = torch.Generator().manual_seed(0)
    W = 0.3 * torch.randn(4, 4, generator=generator)
    layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W.T + x), gradient=wp.ImplicitGradient(solver), on_failure="ignore")  # type: ignore[arg-type]
    x = torch.randn(3, 4, generator=generator)
    x[2, 0] = torch.nan
    grads = []
    for part in (x, x[:2]):
        part = part.clone().requires_grad_()
        layer(part)[:2].sum().backward()
        assert part.grad is not None
        grads.append(part.grad[:2])
    assert torch.allclose(*grads, rtol=1e-4)


def test_a_nan_in_a_single_sample_is_not_called_random() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(0.5 * z + x), on_failure="ignore")
    x = torch.tensor([[torch.nan, 1.0]], requires_grad=True)
    layer(x).nan_to_num().sum().backward()
    assert layer.last_adjoint is not None
    assert not layer.last_adjoint.note
    assert not layer.last_adjoint.converged.any() or not layer.last_adjoint.residual.isnan().any()


@pytest.mark.parametrize("factor", [0.95, 1.1, 1.2])
def test_a_chain_whose_residual_rises_before_it_ends(factor: float) -> None:
    """Plain steps end after its length; Krylov methods stagnate until then."""
    generator = torch.Generator().manual_seed(0)
    W = torch.zeros(1, 62, 62, dtype=torch.float64)
    W[0, :2, :2] = 0.1 * torch.randn(2, 2, generator=generator)
    W[0, 2:, 2:] = torch.diag(torch.full((59,), factor), -1)
    c, v = torch.zeros(1, 62, dtype=torch.float64), torch.randn(1, 62, generator=generator, dtype=torch.float64)
    c[0, :2] = torch.randn(2, generator=generator)
    found, adjoint = gradient(W, c, v)
    assert adjoint.converged.all()
    assert adjoint.num_steps.max() < 70
    assert torch.allclose(found, exact(W, v), rtol=1e-9)


def test_a_slow_direction_in_float32_is_no_runaway() -> None:
    Q = torch.tensor([[1 - 5e-6, 0], [0, 0.5]])
    layer = wp.EquilibriumLayer(lambda z, x: z @ Q + x, state_shape=(2,), rtol=1e-4)
    x = torch.ones(1, 2, requires_grad=True)
    layer(x).sum().backward()
    assert layer.last_solution is not None and layer.last_solution.converged.all()
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.tensor([[2e5, 2.0]]), rtol=0.02)


@pytest.mark.parametrize("max_steps", [6, 8, 12, 200])
def test_an_infinite_slope_has_no_gradient_of_zero(max_steps: int) -> None:
    def f(z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        return torch.where(x[0] > 0, 0.5 * torch.sqrt(z.clamp(min=0)), 0.3 * z) + x[1]

    gradient = wp.ImplicitGradient(max_steps=max_steps)
    layer = wp.EquilibriumLayer(f, gradient=gradient, state_shape=(1,), on_failure="ignore")
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(layer((torch.tensor([[1.0], [-1.0]], dtype=torch.float64), x)).sum(), x)
    assert layer.last_adjoint is not None
    assert layer.last_adjoint.status[0] is wp.Status.NOT_FINITE
    assert found[0].isnan().all()


@pytest.mark.parametrize("solver", [None, wp.Picard(), wp.GMRES(), wp.Neumann()])
def test_a_neighbour_that_makes_f_infinite(solver: object) -> None:
    """inf <= inf is not convergence, in either direction."""

    def forward(z: Tensor, x: Tensor) -> Tensor:
        return torch.cat([0.5 * z[:1] + torch.relu(torch.exp(1000 * (z[1:] - 1)) - 1e3), 0.5 * z[1:] + x[1:]])

    def backward(z: Tensor, x: Tensor) -> Tensor:
        return torch.cat([0.5 * z[:1] + x[:1], 0.5 * z[1:] + torch.sqrt(z[:1]) + x[1:]])

    options: dict[str, Any] = {"gradient": wp.ImplicitGradient(solver), "state_shape": (1,), "on_failure": "ignore"}  # type: ignore[arg-type]
    layer = wp.EquilibriumLayer(forward, **options)
    layer(torch.tensor([[0.0], [5.0]], dtype=torch.float64))
    assert layer.last_solution is not None
    assert not layer.last_solution.converged.all()
    layer = wp.EquilibriumLayer(backward, **options)
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64, requires_grad=True)
    layer(x)[1].sum().backward()
    assert layer.last_adjoint is not None
    assert not layer.last_adjoint.converged.all()
