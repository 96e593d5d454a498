"""Existence and uniqueness of equilibria: contraction, monotonicity, Perron-Frobenius."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._torch import apart
from wellposed.certify._gate import DECLARED, KNOWN, NO_MATRIX, changed, check_model, margin_of, not_finite
from wellposed.certify.certificate import Certificate, Hypothesis, Verdict, verdict_on
from wellposed.convex._network import AbstractOptEq
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg import least_eigenvalue_lower, spectral_norm_upper
from wellposed.linalg.directed import ROUNDING, down, spectral_norm_lower, up, vector_norm_upper
from wellposed.nn import DenseCell, EquilibriumLayer, Monotone, MonotoneConvCell, MonotoneTierCell
from wellposed.nn.families import FAMILIES, is_theory_network

_BISECTIONS = 60


def contraction(model: Any) -> Certificate:
    r"""|R| < 1 in the spectral norm: the map z -> relu(R z + c) contracts, for every input.

    Then there is exactly one equilibrium, and Picard's iteration gains a factor |R| in every step
    (Banach). |R| is bounded by a measured singular value decomposition; power iteration would only
    come near it from below.

    Args:
        model: A theory network.
    """
    found = _recurrent("contraction", model)
    if isinstance(found, Certificate):
        return found
    R, error = found
    upper, lower = up(spectral_norm_upper(R) + error), down(spectral_norm_lower(R) - error)
    holds = True if upper < 1 else (False if lower >= 1 else None)
    hypothesis = Hypothesis("the map contracts", "|R| < 1", upper, 1.0, "<", holds)
    licenses = (
        "For every input there is exactly one equilibrium. Picard() converges to it from any start, by a factor of "
        f"{upper:.6g} in every step; so does Neumann() for the adjoint.",
    )
    return _judged("contraction", hypothesis, licenses, {"|R|, upper": upper, "|R|, lower": lower}, {"R": error})


def monotone(model: Any) -> Certificate:
    r"""sym(I - R) >= m > 0: the operator whose zero is the equilibrium is strongly monotone
    [winston2020].

    Then there is exactly one equilibrium, because relu is the proximal operator of a convex
    function; |R| may be anything, so Picard's iteration may diverge and splitting is licensed
    instead: forward-backward for steps in (0, 2 m/L^2) (open: at the end there are maps that only
    rotate), Peaceman-Rachford and Douglas-Rachford for every step, L = |I - R|.

    [nguyen2022, Lemma 2.3.2] asks for W + W^T >= m I where (W + W^T)/2 is needed. A contraction is
    monotone with m >= 1 - |R|. For `MonotoneDEQ` the margin holds by construction, exactly.

    Args:
        model: A theory network.
    """
    found = _recurrent("monotone", model)
    if isinstance(found, Certificate):
        return found
    R, error = found
    F = torch.eye(R.shape[0], dtype=R.dtype) - R
    S = (F + F.t()) / 2
    measured = down(least_eigenvalue_lower(S) - error)
    # x^T S x for the computed eigenvector is an upper bound of the least eigenvalue
    x = torch.linalg.eigh(S).eigenvectors[:, 0]
    upper = up(float(x @ S @ x / (x @ x)) + error + 4 * (len(x) + 4) * ROUNDING * vector_norm_upper(S))
    built = margin_of(model)
    margin = measured if built is None else max(measured, down(built))
    L = up(spectral_norm_upper(F) + error)
    holds = True if margin > 0 else (False if upper <= 0 else None)
    note = "" if built is None else "by construction"
    hypothesis = Hypothesis("the operator is strongly monotone", "sym(I - R) >= m > 0", margin, 0.0, ">", holds, note)
    limit = max(0.0, down(2 * margin / L / L)) if margin > 0 else 0.0
    forward = f", ForwardBackward(step_size) below {limit:.4g}" if limit > 0 else ""
    licenses = (
        "For every input there is exactly one equilibrium.",
        f"PeacemanRachford() and DouglasRachford() converge to it for every step size{forward}. Picard() is not licensed: it "
        "may diverge.",
    )
    numbers = {"margin": margin, "|I - R|": L, "forward-backward step below": limit}
    return _judged("monotone", hypothesis, licenses, numbers, {"R": error})


def perron_frobenius(model: Any) -> Certificate:
    r"""rho(|R|) < 1, where |R| has the absolute values of the entries [elghaoui2021].

    Proved by a positive vector d with |R| d <= q d, q < 1 (Collatz-Wielandt: rho(|R|) <= max_i (|R|
    d)_i/d_i). As |relu(s) - relu(t)| <= |s - t|, the map contracts by q in the norm max_i
    |z_i|/d_i, so there is exactly one equilibrium and Picard's iteration finds it. |R| itself may
    exceed 1: nilpotent matrices of any norm pass. All entries are nonnegative, so each sum that is
    computed is right to a relative gamma_m (Chapter 3 of [higham2002]), which is added.

    Args:
        model: A theory network.
    """
    found = _recurrent("perron_frobenius", model)
    if isinstance(found, Certificate):
        return found
    R, error = found
    # an error of that spectral norm changes no entry by more
    lower, upper = radius_bounds((R.abs() - error).clamp(min=0.0))[0], radius_bounds(R.abs() + error)[1]
    holds = True if upper < 1 else (False if lower >= 1 else None)
    hypothesis = Hypothesis("the absolute values contract", "rho(|R|) < 1", upper, 1.0, "<", holds)
    licenses = (
        "For every input there is exactly one equilibrium. Picard() converges to it from any start, by a factor of "
        f"{upper:.6g} in every step, in a weighted maximum norm (the first steps may grow in the Euclidean norm).",
    )
    return _judged("perron_frobenius", hypothesis, licenses, {"rho(|R|), upper": upper, "rho(|R|), lower": lower}, {"R": error})


def well_posed(model: nn.Module, X: Tensor | None = None, theorem: str = "auto") -> Certificate:
    r"""Existence and uniqueness for any model with one known equilibrium layer, at the present
    parameters.

    Theory networks: `contraction` or `monotone`. A dense layer z = s(W z + U x + b), s
    non-decreasing and 1-Lipschitz: |W| < 1 ("contraction") or sym(I - W) > 0 ("monotone"). W is the
    matrix that inference uses, as rounded; training may round it differently (a parametrization
    takes another path when it is differentiated), for which m eps |W|_F is allowed. Monotone
    convolutions: "monotone", from the kernels, at the size of the images of X. OptEq: its own bound
    of the contraction factor.

    Args:
        model: Of a kind that `has_one_equilibrium` knows, or a theory network.
        X: (n, ...) inputs; only convolutions need them.
        theorem: "auto", "contraction" or "monotone".
    """
    if is_theory_network(model):
        by_margin = theorem == "monotone" or (theorem == "auto" and model.theory.margin is not None)
        return monotone(model) if by_margin else contraction(model)
    opteq, cell, layer = _opteq(model), _cell(model), _image_layer(model)
    if theorem not in ("auto", "contraction", "monotone") or (theorem == "monotone" and opteq is not None):
        raise InvalidArgument(
            f"theorem={theorem!r} is about theory networks ({', '.join(FAMILIES)}); {type(model).__name__} has a certificate "
            "of well-posedness: theorem='auto'."
        )
    if layer is not None and theorem == "contraction":
        raise InvalidArgument("A monotone convolution need not contract, and nothing here bounds |W|: theorem='monotone'.")
    part = _layer(model) if opteq is None else opteq
    if part is not None and (reason := changed(part) or not_finite(part)):
        return Certificate("contraction" if theorem == "auto" else theorem, Verdict.UNDECIDED, note=reason)
    if opteq is not None:
        return _one_bound("contraction", opteq.contraction_upper())
    if layer is not None:
        if X is None:
            raise InvalidArgument("The certificate of a monotone convolution needs X, for the size of its images.")
        return _one_bound("monotone", _image_margin(model, layer, X))
    if cell is None:
        raise InvalidType(f"There is no certificate for {type(model).__name__}.")
    with torch.no_grad(), apart():
        used = cell.recurrent().detach()
    W = used.double().cpu()  # exact: from float32, or float64 already
    slack = len(W) * torch.finfo(used.dtype).eps * float(W.norm())
    if theorem == "contraction" or (theorem == "auto" and not isinstance(cell.weight, Monotone)):
        return _one_bound("contraction", spectral_norm_upper(W) + slack)
    S = torch.eye(len(W), dtype=W.dtype) - (W + W.t()) / 2
    # every entry of S is rounded twice, by at most a unit of |W_ij + W_ji|/2 and of |S_ij|
    return _one_bound("monotone", least_eigenvalue_lower(S) - 2 * ROUNDING * float(W.norm() + S.norm()) - slack)


def has_one_equilibrium(model: nn.Module) -> bool:
    """Whether `well_posed` knows this kind of model."""
    return any(known(model) is not None for known in (_opteq, _cell, _image_layer))


def _opteq(model: nn.Module) -> AbstractOptEq | None:
    # by type: a convolutional OptEq has no `theory`, and its bound of the contraction factor is all that is needed
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


def _image_margin(model: nn.Module, layer: Any, X: Tensor) -> float:
    """A lower bound of the least eigenvalue of sym(I - W) on images as the layer gets them."""
    entered: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, arguments: entered.append(arguments[0]))
    try:
        with torch.no_grad(), apart():
            model(X[:1])
    finally:
        hook.remove()
    margin: float = layer.cell.bind(entered[0]).monotonicity()[0]
    return margin


def _recurrent(theorem: str, model: Any) -> tuple[Tensor, float] | Certificate:
    """R in float64 and a bound of the norm of its rounding error; or what is said where nothing is
    proved."""
    if not is_theory_network(model):
        raise InvalidType(f"{theorem} knows {KNOWN} and their relatives; got {type(model).__name__}.")
    check_model(theorem, model)
    if reason := changed(model, declared=DECLARED):
        return Certificate(theorem, Verdict.UNDECIDED, note=reason)
    twin = copy.deepcopy(model).double().cpu()
    R: Tensor = twin.recurrent().detach()
    if not bool(torch.isfinite(R).all()):
        return Certificate(theorem, Verdict.UNDECIDED, note=NO_MATRIX)
    return R, twin.recurrent_error()


def _one_bound(theorem: str, value: float) -> Certificate:
    """From an upper bound of |W|, or from a lower bound of sym(I - W); from the other side nothing
    is known."""
    if theorem == "contraction":
        hypothesis = Hypothesis.compare("the map contracts", "|W| < 1", value, "<", 1.0, refutes=False)
        solver = "Picard() converges to it from any start."
    else:
        hypothesis = Hypothesis.compare("the operator is strongly monotone", "sym(I - W) > 0", value, ">", 0.0, refutes=False)
        solver = "PeacemanRachford() and DouglasRachford() converge to it for every step size."
    licenses = (f"For every input there is exactly one equilibrium. {solver}",)
    return _judged(theorem, hypothesis, licenses, {hypothesis.equation: value})


def _judged(
    theorem: str,
    hypothesis: Hypothesis,
    licenses: tuple[str, ...],
    measured: dict[str, float],
    errors: dict[str, float] | None = None,
) -> Certificate:
    judged = verdict_on((hypothesis,))
    if judged is Verdict.CERTIFIED:
        return Certificate(theorem, judged, (hypothesis,), licenses=licenses, measured=measured, errors=errors or {})
    note = "Nothing is proved about existence or uniqueness; the condition is sufficient, not necessary."
    return Certificate(theorem, judged, (hypothesis,), measured=measured, errors=errors or {}, note=note)


def radius_bounds(M: Tensor) -> tuple[float, float]:
    r"""Lower and upper bounds of rho(M) for M >= 0, by vectors d > 0 (Collatz-Wielandt):

        min_i (M d)_i/d_i <= rho(M) <= max_i (M d)_i/d_i

    Any positive d gives true bounds; good ones come from d = (t I - M)^(-1) 1 with t a little above
    rho(M), for which (M d)_i/d_i = t - 1/d_i < t. Bisection finds a small t for which d is
    positive. This works for reducible and nilpotent M too, where power iteration has no positive
    limit.

    Args:
        M: (m, m), nonnegative, finite, float64.
    """
    low, high = 0.0, float(M.sum(dim=1).max())
    lower, upper = _quotients(M, torch.ones(M.shape[0], dtype=M.dtype))
    if high == 0.0:
        return 0.0, upper
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        d = _resolvent(M, middle)
        if d is None:
            low = middle
            continue
        high = middle
        below, above = _quotients(M, d)
        lower, upper = max(lower, below), min(upper, above)
        if high - low <= 1e-6 * high:
            break
    return lower, upper


def _resolvent(M: Tensor, t: float) -> Tensor | None:
    """(t I - M)^(-1) 1, scaled, if it is positive: for t <= rho(M) it is not."""
    eye = torch.eye(M.shape[0], dtype=M.dtype)
    d, info = torch.linalg.solve_ex(t * eye - M, torch.ones(M.shape[0], 1, dtype=M.dtype))
    d = d.squeeze(1)
    if int(info) != 0 or not bool(torch.isfinite(d).all()) or bool((d <= 0).any()):
        return None
    return d / d.max()


def _quotients(M: Tensor, d: Tensor) -> tuple[float, float]:
    """Bounds of (M d)_i/d_i over i; sums of nonnegative terms are right to a relative gamma_m."""
    gamma = 2 * (M.shape[0] + 4) * ROUNDING
    if bool((d < 1e-290).any()):
        return 0.0, math.inf  # too near to underflow for a relative error bound
    quotients = (M @ d) / d
    # underflow takes away, or adds, less than m 2^-1074/1e-290
    lower = max(0.0, down(float(quotients.min()) * (1 - gamma) - 1e-30))
    return lower, up(float(quotients.max()) * (1 + gamma) + 1e-30)
