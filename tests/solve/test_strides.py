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
        # the last evaluation confirms all samples: for one that was done before it is another one
        assert int(layer.last_solution.num_steps[i] - alone.last_solution.num_steps) in (-1, 0, 1)
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


class Modes(nn.Module):
    """tanh(z W + x), which notes the rows and whether a graph is recorded at each evaluation, and the last points."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.W = nn.Parameter(0.5 * gaussian(width, width, seed=1) / width**0.5)
        self.seen: list[tuple[int, bool]] = []
        self.points: list[Tensor] = []

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        self.seen.append((z.shape[0], torch.is_grad_enabled()))
        self.points = [*self.points[-1:], z.detach().clone()]
        return torch.tanh(Counted.apply(z) @ self.W + x)


def different(batch: int = 7, width: int = 6) -> Tensor:
    """Inputs whose samples are done at different steps."""
    return gaussian(batch, width, seed=4) * torch.logspace(-2, 1, batch, dtype=F64)[:, None]


def test_the_step_at_which_the_last_samples_are_done_is_the_one_recorded() -> None:
    """No evaluation follows it: f of the whole batch at the values that are returned has been measured."""
    layer = wp.EquilibriumLayer(Modes(), on_failure="raise", rtol=1e-8)
    x = different()
    for _ in range(2):  # the first solve counts the cost of the cell
        layer.cell.seen.clear()
        z = layer(x)
        steps = layer.last_solution.num_steps
        assert len(steps.unique()) > 1 and len(layer.cell.seen) == int(steps.max())
        assert layer.cell.seen[-1] == (7, True) and not any(graph for _, graph in layer.cell.seen[:-1])
        before, last = layer.cell.points
        assert torch.equal(last, z) and not (before == last)[steps == steps.max()].all(dim=1).any()  # no point twice
        image = layer.cell(z.detach(), x)
        measured = (image - z).norm(dim=1) / image.norm(dim=1)
        assert (measured <= 1e-8).all() and (measured - layer.last_solution.residual).abs().max() <= 1e-12


def test_the_last_product_of_all_samples_confirms_those_done_before() -> None:
    layer = wp.EquilibriumLayer(Modes(), on_failure="raise", rtol=1e-8)
    z, v = layer(different()), torch.logspace(-4, 4, 7, dtype=F64)[:, None] * gaussian(7, 6, seed=5)
    Counted.products = 0
    (grad,) = torch.autograd.grad((z * v).sum(), layer.cell.W)
    steps = layer.last_adjoint.num_steps
    assert len(steps.unique()) > 1 and Counted.products == int(steps.max()) - 1  # the first evaluation, at 0, takes none
    alone = wp.EquilibriumLayer(layer.cell, on_failure="raise", rtol=1e-8)
    slowest = int(steps.argmax())
    (alone(different()[slowest : slowest + 1]) * v[slowest]).sum().backward()
    assert int(alone.last_adjoint.num_steps) == int(steps.max())  # a product for the whole batch does not follow
    J = (1 - z.detach() ** 2)[:, :, None] * layer.cell.W.detach().T
    u = torch.linalg.solve((torch.eye(6, dtype=F64) - J).transpose(1, 2), v)
    assert (grad - z.detach().T @ ((1 - z.detach() ** 2) * u)).norm() <= 1e-7 * grad.norm()


def test_a_solve_is_the_same_again() -> None:
    """Bit for bit, although the first one counts the cost of the cell, and looks for draws."""
    for solver in (wp.Auto(), wp.Anderson(), wp.Picard()):
        layer, x = wp.EquilibriumLayer(Modes(), solver, on_failure="raise", rtol=1e-8), different()
        first, steps = layer(x).detach(), layer.last_solution.num_steps
        assert torch.equal(layer(x), first) and torch.equal(layer.last_solution.num_steps, steps)


def test_a_row_that_is_done_shortly_before_the_others_stays_in_an_accelerated_batch() -> None:
    """Taking it out would copy the memory of all others."""
    cell = Modes(64).float()
    W = torch.exp(-((torch.arange(64.0)[:, None] - torch.arange(64.0)) ** 2) / 50)  # a smoothing map
    cell.W.data = 0.95 * W / torch.linalg.matrix_norm(W, 2)
    x = gaussian(16, 64, seed=3).float()
    layer = wp.EquilibriumLayer(cell, wp.Anderson(), on_failure="raise", rtol=1e-5)
    layer(x)
    steps = layer.last_solution.num_steps
    assert 1 <= int(steps.max() - steps.min()) <= 3 and {rows for rows, _ in cell.seen} == {16}


def test_what_is_kept_of_a_solve_holds_no_graph_and_is_made_once() -> None:
    layer = wp.EquilibriumLayer(Modes(), on_failure="raise", rtol=1e-8)
    layer(different()).sum().backward()
    outcome = layer._record.solution.args[0]
    assert outcome.recorded is None and outcome.at_once is None and not outcome.value.requires_grad
    assert layer.last_solution is layer.last_solution and layer.last_adjoint is layer.last_adjoint
    assert layer.last_solution.converged.all() and layer.last_adjoint.converged.all()


@pytest.mark.parametrize("late", ["converges", "is lost"])
def test_answers_are_those_of_the_steps_at_which_samples_ended(late: str) -> None:
    """They are not copied until rows leave the batch; a row that is lost later, or is slow, changes none of them."""
    rates = torch.tensor([0.02, 0.1, 0.1, 0.12], dtype=F64).unsqueeze(1)
    scale = nn.Parameter(torch.ones((), dtype=F64))

    def cell(z: Tensor, x: Tensor) -> Tensor:
        value = scale * x[:, :1] * z + x[:, 1:]
        slow = x[:, :1] > 0.11
        return torch.where(slow & (z.abs().amax(1, keepdim=True) > 1.1363), torch.nan, value) if late == "is lost" else value

    x = torch.cat((rates, torch.ones(4, 5, dtype=F64)), dim=1)
    layer = wp.EquilibriumLayer(cell, rtol=1e-6, state_shape=(5,), on_failure="ignore")
    for _ in range(2):  # the second solve knows the cost
        z = layer(x)
        solution = layer.last_solution
        assert solution.converged.tolist() == [True, True, True, late == "converges"]
        assert len(solution.num_steps.unique()) > 1
        for i in range(3):
            assert torch.equal(z[i], solution.value[i])
            torch.testing.assert_close(z[i], torch.full((5,), float(1 / (1 - rates[i])), dtype=F64), rtol=1e-5, atol=0)
        assert torch.equal(solution.residual[:3], ((cell(z, x) - z).norm(dim=1) / cell(z, x).norm(dim=1)).detach()[:3])


@pytest.mark.parametrize("late", ["as predicted", "later than predicted"])
def test_samples_that_end_a_stride_apart_are_judged_together(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are done first stand still: each has the answer and the steps that it has alone."""
    judged: list[int] = []
    judge = loop._Stage._judge
    monkeypatch.setattr(
        loop._Stage, "_judge", lambda self, count, *numbers: judged.append(count) or judge(self, count, *numbers)
    )
    rates = torch.tensor([0.05, 0.04, 0.10, 0.12], dtype=F64).unsqueeze(1)
    scale = nn.Parameter(torch.ones((), dtype=F64))

    def cell(z: Tensor, x: Tensor) -> Tensor:
        value = scale * x[:, :1] * z + x[:, 1:]
        if late == "as predicted":
            return value
        # the slowest sample contracts less near its equilibrium
        near = (value - 1 / (1 - x[:, :1])).abs() < 1e-6
        return torch.where(near & (x[:, :1] > 0.11), value + 0.5 * (z - value), value)

    layer = wp.EquilibriumLayer(cell, rtol=1e-9, state_shape=(5,), on_failure="raise")
    x = torch.cat((rates, torch.ones(4, 5, dtype=F64)), dim=1)
    layer(x)  # counts the cost
    judged.clear()
    z, steps = layer(x).detach(), layer.last_solution.num_steps
    assert len(steps.unique()) > 1 and (not judged if late == "as predicted" else judged)
    for i in range(4):
        alone = layer(x[i : i + 1]).detach()
        assert torch.equal(alone[0], z[i])
        # the evaluation at which others are due confirms it again, and so does the last one
        assert 0 <= int(steps[i] - layer.last_solution.num_steps) <= (1 if late == "as predicted" else 2)
