"""NaN in rows that have no equilibrium, in their values and in their derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def without_lost(rows: Tensor, lost: Tensor) -> Tensor:
    """(batch, features) NaN in the (batch,) lost rows, and the others as they are.

    A derivative is NaN too in every lost row that it depends on, and 0 in those that it does not.
    (That of `torch.where` would be 0 in all of them, as if the row were known.)
    """
    column = lost.unsqueeze(1)
    marked: Tensor = _Lost.apply(rows, column, column)
    return marked


class _Lost(torch.autograd.Function):
    """Rows, with NaN where they are marked; of the cotangents, the lost ones that are not 0 are."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, lost: Tensor, marked: Tensor) -> Tensor:
        return rows.masked_fill(marked, torch.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, None]:
        (lost,) = ctx.saved_tensors
        return _Lost.apply(v, lost, lost & (v != 0).any(dim=1, keepdim=True)), None, None
