"""DeepOptEq: a composition of unit layers as one fixed point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from wellposed._checks import check_positive_integer
from wellposed.convex._dense import AbstractDenseOptEq, UnitParameters
from wellposed.errors import InvalidArgument

__all__ = ["DeepOptEq"]


class DeepOptEq(AbstractDenseOptEq):
    r"""z = f_L o ... o f_1(z, x), f_l(z, x) = a/mu W_l^T s(W_l z + U_l x + b_l) + (1 - a) z, y = w . z [xie2021, eq. (4)-(5)].

    With two layers the equilibrium still minimises a convex function ([xie2021, Corollary 1], `convex.objective`); with more
    it solves a monotone inclusion ([xie2021, Theorem 2], `convex.inclusion_residual`). Unlike in one layer, `alpha` matters.

        >>> import torch, wellposed as wp
        >>> model = wp.DeepOptEq(4, (8, 16, 8), alpha=0.5)
        >>> model(torch.randn(8, 4)).shape
        torch.Size([8])

    Args:
        in_features: d.
        widths: (m_1, ..., m_L), the rows of the matrices W_l.
        width: m, the size of the state; the largest of `widths` if not given.
        norm_bound: Keeps L_s |W_l|^2 <= norm_bound^2 mu for all l, in (0, 1], by exact spectral norms; below 1 there is exactly
            one equilibrium. None takes the matrices as they are.
        generator: Of the initialization.
        device, dtype: Of the parameters.
        options: `alpha`, `mu`, `activation`, `prior`, `solver`, `gradient`, `on_failure`, `rtol`, `max_steps` as in
            `AbstractOptEq`.

    Attributes:
        W: L matrices (m_l, m). U: L matrices (m_l, d). b: L vectors (m_l,). w: (m,).
    """

    def __init__(
        self,
        in_features: int,
        widths: Sequence[int],
        *,
        width: int | None = None,
        norm_bound: float | None = 0.95,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(widths, (list, tuple)) or not widths:
            raise InvalidArgument(
                f"The 'widths' parameter of DeepOptEq must be a sequence such as (16, 32, 16). Got {widths!r}."
            )
        for size in widths:
            check_positive_integer("DeepOptEq", "widths", size)
        super().__init__(in_features, max(widths) if width is None else width, norm_bound=norm_bound, **options)
        self.widths = tuple(widths)
        draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        drawn = [self._draw(size, **draw) for size in self.widths]
        self.W, self.U, self.b = (
            nn.ParameterList(nn.Parameter(tensor) for tensor in part) for part in zip(*drawn, strict=True)
        )
        self.w = nn.Parameter(torch.randn(self.width, **draw) / math.sqrt(self.width))

    def parameters_by_unit(self) -> list[UnitParameters]:
        return [
            UnitParameters((f"W.{i}", f"U.{i}", f"b.{i}"), W, U, b)
            for i, (W, U, b) in enumerate(zip(self.W, self.U, self.b, strict=True))
        ]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.widths}, width={self.width}, {self._common_repr()}"
