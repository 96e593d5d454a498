"""Checks that the conformance classes share: true reports, right answers, counted evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellposed.linalg import AbstractJacobian
from wellposed.solve import AbstractMap, AbstractSolver, Solution, fixed_point
from wellposed.solve._closing import MOST_PROBES
from wellposed.status import Status
from wellposed.testing._problem import Problem, compute_dtype, flat

#: The relative tolerance that the checks ask for.
RTOL = {torch.float64: 1e-9, torch.float32: 1e-5}


def require(claim: bool | Tensor, message: str) -> None:
    """Raises AssertionError unless (every entry of) the claim is true, also with -O."""
    if not bool(claim.all() if isinstance(claim, Tensor) else claim):
        raise AssertionError(message)


def same(a: Tensor, b: Tensor, *, rtol: float) -> bool:
    """Whether two tensors have one shape and agree to `rtol` of the largest entry of `b`."""
    if a.shape != b.shape:
        return False
    a, b = a.detach(), b.detach()
    scale = float(b.abs().max()) if b.numel() else 0.0
    return bool(((a - b).abs() <= rtol * max(scale, torch.finfo(b.dtype).tiny)).all())


def rtol_of(p: Problem) -> float:
    """The relative tolerance for the dtype in which a problem is solved."""
    return RTOL[compute_dtype(p.dtype)]


def solve(p: Problem, solver: AbstractSolver, *, dense: bool = False, **options: Any) -> Solution:
    """Solves without warnings, as a function with args or (`dense`) as the map of a cell."""
    defaults: dict[str, Any] = {"rtol": rtol_of(p), "atol": p.atol, "max_steps": p.max_steps, "on_failure": "ignore"}
    options = defaults | options
    if dense:
        return fixed_point(p.dense_map(), p.z0, solver, **options)
    return fixed_point(p.f, p.z0, solver, args=p.args, **options)


def check_honest(p: Problem, sol: Solution, *, rtol: float | None = None, atol: float | None = None) -> None:
    """Residuals are those of `value`, and the status follows from them."""
    rtol, atol = rtol_of(p) if rtol is None else rtol, p.atol if atol is None else atol
    batch, dtype = p.batch, compute_dtype(p.dtype)
    require(flat(sol.value).shape == flat(p.z0).shape, f"{p.name}: the value has another shape than z0")
    for name in ("residual", "absolute_residual", "rate", "num_steps", "converged", "status"):
        shape = tuple(getattr(sol, name).shape)
        require(shape == (batch,), f"{p.name}: {name} must have shape ({batch},); got {shape}")
    for name in ("residual", "absolute_residual", "rate"):
        require(getattr(sol, name).dtype == dtype, f"{p.name}: {name} must be {dtype}; got {getattr(sol, name).dtype}")
    require(sol.num_steps.dtype == torch.int64, f"{p.name}: num_steps must be int64; got {sol.num_steps.dtype}")
    require(sol.converged == (sol.status == Status.CONVERGED), f"{p.name}: converged contradicts the status in {sol}")

    g, f = p.residual(sol.value)
    unit = p.rounding(sol.value)
    known = sol.absolute_residual.isfinite()  # NaN or infinite only if f was never finite at any point
    require(known | (sol.status == Status.NOT_FINITE), f"{p.name}: a residual is not finite, but the status hides it")
    require(flat(sol.value)[known].isfinite(), f"{p.name}: a value with a finite residual is not finite")
    wrong = (sol.absolute_residual.double() - g).abs()
    require((wrong <= unit)[known], f"{p.name}: the reported residuals differ from the true ones by up to {wrong[known].max()}")
    relative = torch.where(g == 0, 0.0, g / f)
    close = (sol.residual.double() - relative).abs() <= 2 * unit / f
    require(close[known & (f > 0)], f"{p.name}: the relative residuals are not |f(z) - z| / |f(z)| at the value")
    zero = sol.residual[f == 0].double() == relative[f == 0]  # 0, or infinite
    require(zero, f"{p.name}: the relative residual at f(z) = 0 must be 0 or infinite")

    good = sol.converged
    target = torch.maximum(rtol * f, torch.full_like(f, atol))
    require((g <= target + unit)[good], f"{p.name}: a sample is reported as converged above its tolerance in {sol}")
    missed = (g < target - unit)[known & ~good]
    require(~missed, f"{p.name}: a sample met its tolerance and is not reported as converged in {sol}")
    require(atol > 0 or bool((sol.residual <= rtol)[good].all()), f"{p.name}: converged above rtol={rtol}")
    require(sol.num_steps >= 1, f"{p.name}: every sample takes part in at least one evaluation; got {sol.num_steps.tolist()}")


def check_right(p: Problem, sol: Solution) -> None:
    """Converged samples are at the solution, up to residual times conditioning."""
    if p.solution is None:
        require(~sol.converged, f"{p.name} has no fixed point, but the report is {sol}")
        return
    good = sol.converged
    require(flat(p.solution)[good].isfinite(), f"{p.name}: a sample without a solution is reported as converged")
    allowed = p.conditioning * (sol.absolute_residual.double() + p.rounding(sol.value))
    require((p.distance(sol.value) <= allowed)[good], f"{p.name}: converged, but not to the solution")


def check_close(a: Solution, b: Solution, p: Problem) -> None:
    """Two solves of the same samples agree to rounding: same status, same steps, same values.

    A sample that diverged or met NaN may take part in a few more evaluations in a batch: the
    closing one, and those that find out whether other rows are the cause. A rounding error in one
    evaluation is amplified by the rest of the run as the problem amplifies residuals.
    """
    require(a.status.codes == b.status.codes, f"{p.name}: the statuses differ, {a.status} and {b.status}")
    allowed = torch.where((a.status == Status.DIVERGED) | (a.status == Status.NOT_FINITE), 1 + MOST_PROBES, 0)
    steps = a.num_steps.tolist(), b.num_steps.tolist()
    require((a.num_steps - b.num_steps).abs() <= allowed, f"{p.name}: the numbers of steps differ, {steps[0]} and {steps[1]}")
    difference = (flat(a.value) - flat(b.value)).norm(dim=1)
    require(difference <= p.conditioning * p.rounding(a.value), f"{p.name}: the values differ by {difference.max():.1e}")


class CountingMap(AbstractMap):
    """A map that counts every evaluation and every product for the samples that took part in it.

    Attributes:
        counts: (batch,) evaluations and products of each sample.
        calls: For each evaluation the samples in it.
    """

    def __init__(self, p: Problem) -> None:
        self._p, self._samples = p, torch.arange(p.batch)
        self.counts = torch.zeros(p.batch, dtype=torch.int64)
        self.calls: list[list[int]] = []

    def _count(self) -> None:
        self.counts[self._samples] += 1
        self.calls.append(self._samples.tolist())

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        self._count()
        return self.tracked(z)

    def tracked(self, z: Tensor) -> Tensor:
        value: Tensor = self._p.f(z, *(arg[self._samples] for arg in self._p.args))
        return value

    def take(self, rows: Tensor) -> CountingMap:
        part = CountingMap(self._p)
        part._samples, part.counts, part.calls = self._samples[rows], self.counts, self.calls
        return part

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        self._count()
        return _CountingJacobian(super().jacobian(z), self._count)


class _CountingJacobian(AbstractJacobian):
    setup = 1

    def __init__(self, inner: AbstractJacobian, count: Callable[[], None]) -> None:
        super().__init__(inner.point)
        self._inner, self._count = inner, count

    def mv(self, u: Tensor) -> Tensor:
        self._count()
        return self._inner.mv(u)

    def rmv(self, u: Tensor) -> Tensor:
        self._count()
        return self._inner.rmv(u)
