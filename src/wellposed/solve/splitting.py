"""Splitting methods for monotone equilibria: z = prox(W z + c) with I - W strongly monotone.

They ask the map for what they need (an affine part, a resolvent, a proximal operator), not for a network. The adjoint
equation of a monotone cell has the same form, so they serve backward passes as well.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.solve._map import AbstractMap
from wellposed.solve._solver import AbstractSolver, Point, Step, check_interval
from wellposed.solve._tuning import TunedStep, minimal_residual, tune_reflection

__all__ = [
    "AbstractSplitMap",
    "AbstractSplitting",
    "DouglasRachford",
    "ForwardBackward",
    "PeacemanRachford",
    "TunedStep",
]

#: Steps after which a tuned forward-backward run is judged.
WINDOW = 20
#: The part of the contraction promised along its displacements that a run must show in a window.
LEAST_PROGRESS = 0.1
#: Steps over which one relaxation is measured, the first one, the factor between two, and the largest.
TRIAL, FIRST_OVER, OVER_FACTOR, MOST_OVER = 6, 1.2, 1.15, 1.7
#: After a window with progress the longest step may be this much longer.
LENGTHEN = 1.5


class AbstractSplitMap(AbstractMap):
    """f(z) = prox_1(W z + c): an affine operator followed by a proximal operator of some convex potential."""

    @abc.abstractmethod
    def affine(self, z: Tensor) -> Tensor:
        """W z + c."""

    @abc.abstractmethod
    def resolvent(self, v: Tensor, step_size: float) -> Tensor:
        """The z solving z + step_size ((I - W) z - c) = v."""

    @abc.abstractmethod
    def prox(self, v: Tensor, step_size: float | Tensor) -> Tensor:
        """The proximal operator of step_size times the potential; a tensor holds one step size per sample, (batch, 1)."""

    @abc.abstractmethod
    def monotonicity(self) -> tuple[float, float]:
        """(m, L): a lower bound of the least eigenvalue of sym(I - W) and an upper bound of |I - W|."""

    def affine_at_zero(self) -> Tensor:
        """(batch, features) c."""
        raise NotImplementedError(f"{type(self).__name__} does not tell its constant; a probe must.")

    def probe(self) -> AbstractSplitMap | None:
        """A map of a few fixed samples with the same W and prox, to measure contraction on; None if there is none."""
        return None

    def tuned(self, name: str, tune: Callable[[float | None], float]) -> float:
        """What `tune` finds for this W, given what it found last; remembered by maps that can."""
        return tune(None)


class AbstractSplitting(AbstractSolver):
    """A solver that needs an `AbstractSplitMap`."""


def _as_split(f: AbstractMap, solver: str) -> AbstractSplitMap:
    if not isinstance(f, AbstractSplitMap):
        raise InvalidType(
            f"{solver} needs a map that knows its resolvent and prox, such as an EquilibriumLayer over DenseCell(ReLU()); "
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

    With I - W >= m and |I - W| <= L the factor is at most sqrt(1 - 2 a m + a^2 L^2), below 1 for a in the *open* interval
    (0, 2m/L^2) and least at a = m/L^2 ([nguyen2022] prints the interval closed in one place; at its end the factor is 1).
    Costs one product a step, which also gives the residual.

    Args:
        step_size: a. None takes m/L^2 from the map's own rigorous bounds, and refuses a map that is not monotone.
            `TunedStep()` takes for every sample the step of least factor along its last displacement, which is never
            shorter than m/L^2. A sample that in 20 steps does not show a tenth of the contraction it measured takes steps
            of at most half the length, and is given three times as many to show it, so that at the latest in the interval
            above it makes progress; longer ones are allowed again, slowly, while it does.
    """

    step_size: float | TunedStep | None = None

    def __post_init__(self) -> None:
        _check_step_size("ForwardBackward", self.step_size)

    def init(self, f: AbstractMap, point: Point) -> dict[str, Any]:
        split = _as_split(f, "ForwardBackward")
        if isinstance(self.step_size, TunedStep):
            return _Adaptive.state(split, point)
        if self.step_size is not None:
            return {"step_size": self.step_size}
        m, L = _certified(split, "ForwardBackward")
        return {"step_size": m / L**2}

    def step(self, state: dict[str, Any], f: AbstractMap, point: Point) -> Step:
        split = _as_split(f, "ForwardBackward")
        if isinstance(self.step_size, TunedStep):
            return _Adaptive.step(state, split, point)
        a = state["step_size"]
        affine = state.pop("affine", None)
        affine = split.affine(point.z) if affine is None else affine
        z = split.prox(torch.lerp(point.z, affine, a) if a != 1 else affine, a)
        state["affine"] = split.affine(z)
        return Step(z, split.prox(state["affine"], 1.0))


