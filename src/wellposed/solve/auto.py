"""The default solver: chooses while running."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from wellposed.errors import InvalidType
from wellposed.solve._samples import FIXED, JUDGED_AT
from wellposed.solve.anderson import Anderson
from wellposed.solve.map import AbstractMap
from wellposed.solve.newton import NewtonKrylov
from wellposed.solve.solver import AbstractSolver, AbstractSwitchingRule, Picard, Point, Step
from wellposed.status import Status

#: Below this many remaining plain steps nothing else can pay, and nothing else is measured.
FEW_STEPS = 10.0
#: What a step of Anderson acceleration costs, in plain steps of a dense cell, and how many it needs to build up its memory.
ACCELERATED_COST, WARM_UP = 1.5, 6.0
#: Anderson gives up if it is predicted to need more than this many further steps.
MANY_STEPS = 50.0


@dataclass(frozen=True)
class Auto(AbstractSolver):
    r"""Plain iteration as long as that is cheapest, then Anderson acceleration, then Newton-Krylov.

    Every sample is judged by its own residuals alone, after 5, 10, 20, ... steps of a stage, so its
    answer does not depend on its neighbours. From the last residuals g_k the factor q of plain
    iteration is measured, and with it the number N of plain steps to the tolerance is predicted. A
    sample switches

    - from `Picard` to `Anderson` if it does not contract (q >= 1), if N exceeds its budget, or if
      acceleration is predicted to cost less: with c the factor by which the least-squares
      combination of the last three residuals is below |g_k|, its predicted factor is q c^(1/3) per
      step. (For a map whose spectrum fills a disk, e.g. a random or orthogonal W, c is near 1 and
      plain steps are as good as any; for a smoothing map they are not.)
    - from `Anderson` back to `Picard` if its residuals stall or its own predicted N is large: at a
      kink acceleration can be stuck where plain steps are not;
    - from there to `NewtonKrylov` if plain steps do not contract, or N exceeds the budget.

    These predictions decide only about cost; the answer is judged by the residual, as with any
    solver.

    Args:
        plain, accelerated, newton: The solvers of the three stages.
    """

    plain: Picard = field(default_factory=Picard)
    accelerated: Anderson = field(default_factory=Anderson)
    newton: NewtonKrylov = field(default_factory=NewtonKrylov)

    def __post_init__(self) -> None:
        for name, kind in (("plain", Picard), ("accelerated", Anderson), ("newton", NewtonKrylov)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidType(f"The {name!r} parameter of Auto must be a {kind.__name__}; got {getattr(self, name)!r}.")

    def stages(self) -> list[tuple[AbstractSolver, AbstractSwitchingRule | None]]:
        return [
            (self.plain, _LeavePlain()),
            (self.accelerated, _LeaveAccelerated()),
            (self.plain, _LeaveReturned()),
            (self.newton, None),
        ]

    def init(self, f: AbstractMap, point: Point) -> None:
        raise NotImplementedError("Auto has no own steps: the loop runs its stages.")

    def step(self, state: None, f: AbstractMap, point: Point) -> Step:
        raise NotImplementedError("Auto has no own steps: the loop runs its stages.")

    def advice(self, status: Status, rate: float) -> str:  # the other solvers were tried already
        if status is Status.MAX_STEPS and rate < 1:
            return "Raise max_steps or loosen rtol."
        if status is Status.NOT_FINITE:
            return super().advice(status, rate)
        return (
            "The map may not contract, or may have no fixed point: constrain the cell, e.g. with Spectral(bound=0.95), or try "
            "another start."
        )


class _LeavePlain(AbstractSwitchingRule):
    """From plain iteration to Anderson acceleration.

    Norms are compared first, since they are known; residual vectors are kept only while a sample is
    slow.
    """

    def __init__(self) -> None:
        self._before: tuple[int, Tensor] | None = None  # the last step at which all were measured, and the norms
        self._g: list[Tensor] = []  # the last residual vectors, while they are needed

    @property
    def needs_next_step(self) -> bool:
        return bool(self._g)

    def decide(self, count: int, point: Point) -> Tensor | None:
        before = self._before
        if count in FIXED:
            self._before = (count, point.r)
        if before is None or (count not in JUDGED_AT and not self._g):
            return None
        q = (point.r / before[1]) ** (1.0 / (count - before[0]))
        remaining = _steps_to_target(point, q)
        slow = remaining > FEW_STEPS
        if not bool(slow.any()):
            self._g = []
            return None
        if len(self._g) < 2:
            self._g.append(point.g.clone())
            return slow & ((q >= 1) | (remaining > point.budget))
        cut = _extrapolated(self._g[0], self._g[1], point.g) / point.r
        self._g = []
        accelerated = ACCELERATED_COST * _steps_to_target(point, q * cut ** (1 / 3)) + WARM_UP
        return slow & ((q >= 1) | (remaining > point.budget) | (accelerated < remaining))

    def take(self, rows: Tensor) -> None:
        self._before = None if self._before is None else (self._before[0], self._before[1][rows])
        self._g = [g[rows] for g in self._g]


class _LeaveAccelerated(AbstractSwitchingRule):
    """From Anderson acceleration back to plain iteration."""

    def __init__(self) -> None:
        self._r: list[Tensor] = []  # least residual up to each step

    def decide(self, count: int, point: Point) -> Tensor | None:
        least = torch.minimum(self._r[-1], point.r) if self._r else point.r
        self._r.append(least)
        if count < 16 or count not in JUDGED_AT:
            return None
        q = (least / self._r[count // 2]) ** (1.0 / (count - count // 2))
        remaining = _steps_to_target(point, q)
        return (remaining > MANY_STEPS) | (remaining > point.budget)

    def take(self, rows: Tensor) -> None:
        self._r = [r[rows] for r in self._r]


class _LeaveReturned(AbstractSwitchingRule):
    """From plain iteration, after acceleration has failed, to Newton-Krylov.

    Residuals may rise at first, so a rate counts only after twenty steps; before that, only growth
    does.
    """

    def __init__(self) -> None:
        self._r: dict[int, Tensor] = {}  # norms at the steps at which all were measured

    def decide(self, count: int, point: Point) -> Tensor | None:
        if count not in FIXED:
            return None
        self._r[count] = point.r
        if count < 20:
            return point.r > 10 * self._r[0]
        q = (point.r / self._r[count // 2]) ** (2.0 / count)
        return (q >= 1) | (_steps_to_target(point, q) > point.budget)

    def take(self, rows: Tensor) -> None:
        self._r = {count: r[rows] for count, r in self._r.items()}


def _steps_to_target(point: Point, q: Tensor) -> Tensor:
    """(batch,) predicted steps at the factor q per step; infinite if q >= 1."""
    steps = torch.log(point.target / point.r) / torch.log(q)
    return torch.where(q < 1, steps, torch.full_like(steps, torch.inf))


def _extrapolated(older: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """(batch,) the least norm of an affine combination of three residuals."""
    basis = torch.stack((new - old, old - older, new), dim=1)
    gram = torch.bmm(basis, basis.transpose(1, 2)).double()
    a, b, c = gram[:, 0, 0], gram[:, 0, 1], gram[:, 1, 1]
    p, q, square = gram[:, 0, 2], gram[:, 1, 2], gram[:, 2, 2]
    # project `new` off d1, then off what d2 adds to d1
    a = a.clamp_min(torch.finfo(torch.float64).tiny)
    c_rest = c - b * b / a
    q_rest = q - b * p / a
    usable = c_rest > 1e-6 * c
    gain = p * p / a + torch.where(usable, q_rest * q_rest / torch.where(usable, c_rest, torch.ones_like(c_rest)), 0.0)
    return torch.sqrt((square - gain).clamp_min(0.0)).to(new.dtype)
