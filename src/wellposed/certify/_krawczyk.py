r"""One equilibrium in a box, by Krawczyk's form of Newton's method [krawczyk1969].

Let B be the box of all w with |w_i - c_i| <= r, and C any matrix. T(w) = w - C (w - f(w)) has

    T(v) - T(w) = (I - C (I - Q)) (v - w),        v, w in B,                                     (1)

with a matrix Q of quotients of f. Let E bound |I - C (I - Q)| for all of them, entry by entry, e_i
be its row sums, and y_i bound |C (c - f(c))|_i. If

    e_i < 1   and   y_i + e_i r < r     for all i,                                               (2)

T maps B into itself and contracts in the maximum norm, so it has exactly one fixed point there
(Banach). C and I - Q are then invertible, so it is exactly one equilibrium of f, with

    |z*_i - c_i| <= y_i + e_i max_j y_j/(1 - max_j e_j).                                         (3)

For every matrix J of the enclosure of the quotients, so for the derivatives in B where they exist,
(I - J)^-1 = (I - E')^-1 C with |E'| <= E, and for two of them

    |(I - J)^-1 - (I - J')^-1| <= |(I - J)^-1| |J - J'| |(I - J')^-1|.                           (4)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wellposed.certify._balls import SLACK, Boxes, gamma
from wellposed.certify._functions import TINY
from wellposed.linalg.bounds import spectral_norm_upper
from wellposed.linalg.directed import ROUNDING, down, up, vector_norm_upper

_NEWTON_STEPS = 30
#: Entries of the tables that the derivative with respect to one tensor may take.
LARGEST_DERIVATIVE = 2**20
#: The least radius that is tried, of the largest entry.
_LEAST = 2.0**-46


@dataclass(frozen=True)
class Enclosure:
    """Exactly one equilibrium in the box around a point.

    Attributes:
        centre: (n,) the point.
        radius: Of the box. within: Of a smaller one, in which the following hold.
        distance: (n,) upper bounds of |z* - centre|, entry by entry.
        inverse: Upper bound of |(I - J)^-1| for all quotients and derivatives J in the box.
        change: Upper bound of |J - J'| for two of them.
    """

    centre: Tensor
    radius: float
    within: float
    distance: Tensor
    inverse: float
    change: float

    def differs(self, other: Enclosure) -> bool:
        """Whether the two equilibria are different, proved."""
        gap = (self.centre - other.centre).abs() * (1 - 4 * ROUNDING)
        return bool((gap > (self.distance + other.distance) * SLACK + TINY).any())

    def error_at(self, z: Tensor) -> float:
        """Upper bound of the Euclidean norm of z - z*."""
        gap = (z - self.centre).abs()
        return vector_norm_upper(gap * (1 + 4 * ROUNDING) + self.distance)

    def radius_at(self, z: Tensor) -> float:
        """A radius around z, in the maximum norm, with exactly one equilibrium; 0 if none is
        proved."""
        gap = up(float((z - self.centre).abs().max()))
        radius = max(0.0, down(self.radius - gap))
        return radius if gap + up(float(self.distance.max())) <= radius else 0.0

    def gradient_error_at(self, z: Tensor) -> float:
        """Upper bound of |(I - J)^-1 - (I - J*)^-1|, J at z and J* at z*: (4)."""
        inside = float((z - self.centre).abs().max()) < self.within * (1 - 2.0**-40)
        return up(self.inverse * self.change * self.inverse) if inside else math.inf


def gradient_errors(boxes: Boxes, enclosure: Enclosure, z: Tensor) -> tuple[float, float]:
    r"""Upper bounds of |g - g*|/|v| for the gradients with respect to the parameters and to x.

    g = D^T u with D = df/dtheta at z, so that with (4)

        |g - g*| <= (|D - D*| |(I - J)^-1| + |D*| |(I - J)^-1 - (I - J*)^-1|) |v|.               (5)

    Infinite where a derivative has more than `LARGEST_DERIVATIVE` entries.
    """
    adjoint = math.inf if boxes.tape.hides else enclosure.gradient_error_at(z)
    steps = boxes.tape.steps
    found = []
    for wanted in ("parameter", "data"):
        # what an operation that is not known makes of x, and parameters, has a derivative that is not known
        unknown = any(step.kind == "computed" and (wanted == "data" or step.name == wanted) for step in steps)
        squares = math.inf if unknown else 0.0
        for step in steps:
            if step.shape.numel() and wanted in (step.kind, step.name if step.kind == "constant" else ""):
                p = step.shape.numel()
                size = p * max(other.shape.numel() for other in steps)
                if not math.isfinite(adjoint) or size > LARGEST_DERIVATIVE:
                    squares = math.inf
                    break
                D = boxes.varied(enclosure.centre, enclosure.within, step)
                change = _norm_upper(2 * D.rad.reshape(p, -1))
                norm = _norm_upper((D.mid.abs() + D.rad).reshape(p, -1))
                part = up(up(change * enclosure.inverse) + up(norm * adjoint))
                squares = up(squares + up(part * part))
        found.append(up(math.sqrt(squares)) if squares < math.inf else math.inf)
    return found[0], found[1]


def _norm_upper(magnitude: Tensor) -> float:
    """Upper bound of the spectral norm of matrices with at most these absolute values."""
    if not magnitude.numel():
        return 0.0
    sums = (float(magnitude.sum(dim=d).max()) * SLACK for d in (0, 1))
    return up(math.sqrt(up(next(sums)) * up(next(sums))))


def refine(boxes: Boxes, z: Tensor) -> tuple[Tensor, Tensor | None]:
    """A point near the equilibrium that Newton's method finds from z, and (n, n) J near it; None if
    the cell is not finite at z."""
    eye = torch.eye(z.numel(), dtype=torch.float64)
    best, J = z, None
    least, inverse = math.inf, None
    for _ in range(_NEWTON_STEPS):
        residual = boxes.at(z).value.mid.reshape(-1) - z
        size = float(residual.abs().max())
        if not size < least:
            break
        if inverse is None or size > 0.01 * least:
            ball = boxes.at(z, quotients=True)
            assert ball.quotients is not None
            J = ball.quotients.mid.reshape(z.numel(), -1).t()
            inverse, info = torch.linalg.inv_ex(eye - J)
            if int(info) or not bool(torch.isfinite(inverse).all()):
                return z, J
        best, least = z, size
        z = z + inverse @ residual
    return best, J


def enclose(boxes: Boxes, z: Tensor) -> tuple[Enclosure | None, Tensor | None]:
    """An enclosure of an equilibrium near z, and (n, n) J there; None if nothing is proved.

    Args:
        boxes: The cell.
        z: (n,) float64: near an equilibrium.
    """
    c, J = refine(boxes, z)
    if J is None:
        return None, None
    C, info = torch.linalg.inv_ex(torch.eye(len(J), dtype=torch.float64) - J)
    if int(info) or not bool(torch.isfinite(C).all()):
        return None, J
    y = _residual(boxes, c, C)
    scale = max(float(c.abs().max()), 2.0**-20)
    near = 4 * float(y.max()) + _LEAST * scale
    if not math.isfinite(near):
        return None, J
    around = near + 1.25 * float((z - c).abs().max())
    for radius in dict.fromkeys((around, near)):
        found, contraction = _test(boxes, c, C, y, radius)
        if found is not None:
            # e grows like r at first: a larger box may pass too, with the sharper bounds of the smaller one kept
            factor = min(0.25 / contraction, 1e6)
            for wider in (radius * factor, radius * math.sqrt(factor)) if factor > 2 else ():
                if _test(boxes, c, C, y, wider)[0] is not None:
                    return replace(found, radius=wider, within=radius), J
            return found, J
    return None, J


def _residual(boxes: Boxes, c: Tensor, C: Tensor) -> Tensor:
    """(n,) y of (2)."""
    value = boxes.at(c).value
    g = value.mid.reshape(-1) - c
    error = value.rad.reshape(-1) + (gamma(len(c)) + 2 * ROUNDING) * g.abs()
    return ((C @ g).abs() + C.abs() @ error) * SLACK + TINY


def _test(boxes: Boxes, c: Tensor, C: Tensor, y: Tensor, radius: float) -> tuple[Enclosure | None, float]:
    """The enclosure in this box if (2) holds, and the largest e."""
    n = len(c)
    quotients = boxes.at(c, radius, quotients=True).quotients
    assert quotients is not None
    J, spread = quotients.mid.reshape(n, n).t(), quotients.rad.reshape(n, n).t()
    eye = torch.eye(n, dtype=torch.float64)
    A = eye - J
    E = (eye - C @ A).abs() + gamma(n) * eye
    E = (E + C.abs() @ (spread + (gamma(n) + 2 * ROUNDING) * A.abs())) * SLACK + TINY
    rows = E.sum(dim=1) * SLACK
    largest = float(rows.max())
    if not (largest < 1 and bool((y + rows * radius * SLACK < radius).all())):
        return None, largest
    furthest = up(float(y.max()) / down(1 - up(largest)))
    distance = (y + rows * furthest) * SLACK
    inverse = _inverse_norm(C, E)
    # the spectral norm is at most that of the absolute values, and theirs at most the root of both sums
    sums = float((2 * spread).sum(dim=1).max()), float((2 * spread).sum(dim=0).max())
    return Enclosure(c, radius, radius, distance, inverse, up(math.sqrt(up(sums[0] * SLACK) * up(sums[1] * SLACK)))), largest


def _inverse_norm(C: Tensor, E: Tensor) -> float:
    """Upper bound of |(I - E')^-1 C| for |E'| <= E."""
    spread = up(math.sqrt(up(float(E.sum(dim=1).max()) * SLACK) * up(float(E.sum(dim=0).max()) * SLACK)))
    return up(spectral_norm_upper(C) / down(1 - spread)) if spread < 1 else math.inf
