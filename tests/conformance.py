"""What every solver must do, and the one list of solvers that must do it.

A new solver is added to `SOLVERS` (or to `SPLITTING`, if it needs a resolvent) and inherits `solve/test_conformance.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from problems import Problem
from wellposed.solve import AbstractSolver, TunedStep
from wellposed.testing._checks import CountingMap, check_close, check_honest, check_right, rtol_of, solve

SOLVERS: list[AbstractSolver] = [
    wp.Picard(),
    wp.Picard(damping=0.6),
    wp.Anderson(),
    wp.Anderson(memory=1),
    wp.Anderson(memory=12, regularization=0.0),
    wp.Anderson(memory=3, regularization=1e-6, damping=0.7),
    wp.Broyden(),
    wp.Broyden(memory=3),
    wp.NewtonKrylov(),
    wp.NewtonKrylov(linear_solver=wp.BiCGStab(), forcing=0.5),
    wp.Auto(),
]
#: Need a resolvent and a prox: they run on the maps of `DenseCell`.
SPLITTING: list[AbstractSolver] = [
    wp.ForwardBackward(),
    wp.PeacemanRachford(),
    wp.PeacemanRachford(step_size=0.2),
    wp.DouglasRachford(),
    wp.ForwardBackward(TunedStep()),
    wp.PeacemanRachford(None),
    wp.PeacemanRachford(TunedStep()),
    wp.DouglasRachford(TunedStep()),
]
#: These evaluate f and nothing else; the others also take products with its Jacobian.
EVALUATING = [solver for solver in SOLVERS if not isinstance(solver, (wp.NewtonKrylov, wp.Auto))]

DTYPES = [torch.float32, torch.float64]


def short(solver: AbstractSolver) -> str:
    """A readable test name: the class, and what differs from its defaults."""
    default = type(solver)()
    changed = [f"{k}={v}" for k, v in vars(solver).items() if v != getattr(default, k)]
    return type(solver).__name__ + (f"({','.join(changed)})" if changed else "")


def cross(names: str, rows: Sequence[Any], columns: Sequence[Any]) -> pytest.MarkDecorator:
    """Every row with the first column and every column with the first row; all other pairs are slow.

    For choices that do not know of each other, such as the solver of an equilibrium and that of its adjoint.
    """
    pairs = [
        pytest.param(row, column, marks=[] if i == 0 or k == 0 else [pytest.mark.slow], id=f"{row!r}-{column!r}")
        for i, row in enumerate(rows)
        for k, column in enumerate(columns)
    ]
    return pytest.mark.parametrize(names, pairs)


every_solver = pytest.mark.parametrize("solver", SOLVERS, ids=short)
#: Where options cannot matter: each method once.
every_method = pytest.mark.parametrize("solver", [s for s in SOLVERS if s == type(s)()], ids=short)
#: Every solver in float64, each method once more in float32.
every_solver_and_dtype = pytest.mark.parametrize(
    ("solver", "dtype"),
    [(s, torch.float64) for s in SOLVERS] + [(s, torch.float32) for s in SOLVERS if s == type(s)()],
    ids=lambda value: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else short(value),
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])


def must_converge(p: Problem, solver: AbstractSolver) -> bool:
    return p.solvers is None or type(solver).__name__ in p.solvers


class CountingFunction:
    """f(z, sample, *args) that records which samples each call had, and at which points.

    Attributes:
        visited: For each sample the points at which it was evaluated.
        rows: For each call the number of its samples.
    """

    def __init__(self, p: Problem) -> None:
        self._p = p
        self.visited: list[list[Tensor]] = [[] for _ in range(p.batch)]
        self.rows: list[int] = []

    def __call__(self, z: Tensor, sample: Tensor, *args: Tensor) -> Any:
        self.rows.append(len(sample))
        for i, row in zip(sample.tolist(), z, strict=True):
            self.visited[i].append(row.clone())
        return self._p.f(z, *args)

    def evaluations(self) -> list[int]:
        """For each sample; the last evaluation is that of the whole batch at the value."""
        return [len(points) for points in self.visited]


__all__ = [
    "DTYPES",
    "EVALUATING",
    "SOLVERS",
    "SPLITTING",
    "CountingFunction",
    "CountingMap",
    "check_close",
    "check_honest",
    "check_right",
    "cross",
    "every_dtype",
    "every_method",
    "every_solver",
    "every_solver_and_dtype",
    "must_converge",
    "rtol_of",
    "short",
    "solve",
]
