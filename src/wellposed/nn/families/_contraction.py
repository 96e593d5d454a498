"""Networks that are well-posed because |R| < 1, and the bound of |R| that is asked for while R
moves a little."""

from __future__ import annotations

import abc
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellposed._tree import LOW_PRECISION
from wellposed.errors import IllPosed, IllPosedWarning, InvalidArgument, did_you_mean
from wellposed.linalg import spectral_norm_upper
from wellposed.linalg.directed import ldexp_up, scaled, up
from wellposed.linalg.verified_cholesky import norm_is_below
from wellposed.nn.families._network import AbstractNetwork
from wellposed.solve._failure import user_level

ILL_POSED_POLICIES = ("raise", "warn", "ignore")
#: From this width on a test of |V| < c takes less time than a decomposition; and how many tests there are at most.
WIDE, TESTS = 400, 4
#: Steps of power iteration before the tests: the norm of a Gaussian matrix is then known to about 2 %.
POWER_STEPS = 20
#: Entries of which the differences are taken at once.
BLOCK = 2**17
#: Covers the rounding of a difference, and of its norm summed in float64, for matrices of up to 2^30 entries.
_SLACK = 1.0 + 2.0**-20


class NormBound:
    """Upper bounds of |V|: one decomposition of a reference V_0 now and then, one subtraction in
    between.

    |V| <= |V_0| + |V - V_0|_F. The matrices are compared entry by entry, so every change is seen.

    Args:
        upper: What bounds |V_0|; `spectral_norm_upper` if not given.

    Attributes:
        decompositions: How many references there have been.
    """

    #: The reference and its bound: one value, so that threads never see one of them without the other.
    _known: tuple[Tensor, float] | None = None
    _sharp = True  # whether the bound is that of a decomposition

    def __init__(self, upper: Callable[[Tensor], float] | None = None) -> None:
        self._upper, self.decompositions = upper, 0

    @property
    def bound(self) -> float:
        """Upper bound of |V_0|; infinite without a reference."""
        return math.inf if self._known is None else self._known[1]

    def __call__(self, V: Tensor, below: float) -> float:
        """An upper bound of |V|; a sharp one if a cheap one is not below `below`.

        Args:
            V: (m, k) finite.
            below: What the bound is compared with; 0 always asks for the sharp one.
        """
        known = self._known
        if known is not None:
            W, bound = known
            drift = _distance(V.detach(), W)
            if drift == 0.0 and (self._sharp or bound < below):
                return bound
            cheap = math.nextafter(bound + drift, math.inf)
            if cheap < below:
                return cheap
        tested = _tested_bound(V.detach(), below) if self._upper is None and min(V.shape) >= WIDE else None
        return self.renew(V) if tested is None else self._keep(V, tested, sharp=False)

    def renew(self, V: Tensor) -> float:
        """Makes V the reference (a copy, because V may be a tensor that training changes), and
        bounds its norm."""
        return self._keep(V, (self._upper or spectral_norm_upper)(V.detach()), sharp=True)

    def _keep(self, V: Tensor, bound: float, *, sharp: bool) -> float:
        self._known, self._sharp = (V.detach().clone(), bound), sharp
        self.decompositions += 1
        return bound

    def drift(self, V: Tensor) -> float:
        """Upper bound of |V - V_0|_F; infinite without a reference of this shape, dtype and
        device."""
        known = self._known
        return math.inf if known is None else _distance(V.detach(), known[0])


def _tested_bound(V: Tensor, below: float) -> float | None:
    """A number below `below` that exceeds |V|, proved by at most `TESTS` tests; None if none was.

    Power iteration gives numbers that |V| exceeds; the tests begin a little above the last of them.
    """
    A = V.double()
    u = torch.cos(torch.arange(A.shape[1], dtype=A.dtype, device=A.device) ** 2)
    norm = 0.0
    for _ in range(POWER_STEPS):
        u = A.T @ (A @ (u / torch.linalg.vector_norm(u)))
        norm = math.sqrt(float(torch.linalg.vector_norm(u)))
        if not 0.0 < norm < below:
            return None
    for part in [0.1 * 2.0**k for k in range(TESTS - 1)] + [0.98]:
        candidate = norm + part * (below - norm)
        if norm_is_below(V, candidate):
            return candidate
    return None


