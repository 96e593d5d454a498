"""How a solve ended, sample by sample. Shared by the nonlinear and the linear solvers."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

__all__ = ["Status", "StatusArray"]


class Status(enum.IntEnum):
    """How the solve of one sample ended; each member carries its explanation as `message`.

    Examples:
        >>> import torch, wellposed as wp
        >>> solution = wp.fixed_point(lambda z: 0.5 * z + 1, torch.zeros(3, 1))
        >>> bool((solution.status == wp.Status.CONVERGED).all())
        True
        >>> wp.Status.MAX_STEPS.message
        'max_steps was used up before the residual met the tolerance'
    """

    CONVERGED = 0
    MAX_STEPS = 1
    DIVERGED = 2
    NOT_FINITE = 3

    @property
    def message(self) -> str:
        """What this status means, in one sentence."""
        return _MESSAGES[self]


_MESSAGES = {
    Status.CONVERGED: "the residual met the tolerance",
    Status.MAX_STEPS: "max_steps was used up before the residual met the tolerance",
    Status.DIVERGED: "the residual grew to more than 1e8 times its least value",
    Status.NOT_FINITE: "a value that is NaN or infinite appeared",
}


@dataclass(eq=False, repr=False, slots=True)
class StatusArray:
    """One `Status` per sample: a sequence of members over an integer tensor.

    An integer index and iteration give `Status` members; a slice, mask or list of indices gives a
    shorter array. Comparison with a member or with another array gives a boolean tensor of shape
    (batch,), so `status == Status.CONVERGED` is a mask.

    Attributes:
        codes: (batch,) the integer codes; also `numpy.asarray(status)`.
    """

    codes: Tensor
    __hash__ = None  # type: ignore[assignment]  # compared elementwise, like a tensor

    def __len__(self) -> int:
        return self.codes.shape[0]

    @overload
    def __getitem__(self, index: int) -> Status: ...
    @overload
    def __getitem__(self, index: slice | list[int] | Tensor) -> StatusArray: ...
    def __getitem__(self, index: Any) -> Status | StatusArray:
        codes = self.codes[index]
        return Status(int(codes)) if codes.dim() == 0 else StatusArray(codes)

    def __iter__(self) -> Iterator[Status]:
        return iter(self.tolist())

    def __contains__(self, status: object) -> bool:
        return status in self.codes.tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.codes.cpu().numpy(), dtype=dtype)  # always a copy: the codes are not to be written through it

    def tolist(self) -> list[Status]:
        """The members, in order."""
        return [Status(code) for code in self.codes.tolist()]

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]  # elementwise, like a tensor
        if isinstance(other, StatusArray):
            return self.codes == other.codes
        if isinstance(other, (int, Tensor)):
            return self.codes == other
        return NotImplemented

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]  # elementwise, like a tensor
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else ~equal

    @property
    def shape(self) -> torch.Size:
        """(batch,)."""
        return self.codes.shape

    def __repr__(self) -> str:
        counts = {s: int((self.codes == s).sum()) for s in Status}
        return "StatusArray(" + ", ".join(f"{s.name}: {k}" for s, k in counts.items() if k) + ")"


#: A mean factor of the residual per step from which on a standstill cannot be excluded.
SLOW = 0.99


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
