r"""How much the equilibrium and the logits of a monotone classifier can change with its input.

Two equilibria z, z' for x, x' differ by dz = E (W dz + U dx), E diagonal with the secant slopes of the activation, in [0, b]
(b its Lipschitz constant). Where E_i = 0, dz_i = 0; elsewhere dz_i/E_i = (W dz + U dx)_i. Multiplied by dz_i and summed:

    sum dz_i^2/E_i = <dz, W dz> + <dz, U dx>,   hence   <dz, M dz> <= <dz, U dx>,   M = sym(I - W) + (1/b - 1) I       (1)

With M >= m + 1/b - 1 this gives |dz| <= |U| |dx|/(m + 1/b - 1), for b = 1 the |U|/m of [pabbaraju2021, Theorem 1]. It needs no
derivative of the activation, and holds between any two points. Sharper, in the norm |y|_M^2 = <y, M y>: the right side of (1)
is <M^(1/2) dz, M^(-1/2) U dx>, so |dz|_M <= |M^(-1/2) U dx|, and for every read-out w

    |<w, dz>| <= |M^(-1/2) w| |M^(-1/2) U| |dx|                                                                        (2)

which is never worse, because M >= margin I. Sharper again where something is known of x and x': if units outside a set S have
dz_i = 0 on all inputs considered, then (1) and (2) hold with M_SS, U_S and w_S (see `robustness`).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument
from wellposed.linalg import spectral_norm_upper
from wellposed.linalg.scaling import ldexp, ldexp_up, scaled
from wellposed.nn import DenseCell, MonotoneClassifier
from wellposed.nn.maps.operator import AbstractOperator
from wellposed.nn.monotone.conjugate_gradients import conjugate_gradients

__all__ = ["SLACK", "LipschitzBounds", "certified_operator", "classifier_bounds"]

#: What the rounding of sums of squares in float64 may take from a bound, relatively: far more than it does for 1e8 terms.
SLACK = 1.0 + 1e-7
#: What underflow may take from a bound.
TINY = torch.finfo(torch.float64).smallest_normal


@dataclass(frozen=True)
class LipschitzBounds:
    """Certified upper bounds of Lipschitz constants in the Euclidean norm, over all inputs.

    Attributes:
        margin: m + 1/b - 1: M >= margin I.
        input_norm: An upper bound of |U|.
        equilibrium: Of x -> z: |U|/margin.
        weighted_input_norm: An upper bound of |M^(-1/2) U|.
        weighted_readout: (classes, classes) upper bounds of |M^(-1/2) (w_i - w_j)|, w the directions of the logits.
        pairs: (classes, classes) of x -> logit_i - logit_j: the better of (2) and |w_i - w_j| |U|/margin.
        logits: Of x -> logits, in the Euclidean norm.
    """

    margin: float
    input_norm: float
    equilibrium: float
    weighted_input_norm: float
    weighted_readout: Tensor
    pairs: Tensor
    logits: float


def classifier_bounds(model: MonotoneClassifier) -> LipschitzBounds:
    """`lipschitz_upper` of a monotone classifier.

    Costs one conjugate-gradient solve with M per class, and for a dense cell the norm of a matrix.
    """
    with torch.no_grad():
        operator, shift, margin = certified_operator(model)
        cell = model.cell
        w, read = scaled(model.directions().double())  # so that no product vanishes or overflows
        underflow = TINY * (w.unsqueeze(1) != w.unsqueeze(0)).any(dim=2)  # between equal directions 0 is exact
        rows = ldexp(inverse_root_gram(operator, w, shift, margin), read) + underflow
        if isinstance(cell, DenseCell):
            U, injected = scaled(cell.U.detach().double())
            weighted = math.sqrt(inverse_quadratic_upper(operator, U.t().contiguous(), shift, margin))
            weighted = ldexp_up(min(weighted, spectral_norm_upper(U) / math.sqrt(margin)) * SLACK, injected)
            input_norm = spectral_norm_upper(cell.U.detach())
        else:
            assert model.image is not None
            input_norm = cell.injection_norm_upper(model.image[1], model.image[2])
            weighted = input_norm / math.sqrt(margin) * SLACK
        plain = ldexp(_pair_norms(w) / margin, read) * input_norm
        pairs = torch.minimum(rows * weighted, plain) * SLACK + underflow
        logits = min(
            spectral_norm_upper(model.head.weight.detach()) * _pooling_norm(model) * input_norm / margin,
            ldexp_up(math.sqrt(inverse_quadratic_upper(operator, w, shift, margin)), read) * weighted,
        )
    return LipschitzBounds(margin, input_norm, input_norm / margin * SLACK + TINY, weighted, rows, pairs, logits * SLACK + TINY)


def certified_operator(model: MonotoneClassifier) -> tuple[AbstractOperator, float, float]:
    """W of the model in float64, 1/b - 1, and a lower bound of the least eigenvalue of M."""
    cell = model.cell
    shift = 1.0 / cell.activation.lipschitz - 1.0
    if isinstance(cell, DenseCell):
        x = cell.U.new_zeros(1, cell.in_features).double()
    else:
        assert model.image is not None
        x = cell.U[0].new_zeros(1, *model.image).double()
    operator = _in_double(model, x)
    m, _ = operator.monotonicity()
    margin = m + shift
    if not margin > 0:
        raise InvalidArgument(
            f"The margin left after rounding is {margin:.3g}, not positive, so nothing is proved. "
            "Give the cell a larger margin, or look for parameters that have grown without bound."
        )
    return operator, shift, margin


def _in_double(model: MonotoneClassifier, x: Tensor) -> AbstractOperator:
    """The operator of the stored parameters, converted to float64 exactly."""
    cell = copy.deepcopy(model.cell).double()
    return cell.bind(x).operator


def inverse_root_gram(operator: AbstractOperator, w: Tensor, shift: float, margin: float) -> Tensor:
    """(k, k) upper bounds of |M^(-1/2) (w_i - w_j)|.

    With y = M^(-1) w up to a residual r = w - M y: w^T M^(-1) w = w^T y + r^T M^(-1) w <= w^T y + |r| |w|/margin.
    """
    y, _ = conjugate_gradients(lambda v: operator.symmetric(v, shift), None, w, rtol=1e-13, floor=1e-13)
    r = w - operator.symmetric(y, shift)
    dy, dw, dr = (t.unsqueeze(1) - t.unsqueeze(0) for t in (y, w, r))
    square = (dw * dy).sum(dim=2) + dr.norm(dim=2) * dw.norm(dim=2) / margin
    return square.clamp(min=0).sqrt() * SLACK


def inverse_quadratic_upper(operator: AbstractOperator, rows: Tensor, shift: float, margin: float) -> float:
    """An upper bound of |R M^(-1) R^T| for R = rows (k, n)."""
    y, _ = conjugate_gradients(lambda v: operator.symmetric(v, shift), None, rows, rtol=1e-13, floor=1e-13)
    r = rows - operator.symmetric(y, shift)
    error = float(r.norm()) * float(rows.norm()) / margin
    return (spectral_norm_upper(rows @ y.t()) + error) * SLACK


def _pair_norms(w: Tensor) -> Tensor:
    return (w.unsqueeze(1) - w.unsqueeze(0)).norm(dim=2)


def _pooling_norm(model: MonotoneClassifier) -> float:
    """|P|: the mean of q numbers has norm 1/sqrt(q)."""
    if model.image is None:
        return 1.0
    return max(model.grid / math.sqrt(h * w) for _, h, w in model.region_shapes())
