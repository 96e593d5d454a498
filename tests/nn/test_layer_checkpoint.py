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
    z = layer(x)
    forward = len(calls)
    z.sum().backward()
    (plain, total), x.grad = (x.grad, len(calls)), None
    calls.clear()
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, plain)
    assert len(calls) <= total + forward  # a checkpoint runs forward twice, and no more


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
