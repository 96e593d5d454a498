"""What a solver is, and the simplest one: it takes an evaluated point to the next evaluated point.

Tolerances, budgets, statuses, best points and samples that leave belong to the loop (`loop.py`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from wellposed._checks import check_interval
from wellposed._torch import sequence_number
from wellposed._tree import Array, give_buffer, take_buffer, to_device
from wellposed.solve._samples import FEW_STEPS, JUDGED_AT, ActiveSamples, Numbers, Outcome, ResidualSchedule
from wellposed.status import Status, advice

if TYPE_CHECKING:
    from wellposed.solve.map import AbstractMap


ENOUGH_FREE = 2  #: Buffers kept for f to write to; a step needs one.
#: Evaluations that taking rows out must save, in units of `AbstractMap.idle_part`: 0 where it costs only copies.
SAVED = 3.0


def is_built_in(*objects: object) -> bool:
    """Whether all objects are of classes of this package, not of subclasses defined elsewhere."""
    return all(map(_is_own, map(type, objects)))


_is_own = cache(lambda kind: kind.__module__.partition(".")[0] == "wellposed")  # asked in every solve


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
        first: (batch,) on the host: |g| at the start of the run; None if it is not given.
        ahead: (batch, features) f(fz), if it is known; NaN in rows where it is not.
        evaluate: z -> (z, f(z)), if the loop evaluates f for a solver that `confirms`.
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
    first: Array | None = None
    ahead: Tensor | None = None
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

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
        more |= {"trail": samples.trail, "first": samples.first_r, "ahead": samples.ahead}
        return cls(samples.z, samples.fz, g, r_, target_, evaluations, max_steps, **more)

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


class AbstractSolver(abc.ABC):
    """A method for z = f(z). Immutable: the memory of a run is in its state.

    A product with the Jacobian of f counts as one evaluation of f.
    """

    #: The batch is compacted once this part of it is idle: about when the copy of z, and of the
    #: state, costs less than the evaluations saved.
    idle_part: ClassVar[float] = 1 / 16
    uses_spare: ClassVar[bool] = False  #: Whether `step` passes `Point.spare` to f, and keeps no tensor of a point.

    steps_once: ClassVar[bool] = False  #: Whether a step is one evaluation of f.
    confirms: ClassVar[bool] = False  #: Whether `step` uses `Point.evaluate`, if it is given, for its evaluation.

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
        """What to try when a sample failed, with the measured factor of its residual per step."""
        return advice(status, rate)


class AbstractSwitchingRule(abc.ABC):
    """Decides, per sample, when the next solver of `AbstractSolver.stages` takes over."""

    #: Whether it judges samples at `JUDGED_AT` only, by their last points (`Point.trail`). If not, it is
    #: asked at every step that is measured.
    uses_trail: ClassVar[bool] = False
    #: Plain steps after which samples are measured: more where a step costs little. Read after `judges_all`.
    stride: int = 1
    #: Read after `judges_all` too: where samples are judged, and how few steps beyond it a sample needs that is not.
    judged_at: frozenset[int] = JUDGED_AT
    few: float = FEW_STEPS
    affine: bool = False  #: Of the map of the stage.
    leaves_start: ClassVar[bool] = False  #: Whether it would pass on all samples of an affine map that plain steps lead away.

    def keeps(self, step: int) -> bool:
        """Whether the point before a step is one of the three before a judgement."""
        at = self.judged_at
        return self.uses_trail and (step in at or step + 1 in at or step + 2 in at)

    def judges_all(self, cost: tuple[float, int] | None, affine: bool) -> bool:
        """Whether all samples, not only slow ones, are measured at `JUDGED_AT`; asked first."""
        self.affine = affine
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


class Workspace:
    """Memory that f may write to, if it does; never that of `foreign` points of the caller."""

    def __init__(self, used: bool, foreign: tuple[Tensor, Tensor]) -> None:
        self.used, self.foreign = used, foreign
        self.lent: list[Tensor] = []  # buffers of full size
        self.free: list[Tensor] = []  # those, and other tensors of at least as many rows, without a reader

    def spare(self, rows: int) -> Tensor | None:
        """A buffer for f to write to, if it does."""
        if not self.used:
            return None
        if not self.free:
            self.lent.append(take_buffer(self.foreign[1]))
            self.free.append(self.lent[-1])
        return self.free.pop()[:rows]

    def release(self, old: Tensor, needed: Iterable[Tensor | None]) -> None:
        """Lets f write over an earlier point, unless it is one that is still needed."""
        if not self.used or len(self.free) >= ENOUGH_FREE:
            return
        if all(old is not other for other in (*self.foreign, *needed, *self.free)):
            self.free.append(old)

    def give_back(self, *others: Tensor, unless: tuple[Tensor | None, ...]) -> None:
        """Returns its buffers, and others, except the memory of some tensors."""
        kept = {out.data_ptr() for out in unless if out is not None}
        for buffer in (*others, *self.lent):
            if buffer.data_ptr() not in kept:
                give_buffer(buffer)


class LastStep:
    """The evaluation of a whole batch that is likely to be the last: it confirms all answers.

    If it is expected to be the last, and a `graph` is wanted, it is recorded.
    """

    def __init__(self, f: AbstractMap, graph: bool, outcome: Outcome, schedule: ResidualSchedule) -> None:
        self._f, self._graph, self._outcome, self._schedule = f, graph, outcome, schedule
        self.recorded: tuple[Tensor, int] | None = None  # the value with its graph, and a `sequence_number` from before it

    def __call__(self, count: int, idle: Array | None, held: Any, z: Tensor) -> tuple[Tensor, Tensor]:
        """z with its finished rows, `idle` or `held` back, at their answers, and f there."""
        done, answers = (idle, self._outcome.value) if held is None else held
        if done is not None:
            z = torch.where(to_device(done, z.device).unsqueeze(1), answers, z)
        self.recorded, since = None, sequence_number()
        if not (self._graph and self._schedule.expects_all(count, idle)):
            return z, self._f(z)
        with torch.enable_grad():
            value = self._f.tracked(z)
        self.recorded = value, since
        return z, value.detach()