class _Adaptive:
    """Forward-backward steps, each sample with its own step size; see `_tuning`."""

    @staticmethod
    def state(split: AbstractSplitMap, point: Point) -> dict[str, Any]:
        affine = split.affine(point.z)
        start = torch.lerp(point.z, split.prox(affine, 1.0), 0.5)
        affine_there = split.affine(start)
        d = start - point.z
        a, _ = minimal_residual(d, d - (affine_there - affine), 1.0, torch.inf)
        nothing = torch.zeros_like(a)
        return {
            "affine": affine,
            "step_size": torch.where(a > 0, a, 1.0),  # NaN where the start is the equilibrium
            "longest": torch.full_like(a, torch.inf),
            "promised": nothing,  # the sum of log factors since the last judgement
            "best": torch.full_like(a, torch.inf),  # the least |f(z) - z| seen, and where
            "best_z": point.z,
            "best_affine": affine,
            "reference": torch.full_like(a, torch.inf),  # `best` at the last judgement
            "over": torch.full_like(a, FIRST_OVER),  # by which steps are longer than the one of least factor
            "trend": torch.full_like(a, OVER_FACTOR),  # what it is multiplied with next
            "speed": torch.full_like(a, torch.inf),  # log |f(z) - z| per step of the last trial, and its beginning
            "begin": torch.full_like(a, torch.inf),
            "trial": torch.full_like(a, TRIAL),
            "due": torch.full_like(a, WINDOW),  # steps until the next judgement
            "window": torch.full_like(a, WINDOW),
        }

    @staticmethod
    def step(state: dict[str, Any], split: AbstractSplitMap, point: Point) -> Step:
        z, affine = point.z, state["affine"]
        r = point.r.unsqueeze(1)
        better = r < state["best"]
        state["best"] = torch.minimum(state["best"], r)
        state["best_z"] = torch.where(better, z, state["best_z"])
        state["best_affine"] = torch.where(better, affine, state["best_affine"])
        state["due"] = state["due"] - 1
        if bool((state["due"] == 0).any()):
            z, affine = _Adaptive._judge(state, z, affine, r)
        state["trial"] = state["trial"] - 1
        if bool((state["trial"] == 0).any()):
            _Adaptive._relax(state, r)
        a = state["step_size"]
        following = split.prox(torch.lerp(z, affine, a), a)
        affine_there = split.affine(following)
        d = following - z
        measured, log_factor = minimal_residual(d, d - (affine_there - affine), state["over"], state["longest"])
        usable = measured > 0  # not where nothing moved
        state["step_size"] = torch.where(usable, measured, a)
        state["promised"] = state["promised"] + torch.where(usable, log_factor, 0.0)
        state["affine"] = affine_there
        return Step(following, split.prox(affine_there, 1.0))

    @staticmethod
    def _relax(state: dict[str, Any], r: Tensor) -> None:
        """Goes on with longer (or shorter) steps while they are the faster ones, else turns round."""
        due = state["trial"] == 0
        speed = torch.log(r / state["begin"]) / TRIAL
        known = due & state["begin"].isfinite()
        slower = known & (speed > state["speed"])
        state["trend"] = torch.where(slower, 1 / state["trend"], state["trend"])
        state["over"] = torch.where(known, (state["over"] * state["trend"]).clamp(1.0, MOST_OVER), state["over"])
        state["speed"] = torch.where(known, speed, state["speed"])
        state["begin"] = torch.where(due, r, state["begin"])
        state["trial"] = torch.where(due, TRIAL, state["trial"])

    @staticmethod
    def _judge(state: dict[str, Any], z: Tensor, affine: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """Shorter steps for samples that break the promise of their displacements; back to the best point if they grew."""
        due = state["due"] == 0
        shown = torch.log(state["best"] / state["reference"])
        failed = due & (shown > LEAST_PROGRESS * state["promised"]) & state["reference"].isfinite()
        shorter = state["step_size"] / 2
        state["longest"] = torch.where(failed, shorter, torch.where(due, LENGTHEN * state["longest"], state["longest"]))
        state["step_size"] = torch.where(failed, shorter, state["step_size"])
        # |f(z) - z| may rise while z comes nearer; a window three times as long as the step is short shows in the end.
        state["window"] = torch.where(failed, 3 * state["window"], state["window"])
        state["due"] = torch.where(due, state["window"], state["due"])
        state["reference"] = torch.where(due, state["best"], state["reference"])
        state["promised"] = torch.where(due, 0.0, state["promised"])
        grown = failed & (r > 2 * state["best"])
        return torch.where(grown, state["best_z"], z), torch.where(grown, state["best_affine"], affine)


@dataclass(frozen=True)
class PeacemanRachford(AbstractSplitting):
    r"""Reflects at the affine part and at the prox in turn:

        u' = 2z - u,   x = (I + a(I - W))^(-1) (u' + a c),   u = 2x - u',   z = prox_a(u)        [nguyen2022, 2.3.2]

    Converges for every a > 0 when I - W >= m > 0, with factor at most sqrt(1 - 4am/(1 + aL)^2), least at a = 1/L.

    Costs one resolvent a step. W x + c = ((1 + a) x - u')/a needs no product, so f(x) and the residual at x are free, and the
    points of the run are the x; a sample whose x is about to meet its tolerance, or whose budget ends, is evaluated at z
    instead, by a product, and that honest residual is the one that counts.

    Args:
        step_size: a. None takes 1/L from the map's own rigorous bounds; `TunedStep()` measures.
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

    def step(self, state: dict[str, Any], f: AbstractMap, point: Point) -> Step:
        split = _as_split(f, type(self).__name__)
        u, z, a = state["u"], state["z"], state["step_size"]
        reflected = torch.lerp(u, z, 2.0)  # 2z - u
        x = split.resolvent(reflected, a)
        state["u"] = self._combine(u, z, reflected, x)
        state["z"] = split.prox(state["u"], a)
        fx = split.prox(torch.lerp(reflected, x, 1 + 1 / a), 1.0)  # W x + c = x - (u' - x)/a
        return self._measured(f, state["z"], x, fx, point)

    @staticmethod
    def _measured(f: AbstractMap, z: Tensor, x: Tensor, fx: Tensor, point: Point) -> Step:
        """x with f(x), where that is far from done; z with f(z) evaluated, where it is near."""
        r = torch.linalg.vector_norm(fx - x, dim=1)
        exact = (r <= 4 * point.target) | (point.budget <= 1)
        rows = exact.nonzero().squeeze(1)
        if rows.shape[0] == 0:
            return Step(x, fx)
        if rows.shape[0] == x.shape[0]:
            return Step(z, f(z))
        return Step(x.index_copy(0, rows, z[rows]), fx.index_copy(0, rows, f.take(rows)(z[rows])))

    @staticmethod
    def _combine(u: Tensor, z: Tensor, reflected: Tensor, resolved: Tensor) -> Tensor:
        return torch.lerp(reflected, resolved, 2.0)  # 2x - u'


@dataclass(frozen=True)
class DouglasRachford(PeacemanRachford):
    """Peaceman-Rachford averaged with the identity: u <- u + x - z. Slower, and converges for m = 0 as well.

    Args:
        step_size: a, as in `PeacemanRachford`.
    """

    @staticmethod
    def _combine(u: Tensor, z: Tensor, reflected: Tensor, resolved: Tensor) -> Tensor:
        return torch.sub(resolved, z).add_(u)
