"""The map whose fixed point is sought, seen as a function of rows.

Solvers know only `AbstractMap`: rows in, rows out, some rows taken, a Jacobian. `FunctionMap` makes one of any Python
function; a cell with structure (see `wellposed.nn`) supplies its own, with in-place products and a closed-form Jacobian.
A map whose rows should not be taken apart is made `Together`.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from wellposed.linalg.jacobian import AbstractJacobian, Jacobian

__all__ = ["AbstractMap", "RowsCoupled", "StandingRows", "Together", "differs", "is_built_in"]

#: Two evaluations of the same rows that differ by more than this many roundings of the row's largest entry are not the same.
ROUNDINGS = 32.0


def is_built_in(*objects: object) -> bool:
    """Whether the classes of all objects are those of this package: a subclass defined elsewhere is not."""
    return all(type(one).__module__.partition(".")[0] == "wellposed" for one in objects)


def differs(a: Tensor, b: Tensor) -> Tensor:
    """(batch,) whether rows that should be equal differ beyond rounding; where b is not finite nothing is said."""
    if b.shape[1] == 0:
        return torch.zeros(b.shape[0], dtype=torch.bool, device=b.device)
    scale = torch.where(b.isfinite(), b, 0.0).abs().amax(dim=1, keepdim=True)
    same = (a - b).abs() <= ROUNDINGS * torch.finfo(b.dtype).eps * scale
    return ~(same | ~b.isfinite()).all(dim=1)


class RowsCoupled(Exception):
    """Rows that stood still changed because others moved: the map is not row-wise. Caught by `_closing.py`.

    Attributes:
        value: (batch, features) what the samples have come to, and
        evaluations: the evaluations of f so far: both filled in by the loop.
        within: Those of the step in which it was found: filled in by the solver, if there were any before.
    """

    value: Tensor
    evaluations: int = 0
    within: int = 0


class AbstractMap(abc.ABC):
    """A row-wise map: row i of the output depends on row i of the input alone, (batch, features) both."""

    #: Whether `out=` of `__call__` is really used; if not the loop keeps no spare buffers.
    writes_out: bool = False
    #: Whether f cannot turn finite numbers into NaN or infinity, short of growing for many steps: then the loop need not
    #: look at every step.
    steady: bool = False

    @property
    def built_in(self) -> bool:
        """Whether the map is known to be row-wise and deterministic, so that no evaluation need confirm an answer."""
        return False

    @property
    def leaves_at_once(self) -> bool:
        """Whether a sample that has finished takes part in no further evaluation at all, because every one is counted.

        If not, it stays until taking it out is paid back by the evaluations saved: see `AbstractSolver.idle_part`.
        """
        return not self.built_in

    @abc.abstractmethod
    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        """f of every row; may write into `out`, a buffer of the same shape that nobody else reads."""

    def tracked(self, z: Tensor) -> Tensor:
        """f of every row, out of place, as autograd should see it. By default `f(z)`."""
        return self(z)

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors, besides z, that f is known to depend on, in the form in which `tracked` uses them."""
        return ()

    def with_inputs(self, *inputs: Tensor) -> AbstractMap:
        """The same map with other tensors in the place of `inputs()`."""
        return self

    @abc.abstractmethod
    def take(self, rows: Tensor) -> AbstractMap:
        """The same map for some of the rows: (k,) indices into the present ones."""

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        """df/dz at the rows of z, one block per row, as an operator; by automatic differentiation unless overridden."""
        return Jacobian(self.tracked, z)

    def forget(self) -> None:  # noqa: B027  # most maps keep nothing
        """Releases what the last evaluation left, so that keeping the map for a backward pass keeps no states."""


class StandingRows(AbstractMap):
    """Some rows of a map that can only be evaluated for its whole batch; the other rows stand still.

    f of a row that stands still does not change, unless it depends on other rows: then `RowsCoupled` is raised.

    Args:
        whole: The map.
        standing: (batch, features) where rows stand still. image: (batch, features) f there.
        rows: (k,) the rows that move.
    """

    def __init__(self, whole: AbstractMap, standing: Tensor, image: Tensor, rows: Tensor) -> None:
        self._whole = whole
        self._standing = torch.where(standing.isfinite(), standing, torch.zeros_like(standing))
        # what was NaN stands at another point now, and its image is not known
        self._image = torch.where(standing.isfinite().all(dim=1, keepdim=True), image, torch.nan)
        self._rows = rows
        self._idle = torch.ones(standing.shape[0], dtype=torch.bool, device=rows.device)
        self._idle[rows] = False

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        value = self._whole(self._standing.index_copy(0, self._rows, z))
        if bool((differs(value, self._image) & self._idle).any()):
            raise RowsCoupled
        return value[self._rows]

    def take(self, rows: Tensor) -> AbstractMap:
        return StandingRows(self._whole, self._standing, self._image, self._rows[rows])

    def tracked(self, z: Tensor) -> Tensor:
        return self._whole.tracked(self._standing.index_copy(0, self._rows, z))[self._rows]

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        return _StandingJacobian(self._whole.jacobian(self._standing.index_copy(0, self._rows, z)), z, self._rows)


class _StandingJacobian(AbstractJacobian):
    """The rows of a Jacobian that belong to some of the samples."""

    def __init__(self, whole: AbstractJacobian, at: Tensor, rows: Tensor) -> None:
        self._whole, self._at, self._rows = whole, at, rows
        self.setup = whole.setup

    @property
    def at(self) -> Tensor:
        return self._at

    @property
    def value(self) -> Tensor:
        """(k, features) f at the point."""
        value: Tensor = self._whole.value  # type: ignore[attr-defined]  # of those that are recorded
        return value[self._rows]

    def mv(self, u: Tensor) -> Tensor:
        return self._whole.mv(self._among_zeros(u))[self._rows]

    def rmv(self, u: Tensor) -> Tensor:
        return self._whole.rmv(self._among_zeros(u))[self._rows]

    def _among_zeros(self, u: Tensor) -> Tensor:
        return u.new_zeros(self._whole.shape).index_copy_(0, self._rows, u)


class Together(AbstractMap):
    """A map that is only evaluated for all its rows: those of samples that have finished stand still.

    Args:
        f: The map.
        z: (batch, features) where it was evaluated last. fz: (batch, features) f there.
    """

    def __init__(self, f: AbstractMap, z: Tensor, fz: Tensor) -> None:
        self.inner = f
        self._seen = (z, fz)

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        value = self.inner(z)
        self._seen = (z, value)
        return value

    def tracked(self, z: Tensor) -> Tensor:
        return self.inner.tracked(z)

    def take(self, rows: Tensor) -> AbstractMap:
        return StandingRows(self, *self._seen, rows)

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        return self.inner.jacobian(z)
