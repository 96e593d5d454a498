"""Plain gradient descent in 60 digits, from the letters of the papers: what proofs are compared with.

Nothing here calls the code under test but for the model that holds the start.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import torch
from mpmath import mp
from torch import Tensor

import wellposed as wp
from exact_networks import DIGITS, Array, norm

__all__ = ["ExactDescent", "problem"]


def problem(
    n: int, m: int, d: int, seed: int, *, kind: str = "relu", variance: float = 0.05
) -> tuple[wp.nn.AbstractNetwork, Tensor, Tensor]:
    """A small random network with data of norm sqrt(d)."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=g, dtype=torch.float64)
    y = torch.randn(n, generator=g, dtype=torch.float64)
    X = X * (math.sqrt(d) / X.norm(dim=1, keepdim=True))
    options: dict[str, Any] = {"generator": g, "dtype": torch.float64}
    if kind == "skip":
        return wp.SkipDEQ(d, m, **options), X, y
    if kind == "implicit_only":
        return wp.ImplicitOnlyDEQ(d, m, gamma0=0.3, **options), X, y / 2
    activation = {"relu": None, "tanh": wp.nn.Tanh(), "softplus": wp.nn.Softplus(centred=True)}[kind]
    return wp.GaussianDEQ(d, m, weight_variance=variance, activation=activation, **options), X, y


def _solve(M: Array, b: Array) -> Array:
    """Gaussian elimination with partial pivoting, rows at a time."""
    A = np.concatenate([M, b.reshape(len(b), -1)], axis=1)
    n = len(M)
    for j in range(n):
        pivot = j + int(np.argmax([abs(value) for value in A[j:, j]]))
        A[[j, pivot]] = A[[pivot, j]]
        A[j + 1 :] = A[j + 1 :] - np.outer(A[j + 1 :, j] / A[j, j], A[j])
    x = np.zeros(n, dtype=object)
    for j in reversed(range(n)):
        x[j] = (A[j, n] - A[j, j + 1 : n] @ x[j + 1 :]) / A[j, j]
    return x


