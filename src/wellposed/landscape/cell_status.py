"""What is known about one point of a landscape."""

from __future__ import annotations

import enum

__all__ = ["CellStatus"]


class CellStatus(enum.IntEnum):
    """How the evaluation of one point went; each member carries its explanation as `message`."""

    PENDING = 0
    VALID = 1
    UNCHECKED = 2
    NOT_CONVERGED = 3
    NOT_UNIQUE = 4
    ILL_POSED = 5
    NOT_FINITE = 6
    NOT_PROVED = 7

    @property
    def message(self) -> str:
        """What this status means, in one sentence."""
        return _MESSAGES[self]


_MESSAGES = {
    CellStatus.PENDING: "not evaluated yet",
    CellStatus.VALID: "every equilibrium converged, and is unique by proof or by every start that was tried",
    CellStatus.UNCHECKED: "every equilibrium converged; whether there are others was not asked",
    CellStatus.NOT_CONVERGED: "the solve of some sample failed to converge",
    CellStatus.NOT_UNIQUE: "another start led some sample to another equilibrium",
    CellStatus.ILL_POSED: "the model refuses to be evaluated, because it has no equilibrium there",
    CellStatus.NOT_FINITE: "the loss is NaN or infinite",
    CellStatus.NOT_PROVED: "every equilibrium converged, and no start led elsewhere, but the model's own bound proves nothing",
}
