r"""How much the equilibria of a dense OptEq network can change in a ball of parameters, with
one-sided numbers.

In the ball let w_l >= |W'_l|, k_l = a L_s w_l^2/mu + 1 - a (a Lipschitz constant of f_l) and k =
prod_l k_l < 1. For fixed z

    f'_l(z) - f_l(z) = a/mu [dW_l^T s(W_l z + c_l) + W'_l^T (s(W'_l z + c'_l) - s(W_l z + c_l))],

so with Z_(l-1) the states before layer l and S_l = s(W_l Z_(l-1) + ...), samples in rows, n of
them, and operator norms,

    e_l = a/mu [|dW_l| (|S_l| + L_s w_l |Z_(l-1)|) + L_s w_l (|dU_l| |X| + sqrt n |db_l|)]                     (1)

bounds |f'_l(Z_(l-1)) - f_l(Z_(l-1))|_F. Through the later layers and the fixed point, telescoping,

    |Z' - Z|_F <= D = sum_l k_L ... k_(l+1) e_l/(1 - k),     sigma_min(Z') >= sigma_min(Z) - D   (Weyl).        (2)

The adjoints of Section B of the tangent kernel have |q_l| <= Q_l = k_L ... k_(l+1) |w'|/(1 - k) and
|h_l| <= H_l = a/mu L_s w_l Q_l, so the gradients of |r|^2/2 are at most |r| times |S'_l| Q_l +
|Z'_(l-1)| H_l in W_l, |X| H_l in U_l and sqrt n H_l in b_l. These are the sensitivities that a
radius certificate asks for: PL by the read-out, from any point. [xie2021, Theorem 5] is false (its
Lemma 16 uses an operator norm as a lower bound) and is not offered.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from wellposed.convex.opteq import AbstractDenseOptEq, check_dense
from wellposed.errors import InvalidArgument
from wellposed.linalg import least_singular_value_lower, spectral_norm_upper
from wellposed.linalg.directed import ROUNDING, UNDERFLOW
from wellposed.nn.sensitivity import AbstractSensitivity, DescentBounds

#: Relative rounding of the scalar arithmetic below, generously.
_SLACK = 1.0 + 2.0**-40


class OptEqSensitivity(AbstractSensitivity):
    r"""The bounds (1) and (2) around the present parameters of a network, from data (X, y), loss
    |r|^2/2.

    Holds for a contraction without a prior, as long as the norm bound is not active anywhere in the
    ball (the parametrization is then the identity). Everything is measured in float64 on a copy;
    upper bounds are upper in spite of rounding and of an equilibrium that is known only to its
    residual.

    Args:
        model: A dense OptEq network.
        X: (n, d) inputs.
        y: (n,) targets.

    Attributes:
        residual: Upper bound of |r|.
        readout: ("w",).
        hidden: Names of the other parameters.
    """

    readout = ("w",)

    def __init__(self, model: AbstractDenseOptEq, X: Tensor, y: Tensor) -> None:
        check_dense("OptEqSensitivity", model, plain=True)
        model.sample_shape(X)
        if tuple(y.shape) != (len(X),):
            raise InvalidArgument(f"y must have shape ({len(X)},), one number per sample; got {tuple(y.shape)}.")
        twin = copy.deepcopy(model).double().cpu()
        twin.layer.on_failure, twin.layer.rtol, twin.layer.max_steps = "ignore", 1e-14, 5000
        X, y = X.detach().double().cpu(), y.detach().double().cpu()
        self._limit = math.inf if twin.weight is None else twin.weight.bound
        self._scale, self._keep, self._L = twin.alpha / twin.mu, 1 - twin.alpha, twin.activation.lipschitz
        self._raw = twin.parameters_by_unit()
        self.hidden = tuple(name for unit in self._raw for name in unit.names)
        with torch.no_grad():
            self._norms = [spectral_norm_upper(unit.W) for unit in self._raw]
            self._measure(twin, X, y)

    def _measure(self, twin: AbstractDenseOptEq, X: Tensor, y: Tensor) -> None:
        """Norms of states and hidden values at the present parameters, and how wrong they may
        be."""
        n, self._root_n = len(X), math.sqrt(len(X)) * _SLACK
        units = twin.units(X)
        Z = twin.solve(X).value
        states = twin.bind(X).states(Z)
        x = torch.linalg.vector_norm(X, dim=1)
        factors = self._factors(0.0) or [math.inf] * len(self._raw)
        error = torch.zeros(n, dtype=torch.float64)
        size = float(max(unit.W.shape[0] + unit.W.shape[1] + X.shape[1] for unit in self._raw))
        gamma = 2 * (size + 8) * ROUNDING
        for unit, raw, z, factor in zip(units, self._raw, states, factors, strict=False):
            # gamma (|W|_F |z| + ..) for each product, carried through what follows
            W, U, b, v = (float(torch.linalg.vector_norm(t)) for t in (raw.W, raw.U, raw.b, unit.c))
            norm, s = torch.linalg.vector_norm(z, dim=1), torch.linalg.vector_norm(unit.hidden(z), dim=1)
            local = self._scale * W * gamma * (self._L * (W * norm + U * x + b + v) + 2 * s) + gamma * norm
            error = factor * error + local + UNDERFLOW
        rate = math.prod(factors)
        amplification = 1.0 / (1.0 - rate) if rate < 1 else math.inf
        z_error = (torch.linalg.vector_norm(states[-1] - Z, dim=1) + error) * amplification
        self._z_error = float(torch.linalg.vector_norm(z_error)) * _SLACK
        self._rate = rate
        # The exact states between the layers differ from these by what the layers make of z_error, and of their own rounding,
        # which `error` and so z_error covers.
        between = 2 * self._z_error * math.prod(max(1.0, factor) for factor in factors) * _SLACK
        self._Z = [spectral_norm_upper(z) + between for z in states[:-1]]
        self._S = [
            spectral_norm_upper(unit.hidden(z)) + self._L * norm * between
            for unit, z, norm in zip(units, states, self._norms, strict=False)
        ]
        self._X = spectral_norm_upper(X) + UNDERFLOW
        few = Z.shape[0] <= Z.shape[1]
        self._s0 = max(0.0, (least_singular_value_lower(Z) - self._z_error) / _SLACK) if few else 0.0
        self._w = float(torch.linalg.vector_norm(twin.w)) * _SLACK + UNDERFLOW
        r = Z @ twin.w - y
        spread = gamma * (self._w * float(torch.linalg.vector_norm(Z)) + float(torch.linalg.vector_norm(y)))
        self.residual = (float(torch.linalg.vector_norm(r)) + self._w * self._z_error + spread) * _SLACK + UNDERFLOW

    def least(self, R: float, h: float) -> float:
        """Lower bound of sigma_min(Z) while the read-out moves by R and the hidden parameters,
        together, by sqrt(h) R.

        Its square bounds the least eigenvalue of the tangent kernel. Minus infinity if nothing is
        known.
        """
        hidden = math.sqrt(h) * R * _SLACK
        factors = self._factors(hidden)
        if factors is None:
            return -math.inf
        total, later = 0.0, 1.0
        for index in reversed(range(len(factors))):
            in_W, in_U, in_b = self._coefficients(index, hidden, self._S[index], self._Z[index])
            total += later**2 * (in_W**2 + in_U**2 + in_b**2)  # Cauchy-Schwarz over all hidden parameters
            later *= factors[index]
        return self._s0 - hidden * math.sqrt(total) / (1 - later) * _SLACK

    def descent(self, radii: Mapping[str, float], h: float) -> DescentBounds | None:
        """Bounds within the given radii (Frobenius norms, by name); None if nothing is known."""
        moved = [tuple(radii[name] for name in unit.names) for unit in self._raw]
        factors = self._factors([move[0] for move in moved])
        if factors is None:
            return None
        w_norms = [norm + move[0] for norm, move in zip(self._norms, moved, strict=True)]
        rate = math.prod(factors)
        local = [
            sum(c * m for c, m in zip(self._coefficients(i, move[0], self._S[i], self._Z[i]), move, strict=True))
            for i, move in enumerate(moved)
        ]
        drift = self._through(local, factors) / (1 - rate) * _SLACK
        # norms of states and hidden values anywhere in the ball
        Z, S, delta = [], [], drift
        for i, (move, factor) in enumerate(zip(moved, factors, strict=True)):
            Z.append(self._Z[i] + delta)
            shift = w_norms[i] * delta + move[0] * self._Z[i] + move[1] * self._X + self._root_n * move[2]
            S.append(self._S[i] + self._L * shift)
            delta = factor * delta + local[i]
        w = self._w + radii["w"]
        gradients: dict[str, float] = {}
        steps, q = [0.0] * len(factors), w / (1 - rate)
        for i in reversed(range(len(factors))):
            h_norm = self._scale * self._L * w_norms[i] * q
            g = (S[i] * q + Z[i] * h_norm, self._X * h_norm, self._root_n * h_norm)
            gradients |= {name: value * _SLACK for name, value in zip(self._raw[i].names, g, strict=True)}
            steps[i] = sum(c * v for c, v in zip(self._coefficients(i, moved[i][0], S[i], Z[i]), g, strict=True))
            q *= factors[i]
        E = w * self._through(steps, factors) / (1 - rate) * _SLACK
        return DescentBounds(self._s0 - drift, (self._Z[0] + drift) * _SLACK, gradients, E)

    def measured(self) -> dict[str, float]:
        """The numbers that went in."""
        numbers = {"|r|": self.residual, "contraction": self._rate, "sigma_min(Z)": self._s0, "|Z|": self._Z[0]}
        return numbers | {"|X|": self._X, "|w|": self._w}

    def errors(self) -> dict[str, float]:
        """How wrong the equilibria may be."""
        return {"|Z - Z*|_F": self._z_error}

    def _factors(self, hidden: float | list[float]) -> list[float] | None:
        """k_1, ..., k_L while |dW_l| <= hidden; None if no contraction, or if the norm bound might
        become active."""
        moves = hidden if isinstance(hidden, list) else [hidden] * len(self._norms)
        norms = [norm + move for norm, move in zip(self._norms, moves, strict=True)]
        factors = [(self._scale * self._L * norm**2 + self._keep) * _SLACK for norm in norms]
        good = math.prod(factors) < 1 and all(norm <= self._limit for norm in norms)
        return factors if good else None

    def _coefficients(self, index: int, move: float, S: float, Z: float) -> tuple[float, float, float]:
        """(1) per unit of |dW_l|, |dU_l| and |db_l|."""
        w = self._norms[index] + move
        inner = self._scale * self._L * w * _SLACK
        return self._scale * S * _SLACK + inner * Z, inner * self._X, inner * self._root_n

    @staticmethod
    def _through(local: list[float], factors: list[float]) -> float:
        """sum_l k_L ... k_(l+1) local_l."""
        total = 0.0
        for value, factor in zip(local, factors, strict=True):
            total = factor * total + value
        return total
