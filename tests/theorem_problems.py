"""Small problems on which the theorems of the papers hold, and the descent that they are about."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import wellposed as wp


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sphere(n: int, d: int, seed: int, radius: float = 1.0) -> tuple[Tensor, Tensor]:
    """Samples on a sphere, labels +1 and -1."""
    g = generator(seed)
    X = torch.randn(n, d, generator=g, dtype=torch.float64)
    y = torch.randint(0, 2, (n,), generator=g).double() * 2 - 1
    return X / X.norm(dim=1, keepdim=True) * radius, y


def gaussian(n: int, d: int, m: int, seed: int, scale: float) -> tuple[Any, Tensor, Tensor]:
    """A GaussianDEQ with a(0) = 0 and U scaled up, and data of norm sqrt(d)."""
    X, y = sphere(n, d, seed, math.sqrt(d))
    model = wp.GaussianDEQ(d, m, weight_variance=0.01, generator=generator(seed + 1), dtype=torch.float64)
    with torch.no_grad():
        model.U *= scale
        model.a.zero_()
    return model, X, y


def monotone(n: int, d: int, m: int, seed: int, scale: float, margin: float = 0.9) -> tuple[Any, Tensor, Tensor]:
    """A MonotoneDEQ with u(0) = 0 and U scaled up."""
    X, y = sphere(n, d, seed)
    model = wp.MonotoneDEQ(d, m, margin=margin, generator=generator(seed + 1), dtype=torch.float64)
    with torch.no_grad():
        model.U *= scale
        model.u.zero_()
    return model, X, y


def steps(model: Any, X: Tensor, y: Tensor, step: float, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Plain gradient descent on |r|^2/2 by autograd: (k, r_k, Z_k), before step k + 1."""
    parameters = list(model.parameters())
    for k in range(count + 1):
        Z = model.equilibrium(X)
        r = Z @ model.readout_weight() - y
        yield k, r.detach(), Z.detach()
        gradients = torch.autograd.grad(r.square().sum() / 2, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= step * gradient


def literal_counterexample() -> tuple[Any, Tensor, Tensor, dict[str, float]]:
    """A = B = 0, u = 0, two samples, margin 1e-5: meets [nguyen2022, (3.16)-(3.18)] as printed with these radii, and diverges.

    W = (1 - m) I, so z = relu(U x)/m: the powers of 1/m that the thesis lost make sigma_min(Z) as large as one likes.
    """
    X = torch.eye(2, dtype=torch.float64)
    y = torch.tensor([0.8, -0.6], dtype=torch.float64)
    model = wp.MonotoneDEQ(2, 3, margin=1e-5, solver=wp.PeacemanRachford(step_size=1e5), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.U.copy_(torch.tensor([[1.0, 0.2], [0.2, 1.0], [0.3, 0.3]]))
    return model, X, y, {"A": 1e-3, "B": 0.1, "U": 1e-3, "u": 1e-3}


def vec(M: Tensor) -> Tensor:
    """The columns of M on top of each other, as the papers write it."""
    return M.t().reshape(-1)


def commutation(rows: int, columns: int) -> Tensor:
    """K with K vec(M) = vec(M^T) for M of that shape."""
    K = torch.zeros(rows * columns, rows * columns, dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            K[i * columns + j, j * rows + i] = 1.0
    return K
