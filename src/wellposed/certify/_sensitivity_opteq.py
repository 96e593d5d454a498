"""Sensitivities of OptEq networks."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from wellposed.certify._measure import down, up
from wellposed.certify._sensitivity import AbstractSensitivity, DescentBounds
from wellposed.convex import AbstractDenseOptEq
from wellposed.linalg import least_singular_value_lower, spectral_norm_upper

__all__ = ["OptEqSensitivity"]

_UNIT = 2.0**-53


class OptEqSensitivity(AbstractSensitivity):
    r"""z = f_L o ... o f_1(z), f_l(z) = a/mu W_l^T s(W_l z + U_l x + b_l) + (1 - a) z, y = w . z, s Lipschitz with L_s.

    f_l contracts with q_l = a L_s |W_l|^2/mu + 1 - a, the composition with Q = prod q_l. Samples in rows, S_l = s(W_l z_(l-1) + ...),
    b = |X|, B_l = |Z_l|. Changing the parameters of f_l moves its value at the same argument by at most

        d_l = a/mu [ |dW| |S_l| + |W_l'| L_s (|dW| B_(l-1) + |dU| b + |db| sqrt(n)) ]                    (1)

    in Frobenius norm over all samples, so |Z' - Z|_F <= sum_l d_l prod_(k > l) q_k' / (1 - Q'). The adjoint vectors satisfy
    |q^(L)| <= |w|/(1 - Q'), |q^(l)| <= |q^(L)| prod_(k > l) q_k' and |h^(l)| <= a/mu L_s |W_l| |q^(l)|, whatever the masks.

    If the network keeps |W_l| below a bound by scaling, the ball must not reach that bound: inside, scaling does nothing.

    Args:
        model: A float64 copy of the network.
        X: (n, d). y: (n,).
    """

    readout = ("w",)

    def __init__(self, model: AbstractDenseOptEq, X: Tensor, y: Tensor) -> None:
        self._a, self._mu, self._L = model.alpha, model.mu, model.activation.lipschitz
        raw = model.parameters_by_unit()
        self._names = [unit.names for unit in raw]
        self.hidden = tuple(name for names in self._names for name in names)
        self._limit = math.inf if model.weight is None else down(model.weight.bound)
        self._W = [spectral_norm_upper(unit.W.detach()) for unit in raw]
        self._b, self._root = spectral_norm_upper(X), up(math.sqrt(X.shape[0]))
        self._w = up(float(torch.linalg.vector_norm(model.w)))
        self._measure(model, X, y)

    @classmethod
    def of(cls, model: AbstractDenseOptEq, X: Tensor, y: Tensor) -> OptEqSensitivity | str:
        """The sensitivities, or the reason why there are none."""
        if any(not bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
            return "A parameter has NaN or infinite entries."
        if model.prior is not None:
            return f"The radius certificate does not cover a prior; got {model.prior!r}."
        twin = copy.deepcopy(model).double().cpu()
        twin.layer.on_failure, twin.layer.rtol, twin.layer.max_steps = "ignore", 1e-13, 2000
        for unit in twin.parameters_by_unit() if twin.weight is not None else ():
            norm = spectral_norm_upper(unit.W.detach())
            if norm >= down(twin.weight.bound):
                return f"|{unit.names[0]}| = {norm:.6g} has reached its bound {twin.weight.bound:.6g}, where scaling sets in."
        contraction = up(twin.contraction_upper())
        if contraction >= 1:
            return f"The contraction factor is only known to be at most {contraction:.6g}, not below 1."
        return cls(twin, X, y)

    def _measure(self, model: AbstractDenseOptEq, X: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            Z = model.solve(X).value
            states, hidden = [Z], []
            rounding = torch.zeros(len(X), dtype=Z.dtype)
            sizes = max(Z.shape[1], X.shape[1], *(W.shape[0] for W in model.matrices()))
            x = torch.linalg.vector_norm(X, dim=1)
            for W, unit in zip(model.matrices(), model.parameters_by_unit(), strict=True):
                S = model.activation(states[-1] @ W.t() + X @ unit.U.t() + unit.b)
                hidden.append(S)
                size = float(torch.linalg.vector_norm(W))
                terms = size * torch.linalg.vector_norm(states[-1], dim=1) + float(torch.linalg.vector_norm(unit.U)) * x
                terms = self._L * (terms + float(torch.linalg.vector_norm(unit.b))) + torch.linalg.vector_norm(S, dim=1)
                z = torch.linalg.vector_norm(states[-1], dim=1)
                rounding = rounding + 8 * (sizes + 8) * _UNIT * (self._a / self._mu * size * terms + z)
                states.append(self._a / self._mu * (S @ W) + (1 - self._a) * states[-1])
            Q = math.prod(self._q(W) for W in self._W)
            z_error = (torch.linalg.vector_norm(states[-1] - Z, dim=1) + rounding) * up(1.0 / (1.0 - Q))
            error = up(float(torch.linalg.vector_norm(z_error)) * 1.001)  # f_l contract: no later state is worse than this
            r = Z @ model.w - y
            terms = _UNIT * (sizes + 4) * 4 * float(torch.linalg.vector_norm(Z))
            r_error = up(self._w * error + terms * self._w + 4 * _UNIT * float(torch.linalg.vector_norm(y)))
        self.residual = up(float(torch.linalg.vector_norm(r)) + r_error)
        self._B = [up(spectral_norm_upper(state) + error) for state in states[:-1]]
        self._S = [up(spectral_norm_upper(S) + self._L * W * error) for S, W in zip(hidden, self._W, strict=True)]
        wide = Z.shape[0] <= Z.shape[1]
        self._s0 = max(0.0, down(least_singular_value_lower(Z) - error)) if wide else 0.0
        self._loss = float(r.square().sum()) / 2
        self.errors = {"|Z - Z*|_F": error, "|r - r*|": r_error}

    def _q(self, W: float) -> float:
        return up(self._a * self._L * W**2 / self._mu + 1 - self._a)

    def _tails(self, radii: list[float]) -> tuple[list[float], float] | None:
        """prod_(k > l) q_k for every l, and Q, in the ball; None outside of what is known."""
        if any(W + R >= self._limit for W, R in zip(self._W, radii, strict=True)):
            return None
        q = [self._q(W + R) for W, R in zip(self._W, radii, strict=True)]
        Q = up(math.prod(q))
        return ([up(math.prod(q[index + 1 :])) for index in range(len(q))], Q) if Q < 1 else None

    def least(self, R: float, h: float) -> float:
        hidden = up(math.sqrt(h) * R)
        known = self._tails([hidden] * len(self._W))
        if known is None:
            return -math.inf
        tails, Q = known
        square = 0.0  # (1) is linear in (dW, dU, db): Cauchy-Schwarz over all of them
        for tail, W, S, B in zip(tails, self._W, self._S, self._B, strict=True):
            inner = self._L * (W + hidden)
            parts = (S + inner * B) ** 2 + (inner * self._b) ** 2 + (inner * self._root) ** 2
            square += (tail * self._a / self._mu) ** 2 * parts
        return down(self._s0 - up(hidden * math.sqrt(square) / (1.0 - Q)))

    def descent(self, radii: Mapping[str, float], h: float) -> DescentBounds | None:
        moves = [tuple(radii[name] for name in names) for names in self._names]
        known = self._tails([move[0] for move in moves])
        if known is None:
            return None
        tails, Q = known
        scale = self._a / self._mu
        changes = [self._change(S, B, W + m[0], m) for W, S, B, m in zip(self._W, self._S, self._B, moves, strict=True)]
        drift = up(sum(tail * change for tail, change in zip(tails, changes, strict=True)) / (1 - Q))
        w = up(self._w + radii["w"])
        top = w / (1 - Q)
        gradients: dict[str, float] = {}
        step, d = 0.0, drift
        for index, (names, move) in enumerate(zip(self._names, moves, strict=True)):
            W = self._W[index] + move[0]
            B = self._B[index] + d
            moved = self._L * (W * d + move[0] * self._B[index] + move[1] * self._b + move[2] * self._root)
            S = self._S[index] + moved
            q = up(tails[index] * top)
            adjoint = up(scale * self._L * W * q)  # bounds |h^(l)|
            own = (up(scale * S * q + adjoint * B), up(adjoint * self._b), up(adjoint * self._root))
            gradients |= dict(zip(names, own, strict=True))
            step += tails[index] * self._change(S, B, W, own)
            d = up(self._q(W) * d + changes[index])
        E = up(w * step / (1 - Q))
        return DescentBounds(down(self._s0 - drift), up(self._B[0] + drift), gradients, E)

    def _change(self, S: float, B: float, W_other: float, move: tuple[float, ...]) -> float:
        """(1): how much f_l moves at the same argument, between a point with |S_l| <= S, B and one with |W_l| <= W_other."""
        dW, dU, db = move
        inner = W_other * self._L * (dW * B + dU * self._b + db * self._root)
        return up(self._a / self._mu * (dW * S + inner))

    def measured(self) -> dict[str, float]:
        Q = math.prod(self._q(W) for W in self._W)
        numbers = {"loss": self._loss, "|r|": self.residual, "contraction": Q, "sigma_min(Z)": self._s0}
        return numbers | {"|Z|": self._B[0], "|X|": self._b, "|w|": self._w}
