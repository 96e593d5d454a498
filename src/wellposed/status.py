"""How a solve ended, sample by sample. Shared by the nonlinear and the linear solvers."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

__all__ = ["Status", "StatusArray"]


class Status(enum.IntEnum):
    """How the solve of one sample ended; each member carries its explanation as `message`."""

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
    Status.DIVERGED: "the residual grew without bound",
    Status.NOT_FINITE: "a value that is NaN or infinite appeared",
}


class StatusArray:
    """One `Status` per sample: a sequence of members over an integer tensor.

    Indexing and iteration give `Status` members; comparison with a member or with another array gives a
    boolean tensor of shape (batch,), so `status == Status.CONVERGED` is a mask. The integer codes are `.codes`.
    """

    __slots__ = ("codes",)
    __hash__ = None  # type: ignore[assignment]  # compared elementwise, like a tensor

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    def __len__(self) -> int:
        return self.codes.shape[0]

    def __getitem__(self, index: int) -> Status:
        return Status(int(self.codes[index]))

    def __iter__(self):
        return (Status(code) for code in self.codes.tolist())

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]  # elementwise, like a tensor
        if isinstance(other, StatusArray):
            return self.codes == other.codes
        if isinstance(other, (int, Tensor)):
            return self.codes == other
        return NotImplemented

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]  # elementwise, like a tensor
        return ~(self == other)

    @property
    def shape(self) -> torch.Size:
        """(batch,)."""
        return self.codes.shape

    def __repr__(self) -> str:
        counts = {s: int((self.codes == s).sum()) for s in Status}
        return "StatusArray(" + ", ".join(f"{s.name}: {k}" for s, k in counts.items() if k) + ")"
