"""Newton-Krylov: costs counted product by product, finite termination, superlinear convergence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from conformance import CountingMap, check_honest, check_right, solve
from problems import Problem, flat, problem
from wellposed import Status

DOUBLE = torch.float64


def test_cost_of_one_step_on_a_function() -> None:
    """1 evaluation at z0, 2 to record J, 1 product, 1 product to measure the linear residual, 1 evaluation, 1 to confirm: 7."""
    sol = solve(problem("scalar"), wp.NewtonKrylov())
    assert sol.num_steps.tolist() == [7] * 4 and (sol.residual < 1e-15).all()


def test_cost_of_one_step_on_a_cell() -> None:
    """A cell knows its Jacobian by formula: one evaluation sets it up."""
    W = torch.tensor([[0.8]], dtype=DOUBLE)
    p = Problem(
        "cell", lambda z, c: z @ W.T + c, (torch.ones(2, 1, dtype=DOUBLE),), torch.zeros(2, 1, dtype=DOUBLE), None, 0.8, 5
    )
    p = Problem(**{**vars(p), "matrix": W, "activation": wp.nn.Identity()})
    assert solve(p, wp.NewtonKrylov(), dense=True).num_steps.tolist() == [5, 5]


@pytest.mark.parametrize("name", ["affine", "relu_random", "tanh", "monotone", "slow"])
def test_every_product_is_counted(name: str) -> None:
    for i in range(3):
        p = problem(name).take([i])
        f = CountingMap(p)
        sol = wp.fixed_point(f, p.z0, wp.NewtonKrylov(), rtol=1e-9, max_steps=500)
        assert f.counts.tolist() == sol.num_steps.tolist()


def test_no_jacobian_for_a_sample_that_cannot_use_it() -> None:
    """With 3 evaluations in all there is one plain step and a confirmation; nothing is evaluated without being counted."""
    p = problem("affine").take([0])
    f = CountingMap(p)
    sol = wp.fixed_point(f, p.z0, wp.NewtonKrylov(), max_steps=3, on_failure="ignore")
    assert f.counts.tolist() == sol.num_steps.tolist() == [3]
    assert torch.allclose(sol.value, p.image(p.z0), rtol=1e-14)


def test_samples_short_of_budget_step_plainly_beside_others() -> None:
    """The samples use up their budgets at different times; each stays within its own."""
    p = problem("spread", batch=8)
    for budget in range(8, 24):
        sol = wp.fixed_point(p.f, p.z0, wp.NewtonKrylov(), args=p.args, rtol=1e-12, max_steps=budget, on_failure="ignore")
        assert (sol.num_steps <= budget).all()
        assert (sol.num_steps == budget)[sol.status == Status.MAX_STEPS].all()
        check_honest(p, sol, rtol=1e-12)


def test_piecewise_linear_maps_end_after_finitely_many_steps() -> None:
    """Once the active set is right, one more step is exact: the residual drops from anywhere to rounding."""
    for name in ("relu_by_hand", "relu_random", "monotone"):
        p = problem(name)
        exact = wp.NewtonKrylov(linear_solver=wp.DenseSolve(), forcing=1e-12)
        sol = solve(p, exact, rtol=1e-13, atol=1e-14, record=True)
        assert sol.converged.all() and sol.history is not None
        steps = sol.history.isfinite().sum(dim=0)
        assert (steps <= 12).all()
        for i in range(p.batch):
            column = sol.history[:, i]
            column = column[column.isfinite()][:-1]  # the last one confirms
            assert column[-1] <= 1e-13 and (len(column) < 2 or column[-2] > 1e-6)
        check_right(p, sol)


def test_smooth_maps_converge_superlinearly() -> None:
    p = problem("tanh")
    sol = solve(p, wp.NewtonKrylov(linear_solver=wp.DenseSolve(), forcing=1e-12), rtol=1e-14, record=True)
    assert sol.history is not None
    for i in range(p.batch):
        column = sol.history[:, i]
        r = column[column.isfinite()]
        near = (r[:-1] < 1e-2) & (r[1:] > 1e-14)
        assert near.any() and (r[1:][near] <= 10 * r[:-1][near] ** 1.8).all()


def test_forcing_trades_products_for_steps() -> None:
    p = problem("tanh")
    tight, loose = (solve(p, wp.NewtonKrylov(forcing=eta), record=True) for eta in (1e-9, 0.5))
    count = [int(sol.history.isfinite().sum()) for sol in (tight, loose)]  # type: ignore[union-attr]
    assert count[0] < count[1]
    assert tight.converged.all() and loose.converged.all()


def test_line_search_rescues_what_full_steps_lose() -> None:
    """Newton on atan from 10 diverges without a line search: |s| = (1 + 100) atan(10)."""
    z0 = torch.tensor([[10.0], [0.5], [-3.0]], dtype=DOUBLE)
    sol = wp.fixed_point(lambda z: z - torch.atan(z), z0, wp.NewtonKrylov(), rtol=0.0, atol=1e-10, on_failure="raise")
    assert sol.value.abs().max() <= 1e-9


def test_not_contracting_is_no_obstacle() -> None:
    generator = torch.Generator().manual_seed(0)
    W = 5 * torch.randn(6, 6, generator=generator, dtype=DOUBLE)
    c = torch.randn(3, 6, generator=generator, dtype=DOUBLE)
    sol = wp.fixed_point(lambda z, c: z @ W.T + c, torch.zeros(3, 6, dtype=DOUBLE), wp.NewtonKrylov(), args=(c,), rtol=1e-10)
    exact = torch.linalg.solve(torch.eye(6, dtype=DOUBLE) - W, c.T).T
    assert torch.allclose(sol.value, exact, rtol=1e-6)


def test_singular_jacobian_is_reported_or_survived() -> None:
    """z - (z - 2)^2/10 has a double root: I - J vanishes at the solution. z + 1 has none, and I - J = 0 everywhere."""
    z0 = torch.zeros(1, 1, dtype=DOUBLE)
    double = wp.fixed_point(lambda z: z - 0.1 * (z - 2) ** 2, z0, wp.NewtonKrylov(), rtol=1e-9, on_failure="raise")
    assert abs(float(double.value) - 2) <= (1e-9 * 2 / 0.1) ** 0.5 * 1.01
    none = wp.fixed_point(lambda z: z + 1, z0, wp.NewtonKrylov(), on_failure="ignore")
    assert none.status[0] == Status.MAX_STEPS


def test_a_singular_jacobian_on_the_way_does_not_use_up_the_budget() -> None:
    """log(z) + 2 from 1, where J = 1: the linear solve gets nowhere, and must leave enough for the steps after it."""
    sol = wp.fixed_point(lambda z: torch.log(z) + 2, torch.ones(1, 1, dtype=DOUBLE), wp.NewtonKrylov(), on_failure="raise")
    assert abs(float(sol.value) - 3.1461932206) < 1e-5


def test_functions_without_a_derivative_take_plain_steps() -> None:
    def opaque(z: Tensor) -> Tensor:
        return torch.from_numpy(0.5 * z.detach().numpy() + 1)

    sol = wp.fixed_point(opaque, torch.zeros(2, 1, dtype=DOUBLE), wp.NewtonKrylov(), rtol=1e-8, on_failure="raise")
    assert torch.allclose(sol.value, torch.tensor(2.0).double(), rtol=1e-6)


def test_structures() -> None:
    p = problem("dict_state")
    sol = solve(p, wp.NewtonKrylov())
    assert sol.converged.all() and (flat(sol.value) - flat(p.solution)).abs().max() < 1e-8


def test_a_dense_inner_solver_stays_within_the_budget():
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(12, 12, generator=generator, dtype=torch.float64) / 12

    def f(z):
        return torch.tanh(z @ W.T + 1)

    solver = wp.NewtonKrylov(linear_solver=wp.linalg.DenseSolve())
    for max_steps in (4, 10, 17, 40):
        solution = wp.fixed_point(
            f, torch.zeros(1, 12, dtype=torch.float64), solver=solver, rtol=1e-30, max_steps=max_steps, on_failure="ignore"
        )
        assert int(solution.num_steps.max()) <= max_steps


@pytest.mark.parametrize("activation", [wp.nn.Tanh(), wp.nn.ReLU()], ids=repr)
def test_only_maps_that_are_affine_are_solved_in_one_step(activation: Any) -> None:
    """A dense cell has an affine part, and is not affine: its first Newton step is as loose as `forcing` says."""
    asked: list[Tensor] = []

    class Noted(wp.GMRES):
        def __call__(self, *args: Any, rtol: Any, **options: Any) -> Any:  # type: ignore[override]
            asked.append(torch.as_tensor(rtol))
            return super().__call__(*args, rtol=rtol, **options)

    cell = wp.nn.DenseCell(4, 8, activation, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wp.EquilibriumLayer(cell, wp.NewtonKrylov(Noted()), rtol=1e-10).solve(x)
    assert bool((asked[0] == 0.1).all())
