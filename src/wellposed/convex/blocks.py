r"""The convex function behind one unit layer, evaluated.

A unit f(z) = a/mu W^T s(W z + c) + (1 - a) z is the gradient of the convex function

    Theta(z) = a/mu 1^T S(W z + c) + (1 - a) |z|^2/2,       S the primitive of s,                              (1)

and, being non-expansive if |W|^2 L_s <= mu, the proximal operator of

    Phi(z) = Theta*(z) - |z|^2/2 = a M^(1-a)_phi(z)                                                            (2)

[xie2021, Theorems 1 and 2]; for a = 1 this is phi = psi* - |z|^2/2 itself. (Section 2.2 there forgets the factor a.)
"""

from __future__ import annotations

import abc
import math
from typing import Any

import torch
from torch import Tensor

from wellposed.convex._conjugate import conjugate_by_newton
from wellposed.convex.operators import MatrixOperator
from wellposed.convex.prox import primitive_conjugate, value_range
from wellposed.convex.regularizers import AbstractRegularizer
from wellposed.convex.stages import Unit
from wellposed.errors import InvalidArgument, InvalidType

__all__ = ["AbstractBlock", "RegularizerBlock", "UnitBlock"]

#: How far outside its domain, relative to its size, a point may lie by rounding and still count as inside.
FEASIBLE = 1e-9


class AbstractBlock(abc.ABC):
    """A convex function Phi of a state (n, m), one value per sample, and its proximal operator."""

    @abc.abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """(n, m) -> (n,) Phi(z), infinite outside its domain."""

    @abc.abstractmethod
    def prox(self, z: Tensor) -> Tensor:
        """(n, m) -> (n, m) the proximal operator of Phi."""

    def check(self, z: Any) -> None:  # noqa: B027
        """Raises unless z is a state for which the function was made; by default it is one of any."""

    def prepare(self, z: Tensor) -> Tensor:
        """(n, m) -> (n, k) a linear image of z that `value_prepared` needs; the expensive part, shared along a line."""
        return z

    def value_prepared(self, z: Tensor, prepared: Tensor) -> Tensor:
        """`value`, given `prepare(z)`."""
        return self.value(z)


class RegularizerBlock(AbstractBlock):
    """Phi = R."""

    def __init__(self, regularizer: AbstractRegularizer) -> None:
        self._regularizer = regularizer

    def value(self, z: Tensor) -> Tensor:
        return self._regularizer.value(z)

    def prox(self, z: Tensor) -> Tensor:
        return self._regularizer.prox(z)


class UnitBlock(AbstractBlock):
    r"""Phi of (2), for a unit with a matrix.

    If a = 1 and the rows of W are independent (W invertible, or with fewer rows than columns) it is in closed form: psi* is
    the least of 1^T S*(w) - <c, w>, over mu, among the w with W^T w = mu z, and there is only one,

        phi(z) = (1/mu) [1^T S*(w) - <c, w>] - |z|^2/2,     w = mu W^(-T) z                                    (3)

    ([xie2021] prints <c, W^(-1) z>). W is factored once, W^T = Q R; a value then costs two products. Otherwise Theta* is found
    by maximising <z, v> - Theta(v) with Newton's method, one system of size m per sample and step.

    Args:
        unit: f, with a `MatrixOperator`.
    """

    def __init__(self, unit: Unit) -> None:
        if not isinstance(unit.operator, MatrixOperator):
            raise InvalidType(
                "The objective needs the matrices of the layers; a convolutional network has none of usable size."
            )
        self._unit = unit.detach()
        self._W, self._c, self._s = self._unit.operator.tensor, self._unit.c, unit.activation
        self._mu = (1 - unit.keep) / unit.scale
        self._factor = self._factorize() if unit.keep == 0.0 else None

    @property
    def is_closed_form(self) -> bool:
        """Whether (3) applies."""
        return self._factor is not None

    def check(self, z: Any) -> None:
        n, m, dtype = self._c.shape[0], self._W.shape[1], self._W.dtype
        if not isinstance(z, Tensor):
            raise InvalidType(f"The objective expects states of shape ({n}, {m}); got {type(z).__name__}. Give a tensor.")
        if z.dim() != 2 or z.shape[1] != m or n not in (1, z.shape[0]):  # one sample: its function, at many points
            raise InvalidArgument(
                f"The objective was made for {n} sample(s) X and expects states of shape ({n}, {m}); got {tuple(z.shape)}. "
                "Make it anew with the X of these states."
            )
        if z.dtype != dtype:
            raise InvalidType(
                f"The objective has {dtype} parameters and got a state of {z.dtype}; convert it, e.g. z.to({dtype})."
            )

    def prox(self, z: Tensor) -> Tensor:
        return self._unit(z)

    def psi(self, z: Tensor) -> Tensor:
        """(n, m) -> (n,) Theta(z), the convex function whose gradient is the unit."""
        primitive = self._s.primitive(self._unit.operator.apply(z) + self._c).sum(dim=1)
        return self._unit.scale * primitive + self._unit.keep / 2 * z.square().sum(dim=1)

    def envelope(self, z: Tensor) -> Tensor:
        """(n, m) -> (n,) min_y Phi(y) + |y - z|^2/2 = |z|^2/2 - Theta(z): convex, finite, with the minimisers of Phi.

        Its gradient is z - f(z), the residual of the fixed point, so no conjugate is needed to see the equilibrium minimise.
        """
        return z.square().sum(dim=1) / 2 - self.psi(z)

    def value(self, z: Tensor) -> Tensor:
        return self.value_prepared(z, self.prepare(z))

    def prepare(self, z: Tensor) -> Tensor:
        if self._factor is None:
            return z
        Q, R = self._factor
        return self._mu * torch.linalg.solve_triangular(R, Q.t() @ z.t(), upper=True).t()

    def value_prepared(self, z: Tensor, prepared: Tensor) -> Tensor:
        half = z.square().sum(dim=1) / 2
        if self._factor is None:
            return conjugate_by_newton(self._unit, self.psi, z, mu=self._mu).value - half
        low, high = value_range(self._s)
        w = prepared.clamp(low, high)
        value = (primitive_conjugate(self._s, w) - self._c * w).sum(dim=1) / self._mu - half
        # outside the domain: w beyond the range of s, or z not in the range of W^T
        size = prepared.abs().amax(dim=1)
        beyond = (prepared - w).abs().amax(dim=1) > FEASIBLE * size
        missed = torch.linalg.vector_norm(z - prepared @ self._W / self._mu, dim=1)
        beyond |= missed > FEASIBLE * torch.linalg.vector_norm(z, dim=1)
        return torch.where(beyond, math.inf, value)

    def gradient(self, z: Tensor) -> Tensor:
        """(n, m) -> (n, m) grad Phi = f^(-1)(z) - z where a < 1, so that Phi is smooth.

        It equals a/(1 - a) (z - prox of (1-a) phi at z).
        """
        return conjugate_by_newton(self._unit, self.psi, z, mu=self._mu).argument - z

    def _factorize(self) -> tuple[Tensor, Tensor] | None:
        rows, columns = self._W.shape
        if rows > columns:
            return None
        Q, R = torch.linalg.qr(self._W.t())
        diagonal = R.diagonal().abs()
        independent = float(diagonal.min()) > 1e3 * torch.finfo(R.dtype).eps * float(diagonal.max())
        return (Q, R) if independent else None
