"""When a sample is measured: not at every plain step, if its own residuals foretell how many it still needs.

A residual costs three passes over the state, about a fifth of a product of 500 units. Plain steps of a map that cannot
surprise (`AbstractMap.steady`) are therefore taken without one where nothing could be decided by it. Everybody is measured at
fixed steps; in between, each sample at the step that its own residuals set, so its answer does not depend on its neighbours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["FIXED", "JUDGED_AT", "Pace"]

#: Steps of a stage after which `Auto` judges a sample: early, then ever more rarely.
JUDGED_AT = frozenset(5 * 2**k for k in range(20))
#: Steps at which every sample is measured.
FIXED = frozenset({0}) | JUDGED_AT
#: The part of the predicted steps that is taken before the next look: predictions err, and a step too many costs more than a
#: look too early.
PART = 0.95
#: The first look is not later than this: a nilpotent or very small W is done by then.
FIRST = 3
#: A residual is not expected to fall by more than this in a step.
FASTEST = 10.0


class Pace:
    """The steps at which the samples of one stage are due.

    Args:
        rows: How many samples.
        device: Theirs.
        ahead: Whether steps may be taken without a look at all; if not, everybody is due at every step.
    """

    def __init__(self, rows: int, device: torch.device, *, ahead: bool) -> None:
        self._ahead = ahead
        self._due = torch.zeros(rows if ahead else 0, dtype=torch.int64, device=device)
        self._before: tuple[Tensor, Tensor] | None = None  # (rows,) step and residual at which each was looked at last

    def due(self, count: int) -> Tensor | None:
        """(rows,) bool: who is judged after `count` steps; None for everybody."""
        return None if not self._ahead or count in FIXED else self._due <= count

    def see(self, count: int, r: Tensor, target: Tensor, due: Tensor | None) -> None:
        """Sets the next look at those that were due.

        Args:
            count: Steps taken.
            r: (rows,) residuals. target: (rows,) those at which a sample is done.
            due: From `due(count)`.
        """
        if not self._ahead:
            return
        now = torch.full_like(self._due, count)
        if self._before is None:
            # no factor is known yet: a start that is near is looked at soon, and maps that end after a few steps do
            first = (torch.log(r / target) / math.log(FASTEST)).nan_to_num(nan=1.0, posinf=1.0).clamp(1, FIRST)
            self._before, self._due = (now, r), now + first.to(torch.int64)
            return
        then, before = self._before
        per_step = torch.log(r / before) / (now - then)  # log of the factor
        wanted = PART * torch.log(target / r) / per_step
        # NaN, a factor of 1 or more, or a target already met: look again at once
        more = torch.where((per_step < 0) & (wanted > 1), wanted, 1.0).clamp_max(1e6).to(torch.int64)
        if due is None:
            self._before, self._due = (now, r), now + more
        else:
            self._before = torch.where(due, now, then), torch.where(due, r, before)
            self._due = torch.where(due, now + more, self._due)

    def next_look(self, count: int, idle: Tensor | None) -> int:
        """The first step from `count` on at which somebody is due.

        Args:
            count: Steps taken, the last of them not yet looked at.
            idle: (rows,) those that have left already, or None.
        """
        if not self._ahead:
            return count
        due = self._due if idle is None else self._due[~idle]
        look = max(count, int(due.min())) if due.shape[0] else count
        return next((step for step in range(count, look) if step in FIXED), look)

    def take(self, rows: Tensor) -> None:
        """Only these rows go on."""
        if self._ahead:
            self._due = self._due[rows]
            self._before = None if self._before is None else (self._before[0][rows], self._before[1][rows])
