"""Explicit twins of equilibrium networks: the same cell, so many times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wellposed._checks import check_positive_integer
from wellposed.errors import InvalidType

__all__ = ["WeightTied"]


class WeightTied(nn.Module):
    r"""z_0 = 0, z_(k+1) = cell(z_k, x), k < repeats: an equilibrium layer of finite depth [nguyen2022, Fig. 4.4].

    Differentiated through every step, so memory grows with `repeats`.

    Args:
        cell: `cell(z, x)`; its method `initial(x)`, if it has one, gives z_0.
        repeats: 6, 11 and 18 in the thesis.
    """

    def __init__(self, cell: Callable[..., Any], repeats: int) -> None:
        super().__init__()
        if not callable(cell):
            raise InvalidType(f"cell must be callable; got {type(cell).__name__}.")
        check_positive_integer("WeightTied", "repeats", repeats)
        self.cell, self.repeats = cell, repeats

    def forward(self, x: Any, z0: Any = None) -> Any:
        """z after `repeats` steps.

        Args:
            x: The input.
            z0: The start; zeros if not given.
        """
        initial = getattr(self.cell, "initial", torch.zeros_like)
        z = initial(x) if z0 is None else z0
        for _ in range(self.repeats):
            z = self.cell(z, x)
        return z

    def extra_repr(self) -> str:
        return f"repeats={self.repeats}"
