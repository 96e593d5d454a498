"""The last evaluation of a solve by acceleration is recorded for the gradient, and confirms the answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wellposed as wp
from problems import gaussian
from wellposed.solve import AbstractSolver
from wellposed.status import Status

W, X = 0.25 * gaussian(6, 6, seed=0), gaussian(4, 6, seed=1)


def counted(f, solver: AbstractSolver) -> tuple[wp.EquilibriumLayer, list[int]]:
    calls: list[int] = []

    def cell(z: Tensor, x: Tensor) -> Tensor:
        calls.append(1)
        return f(z, x)

    return wp.EquilibriumLayer(cell, solver, on_failure="ignore"), calls


def tanh_cell(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(z @ W + x)


@pytest.mark.parametrize("rows", [4, 1])
def test_no_further_evaluation_confirms_the_answer(rows: int) -> None:
    layer, calls = counted(tanh_cell, wp.Anderson())
    x = X[:rows]
    with torch.no_grad():
        apart = layer(x)
    without = len(calls)
    calls.clear()
    x = x.clone().requires_grad_()
    z = layer(x)
    assert len(calls) == without - 1 == int(layer.last_solution.num_steps.max())
    assert layer.last_solution.converged.all()
    assert (z.detach() - apart).norm() <= 1e-5 * apart.norm()  # rows that ended earlier stay; rtol is 1e-6
    residual = (tanh_cell(z, x) - z).norm(dim=1) / z.norm(dim=1)
    assert (residual <= 1e-6).all()
    (g,) = torch.autograd.grad(z.sum(), x)
    J = torch.func.vmap(torch.func.jacrev(lambda z, x: torch.tanh(z @ W + x)))(z.detach(), x.detach())
    u = torch.linalg.solve(torch.eye(6, dtype=z.dtype) - J.mT, torch.ones(rows, 6, 1, dtype=z.dtype)).squeeze(2)
    assert (g - u * (1 - z**2)).norm() <= 1e-4 * g.norm()  # z, and with it 1 - z^2, has the error of rtol


def test_a_random_cell_is_still_found() -> None:
    layer, _ = counted(lambda z, x: torch.tanh(z @ W + x) + 1e-9 * torch.rand(()), wp.Anderson())
    x = X.clone().requires_grad_()
    for _ in range(2):  # an earlier solve lets nothing pass
        layer(x)
        assert not layer.last_solution.converged.any()
        assert "random" in layer.last_solution.note


def test_coupled_rows_are_still_found() -> None:
    layer, _ = counted(lambda z, x: torch.tanh(z @ W + x) * (1 + 0.3 * torch.tanh(z.mean())), wp.Anderson())
    x = X.clone().requires_grad_()
    z = layer(x)
    whole = wp.EquilibriumLayer(layer.cell, wp.Anderson(), coupled=True)
    assert (z - whole(x)).norm() <= 1e-4 * z.norm()
    assert set(layer.last_solution.status.tolist()) == {Status.CONVERGED}
