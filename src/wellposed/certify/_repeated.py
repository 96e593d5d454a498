"""Whether a cell gives the same again: a tape knows one evaluation, so what it draws outside of
torch looks like a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellposed._torch import outer_states
from wellposed.certify._tape import TapeRefused


def check_repeats(call: Callable[[Tensor], Any], z: Tensor) -> None:
    """Evaluates a cell twice, at a point where all of z counts; for cells that were recorded, and
    so draw nothing from torch.

    Args:
        call: Evaluates the cell.
        z: Of the shape and dtype that it expects.

    Raises:
        Refused: It draws random numbers from Python or NumPy, or the two values differ in a bit.
    """
    z = torch.randn(z.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(z.dtype)
    before = outer_states()
    with torch.no_grad():
        first, again = call(z.clone()), call(z.clone())
    after = outer_states()
    if after != before:
        drawn = "Python's random" if after[0] != before[0] else "numpy.random"
        raise TapeRefused(f"It draws random numbers ({drawn}), of which this proof would see one draw; leave them out.")
    if not torch.equal(first.nan_to_num(), again.nan_to_num()):
        raise TapeRefused("It gives two values for the same z and x, so it is random, or keeps a state outside of its module.")
