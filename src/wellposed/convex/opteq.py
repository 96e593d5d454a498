"""OptEq: one unit layer at equilibrium."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from wellposed._checks import check_positive_integer
from wellposed.convex._dense import AbstractDenseOptEq, UnitParameters

__all__ = ["OptEq"]


class OptEq(AbstractDenseOptEq):
    r"""z = (1/mu) W^T s(W z + U x + b), y = w . z [xie2021, eq. (3)], with the skip form a(...) + (1 - a) z.

    The equilibrium minimises a convex function, [xie2021, Theorem 1], which `convex.objective(model, X)` gives. The skip
    connection changes neither the equilibrium nor its derivatives, only the path to it. Starts from |W| of about
    0.7 sqrt(mu), U_ij ~ N(0, 2/d), b = 0, w_i ~ N(0, 1/m); the paper leaves this open.

        >>> import torch, wellposed as wp
        >>> model = wp.OptEq(4, 16)
        >>> model(torch.randn(8, 4)).shape
        torch.Size([8])

    Args:
        in_features: d.
        width: m, the size of z.
        hidden_width: m_1, the rows of W; m if not given.
        norm_bound: Keeps L_s |W|^2 <= norm_bound^2 mu, in (0, 1], by the exact spectral norm; below 1 there is exactly one
            equilibrium. None takes W as it is.
        generator: Of the initialization.
        device, dtype: Of the parameters.
        options: `alpha`, `mu`, `activation`, `prior`, `solver`, `gradient`, `on_failure`, `rtol`, `max_steps` as in
            `AbstractOptEq`.

    Attributes:
        W: (m_1, m). U: (m_1, d). b: (m_1,). w: (m,).
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        *,
        hidden_width: int | None = None,
        norm_bound: float | None = 0.95,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, width, norm_bound=norm_bound, **options)
        self.hidden_width = width if hidden_width is None else hidden_width
        check_positive_integer("OptEq", "hidden_width", self.hidden_width)
        draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        W, U, b = self._draw(self.hidden_width, **draw)
        self.W, self.U, self.b = nn.Parameter(W), nn.Parameter(U), nn.Parameter(b)
        self.w = nn.Parameter(torch.randn(width, **draw) / math.sqrt(width))

    def parameters_by_unit(self) -> list[UnitParameters]:
        return [UnitParameters(("W", "U", "b"), self.W, self.U, self.b)]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.width}, hidden_width={self.hidden_width}, {self._common_repr()}"
