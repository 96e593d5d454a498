r"""How much a prediction can change with its input: certified upper bounds, and lower bounds found by search.

The bounds of monotone classifiers are in `_lipschitz_classifier`, those of the theory networks and of dense equilibrium layers
in `_lipschitz_network`.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.certify._directed import down, up, vector_norm_upper
from wellposed.certify._gate import check_finite, check_model, check_unchanged
from wellposed.certify._lipschitz_classifier import LipschitzBounds, classifier_bounds
from wellposed.certify._lipschitz_network import DenseNetwork, NetworkLipschitz, bound_network
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn import (
    AbstractContraction,
    AbstractNetwork,
    DenseCell,
    EquilibriumLayer,
    GaussianDEQ,
    ImplicitOnlyDEQ,
    Monotone,
    MonotoneClassifier,
    MonotoneDEQ,
    SkipDEQ,
    Spectral,
)

__all__ = ["LipschitzBounds", "NetworkLipschitz", "lipschitz_lower", "lipschitz_upper"]

_UNIT = 2.0**-53
#: Of the equilibria between which ratios are taken.
_RTOL = 1e-11


@functools.singledispatch
def lipschitz_upper(model: nn.Module) -> LipschitzBounds | NetworkLipschitz:
    """Certified upper bounds of Lipschitz constants in the input, at the present parameters; computed in float64.

    For `GaussianDEQ`, `SkipDEQ`, `ImplicitOnlyDEQ`, `MonotoneDEQ` and an `EquilibriumLayer` with a `DenseCell` a
    `NetworkLipschitz`, for a `MonotoneClassifier` a `LipschitzBounds`. Other families are added by
    `lipschitz_upper.register(MyNetwork, bounds_of_mine)`.

    Args:
        model: Of one of these types. Its parameters are taken as stored; nothing is changed.
    """
    raise InvalidType(
        "lipschitz_upper knows GaussianDEQ, SkipDEQ, ImplicitOnlyDEQ, MonotoneDEQ, MonotoneClassifier and an EquilibriumLayer "
        f"with a DenseCell; got {type(model).__name__}. Others: lipschitz_upper.register({type(model).__name__}, function)."
    )


@lipschitz_upper.register
def _(model: MonotoneClassifier) -> LipschitzBounds:
    _check(model)
    return classifier_bounds(model)


@lipschitz_upper.register
def _(model: GaussianDEQ) -> NetworkLipschitz:
    _check(model)
    W, U, a = _exact(model.W, model.U, model.a)
    return bound_network(DenseNetwork(W, 0.0, U, v=a), "GaussianDEQ")


@lipschitz_upper.register
def _(model: SkipDEQ) -> NetworkLipschitz:
    _check(model)
    A, W, u, v = _exact(model.A, model.W, model.u, model.v)
    root = math.sqrt(model.width)
    R = A * (model.gamma / root)
    return bound_network(DenseNetwork(R, _relative(R), W, rectified=True, scale=up(1 / root), v=u, v_skip=v), "SkipDEQ")


@lipschitz_upper.register
def _(model: ImplicitOnlyDEQ) -> NetworkLipschitz:
    _check(model)
    A, W, b = _exact(model.A, model.W, model.b)
    R = A.t() * model.gamma
    network = DenseNetwork(
        R, _relative(R), W.t().contiguous(), rectified=True, v=b, readout_scale=up(1 / math.sqrt(model.width))
    )
    return bound_network(network, "ImplicitOnlyDEQ")


@lipschitz_upper.register
def _(model: MonotoneDEQ) -> NetworkLipschitz:
    _check(model)
    A, B, U, u = _exact(model.A, model.B, model.U, model.u)
    W, error = _monotone(A, B, model.parametrization)
    return bound_network(DenseNetwork(W, error, U, v=u, margin=down(model.margin)), "MonotoneDEQ")


@lipschitz_upper.register
def _(model: EquilibriumLayer) -> NetworkLipschitz:
    _check(model)
    cell = model.cell
    if not isinstance(cell, DenseCell):
        raise InvalidType(f"lipschitz_upper needs an EquilibriumLayer with a DenseCell; got one with {type(cell).__name__}.")
    slope = cell.activation.lipschitz
    if isinstance(cell.weight, Monotone):
        A, B, U = _exact(cell.A, cell.B, cell.U)
        R, error = _monotone(A, B, cell.weight)
        return bound_network(DenseNetwork(R, error, U, slope=slope, margin=down(cell.weight.margin + 1 / slope - 1)), "layer")
    W, U = _exact(cell.W, cell.U)
    if cell.weight is None:
        return bound_network(DenseNetwork(W, 0.0, U, slope=slope), "layer")
    if not isinstance(cell.weight, Spectral):
        raise InvalidType(f"lipschitz_upper knows weight=None, Spectral and Monotone; got {type(cell.weight).__name__}.")
    (R,) = _exact(cell.recurrent())  # as the layer uses it; a graph may round it differently
    error = up(len(R) * torch.finfo(cell.W.dtype).eps * vector_norm_upper(R))
    return bound_network(DenseNetwork(R, error, U, slope=slope), "layer")


def _check(model: nn.Module) -> None:
    check_model("lipschitz_upper", model)
    check_unchanged("lipschitz_upper", model)
    check_finite("lipschitz_upper", model)


def _exact(*parameters: Tensor) -> tuple[Tensor, ...]:
    """In float64 on the CPU, which changes no stored value."""
    found = tuple(parameter.detach().double().cpu() for parameter in parameters)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in found):
        raise InvalidArgument("lipschitz_upper: a parameter has NaN or infinite entries; look for the step that made them.")
    return found


def _relative(R: Tensor) -> float:
    """Upper bound of the rounding of a matrix times a scalar that took three operations."""
    return up(5 * _UNIT * vector_norm_upper(R))


def _monotone(A: Tensor, B: Tensor, weight: Monotone) -> tuple[Tensor, float]:
    """W = (1 - m) I - A^T A + B - B^T, and a bound of its rounding."""
    size = vector_norm_upper(A) * vector_norm_upper(A) + 2 * vector_norm_upper(B) + (1 + weight.margin) * math.sqrt(B.shape[0])
    W: Tensor = weight(A, B)
    return W, up(2 * (A.shape[0] + 8) * _UNIT * size)


def lipschitz_lower(
    model: nn.Module,
    x: Tensor,
    *,
    steps: int = 50,
    learning_rate: float = 0.1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """(batch,) ratios |f(x1) - f(x2)|/|x1 - x2| that were really found, by gradient ascent on both points.

    Each is a lower bound of the Lipschitz constant of x -> f(x), the logits or the prediction, up to the tolerance of the
    solves. For networks with one output the first direction is that of the gradient, and all is done on a copy in float64
    with equilibria to 1e-11.

    Args:
        model: A classifier, a theory network, or an equilibrium layer.
        x: (batch, ...) where the search begins: at least one sample, finite, of the size that the model takes.
        steps: Of Adam, on x1 and x2 together.
        learning_rate: Of Adam, relative to the size of x.
        generator: Of the first directions, and of what is added to gradients.
    """
    _check_inputs(model, x)
    f: Any = model
    if isinstance(model, AbstractNetwork):
        f, x = _precise(model), x.detach().double().cpu()
    scale = float(x.detach().square().mean().sqrt()) or 1.0
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    first = x.detach().clone().requires_grad_()
    direction = _steepest(f, first, noise) if isinstance(model, AbstractNetwork) else noise
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
    shape, wanted = tuple(x.shape), _input_shape(model)
    flat = isinstance(model, MonotoneClassifier) and len(wanted or ()) == 1
    if x.dim() < 2 or (wanted is not None and (x[:0].flatten(1) if flat else x).shape[1:] != wanted):
        expected = "..." if wanted is None else ", ".join(map(str, wanted))
        raise InvalidArgument(f"lipschitz_lower: x must have shape (batch, {expected}); got {shape}.")
    if x.numel() == 0:
        raise InvalidArgument(f"lipschitz_lower: x has no samples (shape {shape}); the search needs at least one to begin at.")
    if not bool(torch.isfinite(x).all()):
        raise InvalidArgument("lipschitz_lower: x has NaN or infinite entries; clean the data first.")
    first = next(model.parameters(), x)
    if first.dtype != x.dtype and not isinstance(model, AbstractNetwork):
        raise InvalidType(f"lipschitz_lower: the model is {first.dtype} and x is {x.dtype}; convert one of them.")


def _input_shape(model: nn.Module) -> tuple[int, ...] | None:
    """Of one sample; None where the model does not say."""
    if isinstance(model, AbstractNetwork):
        return (model.in_features,)
    if isinstance(model, MonotoneClassifier) and model.image is not None:
        return tuple(model.image)
    layer = model.layer if isinstance(model, MonotoneClassifier) else model
    if isinstance(layer, EquilibriumLayer) and isinstance(layer.cell, DenseCell):
        return (layer.cell.U.shape[1],)
    return None


def _precise(model: AbstractNetwork) -> AbstractNetwork:
    """A float64 copy with accurate equilibria."""
    twin = copy.deepcopy(model).double().cpu()
    twin.layer.rtol, twin.layer.max_steps = _RTOL, max(2000, twin.layer.max_steps)
    if isinstance(twin, AbstractContraction):
        twin.on_ill_posed = "ignore"  # that is for the upper bound to judge
    return twin.requires_grad_(False)


def _steepest(f: AbstractNetwork, x: Tensor, noise: Tensor) -> Tensor:
    """(batch, d) the gradients' directions, as long as the noise is on average, and a tenth of the noise."""
    (slopes,) = torch.autograd.grad(f(x).sum(), x)
    return slopes * (math.sqrt(x.shape[1]) / slopes.norm(dim=1, keepdim=True).clamp(min=1e-300)) + 0.1 * noise