def _distance(V: Tensor, W: Tensor) -> float:
    """Upper bound of |V - W|_F; 0 only if they are equal, and infinite if they cannot be
    compared."""
    if W.shape != V.shape or W.dtype != V.dtype or W.device != V.device:
        return math.inf
    if V.dtype in LOW_PRECISION:  # their differences are rounded by more than the slack covers
        V, W = V.float(), W.float()
    parts = []
    rows = max(1, BLOCK // max(V.shape[1], 1))
    for v, w in zip(V.split(rows), W.split(rows), strict=True):  # no copy of a large matrix in float64
        D, exponent = scaled((v - w).double())
        norm = float(torch.linalg.vector_norm(D))
        parts.append(ldexp_up(norm * _SLACK, exponent) if norm > 0 else 0.0)
    return parts[0] if len(parts) == 1 else up(math.hypot(*parts)) if any(parts) else 0.0


class AbstractContraction(AbstractNetwork):
    """A network that is well-posed because |R| < 1, and knows a rigorous upper bound of |R|.

    Args:
        in_features, width: d, m.
        on_ill_posed: What happens when the bound reaches 1, where nothing proves any more that an
            equilibrium exists: "raise" (`IllPosed`), "warn" (`IllPosedWarning`) or "ignore".
        options: As in `AbstractNetwork`.

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.GaussianDEQ(4, 32, weight_variance=0.02, generator=torch.Generator().manual_seed(0))
        >>> wp.nn.AbstractContraction in type(model).mro(), bool(model.contraction_upper() < 1)
        (True, True)
    """

    def __init__(self, in_features: int, width: int, *, on_ill_posed: str = "raise", **options: Any) -> None:
        super().__init__(in_features, width, **options)
        if on_ill_posed not in ILL_POSED_POLICIES:
            hint = did_you_mean(str(on_ill_posed), ILL_POSED_POLICIES)
            raise InvalidArgument(f"on_ill_posed must be 'raise', 'warn' or 'ignore'; got {on_ill_posed!r}.{hint}")
        self.on_ill_posed = on_ill_posed
        self._norm_bound = NormBound()

    @abc.abstractmethod
    def _remedy(self) -> str:
        """What to change when |R| is not below 1; the second sentence of an error message."""

    def contraction_upper(self, *, below: float = 0.0) -> float:
        """A rigorous upper bound of the contraction factor |R|, sharp to about 1e-11; one singular
        value decomposition, or none where a cheaper bound is already below `below`."""
        with torch.no_grad():
            return self._norm_bound(self.recurrent(), below=below)

    def check_well_posed(self) -> None:
        if self.on_ill_posed == "ignore":
            return
        with torch.no_grad():
            R = self.recurrent()
            finite = bool(torch.isfinite(R).all())
            bound = self._norm_bound(R, below=1.0) if finite else math.inf
        if bound < 1.0:
            return
        name = type(self).__name__
        if finite:
            text = (
                f"{name}: the contraction factor is only known to be at most {bound:.6g}, not below 1, so nothing proves that "
                f"an equilibrium exists and is unique. {self._remedy()}"
                + (", or pass on_ill_posed='warn' to continue without proof." if self.on_ill_posed == "raise" else ".")
            )
        else:
            text = (
                f"{name}: the recurrent matrix has NaN or infinite entries, so there is no equilibrium. The training has "
                "diverged: go back to finite parameters and take a smaller step."
            )
        if self.on_ill_posed == "raise":
            raise IllPosed(text)
        warnings.warn(text, IllPosedWarning, stacklevel=user_level())
