r"""The convex function behind one unit layer, evaluated.

A unit f(z) = a/mu W^T s(W z + c) + (1 - a) z is the gradient of the convex function

    Theta(z) = a/mu 1^T S(W z + c) + (1 - a) |z|^2/2,       S the primitive of s,                              (1)

and, being non-expansive if |W|^2 L_s <= mu, the proximal operator of

    Phi(z) = Theta*(z) - |z|^2/2 = a M^(1-a)_phi(z)                                                            (2)

[xie2021, Theorems 1 and 2]; for a = 1 this is phi = psi* - |z|^2/2 itself. (Section 2.2 there
forgets the factor a.)

An activation s is non-decreasing and 1-Lipschitz, so it is the derivative of a convex S (its
`primitive`, S(0) = 0) and the proximal operator of a potential p. The two are tied by

    S*(y) = p(y) + y^2/2 - constant,        S(v) + S*(y) >= v y  with equality where y = s(v)                  (3)

(Moreau). S* is what [xie2021] writes with a tilde and a star; for ReLU it is y^2/2 on y >= 0 (the
paper prints y > 0, but inactive units sit exactly at 0) and infinite elsewhere.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed.convex.regularizers import AbstractRegularizer
from wellposed.convex.stages import MatrixMap, UnitLayer
from wellposed.errors import InvalidArgument, InvalidType, NotConverged
from wellposed.linalg.direct import batched_solve
from wellposed.nn import AbstractActivation

#: Newton steps for a conjugate.
MAX_STEPS = 200
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
        """Raises unless z is a state for which the function was made; by default it is one of
        any."""

    def prepare(self, z: Tensor) -> Tensor:
        """(n, m) -> (n, k) a linear image of z that `value_prepared` needs; the expensive part,
        shared along a line."""
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

    If a = 1 and the rows of W are independent (W invertible, or with fewer rows than columns) it is
    in closed form: psi* is the least of 1^T S*(w) - <c, w>, over mu, among the w with W^T w = mu z,
    and there is only one,

        phi(z) = (1/mu) [1^T S*(w) - <c, w>] - |z|^2/2,     w = mu W^(-T) z                                    (4)

    ([xie2021] prints <c, W^(-1) z>). W is factored once, W^T = Q R; a value then costs two
    products. Otherwise Theta* is found by maximising <z, v> - Theta(v) with Newton's method, one
    system of size m per sample and step.

    Args:
        unit: f, with a `MatrixMap`.
    """

    def __init__(self, unit: UnitLayer) -> None:
        if not isinstance(unit.operator, MatrixMap):
            raise InvalidType(
                "The objective needs the matrices of the layers; a convolutional network has none of usable size."
            )
        self._unit = unit.detach()
        self._W, self._c, self._s = self._unit.operator.tensor, self._unit.c, unit.activation
        self._mu = (1 - unit.keep) / unit.scale
        self._factor = self._factorize() if unit.keep == 0.0 else None

    @property
    def is_closed_form(self) -> bool:
        """Whether (4) applies."""
        return self._factor is not None

    def check(self, z: Any) -> None:
        n, m, dtype = self._c.shape[0], self._W.shape[1], self._W.dtype
        if not isinstance(z, Tensor):
            raise InvalidType(f"The objective expects states of shape ({n}, {m}); got {type(z).__name__}. Give a tensor.")
        if z.dim() != 2 or z.shape[1] != m or n not in (1, z.shape[0]):  # one sample: its function, at many points
            raise InvalidArgument(
                f"The objective was made for {n} sample(s) X and expects states of shape ({n}, {m}); got {tuple(z.shape)}. "
                "Make a new one with the X of these states."
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
        """(n, m) -> (n,) min_y Phi(y) + |y - z|^2/2 = |z|^2/2 - Theta(z): convex, finite, with the
        minimisers of Phi.

        Its gradient is z - f(z), the residual of the fixed point, so no conjugate is needed to see
        the equilibrium minimise.
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
            return _conjugate_by_newton(self._unit, self.psi, z, mu=self._mu)[0] - half
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
        return _conjugate_by_newton(self._unit, self.psi, z, mu=self._mu)[1] - z

    def _factorize(self) -> tuple[Tensor, Tensor] | None:
        rows, columns = self._W.shape
        if rows > columns:
            return None
        Q, R = torch.linalg.qr(self._W.t())
        diagonal = R.diagonal().abs()
        independent = float(diagonal.min()) > 1e3 * torch.finfo(R.dtype).eps * float(diagonal.max())
        return (Q, R) if independent else None


def _conjugate_by_newton(unit: UnitLayer, theta: Callable[[Tensor], Tensor], y: Tensor, *, mu: float) -> tuple[Tensor, Tensor]:
    r"""Theta*(y) = sup_v <y, v> - Theta(v), where grad Theta is the unit f, by damped semi-smooth
    Newton steps [qi1993].

    The Hessian scale W^T D W + keep I is at least keep = 1 - a; for a = 1 it may be singular and a
    multiple of the identity that vanishes with the gradient is added. A sample that does not
    converge is asked whether y can be reached at all, by a bounded least-squares problem for y =
    W^T w/mu with w in the range of s: if not, Theta*(y) is infinite.

    Args:
        unit: f = grad Theta, with a matrix W (h, m).
        theta: (n, m) -> (n,) Theta.
        y: (n, m).
        mu: As in the unit: scale = (1 - keep)/mu.

    Returns:
        (n,) values, infinite outside the domain of Theta*, and (n, m) maximisers, NaN there.

    Raises:
        NotConverged: y can be reached, but Newton's method did not get there.
    """
    W = unit.operator.tensor
    identity = torch.eye(W.shape[1], dtype=W.dtype, device=W.device)
    eps = torch.finfo(y.dtype).eps
    goal = 64 * eps * math.sqrt(W.shape[1])
    v = y.clone()
    objective = (y * v).sum(dim=1) - theta(v)
    for _ in range(MAX_STEPS):
        hidden = unit.hidden(v)
        g = y - (unit.scale * unit.operator.transpose(hidden) + unit.keep * v)
        size = torch.linalg.vector_norm(g, dim=1)
        scale = torch.linalg.vector_norm(y, dim=1) + unit.keep * torch.linalg.vector_norm(v, dim=1)
        active = size > goal * scale.clamp(min=torch.finfo(y.dtype).tiny)
        if not bool(active.any()):
            break
        slope = unit.activation.slope(hidden)
        D = torch.ones_like(hidden) if slope is None else slope
        H = unit.scale * torch.einsum("hi,nh,hj->nij", W, D, W) + unit.keep * identity
        if unit.keep == 0.0:
            H = H + (size.clamp(max=1e-2) * 1e-2 + eps).view(-1, 1, 1) * identity
        direction = batched_solve(H, g)
        v, objective, moved = _line_search(y, v, direction, g, objective, theta, active)
        if not bool(moved.any()):
            break
    hidden = unit.hidden(v)
    missed = torch.linalg.vector_norm(y - (unit.scale * unit.operator.transpose(hidden) + unit.keep * v), dim=1)
    scale = torch.linalg.vector_norm(y, dim=1) + unit.keep * torch.linalg.vector_norm(v, dim=1)
    failed = ~(missed <= 1e-8 * scale)
    outside = torch.zeros_like(failed)
    for i in torch.nonzero(failed).flatten().tolist():
        if unit.keep > 0.0 or _reachable(unit, y[i], mu):
            raise NotConverged(
                f"The conjugate of a unit layer was not found for sample {i}: after {MAX_STEPS} Newton steps the gradient is "
                f"{float(missed[i]):.1e}. Points at the border of the domain are hard; try one slightly inside."
            )
        outside[i] = True
    value = torch.where(outside, math.inf, objective)
    return value, torch.where(outside.unsqueeze(1), math.nan, v)


def _line_search(
    y: Tensor, v: Tensor, direction: Tensor, g: Tensor, objective: Tensor, theta: Callable[[Tensor], Tensor], active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Halves the step of each sample until <y, v> - Theta(v) has grown enough (Armijo); samples
    that cannot move stay."""
    ascent = (g * direction).sum(dim=1)
    rounding = 64 * torch.finfo(y.dtype).eps * objective.abs()
    step = active.to(y.dtype)
    moved = torch.zeros_like(active)
    for _ in range(40):
        trial = v + step.unsqueeze(1) * direction
        value = (y * trial).sum(dim=1) - theta(trial)
        good = active & ~moved & (value >= objective + 1e-4 * step * ascent - rounding)
        v = torch.where(good.unsqueeze(1), trial, v)
        objective = torch.where(good, value, objective)
        moved |= good
        if bool((moved | ~active).all()):
            break
        step = torch.where(moved, step, step / 2)
    return v, objective, moved


def _reachable(unit: UnitLayer, y: Tensor, mu: float) -> bool:
    """Whether y = W^T w/mu for some w in the closed range of the activation."""
    from scipy.optimize import lsq_linear  # here: SciPy takes longer to import than the library

    W = unit.operator.tensor.double().cpu().numpy()
    low, high = value_range(unit.activation)
    target = mu * y.double().cpu().numpy()
    if math.isinf(low) and math.isinf(high):
        missed = W.T @ np.linalg.lstsq(W.T, target, rcond=None)[0] - target
    else:
        missed = lsq_linear(W.T, target, bounds=(low, high), tol=1e-13, method="bvls").fun
    return bool(np.linalg.norm(missed) <= 1e-7 * np.linalg.norm(target))


def value_range(activation: AbstractActivation) -> tuple[float, float]:
    """The closed range [s(-inf), s(inf)] of an activation: where the conjugate of its primitive may
    be finite."""
    ends = activation(torch.tensor([-math.inf, math.inf], dtype=torch.float64))
    return float(ends[0]), float(ends[1])


def primitive_conjugate(activation: AbstractActivation, y: Tensor) -> Tensor:
    """S*(y) elementwise, by (3): the conjugate of the primitive of s, at least 0, infinite outside
    the range of s.

    Args:
        activation: s.
        y: Any shape.
    """
    lowest = activation(torch.zeros((), dtype=torch.float64))  # S*(s(0)) = 0 s(0) - S(0) = 0
    constant = float(activation.potential(lowest) + lowest.square() / 2)
    return activation.potential(y) + (y.square() / 2 - constant)
