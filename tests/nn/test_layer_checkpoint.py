"""A layer inside activation checkpointing: the graphs that its solver records are not the checkpoint's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import wellposed as wp
from problems import gaussian
from wellposed.solve import AbstractSolver


@pytest.mark.parametrize("solver", [wp.NewtonKrylov(), wp.Auto(), wp.Anderson()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("scale", [0.5, 4.0])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_and_calls_under_a_checkpoint(solver: AbstractSolver, scale: float, reentrant: bool) -> None:
    W = gaussian(4, 4, seed=0)
    calls = []

    def cell(z: Tensor, x: Tensor) -> Tensor:
        calls.append(1)
        return torch.tanh(scale * z @ W + x)

    layer = wp.EquilibriumLayer(cell, solver, on_failure="ignore")
    x = gaussian(3, 4, seed=1).requires_grad_()
    with torch.no_grad():
        layer(x)
    forward = len(calls)  # of a solve that records nothing, where one more evaluation confirms the answer
    z = layer(x)
    before = len(calls)
    z.sum().backward()
    (plain, backward), x.grad = (x.grad, len(calls) - before), None
    calls.clear()
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, plain)
    assert len(calls) <= 2 * forward + backward  # a checkpoint runs forward twice, and no more


def test_rows_that_are_found_to_be_coupled_under_a_checkpoint() -> None:
    """They are found at the last evaluation, whose graph is recorded; the second run must record as much."""
    torch.manual_seed(0)
    W, x = (0.2 * torch.randn(4, 4, dtype=torch.float64)).requires_grad_(), torch.randn(6, 4, dtype=torch.float64)

    def chain(z: Tensor, x: Tensor) -> Tensor:
        before = torch.cat([0 * z[:1], z[:-1]])
        return 0.5 * before @ torch.eye(4, dtype=z.dtype) + 0 * z @ W + torch.tanh(x @ W)

    layer = wp.EquilibriumLayer(chain)
    (expected,) = torch.autograd.grad(wp.EquilibriumLayer(chain, coupled=True)(x).sum(), W)
    with pytest.warns(wp.errors.CoupledRowsWarning) as warned:
        for _ in range(2):
            (g,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), W)
            assert (g - expected).norm() <= 1e-9 * expected.norm()
    assert len(warned) == 1


def test_fixed_point_under_a_checkpoint() -> None:
    W, x, calls = gaussian(4, 4, seed=0), gaussian(3, 4, seed=1).requires_grad_(), []

    def f(z: Tensor, x: Tensor) -> Tensor:
        calls.append(1)
        return torch.tanh(0.5 * z @ W + x)

    def solve(x: Tensor) -> Tensor:
        return f(wp.fixed_point(f, torch.zeros_like(x), wp.NewtonKrylov(), args=(x,), on_failure="ignore").value, x)

    (plain,) = torch.autograd.grad(solve(x).sum(), x)
    once = len(calls)
    (g,) = torch.autograd.grad(checkpoint(solve, x, use_reentrant=False).sum(), x)
    assert torch.equal(g, plain) and len(calls) <= 3 * once
