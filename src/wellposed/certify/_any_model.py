"""The certificate of a model, if there is one for its kind."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wellposed.certify import Certificate, Hypothesis, Verdict, certify
from wellposed.certify._gate import changed
from wellposed.convex import AbstractOptEq
from wellposed.errors import InvalidArgument
from wellposed.linalg import least_eigenvalue_lower, spectral_norm_upper
from wellposed.nn import AbstractNetwork, DenseCell, EquilibriumLayer, Monotone, MonotoneConvCell, MonotoneTierCell
from wellposed.nn.maps.affine import OperatorMap

__all__ = ["certificate_of", "check_theorem", "has_certificate"]

#: Theorems about existence and uniqueness alone, which hold for equilibrium layers in any model.
WELL_POSED = ("auto", "contraction", "monotone")


def has_certificate(model: nn.Module) -> bool:
    """Whether `certificate_of` knows this kind of model."""
    return isinstance(model, AbstractNetwork) or any(known(model) is not None for known in (_opteq, _cell, _image_layer))


def check_theorem(model: nn.Module, X: Tensor, y: Tensor, *, theorem: str) -> None:
    """Raises `InvalidArgument` or `InvalidType` where `certificate_of` will: an unknown theorem, or one of other networks.

    Args:
        model: Any; one without a certificate takes every theorem, because none is made.
        X, y: The data, of which two samples are looked at.
        theorem: As in `certificate_of`.
    """
    if theorem != "auto" and has_certificate(model):
        certificate_of(model, X[:2], y[:2], theorem=theorem)


def certificate_of(model: nn.Module, X: Tensor, y: Tensor, *, theorem: str = "auto") -> Certificate:
    r"""A certificate at the present parameters.

    Theory networks: `wellposed.certify`. Others with one dense equilibrium layer z = s(W z + U x + b), s non-decreasing and
    1-Lipschitz: exactly one equilibrium for every input, because |W| < 1 ("contraction") or sym(I - W) > 0 ("monotone"). W is
    the matrix that inference uses, rounded as it is; training may round it differently (a parametrization takes another
    path when it is differentiated), for which m eps |W|_F is allowed. Monotone convolutions: "monotone", from the kernels, at
    the size of the images of X. OptEq: its own bound of the contraction factor.

    Args:
        model: Of a kind that `has_certificate` knows.
        X: (n, d) inputs. y: (n,) targets; only theory networks need them.
        theorem: As in `wellposed.certify`; "auto", "contraction" or "monotone" for the others.
    """
    if isinstance(model, AbstractNetwork):
        return certify(model, X, y, theorem=theorem)
    opteq, cell = _opteq(model), _cell(model)
    if theorem not in WELL_POSED or (theorem == "monotone" and opteq is not None):
        raise InvalidArgument(
            f"theorem={theorem!r} is about theory networks (gaussian, skip, implicit_only, monotone); {type(model).__name__} "
            "has a certificate of well-posedness: theorem='auto'."
        )
    layer = _image_layer(model)
    if layer is not None and theorem == "contraction":
        raise InvalidArgument("A monotone convolution need not contract, and nothing here bounds |W|: theorem='monotone'.")
    part = _layer(model) if opteq is None else opteq
    if part is not None and (reason := changed(part)):
        return Certificate("contraction" if theorem == "auto" else theorem, Verdict.UNDECIDED, note=reason)
    if opteq is not None:
        return _contraction(opteq.contraction_upper())
    if layer is not None:
        return _strongly_monotone(_image_margin(model, layer, X))
    if cell is None:
        raise InvalidArgument(f"There is no certificate for {type(model).__name__}.")
    with torch.no_grad():
        used = cell.recurrent().detach()
    W = used.double().cpu()  # exact: from float32, or float64 already
    slack = len(W) * torch.finfo(used.dtype).eps * float(W.norm())
    if theorem == "monotone" or (theorem == "auto" and isinstance(cell.weight, Monotone)):
        return _monotone(W, slack)
    return _contraction(spectral_norm_upper(W) + slack)


def _opteq(model: nn.Module) -> AbstractOptEq | None:
    return next((module for module in model.modules() if isinstance(module, AbstractOptEq)), None)


def _layer(model: nn.Module) -> EquilibriumLayer | None:
    """The only equilibrium layer."""
    layers = [module for module in model.modules() if isinstance(module, EquilibriumLayer)]
    return layers[0] if len(layers) == 1 else None


def _cell(model: nn.Module) -> DenseCell | None:
    layer = _layer(model)
    if layer is None or not isinstance(layer.cell, DenseCell):
        return None
    low, high = layer.cell.activation.slope_bounds
    return layer.cell if low >= 0 and high <= 1 else None


def _image_layer(model: nn.Module) -> EquilibriumLayer | None:
    layer = _layer(model)
    return layer if layer is not None and isinstance(layer.cell, (MonotoneConvCell, MonotoneTierCell)) else None


def _image_margin(model: nn.Module, layer: EquilibriumLayer, X: Tensor) -> float:
    """A lower bound of the least eigenvalue of sym(I - W) on images as the model gives them to its layer."""
    entered: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, arguments: entered.append(arguments[0]))
    try:
        with torch.no_grad():
            model(X[:1])
    finally:
        hook.remove()
    assert isinstance(layer.cell, (MonotoneConvCell, MonotoneTierCell))
    f = layer.cell.bind(entered[0])
    assert isinstance(f, OperatorMap)
    return f.monotonicity()[0]


def _contraction(upper: float) -> Certificate:
    hypothesis = Hypothesis.compare("the map contracts", "|W| < 1", upper, "<", 1.0, refutes=False)
    return _judged("contraction", hypothesis, "Picard() converges to it from any start.")


def _monotone(W: Tensor, slack: float) -> Certificate:
    S = torch.eye(len(W), dtype=W.dtype) - (W + W.t()) / 2
    # every entry of S is rounded twice, by at most a unit of |W_ij + W_ji|/2 and of |S_ij|
    margin = least_eigenvalue_lower(S) - 2 * 2.0**-53 * float(W.norm() + S.norm()) - slack
    return _strongly_monotone(margin)


def _strongly_monotone(margin: float) -> Certificate:
    hypothesis = Hypothesis.compare("the operator is strongly monotone", "sym(I - W) > 0", margin, ">", 0.0, refutes=False)
    return _judged("monotone", hypothesis, "PeacemanRachford() and DouglasRachford() converge to it for every step size.")


def _judged(theorem: str, hypothesis: Hypothesis, solver: str) -> Certificate:
    measured = {} if hypothesis.value is None else {hypothesis.equation: hypothesis.value}
    if hypothesis.holds:
        licenses = (f"For every input there is exactly one equilibrium. {solver}",)
        return Certificate(theorem, Verdict.CERTIFIED, (hypothesis,), licenses=licenses, measured=measured)
    note = "Nothing is proved about existence or uniqueness; the condition is sufficient, not necessary."
    return Certificate(theorem, Verdict.UNDECIDED, (hypothesis,), measured=measured, note=note)
