r"""A network at its present parameters, in float64, with bounds that hold in spite of rounding and
of inexact equilibria.

Data are measured in a unit, a power of two, so that no square of a feature leaves the range of
float64. A network without biases is positively homogeneous: with inputs and labels c X and c y its
injections, equilibria and residual are c C, c Z and c r, its tangent kernel is c^2 K, and the
parameters, their radii and what contracts are the same. So a certificate for (c X, c y) is the one
for (X, y) with steps divided by c^2 and rates of the flow multiplied by c^2. For c = 2^k all of it
is exact.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from wellposed.certify._gate import DECLARED, NO_MATRIX, changed, declared_outside, margin_of, not_finite
from wellposed.certify.certificate import OUT_OF_RANGE
from wellposed.linalg import least_singular_value_lower, spectral_norm_upper
from wellposed.linalg.directed import (
    ROUNDING,
    UNDERFLOW,
    DataUnit,
    down,
    exponent_of,
    ldexp,
    row_norms_upper,
    up,
    vector_norm_upper,
)
from wellposed.nn.families import AbstractNetwork
from wellposed.nn.families._declared import contradiction
from wellposed.nn.families.theory import shared_memory

#: Data and parameters up to 2^LIMIT, and features down to 2^-LIMIT, are measured as they are: the theorems multiply a few of
#: them, and the products of four have room to spare.
LIMIT = 200
_SQUARED = 480
#: The rounding of a few operations on each entry of a vector, generously.
_SCALAR = 2.0**-40
#: No residual is known better than this: what is proved with it holds for all smaller ones.
_LEAST_RESIDUAL = 2.0**-400


def unit_of(model: AbstractNetwork, X: Tensor, y: Tensor) -> tuple[DataUnit, Tensor, Tensor] | str:
    """A unit in which the data have room, with X and y in it; or why there is none.

    It is 1 where the data have room already. Entries that vanish in the unit lose at most 2^-1074.
    The network is in float64 and has finite parameters.
    """
    if large := _large_parameter(model):
        return large
    first = exponent_of(X)
    exponent = first + exponent_of(model.injection(ldexp(X, -first))) if has_no_bias(model) else 0
    if abs(exponent) <= LIMIT and abs(first) <= LIMIT:
        exponent = 0
    X, y = ldexp(X, -exponent), ldexp(y, -exponent)
    for name, tensor in (("inputs", X), ("labels", y)):
        if not bool(torch.isfinite(tensor).all()) or exponent_of(tensor) > LIMIT:
            relative = f", beside features of size 2^{exponent}" if exponent else ""
            return out_of_range(f"the {name} are larger than 2^{LIMIT + exponent}{relative}")
    return DataUnit(exponent), X, y


def has_no_bias(model: AbstractNetwork) -> bool:
    """Whether the network is positively homogeneous: declared, and not contradicted by a class that
    adds a bias."""
    zero = model.readout_weight().new_zeros(1, model.in_features)
    return model.theory.homogeneous and not bool(model.injection(zero).any())


def no_room(model: nn.Module, X: Tensor, y: Tensor) -> str:
    """Why a network with biases, whose only unit is 1, cannot be measured; empty if it can."""
    for name, tensor in (("inputs", X), ("labels", y)):
        if exponent_of(tensor) > _SQUARED:  # only squares of data occur, not fourth powers
            return out_of_range(f"the {name} are larger than 2^{_SQUARED}")
    if bool(X.any()) and exponent_of(X) < -_SQUARED:
        return out_of_range(f"the inputs are smaller than 2^-{_SQUARED}")
    return _large_parameter(model)


def _large_parameter(model: nn.Module) -> str:
    tensors = (*model.named_parameters(), *model.named_buffers())
    name = next((name for name, tensor in tensors if exponent_of(tensor) > LIMIT), "")
    return out_of_range(f"parameter {name} has entries above 2^{LIMIT}") if name else ""


def out_of_range(which: str) -> str:
    return f"{OUT_OF_RANGE} in the conditions of the theorems: {which}. Rescale the inputs, the labels or the parameters."


@dataclass(frozen=True)
class Measurement:
    """What the certificates read. Norms are operator norms unless marked F. Tensors are float64,
    samples in rows.

    Data are in the unit below, a power of two that is 1 unless they would leave the range of
    float64.

    Attributes:
        model: A float64 copy; nothing done to it reaches the caller's model.
        X: (n, d). y: (n,).
        C: (n, m) injections. Z: (n, m) equilibria. P: (n, m) masked adjoints. V: (n, m)
            pre-activations R z + c.
        r: (n,) prediction - y.
        contraction: Upper bound of |R|.
        z_error: (n,) upper bounds of |z_i - z_i*|: the true equilibria are this near.
        v_error: Upper bound of |V - V*| in any entry.
        r_error: Upper bound of |r - r*|.
        known: Bounds below that the caller has already, by name; the others are computed when asked
            for.
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
    unit: DataUnit = DataUnit()

    def __post_init__(self) -> None:
        self.__dict__.update(self.known)  # where cached properties keep their values

    @cached_property
    def z_error_F(self) -> float:
        """Upper bound of |Z - Z*|_F."""
        return vector_norm_upper(self.z_error)

    @cached_property
    def Z_norm(self) -> float:
        """B, upper bound of |Z*|."""
        return up(spectral_norm_upper(self.Z) + self.z_error_F)

    @cached_property
    def X_norm(self) -> float:
        """b, upper bound of |X|."""
        return spectral_norm_upper(self.X) + UNDERFLOW

    @cached_property
    def X_norm_F(self) -> float:
        return vector_norm_upper(self.X) + UNDERFLOW

    @cached_property
    def Z_least(self) -> float:
        """s0, lower bound of sigma_min(Z*) over its n rows; 0 with more samples than units."""
        return _least(self.Z, self.z_error_F)

    @cached_property
    def features(self) -> Tensor:
        """(n, k) F, what the read-out multiplies: Z, or [Z, C] where c is read out too."""
        return features_of(self.model, self.Z, self.C)

    @cached_property
    def F_error(self) -> float:
        """Upper bound of |F - F*|_F: the rounding of c is part of `z_error`."""
        return 2 * self.z_error_F if self.model.theory.skip else self.z_error_F

    @cached_property
    def F_norm(self) -> float:
        """Upper bound of |F*|."""
        return up(spectral_norm_upper(self.features) + self.F_error) if self.model.theory.skip else self.Z_norm

    @cached_property
    def F_least(self) -> float:
        """Lower bound of sigma_min(F*) over its n rows; 0 with more samples than columns."""
        return _least(self.features, self.F_error) if self.model.theory.skip else self.Z_least

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
    point: tuple[Tensor, Tensor] | None = None,
    known: Callable[[AbstractNetwork, Tensor, Tensor, float], Mapping[str, float]] | None = None,
    norm_upper: Callable[[Tensor], float] = spectral_norm_upper,
) -> Measurement | str:
    """The measurement, or the reason why there is none.

    The equilibria that floating point finds are not the exact ones. With g_i = f(z_i) - z_i,
    including the rounding of its evaluation, a contraction has |z_i - z_i*| <= |g_i|/(1 - |R|); for
    a monotone map, w = f(z) = prox(R z + c) satisfies R w + c - R g - w in dphi(w), so monotonicity
    of dphi against z* gives margin |w - z*|^2 <= -<R g, w - z*>, that is
    |z - z*| <= |g| + |R| |g|/margin.

    Args:
        model: A theory network.
        X, y: From `check_data`.
        point: (n, m) equilibria and adjoints found already, however accurate; None solves for them.
        known: (twin, Z, C, |Z - Z*|_F) -> bounds that need not be computed again.
        norm_upper: Bounds |R|.
    """
    if reason := changed(model, declared=DECLARED) or shared_memory(model) or not_finite(model):
        return reason
    if declared_outside(model) and (reason := contradiction(model, X)):
        return reason
    twin = copy.deepcopy(model).double().cpu()
    twin.layer.on_failure, twin.layer.rtol, twin.layer.max_steps = "ignore", 1e-13, 2000
    twin.on_ill_posed, theory = "ignore", twin.theory
    with torch.no_grad():
        found_unit = unit_of(twin, X, y)
        if isinstance(found_unit, str):
            return found_unit
        unit, X, y = found_unit
        if unit.exponent and not (point is None and known is None):
            return out_of_range(f"the features are of size 2^{unit.exponent}")
        R = twin.recurrent()
        if not bool(torch.isfinite(R).all()):
            return NO_MATRIX
        contraction, margin = up(norm_upper(R)), margin_of(model)
        if margin is not None:
            if margin < 2.0**-LIMIT:
                return out_of_range(f"the margin is {margin:.3g}")
            amplification = 1.0 + contraction / down(margin)
        elif contraction < 1.0:
            amplification = 1.0 / (1.0 - contraction)
        else:
            return f"The contraction factor is only known to be at most {contraction:.6g}, not below 1."
        if point is None:
            found = twin.linearise(X)
            Z, P = found.value, found.adjoint
        else:
            Z, P = (tensor.detach().double().cpu() for tensor in point)
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
        terms = ROUNDING * (R.shape[0] + 4) * 4 * (vector_norm_upper(Z) + vector_norm_upper(C))
        vectors = sum(vector_norm_upper(p) for p in (*twin.parameters(), *twin.buffers()) if p.dim() == 1)
        skipped = [getattr(twin, theory.readout[1])] if theory.skip else []  # the error of c is part of z_error
        v_norm = sum(map(vector_norm_upper, (twin.readout_weight(), *skipped)))
        r_error = up(v_norm * z_F + terms * vectors + 4 * ROUNDING * vector_norm_upper(y) + UNDERFLOW)
        v_error = up(float((contraction * z_error + rounding).max()))
        bounds = {} if known is None else known(twin, Z, C, z_F)
    return Measurement(twin, X, y, C, Z, P, V, r, contraction, z_error, v_error, r_error, bounds, unit)


def _least(F: Tensor, error: float) -> float:
    """Lower bound of sigma_min over the n rows of a matrix that is known to an error; 0 if it has
    fewer columns."""
    return max(0.0, down(least_singular_value_lower(F) - error)) if F.shape[0] <= F.shape[1] else 0.0


def features_of(model: AbstractNetwork, Z: Tensor, C: Tensor) -> Tensor:
    return torch.cat([Z, C], dim=1) if model.theory.skip else Z


def _rounding(model: AbstractNetwork, R: Tensor, X: Tensor, C: Tensor, Z: Tensor) -> Tensor:
    """(n,) bound of the rounding in R z + c, c and R included: |fl(R z) - R z| <= gamma_m |R|_F
    |z|."""
    parts = sum(vector_norm_upper(parameter) for parameter in (*model.parameters(), *model.buffers()))
    gamma = 2 * (R.shape[0] + X.shape[1] + 8) * ROUNDING
    z, x, c = (row_norms_upper(t) for t in (Z, X, C))
    return gamma * (vector_norm_upper(R) * z + parts * x + c) + model.recurrent_error() * z + UNDERFLOW
