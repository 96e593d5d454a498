r"""How much the features and the kernel of a contraction can change in a ball of parameters.

Two equilibria have dz = E (R' dz + dR z + dc) with slopes E in [0, 1], hence dz . (R' dz + dR z +
dc) >= |dz|^2, and

    |dz| <= |dR z + dc|/(1 - omega),      omega = lambda_max((R' + R'^T)/2).

A unit that is inactive at both contributes nothing. So omega may be that of R' on S_i, the units of
sample i that are active anywhere in the ball. For a Gaussian R omega is about 0.7 |R|, and with
half of the units active about 0.5 |R|.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.certify._jacobian import FoundJacobian, Reach, Steady
from wellposed.certify.measurement import LIMIT, Measurement
from wellposed.errors import InvalidType
from wellposed.linalg import least_singular_value_lower
from wellposed.linalg.directed import ROUNDING, UNDERFLOW, down, row_norms_upper, up, vector_norm_upper
from wellposed.linalg.verified_cholesky import restricted_norm_upper, restricted_symmetric_part_upper, symmetric_part_upper
from wellposed.nn.families import Theory
from wellposed.nn.sensitivity import AbstractSensitivity, DescentBounds, JacobianBounds

#: What can be switched off to see what it gains: units that cannot become active; the hidden layers' share of the kernel.
SHARPENINGS = ("active", "kernel")


@dataclass(frozen=True)
class _Change:
    """Upper bounds, by sample: |dz_i|, |dp_i|, |(v + R^T p_i) on the units that may flip|; and
    |dJ|_F."""

    equilibria: Tensor
    adjoints: Tensor
    flips: Tensor
    jacobian: float


class Contractive(AbstractSensitivity):
    r"""z = relu(R z + c), y = v . z (+ v' . c), where |dR|_F <= k |dA|_F and |dc_i| <= l |dU x_i|.

    With omega = max_i lambda_max(sym R on S_i) + k |dA| < 1, S_i the units that can be active,
    samples in rows and operator norms B = |Z|, b = |X|:

        |Z' - Z|_F <= (k |dA| B + l |dU| b)/(1 - omega)                                                (1)

    so sigma_min(Z') >= sigma_min(Z) - (1) by Weyl's inequality, and lambda_min(K) >=
    sigma_min(Z')^2. Two ways add the hidden layers' share of the kernel, (P P^T) o (k^2 Z Z^T + l^2
    X X^T):

    - Schur: lambda_min of a Hadamard product is at least the least diagonal entry of one factor
      times lambda_min of the other. On the units Q_i that stay active, p_Q - (R'^T p)_Q = v'_Q, so
      |p_i| >= w . v'_Q/|(w - R' w) on S_i| for every w on Q_i: a linear relation, so it holds for
      every convex combination of the derivatives at a kink too.
    - Weyl on the whole Jacobian, whose rows are (z_i, sqrt(h) k p_i (x) z_i, sqrt(h) l p_i (x)
      x_i). With T_i the units that may flip, |dp_i| <= (|dv| + k |dA| |p_i|)/(1 - omega) + (1 +
      |R'|/(1 - omega)) |(v + R^T p_i)_{T_i}|; this too holds for convex combinations.

    Args:
        point: The measurement.
        theory: Names and scales of the parameters, with k and l; those that the network declares if
            not given.
        sharpen: Which of `SHARPENINGS` to use.
    """

    def __init__(self, point: Measurement, theory: Theory | None = None, *, sharpen: tuple[str, ...] = SHARPENINGS) -> None:
        theory = point.model.theory if theory is None else theory
        self._at, self._sharpen, self._skip = point, sharpen, theory.skip
        self.residual, self.readout = point.residual, theory.trained_readout
        self._recurrent = theory.recurrent
        self._injected = "" if theory.injected in theory.fixed else theory.injected
        self.hidden = (self._recurrent, self._injected) if self._injected else (self._recurrent,)
        # bounds from above, in range
        k, scale = abs(theory.recurrent_scale), abs(theory.injection_scale)  # only norms of what they multiply occur
        self._k, self._k_lower = max(2.0**-LIMIT, up(k)), down(k)
        self._l, self._l_lower = (up(scale), down(scale)) if self._injected else (0.0, 0.0)
        with torch.no_grad():
            self._R = point.model.recurrent().detach()
            self._v = point.model.readout_weight().detach()
            self._z = row_norms_upper(point.Z) + point.z_error
            self._x = row_norms_upper(point.X)
            self._rows = row_norms_upper(self._R)
            self._alpha = vector_norm_upper(self._v)
            skipped = [getattr(point.model, theory.readout[1]).detach()] if self._skip else []
            self._weights = vector_norm_upper(torch.cat([self._v, *skipped]))
            symmetric = symmetric_part_upper(self._R) + point.model.recurrent_error()
        self._s0 = point.F_least if self.readout else 0.0
        self._omega_whole = self._omega = min(point.contraction, up(symmetric))
        self._q = point.contraction
        self._cap = math.inf  # the hidden radius up to which omega and what is steady are valid
        self._steady: Steady | None = None
        # what the two ways of adding the hidden layers' kernel need
        self._x_least = self._xi_least = 0.0
        self._adds_kernel = not self.readout or ("kernel" in sharpen and not self._skip)
        if self._adds_kernel:
            if self._injected and point.X.shape[0] <= point.X.shape[1]:
                self._x_least = least_singular_value_lower(point.X)
            scales = ((self._k_lower, self._k), (self._l_lower, self._l))
            self._found = FoundJacobian(point, readout=bool(self.readout), scales=scales)
            if self.readout and point.X.shape[0] <= point.Z.shape[1] + point.X.shape[1]:
                both = torch.cat([self._k_lower * point.Z, self._l_lower * point.X], dim=1)
                rounding = 4 * ROUNDING * vector_norm_upper(both) + UNDERFLOW
                self._xi_least = least_singular_value_lower(both) - up(self._k * point.z_error_F + rounding)

    def prepare(self, hidden: float) -> None:
        # the active sets, first with omega of the whole matrix and then with what the first sets give
        self._omega, self._q, self._cap, self._steady = self._omega_whole, self._at.contraction, hidden, None
        if "active" not in self._sharpen or hidden == math.inf:
            return
        for _ in range(2):
            reach = self._reach(hidden)
            if reach is None:
                return
            before = self._omega
            omega = restricted_symmetric_part_upper(self._R, reach.possible) + self._at.model.recurrent_error()
            self._omega = min(before, up(omega))
            if self._omega > 0.98 * before:
                break
        reach = self._reach(hidden)
        if reach is None or not self._adds_kernel:
            return
        if self.readout:
            self._steady = Steady.of(self._R, self._v, reach)
        else:  # where all depends on how far adjoints move
            q = restricted_norm_upper(self._R, reach.possible) + self._at.model.recurrent_error()
            self._q = min(self._q, up(q))

    def _factor(self, hidden: float) -> float:
        """1/(1 - omega), or infinity."""
        omega = up(self._omega + self._k * hidden)
        return up(1.0 / (1.0 - omega)) if omega < 1.0 else math.inf

    def _norm(self, hidden: float) -> float:
        """Upper bound of |R'|, on the units that can be active."""
        return up(self._q + self._k * hidden)

    def _jump(self, hidden: float) -> float:
        """Upper bound of |(I - D' R'^T)^-1|: for a vector that no mask precedes."""
        q = self._norm(hidden)
        return min(up(1.0 + q * self._factor(hidden)), up(1.0 / (1.0 - q)) if q < 1.0 else math.inf)

    def _moved(self, hidden: float) -> Tensor:
        """(n,) bounds of |dR z_i + dc_i|."""
        return hidden * torch.hypot(self._k * self._z, self._l * self._x) + UNDERFLOW

    def _reach(self, hidden: float) -> Reach | None:
        """How far pre-activations move: |R'_k| |dz_i| + |dR_k z_i| + |dc_ik|, and what is uncertain
        about them now."""
        factor = self._factor(hidden)
        if factor == math.inf:
            return None
        moved = self._moved(hidden)
        dz = moved * factor
        rows = self._rows + self._k * hidden
        reach = torch.outer(dz, rows) + moved.unsqueeze(1)
        reach = reach * (1 + 2.0**-30) + self._at.v_error
        return Reach(-reach <= self._at.V, reach < self._at.V)

    def least(self, R: float, h: float) -> float:
        hidden = up(math.sqrt(h) * R)
        if hidden > self._cap:
            return -math.inf
        factor = self._factor(hidden)
        if factor == math.inf:
            return -math.inf
        B, b = self._at.Z_norm, self._at.X_norm
        drift = up(hidden * math.hypot(self._k * B, self._l * b) * factor)
        features = math.hypot(drift, self._l * hidden * b) if self._skip else drift
        simple = down(self._s0 - features)
        if self._adds_kernel:
            reach = self._reach(hidden)
            if reach is not None:
                by_jacobian = down(self._found.least(h) - self._change(reach, R, h).jacobian)
                return max(self._by_schur(simple, drift, reach, R, hidden, h), by_jacobian)
        return simple

    def _by_schur(self, simple: float, drift: float, reach: Reach, R: float, hidden: float, h: float) -> float:
        if not self.readout:
            return simple
        active = float(torch.linalg.vector_norm(self._v * reach.sure, dim=1).min())
        p = max(0.0, down(active - R)) / up(1.0 + self._norm(hidden))
        if self._steady is not None:
            p = max(p, self._steady.least(R, self._k * hidden))
        inputs = max(down(self._xi_least - up(self._k * drift)), self._l_lower * self._x_least)
        share = h * (p * max(0.0, inputs)) ** 2
        return down(math.sqrt(max(0.0, simple) ** 2 + down(share))) if share > 0 else simple

    def _change(self, reach: Reach, R: float, h: float) -> _Change:
        """How far the equilibria, the adjoints and the Jacobian are, anywhere in the ball, from
        those that were found."""
        hidden = up(math.sqrt(h) * R)
        factor = self._factor(hidden)
        dz = self._moved(hidden) * factor + self._at.z_error
        dv = R if self.readout else 0.0
        p = self._found.norms
        flips = row_norms_upper(self._found.back * reach.flippable)
        dp = (dv + self._k * hidden * p) * factor + (flips + self._found.residual) * self._jump(hidden)
        outer = self._k * (dp * (self._z + dz) + p * dz)
        inner = self._l * dp * self._x
        square = h * (outer.square() + inner.square())
        if self.readout:
            square = square + dz.square()
        return _Change(dz, dp, flips, math.sqrt(float(square.sum())) * (1 + 2.0**-30) + UNDERFLOW)

    def jacobian(self, R: float, share: float) -> JacobianBounds | None:
        if self.readout or R > self._cap:
            return None
        reach, factor = self._reach(R), self._factor(R)
        if reach is None:
            return None
        change = self._change(reach, R, 1.0)
        largest = up(self._found.largest(1.0) + change.jacobian)
        if self._found.is_zero:  # no sample has features: nothing moves
            return None
        step = up(share * self.residual / largest)  # |step| <= eta |J| |r|, eta = share/largest^2
        # the step's adjoint against the one it begins with: both are within dp of the one found, or nearer, as `_jump` says
        # of (v + R'^T p')_T; T is empty unless a unit can flip
        p = self._found.norms
        crossed = change.flips + self._found.residual + self._k * R * p + self._norm(R) * change.adjoints
        crossed = crossed * reach.flippable.any(dim=1)
        nearby = self._k * step * (p + change.adjoints) * factor + crossed * self._jump(R)
        dp = torch.minimum(2 * change.adjoints, nearby)
        variation = vector_norm_upper(self._k * dp * (self._z + change.equilibria)) * (1 + 2.0**-30)
        return JacobianBounds(down(self._found.least(1.0) - change.jacobian), largest, variation)

    def descent(self, radii: Mapping[str, float], h: float) -> DescentBounds | None:
        if not self.readout:
            return None
        R_A = radii[self._recurrent]
        R_U = radii[self._injected] if self._injected else 0.0
        if math.hypot(R_A, R_U) > self._cap:
            return None
        factor = self._factor(R_A)
        if factor == math.inf:
            return None
        B, b = self._at.Z_norm, self._at.X_norm
        injected = self._l * R_U * b
        drift = up((self._k * R_A * B + injected) * factor)
        features = math.hypot(drift, injected) if self._skip else drift
        B_ball = up(B + drift)
        readout_move = max(radii[name] for name in self.readout)
        alpha = up((self._alpha if not self._skip else self._weights) + readout_move)
        kappa = up(alpha * factor)  # bounds |p_i|
        through = kappa + alpha if self._skip else kappa  # bounds |dy/dc|
        gradients = {self._recurrent: up(self._k * kappa * B_ball)}
        g_U = up(self._l * through * b)
        if self._injected:
            gradients[self._injected] = g_U
        dZ = up((self._k * gradients[self._recurrent] * B_ball + self._l * g_U * b) * factor)
        dF = math.hypot(dZ, self._l * g_U * b) if self._skip else dZ
        return DescentBounds(down(self._s0 - features), up(self._at.F_norm + features), gradients, up(alpha * dF))

    def measured(self) -> dict[str, float]:
        point = self._at
        numbers = {
            "loss": point.loss,
            "|r|": point.unit.upper(point.residual),
            "|R|": point.contraction,
            "|R| on active units": self._q,
            "omega": self._omega_whole,
            "omega on active units": self._omega,
        }
        if self.readout:  # features count only if what reads them out is trained
            numbers["sigma_min(F)"] = point.unit.lower(self._s0)
        return numbers | {"|Z|": point.unit.upper(point.Z_norm), "|X|": point.unit.upper(point.X_norm), "|v|": self._alpha}

    def errors(self) -> dict[str, float]:
        return self._at.errors()


def sensitivity_of(point: Measurement, sharpen: tuple[str, ...] = SHARPENINGS) -> AbstractSensitivity:
    """The bounds of the family that a measured network belongs to: its own, or those of a
    contraction."""
    model = point.model
    own: Any = getattr(model, "sensitivity", None)
    if callable(own):
        sensitivity = own(point)
        if not isinstance(sensitivity, AbstractSensitivity):
            raise InvalidType(f"{type(model).__name__}.sensitivity must return an AbstractSensitivity; got {sensitivity!r}.")
        return sensitivity
    if not model.theory.recurrent:
        raise InvalidType(
            f"The radius certificate does not know {type(model).__name__}: give it a `theory`, or a method "
            "sensitivity(measurement)."
        )
    return Contractive(point, sharpen=sharpen)
