"""Broyden's method with limited memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from wellposed._checks import check_positive_integer
from wellposed.solve.map import AbstractMap
from wellposed.solve.newton import backtrack
from wellposed.solve.solver import AbstractSolver, Point, Step


@dataclass(frozen=True)
class Broyden(AbstractSolver):
    r"""Broyden's first ("good") method [broyden1965] for g(z) = f(z) - z = 0, with limited memory.

    The inverse Jacobian of g is modelled, sample by sample, as H = -I + sum_j u_j v_j^T. The
    direction is p = -H g; with s and y the changes of z and g, the secant equation H y = s is
    restored by

        v = H^T s,    u = (s - H y)/(v . y)                                       (Sherman-Morrison)

    When `memory` pairs are full the model starts again from -I. The step length of each sample is
    halved until the residual does not exceed (1 + 1/(k+1)^2) times the last one; if that fails, the
    sample takes its best trial. Costs one evaluation of f a step plus those of the line search, and
    memory for 2 `memory` states.

    Args:
        memory: Pairs kept.

    Examples:
        >>> import torch, wellposed as wp
        >>> f = lambda z: torch.cos(z) + 0.1 * z.flip(1)
        >>> solution = wp.fixed_point(f, torch.zeros(4, 2, dtype=torch.float64), wp.Broyden(memory=10))
        >>> solution.status
        StatusArray(CONVERGED: 4)
    """

    idle_part: ClassVar[float] = 1 / 4
    memory: int = 20

    def __post_init__(self) -> None:
        check_positive_integer("Broyden", "memory", self.memory)

    def init(self, f: AbstractMap, point: Point) -> dict[str, Any]:
        batch, features = point.z.shape
        pairs = point.z.new_zeros(batch, self.memory, features)
        return {"u": pairs, "v": torch.zeros_like(pairs), "count": 0, "z": point.z, "g": point.g.clone()}

    def step(self, state: dict[str, Any], f: AbstractMap, point: Point) -> Step:
        count = state["count"]
        if count > 0:
            self._update(state, point, (count - 1) % self.memory)
        state["count"] = count + 1
        state["z"] = point.z
        state["g"].copy_(point.g)
        direction = -_apply(state["u"], state["v"], point.g)
        accept = point.r * (1.0 + 1.0 / (count + 1) ** 2)
        return backtrack(f, point, direction, accept=accept, halvings=4, used=torch.zeros_like(point.evaluations))

    def _update(self, state: dict[str, Any], point: Point, j: int) -> None:
        u, v = state["u"], state["v"]
        if j == 0:
            u.zero_()
            v.zero_()
        s, y = point.z - state["z"], point.g - state["g"]
        Hy = _apply(u, v, y)
        v_new = _apply(v, u, s)  # H^T s
        denominator = torch.linalg.vecdot(v_new, y)
        # A pair that determines nothing would only add rounding errors; it is omitted. So is a y that *is* rounding
        # error: on f(z) = z + c the next point would be at 1e14, where |f(z) - z| is small relative to |f(z)|.
        eps, y_norm = torch.finfo(y.dtype).eps, torch.linalg.vector_norm(y, dim=1)
        noise = 16 * eps * torch.linalg.vector_norm(point.fz, dim=1)
        useful = (denominator.abs() > eps * torch.linalg.vector_norm(v_new, dim=1) * y_norm) & (y_norm > noise)
        keep = useful.unsqueeze(1)
        u_new = (s - Hy) / torch.where(useful, denominator, torch.ones_like(denominator)).unsqueeze(1)
        u[:, j] = torch.where(keep, u_new, torch.zeros_like(u_new))
        v[:, j] = torch.where(keep, v_new, torch.zeros_like(v_new))


def _apply(u: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """(-I + sum_j u_j v_j^T) x, row by row."""
    weights = torch.bmm(v, x.unsqueeze(2))  # (batch, memory, 1)
    return torch.baddbmm(x.unsqueeze(1), weights.transpose(1, 2), u, beta=-1).squeeze(1)
