"""Splitting methods for monotone equilibria: z = prox(W z + c) with I - W strongly monotone.

They need parts of the map (an affine part, a resolvent, a proximal operator), not a network. The
adjoint equation of a monotone cell has the same form, so they serve backward passes as well.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed._checks import check_interval
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.solve._samples import JUDGED_AT
from wellposed.solve.map import AbstractMap
from wellposed.solve.solver import AbstractSolver, AbstractSwitchingRule, Point, Step
from wellposed.solve.tuned_step import TunedStep, adaptive_steps, begin_adaptive, tune_reflection
from wellposed.status import Status

#: Residuals of x, in targets, below which z is evaluated: those of z are mostly 0.4 to 0.9 of them, for some W below 0.3.
NEAR = 4.0
#: x is not a guide where its residual is below this many roundings of what it is computed from, or this many times |f(x)|:
#: z = s(u) may be tiny, and known to all its digits, where u and x are not (a sigmoid of -30).
ROUNDINGS, FAR = 8.0, 1e4
#: Residuals below this many roundings of |f(z)| that do not halve in twice as many steps are at their floor.
FLOOR = 200.0


class AbstractSplitMap(AbstractMap):
    """f(z) = prox_1(W z + c): an affine operator, then a proximal operator."""

    @abc.abstractmethod
    def affine(self, z: Tensor) -> Tensor:
        """W z + c."""

    @abc.abstractmethod
    def resolvent(self, v: Tensor, step_size: float) -> Tensor:
        """The z solving z + step_size ((I - W) z - c) = v."""

    @abc.abstractmethod
    def prox(self, v: Tensor, step_size: float | Tensor) -> Tensor:
        """The proximal operator of step_size times the potential; a tensor is (batch, 1)."""

    def reflect(self, v: Tensor, step_size: float) -> Tensor:
        """2 prox(v) - v, a new tensor."""
        return torch.lerp(v, self.prox(v, step_size), 2.0)

    @abc.abstractmethod
    def monotonicity(self) -> tuple[float, float]:
        """(m, L): a lower bound of lambda_min(sym(I - W)) and an upper bound of |I - W|."""

    @abc.abstractmethod
    def affine_at_zero(self) -> Tensor:
        """(batch, features) c; never written to."""

    def affine_at_start(self, z: Tensor) -> Tensor:
        """W z + c, without a product if all of z is 0; never written to."""
        return self.affine(z) if bool(z.any()) else self.affine_at_zero()

    def probe(self) -> AbstractSplitMap | None:
        """A map of a few fixed samples with the same W and prox, for measurements; or None."""
        return None

    def tuned(self, name: str, tune: Callable[[float | None], float]) -> float:
        """What `tune` finds for this W, given what it found last; remembered by maps that can."""
        return tune(None)


class AbstractSplitting(AbstractSolver):
    """A solver that needs an `AbstractSplitMap`."""


def _as_split(f: AbstractMap, solver: str) -> AbstractSplitMap:
    if not isinstance(f, AbstractSplitMap):
        raise InvalidType(
            f"{solver} needs a map with a resolvent and a prox, such as an EquilibriumLayer over DenseCell(ReLU()); "
            "a plain function has neither. Use Auto(), Anderson() or NewtonKrylov() for it."
        )
    return f


def _check_step_size(solver: str, step_size: object) -> None:
    if step_size is not None and not isinstance(step_size, TunedStep):
        check_interval(solver, "step_size", step_size, low=0.0)


def _certified(split: AbstractSplitMap, solver: str) -> tuple[float, float]:
    """(m, L) with m > 0, or an error."""
    m, L = split.monotonicity()
    if m <= 0:
        raise InvalidArgument(
            f"{solver}() found no certified step size: sym(I - W) >= m holds only with m = {m:.3g}, and m must be "
            "positive. Give the cell a monotone parametrization, or choose step_size yourself."
        )
    return m, L


@dataclass(frozen=True)
class ForwardBackward(AbstractSplitting):
    r"""z <- prox_a(z - a ((I - W) z - c)), [winston2020].

    With I - W >= m and |I - W| <= L the factor is at most sqrt(1 - 2 a m + a^2 L^2), below 1 for a
    in the *open* interval (0, 2m/L^2) and least at a = m/L^2 ([nguyen2022] prints the interval
    closed in one place; at its end the factor is 1). Costs one product a step, which also gives the
    residual.

    Args:
        step_size: a. None takes m/L^2 from the map's own rigorous bounds, and refuses a map that is
            not monotone. `TunedStep()` takes for every sample the step of least factor along its
            last displacement, which is never shorter than m/L^2, twice before it measures again. A
            sample that in 20 steps does not show a tenth of the contraction it measured takes steps
            of at most half the length, and is given three times as many to show it, so that at the
            latest in the interval above it makes progress; longer ones are allowed again, slowly,
            while it does.
    """

    step_size: float | TunedStep | None = None

    def __post_init__(self) -> None:
        _check_step_size("ForwardBackward", self.step_size)

    def init(self, f: AbstractMap, point: Point) -> dict[str, Any]:
        split = _as_split(f, "ForwardBackward")
        if isinstance(self.step_size, TunedStep):
            return begin_adaptive(split, point)
        if self.step_size is not None:
            return {"step_size": self.step_size}
        m, L = _certified(split, "ForwardBackward")
        return {"step_size": m / L**2}

    @property
    def skips(self) -> bool:
        return not isinstance(self.step_size, TunedStep)  # a tuned one keeps its own time

    def step(self, state: dict[str, Any], f: AbstractMap, point: Point) -> Step:
        split = _as_split(f, "ForwardBackward")
        if isinstance(self.step_size, TunedStep):
            return adaptive_steps(state, split, point)
        a, z = state["step_size"], point.z
        affine = state.pop("affine", None)
        affine = split.affine_at_start(z) if affine is None else affine
        for _ in range(1 + point.skip):
            z = split.prox(torch.lerp(z, affine, a) if a != 1 else affine, a)
            affine = split.affine(z)
        state["affine"] = affine
        return Step(z, split.prox(affine, 1.0), 1 + point.skip)


@dataclass(frozen=True)
class PeacemanRachford(AbstractSplitting):
    r"""Reflects at the affine part and at the prox in turn:

        u' = 2z - u,   x = (I + a(I - W))^(-1) (u' + a c),   u = 2x - u',   z = prox_a(u)

    [nguyen2022, 2.3.2].
    Converges for every a > 0 when I - W >= m > 0, with factor at most sqrt(1 - 4am/(1 + aL)^2),
    least at a = 1/L.

    Costs one resolvent a step. W x + c = ((1 + a) x - u')/a needs no product, so f(x) and the
    residual at x are free, and the points of the run are the x; a sample whose x is about to meet
    its tolerance, or whose budget ends, is evaluated at z instead, by a product, and that honest
    residual is the one that counts. A sample that stays where the rounding of the resolvent keeps
    it, close to its tolerance, continues with `ForwardBackward(TunedStep())`, which loses fewer
    digits.

    Args:
        step_size: a. None takes 1/L from the map's own rigorous bounds; `TunedStep()` measures.

    Examples:
        >>> import torch, wellposed as wp
        >>> cell = wp.nn.DenseCell(4, 16, weight=wp.nn.Monotone(margin=0.5))
        >>> layer = wp.EquilibriumLayer(cell, wp.PeacemanRachford(step_size=None))
        >>> layer.solve(torch.ones(2, 4)).status
        StatusArray(CONVERGED: 2)
    """

    step_size: float | TunedStep | None = 1.0

    def __post_init__(self) -> None:
        _check_step_size(type(self).__name__, self.step_size)

    def init(self, f: AbstractMap, point: Point) -> dict[str, Any]:
        split = _as_split(f, type(self).__name__)
        if isinstance(self.step_size, TunedStep):
            a = split.tuned("reflection", lambda start: tune_reflection(split, start))
        else:
            a = 1.0 / _certified(split, type(self).__name__)[1] if self.step_size is None else self.step_size
        known = point.z.any(dim=1, keepdim=True)  # a start of zeros says nothing, and shall cost nothing
        if not bool(known.any()):
            return {"u": point.z, "z": point.z, "step_size": a}
        # u* = z* + a (W z* + c - z*) is the u whose prox is z*, so this one is as near to u* as z0 is to z*; u = z0 is not.
        u = torch.where(known, torch.lerp(point.z, split.affine(point.z), a), point.z)
        return {"u": u, "z": torch.where(known, split.prox(u, a), point.z), "step_size": a}

    @property
    def skips(self) -> bool:
        return True

    def stages(self) -> list[tuple[AbstractSolver, AbstractSwitchingRule | None]]:
        return [(self, _LeaveFloor()), (ForwardBackward(TunedStep()), None)]

    def step(self, state: dict[str, Any], f: AbstractMap, point: Point) -> Step:
        split = _as_split(f, type(self).__name__)
        u, z, a = state["u"], state["z"], state["step_size"]
        reflected = torch.lerp(u, z, 2.0)  # 2z - u
        for _ in range(point.skip):
            u = self._combine(u, reflected, split.resolvent(reflected, a))
            reflected = split.reflect(u, a)
        x = split.resolvent(reflected, a)
        fx = split.prox(torch.lerp(reflected, x, 1 + 1 / a), 1.0)  # W x + c = x - (u' - x)/a
        exact = self._wants_z(x, fx, reflected, a, point)
        u = self._combine(u, reflected, x)
        z = split.prox(u, a)
        state["u"], state["z"] = u, z
        return self._measured(f, z, x, fx, point, exact)

    @staticmethod
    def _wants_z(x: Tensor, fx: Tensor, reflected: Tensor, a: float, point: Point) -> Tensor:
        """(batch,) bool: where z is to be evaluated, judged by the present point alone."""
        r = torch.linalg.vector_norm(fx - x, dim=1)
        rounding = torch.finfo(r.dtype).eps * (1 + 1 / a) * torch.linalg.vector_norm(reflected, dim=1)
        far = r > FAR * torch.linalg.vector_norm(fx, dim=1)
        return (r <= NEAR * point.target) | (r <= ROUNDINGS * rounding) | far

    @staticmethod
    def _measured(f: AbstractMap, z: Tensor, x: Tensor, fx: Tensor, point: Point, exact: Tensor) -> Step:
        """x with f(x) where that is far from done; z with f(z) evaluated elsewhere."""
        steps = 1 + point.skip
        exact = exact | (point.budget <= steps)
        rows = exact.nonzero().squeeze(1)
        if rows.shape[0] == 0:
            return Step(x, fx, steps)
        if rows.shape[0] == x.shape[0]:
            return Step(z, f(z), steps)
        z = z.index_select(0, rows)
        return Step(x.index_copy(0, rows, z), fx.index_copy(0, rows, f.take(rows)(z)), steps)

    @staticmethod
    def _combine(u: Tensor, reflected: Tensor, resolved: Tensor) -> Tensor:
        """The next u; may overwrite `reflected`."""
        return torch.lerp(reflected, resolved, 2.0, out=reflected)  # 2x - u'

    def advice(self, status: Status, rate: float) -> str:
        if status is not Status.NOT_FINITE:
            return super().advice(status, rate)
        return (
            "Check f and its input for NaN or overflow near this sample. If they are finite, the resolvent was not solved "
            "(a large zero-padded convolution): take a smaller step_size, or ForwardBackward(TunedStep())."
        )


@dataclass(frozen=True)
class DouglasRachford(PeacemanRachford):
    """Peaceman-Rachford averaged with the identity: u <- u + x - z. Slower; m = 0 is enough.

    Args:
        step_size: a, as in `PeacemanRachford`.

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.MonotoneDEQ(4, 16, margin=0.5, solver=wp.DouglasRachford())
        >>> model.solve(torch.ones(2, 4)).status
        StatusArray(CONVERGED: 2)
    """

    @staticmethod
    def _combine(u: Tensor, reflected: Tensor, resolved: Tensor) -> Tensor:
        return torch.lerp(u, torch.lerp(reflected, resolved, 2.0, out=reflected), 0.5)


class _LeaveFloor(AbstractSwitchingRule):
    """Finds samples that no longer come nearer, within some roundings of their equilibrium."""

    def __init__(self) -> None:
        self._r: dict[int, Tensor] = {}  # norms at the steps at which all are measured

    def decide(self, count: int, point: Point) -> Tensor | None:
        if count not in JUDGED_AT:
            return None
        self._r[count] = point.r
        if count < 20:
            return None
        near = point.r <= FLOOR * torch.finfo(point.r.dtype).eps * torch.linalg.vector_norm(point.fz, dim=1)
        return near & (point.r > 0.5 * self._r[count // 2])

    def take(self, rows: Tensor) -> None:
        self._r = {count: r[rows] for count, r in self._r.items()}
