"""The last evaluation of a solve by acceleration is recorded for the gradient, and confirms the answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wellposed as wp
from problems import gaussian
from wellposed.solve import AbstractSolver
from wellposed.solve._samples import ResidualSchedule
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
    assert (g - exact_gradient(z.detach(), x.detach())).norm() <= 1e-4 * g.norm()  # z has the error of rtol


def exact_gradient(z: Tensor, x: Tensor) -> Tensor:
    """Of z.sum() in x, by dense algebra."""
    J = torch.func.vmap(torch.func.jacrev(tanh_cell))(z, x)
    ones = torch.ones(*z.shape, 1, dtype=z.dtype)
    return torch.linalg.solve(torch.eye(z.shape[1], dtype=z.dtype) - J.mT, ones).squeeze(2) * (1 - z**2)


@pytest.mark.parametrize("lost", range(3, 13))
def test_a_step_that_leaves_the_domain_is_not_the_recorded_one(lost: int) -> None:
    """Row 0, which ends early, has NaN in one evaluation, and goes back: the graph of that evaluation serves for nothing."""
    layer, calls = counted(
        lambda z, x: (
            torch.where(torch.arange(4).unsqueeze(1) + 10 * (len(calls) != lost) == 0, torch.nan, tanh_cell(z, x))
            if z.shape[0] == 4
            else tanh_cell(z, x)
        ),
        wp.Anderson(),
    )
    x = X * torch.tensor([[3.0], [1.0], [1.0], [1.0]], dtype=X.dtype)
    z = layer(x.requires_grad_())
    assert lost <= len(calls)
    assert layer.last_solution.converged.all()
    (g,) = torch.autograd.grad(z.sum(), x)
    assert (g - exact_gradient(z.detach(), x.detach())).norm() <= 1e-4 * g.norm()


@pytest.mark.parametrize("solver", [wp.Anderson(), wp.Auto()], ids=lambda s: type(s).__name__)
def test_an_evaluation_that_was_not_recorded_is_not_counted_twice(
    solver: AbstractSolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the end was not foreseen another evaluation confirms the answers, as without a graph, and is counted once."""
    layer, _ = counted(tanh_cell, solver)
    expected = layer.solve(X).num_steps
    monkeypatch.setattr(ResidualSchedule, "expects_all", lambda self, count, idle: False)
    layer(X.clone().requires_grad_())
    assert torch.equal(layer.last_solution.num_steps, expected)


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
