"""Cheap steps are measured rarely, and no evaluation of a layer is made twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from problems import gaussian
from wellposed.solve import loop

F64 = torch.float64


class Counted(torch.autograd.Function):
    """The identity, which counts the products that pass through it."""

    products = 0

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> Tensor:
        Counted.products += 1
        return v


class Own(nn.Module):
    """tanh(z W + x), which counts its evaluations."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.W = nn.Parameter(0.5 * gaussian(width, width, seed=1) / width**0.5)
        self.calls = 0

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(Counted.apply(z) @ self.W + x)


def solved(x: Tensor, solver: wp.solve.AbstractSolver | None = None) -> tuple[wp.EquilibriumLayer, Tensor]:
    """The layer after forward and backward of a sum, and its equilibrium."""
    cell = Own()
    layer = wp.EquilibriumLayer(cell, solver, on_failure="raise", rtol=1e-8)
    z = layer(x)
    cell.forward_calls, Counted.products = cell.calls, 0
    z.sum().backward()
    return layer, z


def test_the_last_evaluation_of_a_solve_is_the_one_recorded_for_the_gradient() -> None:
    layer, _ = solved(gaussian(1, 6, seed=2))
    assert layer.cell.forward_calls == int(layer.last_solution.num_steps)


def test_a_last_product_of_the_whole_batch_confirms_the_adjoint() -> None:
    x = gaussian(1, 6, seed=2)
    layer, z = solved(x)
    # the first evaluation of v + J^T u, at u = 0, takes no product; samples are measured at every fifth, and none follows
    assert Counted.products == int(layer.last_adjoint.num_steps) - 1 and Counted.products % 5 == 0
    W, slope = layer.cell.W.detach(), (1 - z.detach() ** 2)[0]
    u = torch.linalg.solve((torch.eye(6, dtype=F64) - slope[:, None] * W.T).T, torch.ones(6, dtype=F64))
    expected = torch.outer(z.detach()[0], slope * u)
    assert (layer.cell.W.grad - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("batch", [1, 7])
def test_cheap_steps_are_measured_rarely(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    measure = loop.measure
    monkeypatch.setattr(loop, "measure", lambda g, fz: looks.append(1) or measure(g, fz))
    layer, _ = solved(gaussian(batch, 6, seed=3))
    steps = int(layer.last_solution.num_steps.max()) + int(layer.last_adjoint.num_steps.max())
    assert len(looks) <= steps / 3


def test_what_is_measured_rarely_does_not_depend_on_neighbours() -> None:
    x = gaussian(7, 6, seed=4) * torch.logspace(-2, 1, 7, dtype=F64)[:, None]
    layer, z = solved(x)
    for i in range(7):
        alone, z_alone = solved(x[i : i + 1])
        assert alone.last_solution.num_steps == layer.last_solution.num_steps[i]
        assert (z_alone[0] - z[i]).abs().max() <= 64 * torch.finfo(F64).eps


def test_solvers_that_are_asked_for_stop_at_the_first_step_that_meets_the_tolerance() -> None:
    x = gaussian(1, 6, seed=2)
    auto, picard = (int(solved(x, solver)[0].last_solution.num_steps) for solver in (wp.Auto(), wp.Picard()))
    assert picard <= auto <= picard + 5


def test_a_spent_row_that_is_not_taken_out_stops_no_other() -> None:
    """Rows reach the plain stage after other numbers of evaluations; one of them has none left."""
    n, draws = 60, torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(n, n, generator=draws, dtype=F64)).Q
    slopes = 0.49 + 0.5 * torch.rand(64, 1, generator=draws, dtype=F64)
    x = torch.randn(64, n, generator=draws, dtype=F64)
    W = nn.Parameter(torch.eye(n, dtype=F64))

    def cell(z: Tensor, x: Tensor) -> Tensor:
        y = x[:, -1:] * (z @ Q.T) + x[:, :-1]
        return torch.where(y > 0, y, 0.98 * y) @ W.T

    layer = wp.EquilibriumLayer(cell, state_shape=(n,), max_steps=150, on_failure="ignore", rtol=1e-10)
    layer(torch.cat([x, slopes], dim=1)).sin().sum().backward()
    assert layer.last_adjoint is not None and int(layer.last_adjoint.num_steps.max()) <= 150


def test_a_map_that_changes_by_itself_is_not_called_coupled() -> None:
    calls = 0

    def cell(z: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x[:, :1] * z + x + 1e-3 / calls

    x = gaussian(16, 3, seed=0)
    x[:, 0] = torch.linspace(0.05, 0.9, 16, dtype=F64)
    layer = wp.EquilibriumLayer(cell, on_failure="ignore", rtol=1e-3)
    with torch.no_grad():
        z = layer(x)  # a CoupledRowsWarning would be an error
    assert layer.last_solution is not None
    residual = (cell(z, x) - z).norm(dim=1) / z.norm(dim=1)
    assert (residual[layer.last_solution.converged] <= 2e-3).all()


@pytest.mark.parametrize(("width", "leaves"), [(6, False), (1200, True)])
def test_finished_samples_leave_where_that_saves_more_than_it_costs(width: int, leaves: bool) -> None:
    sizes: list[int] = []
    W = 0.4 * torch.eye(width).roll(1, 0)  # all eigenvalues on a circle: acceleration gains nothing

    def cell(z: Tensor, x: Tensor) -> Tensor:
        sizes.append(z.shape[0])
        return torch.tanh(z @ W) + x

    x = 0.1 * gaussian(64, width, seed=5).float()
    x[:48] = 20.0  # where tanh is flat, the equilibrium is found in a few steps
    layer = wp.EquilibriumLayer(cell, rtol=1e-4, max_steps=400, on_failure="raise")
    z = layer(x).detach()
    steps = layer.last_solution.num_steps
    assert int(steps[:48].max()) < int(steps[48:].min())
    assert (min(sizes) < 64) is leaves
    assert ((torch.tanh(z @ W) + x - z).norm(dim=1) <= 1e-4 * z.norm(dim=1) * 1.01).all()
