r"""How much a prediction can change with its input: certified upper bounds, and lower bounds found
by search.

The bounds of theory networks and of dense equilibrium layers are in `_lipschitz_network`, those of
classifiers here. Two equilibria z, z' for x, x' differ by dz = E (W dz + U dx), E diagonal with the
secant slopes of the activation, in [0, b] (b its Lipschitz constant). Where E_i = 0, dz_i = 0;
elsewhere dz_i/E_i = (W dz + U dx)_i. Multiplied by dz_i and summed:

    sum dz_i^2/E_i = <dz, W dz> + <dz, U dx>,   hence   <dz, M dz> <= <dz, U dx>,   M = sym(I - W) + (1/b - 1) I       (1)

With M >= m + 1/b - 1 this gives |dz| <= |U| |dx|/(m + 1/b - 1), for b = 1 the |U|/m of
[pabbaraju2021, Theorem 1]. It needs no derivative of the activation, and holds between any two
points. Sharper, in the norm |y|_M^2 = <y, M y>: the right side of (1) is <M^(1/2) dz, M^(-1/2) U
dx>, so |dz|_M <= |M^(-1/2) U dx|, and for every read-out w

    |<w, dz>| <= |M^(-1/2) w| |M^(-1/2) U| |dx|                                                                        (2)

which is never worse, because M >= margin I. Sharper again where something is known of x and x': if
units outside a set S have dz_i = 0 on all inputs considered, then (1) and (2) hold with M_SS, U_S
and w_S (see `robustness`).
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.certify._gate import check_finite, check_model, check_unchanged
from wellposed.certify._lipschitz_network import NetworkLipschitz, layer_bounds, network_bounds
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg import spectral_norm_upper
from wellposed.linalg.directed import ldexp, ldexp_up, scaled
from wellposed.nn import DenseCell, EquilibriumLayer, MonotoneClassifier
from wellposed.nn.families import FAMILIES, AbstractNetwork, theory_of
from wellposed.nn.maps.operator import AbstractOperator
from wellposed.nn.monotone.conjugate_gradients import conjugate_gradients

#: What the rounding of sums of squares in float64 may take from a bound, relatively: far more than it does for 1e8 terms.
SLACK = 1.0 + 1e-7
#: What underflow may take from a bound.
TINY = torch.finfo(torch.float64).smallest_normal
_UNKNOWN = (
    f"lipschitz_upper knows {', '.join(family.__name__ for family in FAMILIES.values())}, MonotoneClassifier and an "
    "EquilibriumLayer with a DenseCell; got {name}. Others: lipschitz_upper.register({name}, function)."
)
#: Of the equilibria between which ratios are taken.
_RTOL = 1e-11


@dataclass(frozen=True)
class LipschitzBounds:
    """Certified upper bounds of Lipschitz constants in the Euclidean norm, over all inputs.

    Attributes:
        margin: m + 1/b - 1: M >= margin I.
        input_norm: An upper bound of |U|.
        equilibrium: Of x -> z: |U|/margin.
        weighted_input_norm: An upper bound of |M^(-1/2) U|.
        weighted_readout: (classes, classes) upper bounds of |M^(-1/2) (w_i - w_j)|, w the
            directions of the logits.
        pairs: (classes, classes) of x -> logit_i - logit_j: the better of (2) and |w_i - w_j|
            |U|/margin.
        logits: Of x -> logits, in the Euclidean norm.
    """

    margin: float
    input_norm: float
    equilibrium: float
    weighted_input_norm: float
    weighted_readout: Tensor
    pairs: Tensor
    logits: float


@functools.singledispatch
def lipschitz_upper(model: nn.Module) -> LipschitzBounds | NetworkLipschitz:
    """Certified upper bounds of Lipschitz constants in the input, at the present parameters;
    computed in float64.

    For theory networks and an `EquilibriumLayer` with a `DenseCell` a `NetworkLipschitz`, for a
    `MonotoneClassifier` a `LipschitzBounds`. Other kinds of models are added by
    `lipschitz_upper.register(MyModel, bounds_of_mine)`.

    Args:
        model: Of one of these types. Its parameters are taken as stored; nothing is changed.
    """
    raise InvalidType(_UNKNOWN.format(name=type(model).__name__))


@lipschitz_upper.register
def _(model: MonotoneClassifier) -> LipschitzBounds:
    _check(model)
    return classifier_bounds(model)


@lipschitz_upper.register
def _(model: AbstractNetwork) -> NetworkLipschitz:
    _check(model)
    if not model.theory.injected or not model.theory.readout:
        raise InvalidType(_UNKNOWN.format(name=type(model).__name__))
    return network_bounds(model)


@lipschitz_upper.register
def _(model: EquilibriumLayer) -> NetworkLipschitz:
    _check(model)
    return layer_bounds(model)


def _check(model: nn.Module) -> None:
    check_model("lipschitz_upper", model)
    check_unchanged("lipschitz_upper", model, declared=("theory",))
    check_finite("lipschitz_upper", model)


def lipschitz_lower(
    model: nn.Module, x: Tensor, *, steps: int = 50, learning_rate: float = 0.1, generator: torch.Generator | None = None
) -> Tensor:
    """(batch,) ratios |f(x1) - f(x2)|/|x1 - x2| that were really found, by gradient ascent on both
    points.

    Each is a lower bound of the Lipschitz constant of x -> f(x), the logits or the prediction, up
    to the tolerance of the solves. For networks with one output the first direction is that of the
    gradient, and all is done on a copy in float64 with equilibria to 1e-11.

    Args:
        model: A classifier, a theory network, or an equilibrium layer.
        x: (batch, ...) where the search begins: at least one sample, finite, of the size that the
            model takes.
        steps: Of Adam, on x1 and x2 together.
        learning_rate: Of Adam, relative to the size of x.
        generator: Of the first directions, and of what is added to gradients.
    """
    _check_inputs(model, x)
    f: Any = model
    theory = theory_of(model)
    if theory is not None:
        f, x = _precise(model), x.detach().double().cpu()
    scale = float(x.detach().square().mean().sqrt()) or 1.0
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    first = x.detach().clone().requires_grad_()
    direction = noise if theory is None else _steepest(f, first, noise)
    second = (x.detach() + 0.1 * scale * direction).requires_grad_()
    optimizer = torch.optim.Adam([first, second], lr=learning_rate * scale)
    best = x.new_zeros(x.shape[0])
    for _ in range(steps + 1):
        difference = (f(first) - f(second)).reshape(x.shape[0], -1).norm(dim=1)
        distance = (first - second).flatten(1).norm(dim=1)
        ratio = torch.where(distance > 0, difference / distance, 0.0)
        best = torch.maximum(best, ratio.detach())
        optimizer.zero_grad()
        (-ratio.clamp(min=1e-30).log().sum()).backward(inputs=[first, second])
        optimizer.step()
    return best


def _check_inputs(model: nn.Module, x: Any) -> None:
    """One sentence about what is wrong with the inputs where a search begins."""
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InvalidType(f"lipschitz_lower: x must be a floating-point tensor (batch, ...); got {seen}.")
    shape = tuple(x.shape)
    wanted, flattens = _input_shape(model)
    if x.dim() < 2 or (wanted is not None and (x[:0].flatten(1) if flattens else x).shape[1:] != wanted):
        expected = "..." if wanted is None else ", ".join(map(str, wanted))
        raise InvalidArgument(f"lipschitz_lower: x must have shape (batch, {expected}); got {shape}.")
    if x.numel() == 0:
        raise InvalidArgument(f"lipschitz_lower: x has no samples (shape {shape}); the search needs at least one to begin at.")
    if not bool(torch.isfinite(x).all()):
        raise InvalidArgument("lipschitz_lower: x has NaN or infinite entries; clean the data first.")
    first = next(model.parameters(), x)
    if first.dtype != x.dtype and theory_of(model) is None:
        raise InvalidType(f"lipschitz_lower: the model is {first.dtype} and x is {x.dtype}; convert one of them.")


def _input_shape(model: Any) -> tuple[tuple[int, ...] | None, bool]:
    """Of one sample, or None where the model does not declare it; and whether the model flattens
    samples itself."""
    if theory_of(model) is not None:
        return (model.in_features,), False
    classifier = isinstance(model, MonotoneClassifier)  # by type: it declares no theory
    if classifier and model.image is not None:
        return tuple(model.image), False
    layer = model.layer if classifier else model
    if isinstance(layer, EquilibriumLayer) and isinstance(layer.cell, DenseCell):
        return (layer.cell.U.shape[1],), classifier
    return None, False


def _precise(model: Any) -> Any:
    """A float64 copy with accurate equilibria; whether they exist is for the upper bound to
    judge."""
    twin = copy.deepcopy(model).double().cpu()
    twin.layer.rtol, twin.layer.max_steps = _RTOL, max(2000, twin.layer.max_steps)
    twin.on_ill_posed = "ignore"
    return twin.requires_grad_(False)


def _steepest(f: nn.Module, x: Tensor, noise: Tensor) -> Tensor:
    """(batch, d) the gradients' directions, as long as the noise is on average, and a tenth of the
    noise."""
    (slopes,) = torch.autograd.grad(f(x).sum(), x)
    return slopes * (math.sqrt(x.shape[1]) / slopes.norm(dim=1, keepdim=True).clamp(min=1e-300)) + 0.1 * noise


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

    With y = M^(-1) w up to a residual r = w - M y: w^T M^(-1) w = w^T y + r^T M^(-1) w <= w^T y +
    |r| |w|/margin.
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
