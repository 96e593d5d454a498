"""Matrices W with I - W strongly monotone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument
from wellposed.solve import check_interval

__all__ = ["Monotone"]


class Monotone(nn.Module):
    r"""(A, B) -> W = (1 - m) I - A^T A + B - B^T: every W with sym(I - W) >= m I, and no other [winston2020, Proposition 1].

    A cell s(W z + ...) whose s is the proximal operator of a convex function then has exactly one equilibrium for every
    input. Plain iteration need not find it; `ForwardBackward`, `PeacemanRachford` and `DouglasRachford` do.

    Args:
        margin: m, positive.
    """

    def __init__(self, margin: float = 0.1) -> None:
        super().__init__()
        self.margin = margin

    @property
    def margin(self) -> float:
        """m; checked when it is assigned."""
        margin: float = self.__dict__["margin"]
        return margin

    @margin.setter
    def margin(self, margin: float) -> None:
        check_interval("Monotone", "margin", margin, low=0.0)
        self.__dict__["margin"] = margin

    def forward(self, A: Tensor, B: Tensor) -> Tensor:
        """(k, m), (m, m) -> (m, m)."""
        identity = torch.eye(B.shape[0], dtype=B.dtype, device=B.device)
        return (1 - self.margin) * identity - A.t() @ A + B - B.t()

    def right_inverse(self, W: Tensor) -> tuple[Tensor, Tensor]:
        """(A, B) that give W: A the square root of (1 - m) I - sym(W), B = (W - W^T)/4 [nguyen2022, Proposition 1].

        Args:
            W: (m, m) with sym(I - W) >= m I; what rounding takes away from that is cut off at 0, and more is refused.
        """
        identity = torch.eye(W.shape[0], dtype=W.dtype, device=W.device)
        values, Q = torch.linalg.eigh((1 - self.margin) * identity - (W + W.t()) / 2)
        rounding = 8 * W.shape[0] * torch.finfo(W.dtype).eps * (1 + self.margin + float(W.detach().abs().max()))
        least = float(values.detach().min())
        if least < -rounding:
            raise InvalidArgument(
                f"right_inverse of Monotone: the least eigenvalue of sym(I - W) is {least + self.margin:.6g}, below the margin "
                f"{self.margin:g}, so no (A, B) gives W. Take a smaller margin, or subtract a multiple of I from W."
            )
        return (Q * values.clamp(min=0).sqrt()) @ Q.t(), (W - W.t()) / 4

    def extra_repr(self) -> str:
        return f"margin={self.margin}"
