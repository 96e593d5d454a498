"""Dropout with one mask for a whole solve."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval

__all__ = ["VariationalDropout"]


class VariationalDropout(nn.Module):
    r"""Masks with entries 0 or 1/(1 - p) that are drawn once and then used at every evaluation of the map [gal2016].

    Ordinary dropout inside a cell draws anew at every evaluation, and a map that changes has no fixed point. Here the mask is
    part of the *input* of the cell, one for each sample, so that it also stays with its sample when others have finished, and
    is the same in the backward pass. In evaluation mode there is none.

    Args:
        p: Probability of a zero, in [0, 1).
        generator: Draws the masks; torch's global one if not given. A copy of the module draws from the same one.
    """

    def __init__(self, p: float, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        check_interval("VariationalDropout", "p", p, low=0.0, high=1.0, closed="left")
        self.p = p
        self._generator = (generator,)

    def forward(self, like: Tensor) -> Tensor | None:
        """A mask of the shape of `like`; None where there is nothing to drop.

        Args:
            like: (batch, ...) what the mask will multiply.
        """
        if not self.training or self.p == 0.0:
            return None
        generator = self._generator[0]
        device = like.device if generator is None else generator.device
        keep = torch.rand(like.shape, generator=generator, device=device, dtype=like.dtype) >= self.p
        return keep.to(like) / (1.0 - self.p)

    def __deepcopy__(self, memo: dict[int, object]) -> VariationalDropout:
        made = VariationalDropout(self.p, generator=self._generator[0])
        made.training = self.training
        return made

    def extra_repr(self) -> str:
        return f"p={self.p:g}"