class ExactDescent:
    """theta <- theta - eta grad |r|^2/2 for `GaussianDEQ`, `SkipDEQ` and `ImplicitOnlyDEQ`.

    Args:
        model, X, y, eta: The start, the data and the step size.
        number: What computes: `mp.mpf`, or `Fraction` for ReLU without any rounding.

    Attributes:
        theta: The parameters by name. r: (n,) residuals at theta. least: The least |pre-activation| there.
    """

    def __init__(self, model: wp.nn.AbstractNetwork, X: Tensor, y: Tensor, eta: float, number: Any = mp.mpf) -> None:
        mp.dps = DIGITS
        self.number = number
        exact = self.exact
        self.kind = type(model).__name__
        self.m = model.width
        self.theta = {name: exact(value) for name, value in model.named_parameters()}
        self.fixed = {name: exact(value) for name, value in model.named_buffers()}
        activation = getattr(model, "activation", None)
        self.smooth = activation is not None and not isinstance(activation, wp.nn.ReLU)
        self.tanh = isinstance(activation, wp.nn.Tanh)
        self.shift = number(math.log(2.0))
        root = math.sqrt(self.m)
        if self.kind == "GaussianDEQ":
            self.k = self.ell = number(1)
        elif self.kind == "SkipDEQ":
            self.k, self.ell = number(model.gamma / root), number(1 / root)
        else:
            self.k, self.ell = number(model.gamma), number(1)
            self.b = exact(model.b / root)
        self.X, self.y, self.eta = exact(X), exact(y), number(eta)
        self._masks = [np.ones(self.m, dtype=bool) for _ in X]
        self._z = [np.array([number(0)] * self.m, dtype=object) for _ in X]
        self.evaluate()

    def exact(self, tensor: Tensor) -> Array:
        """The same numbers, exactly."""
        return np.vectorize(self.number, otypes=[object])(tensor.detach().double().numpy())

    def letters(self) -> tuple[Array, Array, Array, Array | None]:
        """R, U, w, v."""
        t = self.theta
        if self.kind == "GaussianDEQ":
            return t["W"], t["U"], t["a"], None
        if self.kind == "SkipDEQ":
            return t["A"] * self.k, t["W"] * self.ell, t["u"], t["v"]
        return t["A"].T * self.k, self.fixed["W"].T, self.b, None

    def _value(self, V: Array) -> tuple[Array, Array]:
        """s(V) and s'(V) of a smooth activation."""
        if self.tanh:
            z = np.array([mpmath.tanh(value) for value in V], dtype=object)
            return z, 1 - z * z
        z = np.array([mpmath.log1p(mpmath.exp(value)) - self.shift for value in V], dtype=object)
        return z, np.array([1 / (1 + mpmath.exp(-value)) for value in V], dtype=object)

    def _equilibrium(self, i: int, R: Array, c: Array) -> tuple[Array, Array, Array]:
        """z, slopes and pre-activations."""
        one = np.array([[self.number(int(a == b)) for b in range(self.m)] for a in range(self.m)], dtype=object)
        if self.smooth:
            z = self._z[i]
            for _ in range(60):  # Newton
                value, slope = self._value(R @ z + c)
                g = value - z
                z = z + _solve(one - slope[:, None] * R, g)
                if norm(g) < mp.mpf(10) ** (-DIGITS + 8):
                    break
            V = R @ z + c
            return z, self._value(V)[1], V
        mask = self._masks[i]
        for _ in range(60):
            z = np.array([self.number(0)] * self.m, dtype=object)
            S = np.flatnonzero(mask)
            if len(S):
                z[S] = _solve((one - R)[np.ix_(S, S)], c[S])
            V = R @ z + c
            found = np.array([value > 0 for value in V])
            if (found == mask).all():
                break
            mask = found
        else:
            raise RuntimeError("no active set was found")
        self._masks[i] = mask
        return z, np.array([self.number(int(on)) for on in mask], dtype=object), V

    def evaluate(self) -> None:
        """Residuals, equilibria and adjoints at theta."""
        R, U, w, v = self.letters()
        one = np.array([[self.number(int(a == b)) for b in range(self.m)] for a in range(self.m)], dtype=object)
        rows = []
        self.least: Any = math.inf
        for i, x in enumerate(self.X):
            c = U @ x
            D_c = np.array([self.number(1)] * self.m, dtype=object)
            if self.kind != "GaussianDEQ":
                D_c = np.array([self.number(int(value > 0)) for value in c], dtype=object)
                self.least = min([self.least, *(abs(value) for value in c)])
                c = c * D_c
            z, D, V = self._equilibrium(i, R, c)
            self.least = min([self.least, *(abs(value) for value in V)])
            self._z[i] = z
            p = _solve(one - D[:, None] * R.T, D * w)
            q = D_c * (p if v is None else p + v)
            rows.append((z, c, p, q, w @ z - self.y[i] + (0 if v is None else v @ c)))
        self.rows = rows
        self.r = np.array([row[-1] for row in rows], dtype=object)

    def gradient(self) -> dict[str, Array]:
        """Of |r|^2/2, by parameter."""
        GR = sum((r * np.outer(p, z) for z, _, p, _, r in self.rows), start=self.number(0))
        GU = sum((row[4] * np.outer(row[3], x) for row, x in zip(self.rows, self.X, strict=True)), start=self.number(0))
        Gw = sum((r * z for z, _, _, _, r in self.rows), start=self.number(0))
        if self.kind == "GaussianDEQ":
            return {"W": GR, "U": GU, "a": Gw}
        if self.kind == "SkipDEQ":
            Gv = sum((r * c for _, c, _, _, r in self.rows), start=self.number(0))
            return {"A": self.k * GR, "W": self.ell * GU, "u": Gw, "v": Gv}
        return {"A": self.k * GR.T}

    def step(self) -> None:
        gradient = self.gradient()
        self.theta = {name: value - self.eta * gradient[name] for name, value in self.theta.items()}
        self.evaluate()

    def distance(self, at: Any) -> Any:
        """To a computed point of a proof, in the norm of theta."""
        R, U, w, v = self.letters()
        pairs = [(R, at.R, self.k)]
        if self.kind != "ImplicitOnlyDEQ":
            pairs += [(U, at.U, self.ell), (w, at.w, self.number(1))] + ([] if v is None else [(v, at.v, self.number(1))])
        squares = [
            sum((value - self.exact(part.high) - self.exact(part.low)).flatten() ** 2) / scale**2
            for value, part, scale in pairs
        ]
        total = sum(squares)
        return mp.sqrt(mp.mpf(total.numerator) / total.denominator if self.number is Fraction else total)

    def distance_to(self, theta: dict[str, Array]) -> Any:
        """Between two exact points."""
        return mp.sqrt(sum(norm(value - theta[name]) ** 2 for name, value in self.theta.items()))
