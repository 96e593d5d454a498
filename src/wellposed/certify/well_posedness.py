"""Existence and uniqueness of equilibria: contraction, monotonicity, Perron-Frobenius."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from wellposed.certify._certificate import Certificate, Hypothesis, Verdict
from wellposed.certify._collatz import radius_bounds
from wellposed.certify._directed import down, up, vector_norm_upper
from wellposed.certify._gate import changed, check_model, is_ours
from wellposed.certify._least import verdict
from wellposed.certify._measure import NO_MATRIX
from wellposed.certify._sides import spectral_norm_lower
from wellposed.errors import InvalidType
from wellposed.linalg import least_eigenvalue_lower, spectral_norm_upper
from wellposed.nn import AbstractNetwork, MonotoneDEQ

__all__ = ["contraction", "monotone", "perron_frobenius"]

_UNIT = 2.0**-53


def contraction(model: Any) -> Certificate:
    r"""|R| < 1 in the spectral norm: the map z -> relu(R z + c) contracts, for every input.

    Then there is exactly one equilibrium, and Picard's iteration gains a factor |R| in every step (Banach). |R| is bounded by
    a measured singular value decomposition; power iteration would only come near it from below.

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
        f"{upper:.6g} in "
        "every step; so does Neumann() for the adjoint.",
    )
    return _judged("contraction", hypothesis, licenses, {"|R|, upper": upper, "|R|, lower": lower}, {"R": error})


def monotone(model: Any) -> Certificate:
    r"""sym(I - R) >= m > 0: the operator whose zero is the equilibrium is strongly monotone [winston2020].

    Then there is exactly one equilibrium, because relu is the proximal operator of a convex function; |R| may be anything, so
    Picard's iteration may diverge and splitting is licensed instead: forward-backward for steps in (0, 2 m/L^2) (open:
    at the end there are maps that only rotate), Peaceman-Rachford and Douglas-Rachford for every step, L = |I - R|.

    [nguyen2022, Lemma 2.3.2] asks for W + W^T >= m I where (W + W^T)/2 is needed. A contraction is monotone with
    m >= 1 - |R|. For `MonotoneDEQ` the margin holds by construction, exactly.

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
    upper = up(float(x @ S @ x / (x @ x)) + error + 4 * (len(x) + 4) * _UNIT * vector_norm_upper(S))
    built = isinstance(model, MonotoneDEQ) and not changed(model)
    margin = max(measured, down(float(model.margin))) if built else measured
    L = up(spectral_norm_upper(F) + error)
    holds = True if margin > 0 else (False if upper <= 0 else None)
    note = "by construction" if built else ""
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

    Proved by a positive vector d with |R| d <= q d, q < 1 (Collatz-Wielandt: rho(|R|) <= max_i (|R| d)_i/d_i). As |relu(s) -
    relu(t)| <= |s - t|, the map contracts by q in the norm max_i |z_i|/d_i, so there is exactly one equilibrium and Picard's
    iteration finds it. |R| itself may exceed 1: nilpotent matrices of any norm pass. All entries are nonnegative, so each sum
    that is computed is right to a relative gamma_m (Chapter 3 of [higham2002]), which is added.

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
        f"{upper:.6g} in "
        "every step, in a weighted maximum norm (the first steps may grow in the Euclidean norm).",
    )
    return _judged("perron_frobenius", hypothesis, licenses, {"rho(|R|), upper": upper, "rho(|R|), lower": lower}, {"R": error})


def _recurrent(theorem: str, model: Any) -> tuple[Tensor, float] | Certificate:
    """R in float64 and a bound of the norm of its rounding error; or what is said where nothing is proved."""
    if not isinstance(model, AbstractNetwork):
        raise InvalidType(
            f"{theorem} knows GaussianDEQ, SkipDEQ, ImplicitOnlyDEQ, MonotoneDEQ and their relatives; got "
            f"{type(model).__name__}."
        )
    check_model(theorem, model)
    if reason := changed(model, families=True):
        return Certificate(theorem, Verdict.UNDECIDED, note=reason)
    twin = copy.deepcopy(model).double().cpu()
    R: Tensor = twin.recurrent().detach()
    if not bool(torch.isfinite(R).all()):
        return Certificate(theorem, Verdict.UNDECIDED, note=NO_MATRIX)
    if any(R is parameter or R.data_ptr() == parameter.data_ptr() for parameter in twin.parameters()):
        return R, 0.0  # the parameter itself
    size = vector_norm_upper(R)
    if not is_ours(type(model).recurrent):
        total = sum(vector_norm_upper(parameter) for parameter in twin.parameters())  # for sums and one product of them
        return R, up(2 * (len(R) + 4) * _UNIT * (size + total * total + 2 * total + len(R) ** 0.5))
    if not isinstance(twin, MonotoneDEQ):
        return R, up(4 * _UNIT * size)  # a parameter times a number or two
    A, B = vector_norm_upper(twin.A), vector_norm_upper(twin.B)
    return R, up(2 * (len(R) + 4) * _UNIT * (size + A * A + 2 * B + len(R) ** 0.5))


def _judged(
    theorem: str, hypothesis: Hypothesis, licenses: tuple[str, ...], measured: dict[str, float], errors: dict[str, float]
) -> Certificate:
    judged = verdict((hypothesis,))
    if judged is Verdict.CERTIFIED:
        return Certificate(theorem, judged, (hypothesis,), licenses=licenses, measured=measured, errors=errors)
    note = "Nothing is proved about existence or uniqueness; the condition is sufficient, not necessary."
    return Certificate(theorem, judged, (hypothesis,), measured=measured, errors=errors, note=note)
