"""The theory networks in 60 digits: a second way to every number that a certificate rests on, at any scale.

Equilibria and adjoints by linear systems on the active units, gradients by the formulas of the papers; only the parameters
come from the model, exactly.
"""

from __future__ import annotations

from typing import Any

from mpmath import mp
from torch import Tensor

import wellposed as wp

DIGITS = 60


def exact(tensor: Tensor) -> Any:
    """A vector or matrix of floats as it is; vectors are columns."""
    rows = tensor.detach().double().tolist()
    return mp.matrix(rows)


def norm(A: Any) -> Any:
    """Frobenius."""
    return mp.sqrt(sum((x * x for x in A), mp.mpf(0)))


def singular_values(A: Any) -> tuple[Any, Any]:
    """The least of the rows and the largest, from the smaller Gram matrix: right to 30 digits."""
    G = A * A.T if A.rows <= A.cols else A.T * A
    values = sorted(mp.eigsy(G, eigvals_only=True))
    least = mp.sqrt(max(mp.mpf(0), values[0])) if A.rows <= A.cols else mp.mpf(0)
    return least, mp.sqrt(max(mp.mpf(0), values[-1]))


class ExactNetwork:
    """A network at its present parameters on inputs X.

    Attributes:
        parameters: By name, those that are trained; change them and call `evaluate`.
        Z, C, P, F: (n, .) equilibria, injections, masked adjoints, features.
        prediction: (n, 1).
    """

    def __init__(self, model: Any, X: Tensor) -> None:
        self.model, self.X = model, exact(X)
        self.parameters = {name: exact(parameter) for name, parameter in model.named_parameters()}
        self.fixed = {name: exact(buffer) for name, buffer in model.named_buffers()}
        self.evaluate()

    def evaluate(self) -> None:
        R, v, X = *self._map(), self.X
        n, m = X.rows, R.rows
        self.R, self.Z, self.P = R, mp.matrix(n, m), mp.matrix(n, m)
        for i in range(n):
            S = self._active(R, self.C[i, :].T)
            if not S:
                continue
            c, w = mp.matrix([self.C[i, j] for j in S]), mp.matrix([v[j] for j in S])
            block = mp.eye(len(S)) - mp.matrix([[R[j, k] for k in S] for j in S])
            z, p = mp.lu_solve(block, c), mp.lu_solve(block.T, w)
            for place, j in enumerate(S):
                self.Z[i, j], self.P[i, j] = z[place], p[place]
        self.F = self.Z
        self.prediction = self.Z * v
        if isinstance(self.model, wp.SkipDEQ):
            self.prediction += self.C * self.parameters["v"]
            self.F = mp.matrix([[*self.Z[i, :], *self.C[i, :]] for i in range(n)])

    def _active(self, R: Any, c: Any) -> list[int]:
        """The units with R z + c > 0, by Newton's method on them; z from the iteration before."""
        S = [j for j in range(len(c)) if c[j] > 0]
        for _ in range(60):
            z = mp.matrix(len(c), 1)
            if S:
                block = mp.eye(len(S)) - mp.matrix([[R[j, k] for k in S] for j in S])
                for j, value in zip(S, mp.lu_solve(block, mp.matrix([c[j] for j in S])), strict=True):
                    z[j] = value
            V = R * z + c
            now = [j for j in range(len(c)) if V[j] > 0]
            if now == S:
                return S
            S = now
        raise AssertionError("Newton's method on the active units goes in circles")

    def _map(self) -> tuple[Any, Any]:
        """R and v; makes C."""
        model, par, m = self.model, self.parameters, self.model.width
        root = mp.sqrt(m)
        if isinstance(model, wp.GaussianDEQ):
            self.C = self.X * par["U"].T
            return par["W"], par["a"]
        if isinstance(model, wp.MonotoneDEQ):
            self.C = self.X * par["U"].T
            R = (1 - mp.mpf(model.margin)) * mp.eye(m) - par["A"].T * par["A"] + par["B"] - par["B"].T
            return R, par["u"]
        if isinstance(model, wp.SkipDEQ):
            self.C = (self.X * par["W"].T).apply(lambda c: max(c, mp.mpf(0))) / root
            return par["A"] * (mp.mpf(model.gamma) / root), par["u"]
        self.C = (self.X * self.fixed["W"]).apply(lambda c: max(c, mp.mpf(0)))
        return par["A"].T * mp.mpf(model.gamma), self.fixed["b"] / root

    def gradients(self, r: Any) -> dict[str, Any]:
        """Of sum_i r_i y_i, by parameter."""
        model, par, X, Z, P, C = self.model, self.parameters, self.X, self.Z, self.P, self.C
        Q = mp.diag(list(r)) * P
        M = Q.T * Z
        if isinstance(model, wp.GaussianDEQ):
            return {"W": M, "U": Q.T * X, "a": Z.T * r}
        if isinstance(model, wp.MonotoneDEQ):
            return {"A": -(par["A"] * (M + M.T)), "B": M - M.T, "U": Q.T * X, "u": Z.T * r}
        if isinstance(model, wp.ImplicitOnlyDEQ):
            return {"A": mp.mpf(model.gamma) * M.T}
        root = mp.sqrt(model.width)
        through = mp.matrix(P.rows, P.cols)
        for i in range(P.rows):
            for j in range(P.cols):
                through[i, j] = (P[i, j] + par["v"][j]) * r[i] if C[i, j] > 0 else mp.mpf(0)
        return {"A": mp.mpf(model.gamma) / root * M, "W": through.T * X / root, "u": Z.T * r, "v": C.T * r}

    def kernel_least(self, rates: dict[str, float]) -> Any:
        """lambda_min of sum over the parameters of rate K_parameter."""
        n = self.X.rows
        rows = []
        for i in range(n):
            parts = self.gradients(mp.matrix([1 if k == i else 0 for k in range(n)]))
            rows.append([mp.sqrt(mp.mpf(rates[name])) * x for name in sorted(parts) for x in parts[name]])
        J = mp.matrix(rows)
        return min(mp.eigsy(J * J.T, eigvals_only=True))
