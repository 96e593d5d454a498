"""num_steps is the number of evaluations that a sample took part in, and never more than max_steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from conformance import every_method
from problems import gaussian
from wellposed.solve import AbstractMap, AbstractSolver, AbstractSwitchingRule, Auto, Picard, Point, Step

F64 = torch.float64
MIX, X = 0.15 * gaussian(5, 5, seed=0), gaussian(5, 3, seed=1)
MAPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "row-wise": lambda z, i: torch.cos(z + X[i]),
    "graph": lambda z, i: torch.tanh(MIX[i][:, i] @ z + X[i]),
    "mean": lambda z, i: torch.tanh(0.4 * z + 0.5 * z.mean(dim=0, keepdim=True) + X[i].mean()),
    "one diverges": lambda z, i: torch.where((i == 0)[:, None], 30 * z + 1, 0.5 * z + 1),
}


@every_method
@pytest.mark.parametrize("name", MAPS)
def test_every_evaluation_of_a_row_is_counted_and_within_the_budget(solver: AbstractSolver, name: str) -> None:
    for max_steps in (2, 4, 7, 10, 15, 30, 60):
        for start in (torch.zeros(5, 3, dtype=F64), torch.eye(5, 3, dtype=F64) * 1e3):
            calls = torch.zeros(5, dtype=torch.int64)

            def f(z: Tensor, i: Tensor, calls: Tensor = calls) -> Tensor:
                calls[i] += 1
                return MAPS[name](z, i)

            sol = wp.fixed_point(f, start, solver, args=(torch.arange(5),), max_steps=max_steps, on_failure="ignore")
            assert (calls <= sol.num_steps).all() and (sol.num_steps <= max_steps).all()


# --- solvers of others -----------------------------------------------------------------------------------------------


class Own(AbstractSolver):
    """Plain steps, reported in some way."""

    def __init__(self, report: Callable[[AbstractMap, Point], Any]) -> None:
        self.report = report

    def init(self, f: AbstractMap, point: Point) -> dict[str, Any]:
        return {}

    def step(self, state: dict[str, Any], f: AbstractMap, point: Point) -> Any:
        return self.report(f, point)


def slow(f: AbstractMap, point: Point) -> Step:
    z = torch.lerp(point.z, point.fz, 0.001)
    return Step(z, f(z), 0)


def tenfold(f: AbstractMap, point: Point) -> Step:
    z = point.fz
    for _ in range(9):
        z = f(z)
    return Step(z, f(z), 1)


def meddling(f: AbstractMap, point: Point) -> Step:
    point.target.fill_(1e9)
    point.evaluations.zero_()
    point.z.add_(1.0)
    return Step(point.fz, f(point.fz), -1)


@pytest.mark.parametrize("report", [slow, tenfold, meddling])
@pytest.mark.parametrize("batch", [1, 3])
def test_evaluations_are_counted_in_the_map_not_by_the_solver(report: Any, batch: int) -> None:
    calls = []
    start = torch.zeros(batch, 2, dtype=F64)

    def f(z: Tensor) -> Tensor:
        calls.append(1)
        return torch.cos(z)

    sol = wp.fixed_point(f, start, Own(report), max_steps=50, on_failure="ignore", record=True)
    assert (sol.num_steps == len(calls)).all() and len(calls) <= 50
    assert (start == 0).all()


def test_products_with_the_jacobian_are_counted_too() -> None:
    def newton(f: AbstractMap, point: Point) -> Step:
        slope = f.jacobian(point.z).mv(torch.ones_like(point.z))
        z = point.z + point.g / (1 - slope)
        return Step(z, f(z), 1)

    sol = wp.fixed_point(torch.cos, torch.zeros(2, 1, dtype=F64), Own(newton), on_failure="raise")
    assert (sol.num_steps == 2 + 4 * ((sol.num_steps - 2) // 4)).all()  # first and last; 2 to record, 1 product, 1 evaluation
    assert (sol.num_steps > 6).all()


@pytest.mark.parametrize(
    "bad",
    [
        lambda f, point: Step(point.fz[:1], f(point.fz)[:1]),
        lambda f, point: Step(point.fz, f(point.fz)[:1]),
        lambda f, point: Step(point.fz.float(), f(point.fz)),
    ],
)
def test_a_step_of_another_shape_or_dtype_is_refused(bad: Any) -> None:
    with pytest.raises(
        wp.InvalidArgument, match=r"Own\.step must keep the shape and dtype of Point\.z, \(3, 1\).*Step\.f?z has"
    ):
        wp.fixed_point(torch.cos, torch.zeros(3, 1, dtype=F64), Own(bad))


def test_a_splitting_of_others_must_report_its_evaluations() -> None:
    class Free(wp.ForwardBackward):
        def step(self, state: Any, f: Any, point: Point) -> Step:
            step = super().step(state, f, point)
            return Step(step.z, step.fz, 0)

    cell = wp.nn.DenseCell(3, 4, weight=wp.nn.Monotone(), dtype=F64)
    layer = wp.EquilibriumLayer(cell, Free(0.1))
    with pytest.raises(wp.InvalidArgument, match=r"Free\.step must report at least 1 evaluation of f; .* is 0"):
        layer(gaussian(2, 3, seed=1))


def test_a_switching_rule_of_others_makes_a_solve_be_confirmed() -> None:
    class Meddling(AbstractSwitchingRule):
        def decide(self, count: int, point: Point) -> None:
            point.target.fill_(1e9)

        def take(self, rows: Tensor) -> None:
            pass

    class Watched(Auto):
        def stages(self) -> Any:
            return [(Picard(), Meddling())]

    cell = wp.nn.DenseCell(3, 5, dtype=F64)
    x = gaussian(4, 3, seed=1)
    sol = wp.EquilibriumLayer(cell, Watched(), on_failure="ignore").solve(x)
    fz = cell(sol.value, x)
    true = (fz - sol.value).norm(dim=1) / fz.norm(dim=1)
    assert not sol.converged.any() and (true > 1e-3).any()
