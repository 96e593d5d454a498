"""A network at its present parameters, in float64, with bounds that hold in spite of rounding and of inexact equilibria."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.certify._directed import down, up, vector_norm_upper
from wellposed.certify._gate import changed, check_model, check_tensors
from wellposed.certify._units import LIMIT, UNDERFLOW, Unit, out_of_range, row_norms_upper, unit_of
from wellposed.convex import AbstractDenseOptEq
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg import least_singular_value_lower, spectral_norm_upper
from wellposed.nn import AbstractContraction, AbstractNetwork, MonotoneDEQ, SkipDEQ

__all__ = ["NO_MATRIX", "Measurement", "check_data", "down", "measure", "not_finite", "up"]

_UNIT = 2.0**-53
#: The rounding of a few operations on each entry of a vector, generously.
_SCALAR = 2.0**-40
#: No residual is known better than this: what is proved with it holds for all smaller ones.
_LEAST_RESIDUAL = 2.0**-400


#: The reason where the parameters are finite and their recurrent matrix is not.
NO_MATRIX = "The recurrent matrix has NaN or infinite entries."


def check_data(model: Any, X: Any, y: Any) -> tuple[Tensor, Tensor]:
    """(n, d) and (n,) in float64 on the CPU, or one sentence about what is wrong."""
    if not isinstance(model, (AbstractNetwork, AbstractDenseOptEq)):
        raise InvalidType(
            "certify knows GaussianDEQ, SkipDEQ, ImplicitOnlyDEQ, MonotoneDEQ, OptEq, DeepOptEq and their relatives; "
            f"got {type(model).__name__}."
        )
    if not isinstance(X, Tensor) or not isinstance(y, Tensor):
        raise InvalidType(f"X and y must be tensors; got {type(X).__name__} and {type(y).__name__}.")
    if X.dim() != 2 or X.shape[1] != model.in_features:
        raise InvalidArgument(f"X must have shape (n, {model.in_features}); got {tuple(X.shape)}.")
    if X.shape[0] == 0:
        raise InvalidArgument("X has no samples; a certificate needs at least one.")
    if tuple(y.shape) != (X.shape[0],):
        raise InvalidArgument(f"y must have shape ({X.shape[0]},), one number per sample; got {tuple(y.shape)}.")
    check_model("certify", model)
    check_tensors("certify", (("X", X), ("y", y)))
    for name, tensor in (("X", X), ("y", y)):
        if not tensor.dtype.is_floating_point:
            raise InvalidType(f"{name} must be floating point; got {tensor.dtype}. Convert it, e.g. {name}.float().")
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidArgument(f"{name} has NaN or infinite entries; clean the data first.")
    return X.detach().double().cpu(), y.detach().double().cpu()


@dataclass(frozen=True)
class Measurement:
    """What the certificates read. Norms are operator norms unless marked F. Tensors are float64, samples in rows.

    Data are in the unit below, a power of two that is 1 unless they would leave the range of float64.

    Attributes:
        model: A float64 copy; nothing done to it reaches the caller's model.
        X: (n, d). y: (n,).
        C: (n, m) injections. Z: (n, m) equilibria. P: (n, m) masked adjoints. V: (n, m) pre-activations R z + c.
        r: (n,) prediction - y.
        contraction: Upper bound of |R|.
        z_error: (n,) upper bounds of |z_i - z_i*|: the true equilibria are this near.
        v_error: Upper bound of |V - V*| in any entry.
        r_error: Upper bound of |r - r*|.
        known: Bounds below that the caller has already, by name; the others are made when asked for.
        unit: Of X, y, C, Z, V, r, their errors and their norms.
    """

    model: AbstractNetwork
    X: Tensor
    y: Tensor
    C: Tensor
    Z: Tensor
    P: Tensor
    V: Tensor
    r: Tensor
    contraction: float
    z_error: Tensor
    v_error: float
    r_error: float
    known: Mapping[str, float] = field(default_factory=dict)
    unit: Unit = Unit()

    @cached_property
    def z_error_F(self) -> float:
        """Upper bound of |Z - Z*|_F."""
        return vector_norm_upper(self.z_error)

    @cached_property
    def Z_norm(self) -> float:
        """B, upper bound of |Z*|."""
        if "Z_norm" in self.known:
            return self.known["Z_norm"]
        return up(spectral_norm_upper(self.Z) + self.z_error_F)

    @cached_property
    def X_norm(self) -> float:
        """b, upper bound of |X|."""
        return self.known["X_norm"] if "X_norm" in self.known else spectral_norm_upper(self.X) + UNDERFLOW

    @cached_property
    def X_norm_F(self) -> float:
        return vector_norm_upper(self.X) + UNDERFLOW

    @cached_property
    def Z_least(self) -> float:
        """s0, lower bound of sigma_min(Z*) over its n rows; 0 if there are more samples than units."""
        if "Z_least" in self.known:
            return self.known["Z_least"]
        if self.Z.shape[0] > self.Z.shape[1]:
            return 0.0
        return max(0.0, down(least_singular_value_lower(self.Z) - self.z_error_F))

    @cached_property
    def features(self) -> Tensor:
        """(n, k) F, what the read-out multiplies: Z, or [Z, C] for `SkipDEQ`."""
        return torch.cat([self.Z, self.C], dim=1) if isinstance(self.model, SkipDEQ) else self.Z

    @cached_property
    def F_error(self) -> float:
        """Upper bound of |F - F*|_F: the rounding of c is part of `z_error`."""
        return 2 * self.z_error_F if isinstance(self.model, SkipDEQ) else self.z_error_F

    @cached_property
    def F_norm(self) -> float:
        """Upper bound of |F*|."""
        if "F_norm" in self.known:
            return self.known["F_norm"]
        return up(spectral_norm_upper(self.features) + self.F_error) if isinstance(self.model, SkipDEQ) else self.Z_norm

    @cached_property
    def F_least(self) -> float:
        """Lower bound of sigma_min(F*) over its n rows; 0 if there are more samples than columns."""
        if "F_least" in self.known:
            return self.known["F_least"]
        if not isinstance(self.model, SkipDEQ):
            return self.Z_least
        if self.features.shape[0] > self.features.shape[1]:
            return 0.0
        return max(0.0, down(least_singular_value_lower(self.features) - self.F_error))

    @cached_property
    def residual(self) -> float:
        """e, upper bound of |r*|."""
        return max(_LEAST_RESIDUAL, up(vector_norm_upper(self.r) + self.r_error))

    def errors(self) -> dict[str, float]:
        """The numerical errors that the bounds contain, of the data as they were given."""
        errors = {"|Z - Z*|_F": self.z_error_F, "|r - r*|": self.r_error, "pre-activations": self.v_error}
        return {name: self.unit.upper(error) for name, error in errors.items()}

    @cached_property
    def loss(self) -> float:
        """|r|^2/2 as computed (not a bound), of the data as they were given."""
        return self.unit.exact(float(self.r.square().sum()) / 2, 2)


def measure(
    model: AbstractNetwork,
    X: Tensor,
    y: Tensor,
    *,
    at: tuple[Tensor, Tensor] | None = None,
    known: Callable[[AbstractNetwork, Tensor, Tensor, float], Mapping[str, float]] | None = None,
    norm_upper: Callable[[Tensor], float] = spectral_norm_upper,
) -> Measurement | str:
    """The measurement, or the reason why there is none.

    The equilibria that floating point finds are not the exact ones. With g_i = f(z_i) - z_i, including the rounding of its
    evaluation, a contraction has |z_i - z_i*| <= |g_i|/(1 - |R|); for a monotone map, w = f(z) = prox(R z + c) satisfies
    R w + c - R g - w in dphi(w), so monotonicity of dphi against z* gives margin |w - z*|^2 <= -<R g, w - z*>, that is
    |z - z*| <= |g| + |R| |g|/margin.

    Args:
        model: A theory network.
        X, y: From `check_data`.
        at: (n, m) equilibria and adjoints found already, as good as they are; None solves for them.
        known: From (twin, Z, C, |Z - Z*|_F) bounds that need not be made again.
        norm_upper: Bounds |R|.
    """
    if reason := changed(model, families=True) or not_finite(model):
        return reason
    twin = copy.deepcopy(model).double().cpu()
    twin.layer.on_failure, twin.layer.rtol, twin.layer.max_steps = "ignore", 1e-13, 2000
    if isinstance(twin, AbstractContraction):
        twin.on_ill_posed = "ignore"
    with torch.no_grad():
        found_unit = unit_of(twin, X, y)
        if isinstance(found_unit, str):
            return found_unit
        unit, X, y = found_unit
        if unit.exponent and not (at is None and known is None):
            return out_of_range(f"the features are of size 2^{unit.exponent}")
        R = twin.recurrent()
        if not bool(torch.isfinite(R).all()):
            return NO_MATRIX
        contraction = up(norm_upper(R))
        if isinstance(twin, MonotoneDEQ):
            if twin.margin < 2.0**-LIMIT:
                return out_of_range(f"the margin is {twin.margin:.3g}")
            amplification = 1.0 + contraction / down(twin.margin)
        elif contraction < 1.0:
            amplification = 1.0 / (1.0 - contraction)
        else:
            return f"The contraction factor is only known to be at most {contraction:.6g}, not below 1."
        if at is None:
            found = twin.linearise(X)
            Z, P = found.value, found.adjoint
        else:
            Z, P = (tensor.detach().double().cpu() for tensor in at)
        if not bool(torch.isfinite(Z).all()) or not bool(torch.isfinite(P).all()):
            return "The equilibrium or its adjoint is not finite."
        C = twin.injection(X)
        V = torch.addmm(C, Z, R.t())
        rounding = _rounding(twin, R, X, C, Z)
        g = torch.linalg.vector_norm(torch.relu(V) - Z, dim=1) + rounding
        z_error = g * (amplification * (1 + _SCALAR))
        r = twin.readout(Z, C) - y
        z_F = vector_norm_upper(z_error)
        # a product with m terms and the subtraction of y, for each of up to two read-outs
        terms = _UNIT * (R.shape[0] + 4) * 4 * (vector_norm_upper(Z) + vector_norm_upper(C))
        v_norm = vector_norm_upper(twin.readout_weight())
        if isinstance(twin, SkipDEQ):  # the error of c is part of z_error
            v_norm += vector_norm_upper(twin.v)
        r_error = up(v_norm * z_F + terms * _readout_norm(twin) + 4 * _UNIT * vector_norm_upper(y) + UNDERFLOW)
        v_error = up(float((contraction * z_error + rounding).max()))
        bounds = {} if known is None else known(twin, Z, C, z_F)
    return Measurement(twin, X, y, C, Z, P, V, r, contraction, z_error, v_error, r_error, bounds, unit)


def not_finite(model: nn.Module) -> str:
    """The reason why there is nothing to measure where a parameter is not finite; empty where all are."""
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in (*model.parameters(), *model.buffers()))
    return "" if finite else "A parameter has NaN or infinite entries."


def _rounding(model: AbstractNetwork, R: Tensor, X: Tensor, C: Tensor, Z: Tensor) -> Tensor:
    """(n,) bound of the rounding in R z + c, c included: |fl(R z) - R z| <= gamma_m |R|_F |z|, and likewise for c.

    R itself is a rounded function of the parameters; its relative error, at most 2 (m + 3) units of |.|_F of its parts, is
    bounded by those of the parts. What underflows is less than `UNDERFLOW`, which is added.
    """
    m, d = R.shape[0], X.shape[1]
    parts = sum(vector_norm_upper(parameter) for parameter in (*model.parameters(), *model.buffers()))
    gamma = 2 * (m + d + 8) * _UNIT
    z, x, c = (row_norms_upper(t) for t in (Z, X, C))
    size = vector_norm_upper(R)
    if isinstance(model, MonotoneDEQ):
        A, B = (vector_norm_upper(parameter) for parameter in (model.A, model.B))
        size += A**2 + 2 * B + math.sqrt(m)
    return gamma * (size * z + parts * x + c) + UNDERFLOW


def _readout_norm(model: AbstractNetwork) -> float:
    """An upper bound of the norm of all vectors that read out."""
    return sum(vector_norm_upper(p) for p in (*model.parameters(), *model.buffers()) if p.dim() == 1)
