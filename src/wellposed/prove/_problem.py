"""What a proof is about: a network in the letters R, U, w, v of `format`, its data, and a point."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wellposed.prove._slopes import AbstractSlopes
from wellposed.prove.error_free import SLACK, UNIT, gamma, norm_up, rows_up, split, two_product, two_sum

#: Low parts are kept to float32, so that a checkpoint takes 12 bytes a number; this is what it costs.
_LOW = 2.0**-24


@dataclass(frozen=True)
class Exact:
    """A tensor as an unevaluated sum high + low."""

    high: Tensor
    low: Tensor

    @classmethod
    def product(cls, A: Tensor, factor: float) -> Exact:
        """factor A without rounding."""
        A = A.detach().double().cpu().contiguous()
        return cls(A.clone(), torch.zeros_like(A)) if factor == 1.0 else cls(*two_product(A, factor))

    def minus(self, step: Tensor, step_low: Tensor) -> tuple[Exact, float]:
        """This less a step high + low, and a bound of the rounding, in the Frobenius norm."""
        high, low = two_sum(self.high, -step)
        rounding = 2 * UNIT * (norm_up(low) + norm_up(self.low) + norm_up(step_low))
        high, low = two_sum(high, low + (self.low - step_low))
        kept = low.float().double()
        return Exact(high, kept), rounding + _LOW * norm_up(low) + 1e-40  # float32 ends at 1e-45


@dataclass(frozen=True)
class Parameters:
    """The scaled parameters at one point; v is None where c is not read out."""

    R: Exact
    U: Exact
    w: Exact
    v: Exact | None = None

    def parts(self) -> dict[str, Exact]:
        """By name."""
        found = {"R": self.R, "U": self.U, "w": self.w}
        return found if self.v is None else found | {"v": self.v}

    def with_parts(self, parts: dict[str, Exact]) -> Parameters:
        """These with some parts replaced."""
        return replace(self, **parts)


class ProvedProblem:
    """A network and its data: all that stays the same during a proof.

    Args:
        family: "gaussian", "skip" or "implicit_only".
        slopes: The activation.
        scales: k, l, 1, 1 for R, U, w, v; 0 for a part that is not trained.
        rectified: Whether c = relu(U x).
        X: (n, d). y: (n,).
        start: Parameters and buffers of the network, by name.
    """

    def __init__(
        self,
        family: str,
        slopes: AbstractSlopes,
        scales: dict[str, float],
        rectified: bool,
        X: Tensor,
        y: Tensor,
        start: dict[str, Tensor],
    ) -> None:
        self.family, self.slopes, self.scales, self.rectified = family, slopes, scales, rectified
        self.X, self.y, self.start = X, y, start
        self.n, self.d = X.shape
        self.k, self.ell, self.trains_w, self.trains_v = (scales.get(part, 0.0) for part in ("R", "U", "w", "v"))
        self.X1, self.X2 = split(X, self.d)
        self.XX = X @ X.T
        self.x_norms = rows_up(X)
        self.XX_error = 3 * gamma(self.d) * float(self.x_norms.square().sum()) * SLACK
        self.trained = [part for part, scale in scales.items() if scale > 0]

    def same(self, other: ProvedProblem) -> bool:
        """Whether a step of the one is a step of the other: the same map, start and data."""
        if self._network() != other._network():
            return False
        pairs = [(other.start[name], value) for name, value in self.start.items()]
        pairs += [(other.X, self.X), (other.y, self.y)]
        return all(torch.equal(a, b) for a, b in pairs)

    def _network(self) -> tuple[object, ...]:
        return self.family, self.slopes.name, self.slopes.shift, self.scales, self.rectified, self.start.keys()
