"""The theory networks in 60 digits: equilibria, adjoints, residuals and kernels from the stored float64 parameters."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import torch
from mpmath import mp
from torch import Tensor

import wellposed as wp

DIGITS = 60
Array = np.ndarray  # of mpf; a vector or a matrix


def exact(tensor: Tensor) -> Array:
    """The same numbers, in `DIGITS` digits."""
    return np.vectorize(mp.mpf, otypes=[object])(tensor.detach().double().cpu().numpy())


def number(value: float) -> Any:
    return mp.mpf(value)


def norm(v: Array) -> Any:
    """Euclidean norm of all entries."""
    return mp.sqrt(mp.fsum(entry * entry for entry in v.flatten()))


def row_norms(M: Array) -> Array:
    return np.array([norm(row) for row in M], dtype=object)


def _gram(M: Array) -> Array:
    return M @ M.T if M.shape[0] <= M.shape[1] else M.T @ M


def _eigenvalues(G: Array) -> list[Any]:
    return list(mp.eigsy(mpmath.matrix(G.tolist()), eigvals_only=True))


def largest_singular_value(M: Array) -> Any:
    return mp.sqrt(max(_eigenvalues(_gram(M)))) if M.size else mp.mpf(0)


def largest_of_symmetric_part(M: Array) -> Any:
    """lambda_max((M + M^T)/2)."""
    return max(_eigenvalues((M + M.T) / 2)) if M.size else mp.mpf(0)


def least_singular_value(M: Array) -> Any:
    """Over the rows of M: 0 if there are more rows than columns."""
    return least_root(M @ M.T) if M.shape[0] <= M.shape[1] else mp.mpf(0)


def least_root(G: Array) -> Any:
    """sqrt(lambda_min) of a positive semidefinite matrix."""
    return mp.sqrt(max(mp.mpf(0), min(_eigenvalues(G))))


def _solve(M: Array, b: Array) -> Array:
    """Gaussian elimination with partial pivoting; rows at a time, which is far faster than mpmath's own."""
    A = np.concatenate([M, b[:, None]], axis=1)
    for k in range(len(b)):
        pivot = k + int(np.argmax(abs(A[k:, k])))
        A[[k, pivot]] = A[[pivot, k]]
        A[k + 1 :, k:] = A[k + 1 :, k:] - np.outer(A[k + 1 :, k] / A[k, k], A[k, k:])
    x = A[:, -1].copy()
    for k in reversed(range(len(b))):
        x[k] = (x[k] - A[k, k + 1 : -1] @ x[k + 1 :]) / A[k, k]
    return x


class ExactNetwork:
    """A theory network at parameters that may be any numbers, not floats alone.

    Attributes:
        kind: The class of the network.
        parameters: By name, those that are trained.
        fixed: The others.
    """

    def __init__(self, model: Any) -> None:
        self.kind, self._model = type(model), model
        self.parameters = {name: exact(parameter) for name, parameter in model.named_parameters()}
        self.fixed = {name: exact(buffer) for name, buffer in model.named_buffers()}
        self.root = mp.sqrt(mp.mpf(model.width))
        self.gamma = number(getattr(model, "gamma", 1.0))
        self.margin = number(getattr(model, "margin", 0.0))

    @property
    def scales(self) -> tuple[Any, Any]:
        """k and l: |dR|_F <= k |dA|_F and |dc| <= l |dU x|."""
        one = mp.mpf(1)
        return {
            wp.GaussianDEQ: (one, one),
            wp.SkipDEQ: (self.gamma / self.root, 1 / self.root),
            wp.ImplicitOnlyDEQ: (self.gamma, mp.mpf(0)),
            wp.MonotoneDEQ: (one, one),
        }[self.kind]

    @property
    def readout(self) -> tuple[str, ...]:
        return {wp.GaussianDEQ: ("a",), wp.SkipDEQ: ("u", "v"), wp.ImplicitOnlyDEQ: (), wp.MonotoneDEQ: ("u",)}[self.kind]

    @property
    def hidden(self) -> tuple[str, ...]:
        return tuple(name for name in self.parameters if name not in self.readout)

    def recurrent(self) -> Array:
        p = self.parameters
        if self.kind is wp.GaussianDEQ:
            return p["W"]
        if self.kind is wp.SkipDEQ:
            return p["A"] * (self.gamma / self.root)
        if self.kind is wp.ImplicitOnlyDEQ:
            return p["A"].T * self.gamma
        return (1 - self.margin) * np.eye(len(p["A"]), dtype=int) - p["A"].T @ p["A"] + p["B"] - p["B"].T

    def injection(self, X: Array) -> Array:
        p = self.parameters
        if self.kind is wp.SkipDEQ:
            return np.maximum(X @ p["W"].T, mp.mpf(0)) / self.root
        if self.kind is wp.ImplicitOnlyDEQ:
            return np.maximum(X @ self.fixed["W"], mp.mpf(0))
        return X @ p["U"].T

    def weight(self) -> Array:
        """What multiplies z in the prediction."""
        p = self.parameters
        if self.kind is wp.ImplicitOnlyDEQ:
            return self.fixed["b"] / self.root
        return p["a"] if self.kind is wp.GaussianDEQ else p["u"]

    def moved(self, by: dict[str, Array]) -> ExactNetwork:
        """The network at parameters + by."""
        other = ExactNetwork(self._model)
        other.parameters = {name: value + by[name] for name, value in self.parameters.items()}
        return other


