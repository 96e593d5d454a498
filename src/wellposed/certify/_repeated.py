"""Whether a cell gives the same again: a tape knows one evaluation, so what it draws outside of
torch looks like a constant."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellposed.certify._tape import Refused


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
    python, numpy = random.getstate(), _numpy_state()
    with torch.no_grad():
        first, again = call(z.clone()), call(z.clone())
    drawn = "Python's random" if random.getstate() != python else "numpy.random" if _numpy_state() != numpy else ""
    if drawn:
        raise Refused(f"It draws random numbers ({drawn}), of which this proof would see one draw; leave them out.")
    if not torch.equal(first.nan_to_num(), again.nan_to_num()):
        raise Refused("It gives two values for the same z and x, so it is random, or keeps a state outside of its module.")


def _numpy_state() -> bytes:
    """Of the generator that functions of numpy.random share; empty if NumPy was not imported."""
    module = sys.modules.get("numpy.random")
    return b"" if module is None else pickle.dumps(module.get_state(legacy=False))
