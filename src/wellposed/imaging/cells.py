r"""Equilibria that reconstruct an image x from y = A x + noise [gilton2021].

The cells iterate a method of optimization in which a network N takes the place of the regulariser.
With |N| <= k < 1 (see `BoundedDnCNN`), m <= A^T A <= L and the step sizes below, each is a
contraction with a factor that is known, whatever the data; so an equilibrium exists, is unique, and
`Reconstructor.error_bound` bounds the distance of the image from it.

A factor is that of the map in exact arithmetic, with the numbers that the cell holds and uses at
present (float32 or float64). `Solution.error_bound(cell.contraction)` is quicker; but its residual
is a number in the dtype of the state, and is off by some eps |f(z)|.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval
from wellposed.imaging._claims import check_prox, reflects
from wellposed.imaging._reconstruction import ReconstructionCell, number_of


class DEQGrad(ReconstructionCell):
    r"""f(x, y) = x - h (A^T (A x - y) + w (x - N(x))), with h = 1/(L + w).

    w > 0 is learned. The factor is 1 - h (m + w (1 - k)). It is below 1 if h (m + w (1 - k)) is
    above its rounding, 1e-12: not if w is so small that it has no effect.

    Args:
        operator: With `A` and `A_adjoint`.
        network: N.
        weight: w at the start.
        norm: A bound of |A|, whose square is L. If not given, it is that of the operator, and
            changes with it; a given one is believed, also of an operator put in its place.

    Examples:
        >>> import torch, wellposed as wp
        >>> blur = wp.imaging.Blur(wp.imaging.gaussian_kernel(1.0))
        >>> cell = wp.imaging.DEQGrad(blur, wp.imaging.BoundedDnCNN(features=4, depth=2, bound=0.9))
        >>> cell.contraction < 1
        True
    """

    def __init__(self, operator: Any, network: nn.Module, *, weight: float = 0.1, norm: float | None = None) -> None:
        super().__init__(operator, network, norm=norm)
        check_interval("DEQGrad", "weight", weight, low=0.0, closed="neither")
        self.log_weight = nn.Parameter(torch.tensor(math.log(weight)))

    def _numbers(self) -> dict[str, Any]:
        weight = self.log_weight.exp()
        return {"weight": weight, "step": 1 / (self.norm * self.norm + weight)}

    def _step(self, z: Tensor, back: Tensor, network: Callable[[Tensor], Tensor], numbers: dict[str, Any]) -> Tensor:
        slope = numbers["normal"](z) - back + numbers["weight"] * (z - network(z))
        return z - numbers["step"] * slope

    def _factor(self) -> float:
        weight, step = (float(number) for number in self._numbers().values())
        return self._forward_factor(step, weight) + step * weight * self._lipschitz


class DEQProx(ReconstructionCell):
    r"""f(x, y) = N(x - h A^T (A x - y)), with h = t/L and 0 < t <= 1.

    t is learned. The factor is k (1 - h m), below 1 whatever t is.

    Args:
        operator, network, norm: As in `DEQGrad`.
        step: t at the start, in (0, 1).

    Examples:
        >>> import torch, wellposed as wp
        >>> mask = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.7
        >>> cell = wp.imaging.DEQProx(wp.imaging.Inpainting(mask), wp.imaging.BoundedDnCNN(features=4, bound=0.9))
        >>> wp.imaging.Reconstructor(cell, rtol=1e-3)(torch.rand(2, 1, 8, 8) * mask).shape
        torch.Size([2, 1, 8, 8])
    """

    def __init__(self, operator: Any, network: nn.Module, *, step: float = 0.9, norm: float | None = None) -> None:
        super().__init__(operator, network, norm=norm)
        check_interval("DEQProx", "step", step, low=0.0, high=1.0, closed="neither")
        self.logit_step = nn.Parameter(torch.tensor(math.log(step / (1 - step))))

    def _numbers(self) -> dict[str, Any]:
        return {"step": torch.sigmoid(self.logit_step) / (self.norm * self.norm)}

    def _step(self, z: Tensor, back: Tensor, network: Callable[[Tensor], Tensor], numbers: dict[str, Any]) -> Tensor:
        return network(z - numbers["step"] * (numbers["normal"](z) - back))

    def _factor(self) -> float:
        return self._lipschitz * self._forward_factor(float(self._numbers()["step"]))


class DEQADMM(ReconstructionCell):
    r"""The method of multipliers as a map of one image u (Douglas-Rachford):

        x = prox(u),    f(u, y) = (u + N(2 x - u))/2,    prox(u) = (I + g A^T A)^-1 (u + g A^T y)

    where (N + I)/2 takes the place of the proximal operator of the regulariser. u -> 2 prox(u) - u
    expands by at most r = `operator.reflection`, which is 1 for an exact proximal map, so the
    factor is (1 + r k)/2. The image of a state u is prox(u); g > 0 is learned.

    Args:
        operator: With `A`, `A_adjoint` and `prox_l2(z, y, gamma)`.
        network, norm: As in `DEQGrad`.
        penalty: g at the start.

    Examples:
        >>> import torch, wellposed as wp
        >>> blur = wp.imaging.Blur(wp.imaging.gaussian_kernel(1.0))
        >>> cell = wp.imaging.DEQADMM(blur, wp.imaging.BoundedDnCNN(features=4, bound=0.9), penalty=5.0)
        >>> wp.imaging.Reconstructor(cell, rtol=1e-3)(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 1, 8, 8])
    """

    _needs = ("A", "A_adjoint", "prox_l2")

    def __init__(self, operator: Any, network: nn.Module, *, penalty: float = 10.0, norm: float | None = None) -> None:
        super().__init__(operator, network, norm=norm)
        check_prox("DEQADMM", operator)
        check_interval("DEQADMM", "penalty", penalty, low=0.0, closed="neither")
        self.log_penalty = nn.Parameter(torch.tensor(math.log(penalty)))

    def image(self, z: Tensor, y: Tensor) -> Tensor:
        return self.operator.prox_l2(z, y, self.log_penalty.exp())

    def _function(self, x: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        penalty = self.log_penalty.exp()
        check_prox(type(self).__name__, self.operator)  # as it is now
        network, maps = self._bound_network(x)

        def f(z: Tensor, y: Tensor, *maps: Tensor) -> Tensor:
            return (z + network(2 * self.operator.prox_l2(z, y, penalty) - z, *maps)) / 2

        return f, (x, *maps)

    def _step(self, z: Tensor, back: Tensor, network: Callable[[Tensor], Tensor], numbers: dict[str, Any]) -> Tensor:
        raise NotImplementedError  # its step needs the data, not A^T y

    def _factor(self) -> float:
        reflection = self.reflection if reflects(self.operator) else math.inf
        return (1 + self._lipschitz * reflection) / 2

    @property
    def reflection(self) -> float:
        """r, of the operator as it is now; NaN if g is not finite."""
        reflection = number_of(getattr(self.operator, "reflection", 1.0))
        finite = bool(torch.isfinite(self.log_penalty.detach().exp()))
        return max(1.0, reflection) if finite and reflection is not None else math.nan