class ExactPoint:
    """Everything a certificate speaks about, at one network: C, V, Z, P, r, features, the rows of the Jacobian."""

    def __init__(self, network: ExactNetwork, X: Array, y: Array, masks: Array | None = None) -> None:
        self.network, self.X = network, X
        self.R, self.C, v = network.recurrent(), network.injection(X), network.weight()
        start = (self.C > 0) if masks is None else masks
        self.Z = np.array([self._equilibrium(c, mask) for c, mask in zip(self.C, start, strict=True)], dtype=object)
        self.V = self.Z @ self.R.T + self.C
        self.masks = np.asarray(self.V > 0, dtype=bool)
        self.P = np.array([self._on(np.flatnonzero(mask), self.R.T, v) for mask in self.masks], dtype=object)
        prediction = self.Z @ v
        self.features = self.Z
        if network.kind is wp.SkipDEQ:
            prediction = prediction + self.C @ network.parameters["v"]
            self.features = np.concatenate([self.Z, self.C], axis=1)
        self.r = prediction - y

    def _equilibrium(self, c: Array, mask: Array) -> Array:
        """By Newton's method on masks, and where it goes in circles from the mask that an iteration in float64 finds."""
        seen: list[Array] = []
        for _ in range(60):
            z = self._on(np.flatnonzero(mask), self.R, c)
            now = np.asarray(self.R @ z + c > 0, dtype=bool)
            if np.array_equal(now, mask):
                return z
            seen.append(mask)
            mask = self._float_mask(c) if any(np.array_equal(now, old) for old in seen) else now
        raise RuntimeError("Newton's method on masks did not end: a unit is at its kink.")

    def _float_mask(self, c: Array) -> Array:
        """Forward-backward steps: they converge for contractions and for monotone maps."""
        eye, R, offset = np.eye(len(c)), self.R.astype(float), c.astype(float)
        margin = float(self.network.margin) or 1 - float(np.linalg.norm(R, 2))
        z, step = np.zeros(len(c)), margin / float(np.linalg.norm(eye - R, 2)) ** 2
        for _ in range(20000):
            z = np.maximum(z - step * (z - R @ z - offset), 0)
        return np.asarray(R @ z + offset > 0)

    @staticmethod
    def _on(S: Array, R: Array, b: Array) -> Array:
        """x with (I - R_SS) x_S = b_S, and 0 elsewhere."""
        x = np.full(len(b), mp.mpf(0), dtype=object)
        x[S] = _solve(np.eye(len(S), dtype=int) - R[np.ix_(S, S)], b[S])
        return x

    def rows(self) -> dict[str, Array]:
        """(n, size) of each parameter: the derivatives of the predictions."""
        network, X, Z, P = self.network, self.X, self.Z, self.P
        outer = np.array([np.outer(p, z) for p, z in zip(P, Z, strict=True)], dtype=object)
        inputs = np.array([np.outer(p, x) for p, x in zip(P, X, strict=True)], dtype=object)
        if network.kind is wp.GaussianDEQ:
            found = {"W": outer, "U": inputs, "a": Z}
        elif network.kind is wp.ImplicitOnlyDEQ:
            found = {"A": network.gamma * outer.transpose(0, 2, 1)}
        elif network.kind is wp.MonotoneDEQ:
            A, mixed = network.parameters["A"], outer.transpose(0, 2, 1)
            both = np.array([-A @ M for M in outer + mixed], dtype=object)
            found = {"A": both, "B": outer - mixed, "U": inputs, "u": Z}
        else:
            through = (P + network.parameters["v"]) * (self.C > 0)
            past = np.array([np.outer(t, x) for t, x in zip(through, X, strict=True)], dtype=object) / network.root
            found = {"A": outer * (network.gamma / network.root), "W": past, "u": Z, "v": self.C}
        return {name: rows.reshape(len(X), -1) for name, rows in found.items()}

    def kernel(self, rates: dict[str, float]) -> Array:
        return sum(number(rates[name]) * (J @ J.T) for name, J in self.rows().items())

    def gradients(self) -> dict[str, Array]:
        """Of |r|^2/2."""
        shapes = {name: value.shape for name, value in self.network.parameters.items()}
        return {name: (self.r @ J).reshape(shapes[name]) for name, J in self.rows().items()}


def point_of(model: Any, X: Tensor, y: Tensor) -> ExactPoint:
    """The exact point of a model, from the masks that float64 finds."""
    with torch.no_grad():
        V = torch.addmm(model.injection(X), model.solve(X).value, model.recurrent().t())
    return ExactPoint(ExactNetwork(model), exact(X), exact(y), (V > 0).numpy())
