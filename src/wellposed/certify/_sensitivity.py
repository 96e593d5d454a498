"""Sensitivities of the networks that contract."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from wellposed.certify._active_sets import Reach, restricted_norm_upper
from wellposed.certify._measure import Measurement, down, up
from wellposed.linalg import least_eigenvalue_lower, least_singular_value_lower
from wellposed.nn import AbstractSensitivity, DescentBounds, SkipDEQ

__all__ = ["Contractive", "SHARPENINGS"]

#: What can be switched off to see what it gains: units that cannot become active; the hidden layers' share of the kernel.
SHARPENINGS = ("active", "kernel")


class Contractive(AbstractSensitivity):
    r"""z = relu(R z + c), y = v . z (+ v' . c), where |dR|_F <= k |dA|_F and |dc_i| <= l |dU x_i|.

    With q = max_i |R_{S_i S_i}| + k |dA| < 1, S_i the units that can be active (see `_active_sets`), samples in rows and
    operator norms B = |Z|, b = |X|:

        |Z' - Z|_F <= (k |dA| B + l |dU| b)/(1 - q)                                                    (1)

    so sigma_min(Z') >= sigma_min(Z) - (1) by Weyl's inequality, and lambda_min(K) >= sigma_min(Z')^2. Two ways add the
    hidden layers' share of the kernel, (P P^T) o (k^2 Z Z^T + l^2 X X^T):

    - Schur: lambda_min of a Hadamard product is at least the least diagonal entry of one factor times lambda_min of the
      other. On the units Q_i that stay active, p_Q - (R^T p)_Q = v_Q, so |p_i| >= |v'_{Q_i}|/(1 + q): a linear relation, so it
      holds for every convex combination of the derivatives at a kink too.
    - Weyl on the whole Jacobian, whose rows are (z_i, sqrt(h) k p_i (x) z_i, sqrt(h) l p_i (x) x_i). With T_i the units that
      may flip, |dp_i| <= (|dv| + k |dA| |p_i| + |(v + R^T p_i)_{T_i}|)/(1 - q); this too holds for convex combinations.

    Args:
        at: The measurement.
        recurrent, injected: Names of A and U; None for an injection that is fixed.
        readout: Names of the read-out's parameters; empty if fixed.
        recurrent_scale, injection_scale: k and l.
        skip: Whether c is read out too, as in `SkipDEQ`.
        sharpen: Which of `SHARPENINGS` to use.
    """

    def __init__(
        self,
        at: Measurement,
        *,
        recurrent: str,
        injected: str | None,
        readout: tuple[str, ...],
        recurrent_scale: float = 1.0,
        injection_scale: float = 1.0,
        skip: bool = False,
        sharpen: tuple[str, ...] = SHARPENINGS,
    ) -> None:
        self._at, self._sharpen, self._skip = at, sharpen, skip
        self.residual, self.readout = at.residual, readout
        self._recurrent, self._injected = recurrent, injected
        self.hidden = (recurrent,) if injected is None else (recurrent, injected)
        self._k, self._l = up(recurrent_scale), up(injection_scale) if injected else 0.0  # bounds from above
        self._k_lower, self._l_lower = down(recurrent_scale), down(injection_scale) if injected else 0.0
        with torch.no_grad():
            self._R = at.model.recurrent().detach()
            self._v = at.model.readout_weight().detach()
            self._z = torch.linalg.vector_norm(at.Z, dim=1) + at.z_error
            self._x = torch.linalg.vector_norm(at.X, dim=1)
            # the adjoint on the units that are active: whatever was found elsewhere counts as its error
            self._mask = (at.V > 0).to(at.P.dtype)
            self._P = at.P * self._mask
            self._p = torch.linalg.vector_norm(self._P, dim=1)
            self._rows = torch.linalg.vector_norm(self._R, dim=1)
            weights = torch.cat([self._v, at.model.v]) if isinstance(at.model, SkipDEQ) else self._v
            self._alpha = up(float(torch.linalg.vector_norm(self._v)))
            self._weights = up(float(torch.linalg.vector_norm(weights)))
        self._s0 = at.F_least if readout else 0.0
        self._q = at.contraction
        self._cap = math.inf  # the hidden radius up to which self._q is valid
        self._kernels()

    def _kernels(self) -> None:
        """What the two ways of adding the hidden layers' kernel need."""
        self._x_least = 0.0
        if "kernel" not in self._sharpen and self.readout:
            return
        at, X = self._at, self._at.X
        if self._injected and not self._skip and X.shape[0] <= X.shape[1]:
            self._x_least = least_singular_value_lower(X)
        if self._skip:
            return
        # an entry of a product with m terms is wrong by at most gamma_m |row| |column|: gamma |Z|_F^2 in Frobenius norm
        self._rounding = 8 * (at.Z.shape[1] + X.shape[1] + 4) * 2.0**-53
        z, p = float(at.Z.square().sum()), float(self._P.square().sum())
        self._gram_error = up(self._rounding * (z + p * (self._k**2 * z + self._l**2 * at.X_norm_F**2)))
        self._parts = (at.Z @ at.Z.t(), self._P @ self._P.t(), X @ X.t())
        self._gram_at: dict[float, float] = {}
        # the adjoint that was found, against the one of the masks that were found
        back = self._v + self._P @ self._R
        residual = torch.linalg.vector_norm(self._mask * back - self._P, dim=1)
        size = float(torch.linalg.vector_norm(self._R))  # |fl(R^T p) - R^T p| <= gamma_m |R|_F |p|
        self._back, self._p_residual = back, residual + self._rounding * (self._alpha + max(1.0, size) * self._p)

    def prepare(self, hidden: float) -> None:
        # the active sets, first with |R| and then with what the first sets give
        self._q, self._cap = self._at.contraction, hidden
        if "active" not in self._sharpen or hidden == math.inf:
            return
        for _ in range(2):
            reach = self._reach(hidden)
            if reach is None:
                return
            q = restricted_norm_upper(self._R, reach.possible)
            if q > 0.98 * self._q:
                self._q = min(self._q, q)
                return
            self._q = q

    def _factor(self, hidden: float) -> float:
        """1/(1 - q), or infinity."""
        q = up(self._q + self._k * hidden)
        return up(1.0 / (1.0 - q)) if q < 1.0 else math.inf

    def _reach(self, hidden: float) -> Reach | None:
        """How far pre-activations move: |R'_k| |dz_i| + |dR_k z_i| + |dc_ik|, and what is uncertain about them now."""
        factor = self._factor(hidden)
        if factor == math.inf:
            return None
        moved = hidden * torch.sqrt((self._k * self._z) ** 2 + (self._l * self._x) ** 2)
        dz = moved * factor
        rows = self._rows + self._k * hidden
        reach = torch.outer(dz, rows) + moved.unsqueeze(1)
        return Reach.of(self._at.V, reach * (1 + 2.0**-30) + self._at.v_error)

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
        if not self.readout or ("kernel" in self._sharpen and not self._skip):
            reach = self._reach(hidden)
            if reach is not None:
                return max(self._by_schur(simple, reach, R if self.readout else 0.0, hidden, h), self._by_jacobian(reach, R, h))
        return simple

    def _by_schur(self, simple: float, reach: Reach, R: float, hidden: float, h: float) -> float:
        if simple <= 0 or not self.readout:
            return simple
        steady = torch.linalg.vector_norm(self._v * reach.sure, dim=1).min()
        p = max(0.0, down(float(steady) - R)) / up(1.0 + self._q + self._k * hidden)
        hidden_share = h * p * p * ((self._k_lower * simple) ** 2 + (self._l_lower * self._x_least) ** 2)
        return down(math.sqrt(simple**2 + down(hidden_share)))

    def _by_jacobian(self, reach: Reach, R: float, h: float) -> float:
        hidden = up(math.sqrt(h) * R)
        factor = self._factor(hidden)
        moved = hidden * torch.sqrt((self._k * self._z) ** 2 + (self._l * self._x) ** 2)
        dz = moved * factor + self._at.z_error
        dv = R if self.readout else 0.0
        flips = torch.linalg.vector_norm(self._back * reach.flippable, dim=1)
        dp = (dv + self._k * hidden * self._p + flips + self._p_residual) * factor
        outer = self._k * (dp * (self._z + dz) + self._p * dz)
        inner = self._l * dp * self._x
        square = h * (outer.square() + inner.square())
        if self.readout:
            square = square + dz.square()
        return down(self._jacobian_least(h) - math.sqrt(float(square.sum())) * (1 + 2.0**-30))

    def _jacobian_least(self, h: float) -> float:
        """Lower bound of sigma_min of the Jacobian made of the vectors that were found."""
        if h not in self._gram_at:
            G, PP, XX = self._parts
            K = h * PP * (self._k_lower**2 * G + self._l_lower**2 * XX)
            if self.readout:
                K = K + G
            lower = least_eigenvalue_lower((K + K.t()) / 2) - max(1.0, h) * self._gram_error
            self._gram_at[h] = math.sqrt(down(lower)) if lower > 0 else 0.0
        return self._gram_at[h]

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
        at = self._at
        numbers = {"loss": at.loss, "|r|": at.residual, "|R|": at.contraction, "|R| on active units": self._q}
        numbers |= {"sigma_min(F)": self._s0, "|Z|": at.Z_norm, "|X|": at.X_norm, "|v|": self._alpha}
        return numbers

    def errors(self) -> dict[str, float]:
        return self._at.errors()
