"""The problems timed, with answers in double precision to judge every contender by.

All are the equilibrium of a dense layer with a squared loss; samples are rows:

    Z = relu(Z W^T + X U^T)        loss = 0.5 |Z a - y|^2        gradients with respect to W, U, a
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

RTOL = 1e-6  # max over samples of |f(z) - z| / |f(z)|, and the same for the adjoint
IN_FEATURES = 784
SMOOTHING_WIDTH = 12.0  # standard deviation, in units, of the smoothing map's Gaussian kernel

Arrays = dict[str, NDArray]


@dataclass(frozen=True)
class Problem:
    """One map: `kind` says how W is drawn, `seed` everything else."""

    name: str
    kind: str
    samples: int
    width: int
    seed: int = 0

    @property
    def title(self) -> str:
        kinds = {
            "gaussian": "Gaussian W, variance 0.16/m",
            "orthogonal": "orthogonal W, |W| = 0.95",
            "smoothing": f"circulant W, Gaussian kernel of width {SMOOTHING_WIDTH:g} units, |W| = 0.95",
        }
        return f"{self.name}: {kinds[self.kind]}; n = {self.samples}, m = {self.width}, d = {IN_FEATURES}"


PROBLEMS = [
    Problem("gaussian-500", "gaussian", 1000, 500),
    Problem("gaussian-1000", "gaussian", 1000, 1000),
    Problem("gaussian-2000", "gaussian", 1000, 2000),
    Problem("orthogonal", "orthogonal", 250, 1000),
    Problem("smoothing", "smoothing", 100, 1000),
]


def weight(kind: str, width: int, rng: np.random.Generator, norm: float = 0.95) -> NDArray:
    """(m, m) the recurrent matrix; `norm` is the operator norm of the two slow kinds."""
    if kind == "gaussian":
        return rng.normal(0.0, (2 * 0.08 / width) ** 0.5, (width, width))
    if kind == "orthogonal":
        Q, R = np.linalg.qr(rng.normal(size=(width, width)))
        return norm * Q * np.sign(np.diag(R))
    if kind == "smoothing":
        distance = np.minimum(np.arange(width), width - np.arange(width))
        kernel = np.exp(-0.5 * (distance / SMOOTHING_WIDTH) ** 2)
        kernel[distance > 5 * SMOOTHING_WIDTH] = 0.0  # the far tail is subnormal in float32: slow on some processors
        kernel *= norm / kernel.sum()  # positive, so its norm is the eigenvalue of the constant vector
        return kernel[(np.arange(width)[:, None] - np.arange(width)) % width]
    raise ValueError(f"unknown kind of weight {kind!r}")


def build(problem: Problem) -> Arrays:
    """X on the sphere of radius sqrt(d), U ~ N(0, 2/d), a ~ N(0, 1/m), y ~ N(0, 1); all float32."""
    rng = np.random.default_rng(problem.seed)
    n, m, d = problem.samples, problem.width, IN_FEATURES
    X = rng.normal(size=(n, d))
    arrays = {
        "W": weight(problem.kind, m, rng),
        "U": rng.normal(0.0, (2 / d) ** 0.5, (m, d)),
        "a": rng.normal(0.0, m**-0.5, m),
        "y": rng.normal(size=n),
        "X": X * (d**0.5 / np.linalg.norm(X, axis=1, keepdims=True)),
    }
    return {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in arrays.items()}


def relative_step(new: torch.Tensor, old: torch.Tensor) -> float:
    """Largest |new - old| / |new| over the samples."""
    return float(((new - old).norm(dim=1) / new.norm(dim=1)).max())


@dataclass(frozen=True)
class Answer:
    """An equilibrium, its gradients, and how many products with W each loop needed."""

    z: torch.Tensor
    dW: torch.Tensor
    dU: torch.Tensor
    da: torch.Tensor
    forward_steps: int
    adjoint_steps: int


def picard(f: Callable[[torch.Tensor], torch.Tensor], z: torch.Tensor, rtol: float) -> tuple[torch.Tensor, int]:
    """Iterate z <- f(z) until every sample moves by at most `rtol`; the last value and the evaluations."""
    for count in itertools.count(1):
        z, previous = f(z), z
        if relative_step(z, previous) <= rtol:
            return z, count
        if count == 5000:
            raise RuntimeError(f"no equilibrium to {rtol:g} within {count} steps")
    raise AssertionError("unreachable")


def solve_plainly(arrays: Arrays, dtype: torch.dtype, rtol: float) -> Answer:
    """Picard iteration and Neumann series, started so that no product is spent on zeros."""
    W, U, a, y, X = (torch.from_numpy(arrays[name]).to(dtype) for name in ("W", "U", "a", "y", "X"))
    c = X @ U.T
    z, forward_steps = picard(lambda z: torch.relu(z @ W.T + c), torch.relu(c), rtol)
    residual = z @ a - y
    v = residual[:, None] * a
    mask = (z > 0).to(dtype)
    u, adjoint_steps = picard(lambda u: v + (mask * u) @ W, v, rtol)
    p = mask * u
    return Answer(z, p.T @ z, p.T @ X, z.T @ residual, forward_steps, adjoint_steps)


def reference(arrays: Arrays) -> Answer:
    """The answer in float64, with the step counts that float32 needs to reach RTOL."""
    exact = solve_plainly(arrays, torch.float64, 1e-13)
    counted = solve_plainly(arrays, torch.float32, RTOL)
    return Answer(exact.z, exact.dW, exact.dU, exact.da, counted.forward_steps, counted.adjoint_steps)


def judge(arrays: Arrays, answer: Answer, z: NDArray, dW: NDArray) -> dict[str, Any]:
    """In float64: the largest relative residual of `z` over the samples, the relative error of `dW`, and how many of
    the n m units are on the wrong side of their kink. One is enough for an error of 1e-4 in `dW`, and rounding puts it
    there, not the solver."""
    W, U, X = (torch.from_numpy(arrays[name]).double() for name in ("W", "U", "X"))
    given = torch.tensor(z, dtype=torch.float64)
    residual = relative_step(torch.relu(given @ W.T + X @ U.T), given)
    error = (torch.tensor(dW, dtype=torch.float64) - answer.dW).norm() / answer.dW.norm()
    flipped = ((given > 0) != (answer.z > 0)).sum()
    return {"residual": residual, "gradient_error": float(error), "flipped_units": int(flipped)}
