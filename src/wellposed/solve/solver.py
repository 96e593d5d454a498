"""What a solver is, and the simplest one: it takes an evaluated point to the next evaluated point.

Tolerances, budgets, statuses, best points and samples that leave belong to the loop (`loop.py`).
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from wellposed._checks import check_interval
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.solve._samples import JUDGED_AT, ActiveSamples, Array, to_device
from wellposed.status import Status

if TYPE_CHECKING:
    from wellposed.solve.map import AbstractMap


#: Numbers per sample.
Numbers = TypeVar("Numbers", Tensor, Array)


#: Evaluations that taking rows out must save, in units of `AbstractMap.idle_part`: 0 where it costs only copies.
SAVED = 3.0


def is_built_in(*objects: object) -> bool:
    """Whether all objects are of classes of this package, not of subclasses defined elsewhere."""
    return all(type(one).__module__.partition(".")[0] == "wellposed" for one in objects)


@dataclass(frozen=True)
class Tolerance:
    """A sample is done when |f(z) - z| <= max(rtol |f(z)|, atol)."""

    rtol: float
    atol: float

    def target(self, f_norm: Numbers) -> Numbers:
        """(batch,) the |f(z) - z| at which a sample is done; a tensor, or an array of the host."""
        target = f_norm * self.rtol
        return target.clip(min=self.atol) if self.atol > 0 else target


@dataclass
class Point:
    """An evaluated point of every active sample.

    Attributes:
        z: (batch, features) the point.
        fz: (batch, features) f at it.
        g: (batch, features) fz - z. The loop reuses this memory: copy it to keep it.
        r: (batch,) |g|.
        target: (batch,) the |g| at which a sample is done.
        evaluations: (batch,) evaluations each sample has taken part in.
        max_steps: How many it may take part in; every sample here has at least one left.
        spare: A buffer of the shape of z that may be overwritten, or None.
        skip: Steps to take, for a solver that `skips`, before the one that is returned.
        trail: The points before z, if plain steps led from each to the next; may be empty.
        due: (batch,) on the host: the samples that a switching rule may judge now; None for all.
    """

    z: Tensor
    fz: Tensor
    g: Tensor
    r: Tensor
    target: Tensor
    evaluations: Tensor
    max_steps: int
    spare: Tensor | None = None
    skip: int = 0
    trail: tuple[Tensor, ...] = ()
    due: Array | None = None

    @property
    def budget(self) -> Tensor:
        """(batch,) evaluations each sample may still use."""
        return self.max_steps - self.evaluations

    @classmethod
    def measured(cls, samples: ActiveSamples, g: Tensor, r: Array, target: Array, max_steps: int, **more: Any) -> Point:
        """The present point of all samples, given |g| and the |g| at which each is done."""
        device = g.device
        evaluations = to_device(samples.evaluations, device)
        r_, target_ = to_device(r, device), to_device(target, device)
        return cls(samples.z, samples.fz, g, r_, target_, evaluations, max_steps, trail=samples.trail, **more)

    def taken(self, rows: Tensor, samples: ActiveSamples) -> Point:
        """The same for some rows, which are `samples`."""
        g, r, target = self.g.index_select(0, rows), self.r[rows], self.target[rows]
        evaluations = to_device(samples.evaluations, rows.device)
        return Point(samples.z, samples.fz, g, r, target, evaluations, self.max_steps, trail=samples.trail)


@dataclass
class Step:
    """What a step returns: the next point, f at it, and its evaluations (per sample or for all)."""

    z: Tensor
    fz: Tensor
    evaluations: int | Tensor = 1


def check_step(solver: AbstractSolver, step: Any, point: Point, *, counted: bool) -> None:
    """Raises for a step that is not the next evaluated point of every row.

    Args:
        solver: The method. step: What it returned at `point`.
        point: The point.
        counted: Whether the map counts its evaluations, and those of the step are not read.
    """
    owner = f"{type(solver).__name__}.step"
    if not isinstance(step, Step):
        raise InvalidType(f"{owner} must return a Step(z, fz), the next point and f at it; got {type(step).__name__}.")
    for name, rows in (("z", step.z), ("fz", step.fz)):
        if rows.shape != point.z.shape or rows.dtype != point.z.dtype:
            raise InvalidArgument(
                f"{owner} must keep the shape and dtype of Point.z, {tuple(point.z.shape)} and {point.z.dtype}; "
                f"Step.{name} has {tuple(rows.shape)} and {rows.dtype}."
            )
    claimed = step.evaluations
    if counted or (isinstance(claimed, int) and claimed >= 1):
        return
    if isinstance(claimed, int) or (not is_built_in(solver) and bool((claimed < 1).any())):
        raise InvalidArgument(f"{owner} must report at least 1 evaluation of f; Step.evaluations is {claimed}.")


class AbstractSolver(abc.ABC):
    """A method for z = f(z). Immutable: the memory of a run is in its state.

    A product with the Jacobian of f counts as one evaluation of f.
    """

    #: The batch is compacted once this part of it is idle: about when the copy of z, and of the
    #: state, costs less than the evaluations saved.
    idle_part: ClassVar[float] = 1 / 16
    #: Whether `step` passes `Point.spare` to f, and keeps no tensor of a point beyond that step.
    uses_spare: ClassVar[bool] = False

    @property
    def is_plain(self) -> bool:
        """Whether a step is z <- f(z) and nothing else: the loop may then take some by itself."""
        return False

    @property
    def skips(self) -> bool:
        """Whether `step` takes `Point.skip` more steps, cheaper since none is measured."""
        return False

    @abc.abstractmethod
    def init(self, f: AbstractMap, point: Point) -> Any:
        """The state of a run that starts at `point`."""

    @abc.abstractmethod
    def step(self, state: Any, f: AbstractMap, point: Point) -> Step:
        """The next evaluated point. Row i depends only on row i of the arguments."""

    def take(self, state: Any, rows: Tensor) -> Any:
        """The state of the samples `rows`: every tensor in it is batch first, unless overridden."""
        if state is None:
            return None
        return {key: value[rows] if isinstance(value, Tensor) else value for key, value in state.items()}

    def takes_out(self, f: AbstractMap, part: float, ahead: int) -> bool:
        """Whether a part of the samples, idle, is taken out with `ahead` steps planned (or 0).

        Steps taken with them count as planned: what was wasted is at most what leaving costs.
        """
        if f.leaves_at_once and not (f.built_in or (ahead and f.idle_part)):
            return True
        least = max(self.idle_part, min(f.idle_part, 0.5))
        return part >= least and (not ahead or part * ahead >= SAVED * f.idle_part)

    def stages(self) -> list[tuple[AbstractSolver, AbstractSwitchingRule | None]]:
        """The solvers to run in turn, each with the rule that passes a sample to the next."""
        return [(self, None)]

    def advice(self, status: Status, rate: float) -> str:
        """What to try when a sample ended with `status`.

        Args:
            status: Not CONVERGED.
            rate: The measured factor of the residual per step.
        """
        return advice(status, rate)


class AbstractSwitchingRule(abc.ABC):
    """Decides, per sample, when the next solver of `AbstractSolver.stages` takes over."""

    #: Whether it judges samples at `JUDGED_AT` only, by their last points (`Point.trail`). If not, it is
    #: asked at every step that is measured.
    uses_trail: ClassVar[bool] = False
    #: Plain steps after which samples are measured: more where a step costs little. Read after `judges_all`.
    stride: int = 1
    #: Read after `judges_all` too.
    judged_at: frozenset[int] = JUDGED_AT

    def keeps(self, step: int) -> bool:
        """Whether the point before a step is one of the three before a judgement."""
        at = self.judged_at
        return self.uses_trail and (step in at or step + 1 in at or step + 2 in at)

    def judges_all(self, cost: tuple[float, int] | None) -> bool:
        """Whether all samples, not only slow ones, are measured at `JUDGED_AT`.

        Asked before a stage, with `AbstractMap.cost`.
        """
        return True

    @abc.abstractmethod
    def decide(self, count: int, point: Point) -> Tensor | Array | None:
        """(batch,) bool, or None for none, after `count` steps of the stage.

        Must judge each sample by the points of that sample alone, and only where it is
        `Point.due`; other samples are not passed on.
        """

    @abc.abstractmethod
    def take(self, rows: Tensor) -> None:
        """Keeps only these rows."""


@dataclass(frozen=True)
class Picard(AbstractSolver):
    r"""Fixed-point iteration z <- (1 - damping) z + damping f(z).

    With damping 1 (the default, no damping) it converges from any start when f contracts, at the
    rate of its contraction factor. A damping below 1 also handles maps whose Jacobian has
    eigenvalues with real part below 1 and modulus above. Costs one evaluation of f a step and no
    memory.

    Args:
        damping: In (0, 1].
    """

    uses_spare: ClassVar[bool] = True
    damping: float = 1.0

    def __post_init__(self) -> None:
        check_interval("Picard", "damping", self.damping, low=0.0, high=1.0)

    @property
    def is_plain(self) -> bool:
        return self.damping == 1.0

    def init(self, f: AbstractMap, point: Point) -> None:
        return None

    def step(self, state: None, f: AbstractMap, point: Point) -> Step:
        if self.damping == 1.0:
            z = point.fz
        else:
            z = torch.add(point.z, point.g, alpha=self.damping)
        return Step(z, f(z, out=point.spare))


#: A mean factor of the residual per step from which on a standstill cannot be excluded.
SLOW = 0.99


def check_options(f: Any, solver: Any, *, name: str = "f") -> None:
    """Checks the map (called `name`) and the solver of a solve."""
    if not callable(f):
        raise InvalidType(f"{name} must be callable; got {type(f).__name__}.")
    if not isinstance(solver, AbstractSolver):
        hint = " Choices are objects: give Anderson(), not its name or class." if isinstance(solver, (str, type)) else ""
        raise InvalidType(f"solver must be a solver such as Auto() or Anderson(); got {solver!r}.{hint}")


def advice(status: Status, rate: float, others: tuple[str, ...] = ("Auto()", "NewtonKrylov()")) -> str:
    """The advice of most solvers, with the solvers to try instead."""
    if status is Status.NOT_FINITE:
        grew = " If they are finite, the iteration diverges: constrain the cell, e.g. with Spectral(bound=0.95)."
        return "Check f and its input for NaN, overflow or division by zero near this sample." + (grew if rate > 1 else "")
    if status is Status.MAX_STEPS and rate < 1:
        return f"Raise max_steps, loosen rtol, or try {others[-1]}.{if_it_stagnates(rate)}"
    return (
        f"The map may not contract, or may have no fixed point: try {' or '.join(others)}, or constrain the cell, "
        "e.g. with Spectral(bound=0.95)."
    )


def if_it_stagnates(rate: float) -> str:
    """What a mean factor near 1 leaves open: a slow map, or one that came to a standstill."""
    slow = "If the residual is the same after more steps, the map may have no fixed point: constrain the cell."
    return f" {slow}" if rate > SLOW else ""
