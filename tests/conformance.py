"""What every solver must do, and the one list of solvers that must do it.

A new solver is added to `SOLVERS` (or to `SPLITTING`, if it needs a resolvent) and inherits `solve/test_conformance.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from problems import Problem, compute_dtype, flat
from wellposed.linalg import AbstractJacobian
from wellposed.solve import AbstractMap, AbstractSolver, TunedStep

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
#: What a solve asks for here.
RTOL = {torch.float64: 1e-9, torch.float32: 1e-5}


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


def rtol_of(p: Problem) -> float:
    return RTOL[compute_dtype(p.dtype)]


def solve(p: Problem, solver: AbstractSolver, *, dense: bool = False, **options: Any) -> wp.Solution:
    """Solves a problem quietly, as a function with args or as the map of a cell."""
    options = {"rtol": rtol_of(p), "atol": p.atol, "max_steps": p.max_steps, "on_failure": "ignore"} | options
    if dense:
        return wp.fixed_point(p.dense_map(), p.z0, solver, **options)
    return wp.fixed_point(p.f, p.z0, solver, args=p.args, **options)


def must_converge(p: Problem, solver: AbstractSolver) -> bool:
    return p.solvers is None or type(solver).__name__ in p.solvers


def check_honest(p: Problem, sol: wp.Solution, *, rtol: float | None = None, atol: float | None = None) -> None:
    """Whatever happened, the report is true: residuals are those of `value`, and the status follows from them."""
    rtol, atol = rtol_of(p) if rtol is None else rtol, p.atol if atol is None else atol
    batch, dtype = p.batch, compute_dtype(p.dtype)
    assert flat(sol.value).shape == flat(p.z0).shape
    assert sol.residual.shape == sol.num_steps.shape == sol.converged.shape == sol.status.shape == (batch,)
    assert sol.residual.dtype == sol.absolute_residual.dtype == sol.rate.dtype == dtype
    assert sol.num_steps.dtype == torch.int64
    assert torch.equal(sol.converged, sol.status == wp.Status.CONVERGED)

    g, f = p.residual(sol.value)
    unit = p.rounding(sol.value)
    known = sol.absolute_residual.isfinite()  # NaN or infinite only if f was never finite at any point
    assert (known | (sol.status == wp.Status.NOT_FINITE)).all()
    assert flat(sol.value)[known].isfinite().all()
    assert ((sol.absolute_residual.double() - g).abs() <= unit)[known].all()
    relative = torch.where(g == 0, 0.0, g / f)
    assert ((sol.residual.double() - relative).abs() <= 2 * unit / f)[known & (f > 0)].all()
    assert torch.equal(sol.residual[f == 0].double(), relative[f == 0])  # 0, or infinite

    good = sol.converged
    target = torch.maximum(rtol * f, torch.full_like(f, atol))
    assert (g <= target + unit)[good].all()
    assert not (g < target - unit)[known & ~good].any()
    assert (sol.residual <= rtol)[good].all() or atol > 0
    assert (sol.num_steps >= 1).all()


def check_right(p: Problem, sol: wp.Solution) -> None:
    """Converged samples are at the solution, as nearly as their residual and the conditioning of the problem promise."""
    if p.solution is None:
        assert not sol.converged.any(), f"{p.name} has no fixed point, yet {sol}"
        return
    fine = sol.converged
    allowed = p.conditioning * (sol.absolute_residual.double() + p.rounding(sol.value))
    assert (p.distance(sol.value) <= allowed)[fine].all()
    assert flat(p.solution)[fine].isfinite().all()  # a sample without a solution cannot have converged


def check_close(a: wp.Solution, b: wp.Solution, p: Problem) -> None:
    """Two solves of the same samples agree to rounding: same status, same steps, same values.

    A rounding error in one evaluation is amplified by the rest of the run as the problem amplifies residuals.
    """
    assert torch.equal(a.status.codes, b.status.codes)
    assert torch.equal(a.num_steps, b.num_steps)
    difference = (flat(a.value) - flat(b.value)).norm(dim=1)
    assert (difference <= p.conditioning * p.rounding(a.value)).all()


class CountingMap(AbstractMap):
    """A map that books every evaluation and every product for the samples that took part in it.

    Attributes:
        counts: (batch,) evaluations and products of each sample.
        calls: Of each evaluation, the samples in it.
    """

    def __init__(self, p: Problem) -> None:
        self._p, self._samples = p, torch.arange(p.batch)
        self.counts = torch.zeros(p.batch, dtype=torch.int64)
        self.calls: list[list[int]] = []

    def book(self) -> None:
        self.counts[self._samples] += 1
        self.calls.append(self._samples.tolist())

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        self.book()
        return self.tracked(z)

    def tracked(self, z: Tensor) -> Tensor:
        return self._p.f(z, *(arg[self._samples] for arg in self._p.args))

    def take(self, rows: Tensor) -> CountingMap:
        part = CountingMap(self._p)
        part._samples, part.counts, part.calls = self._samples[rows], self.counts, self.calls
        return part

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        self.book()
        return _CountingJacobian(super().jacobian(z), self.book)


class _CountingJacobian(AbstractJacobian):
    setup = 1

    def __init__(self, inner: AbstractJacobian, book: Callable[[], None]) -> None:
        super().__init__(inner.point)
        self._inner, self._book = inner, book

    def mv(self, u: Tensor) -> Tensor:
        self._book()
        return self._inner.mv(u)

    def rmv(self, u: Tensor) -> Tensor:
        self._book()
        return self._inner.rmv(u)


class CountingFunction:
    """f(z, sample, *args): books which samples each call saw, and at which points.

    Attributes:
        visited: Of each sample, the points at which it was evaluated.
        rows: Of each call, how many samples it saw.
    """

    def __init__(self, p: Problem) -> None:
        self._p = p
        self.visited: list[list[Tensor]] = [[] for _ in range(p.batch)]
        self.rows: list[int] = []

    def __call__(self, z: Tensor, sample: Tensor, *args: Tensor) -> Tensor:
        self.rows.append(len(sample))
        for i, row in zip(sample.tolist(), z, strict=True):
            self.visited[i].append(row.clone())
        return self._p.f(z, *args)

    def evaluations(self) -> list[int]:
        """Of each sample; the last one is that of the whole batch, at the point that is returned."""
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
