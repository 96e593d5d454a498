"""Small problems on which the claims of the papers are checked."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from wellposed.nn import GaussianDEQ

__all__ = ["F64", "commutation", "descent_losses", "eye", "gaussian", "generator", "norm2", "sphere", "vec"]

F64 = torch.float64


def generator(seed: int) -> torch.Generator:
    """A generator of that seed."""
    return torch.Generator().manual_seed(seed)


def sphere(n: int, d: int, seed: int, radius: float = 1.0) -> tuple[Tensor, Tensor]:
    """Samples on a sphere, labels +1 and -1."""
    g = generator(seed)
    X = torch.randn(n, d, generator=g, dtype=F64)
    y = torch.randint(0, 2, (n,), generator=g).double() * 2 - 1
    return X / X.norm(dim=1, keepdim=True) * radius, y


def gaussian(n: int, d: int, m: int, seed: int, scale: float) -> tuple[GaussianDEQ, Tensor, Tensor]:
    """A GaussianDEQ with a(0) = 0 and U scaled up, and data of norm sqrt(d)."""
    X, y = sphere(n, d, seed, math.sqrt(d))
    model = GaussianDEQ(d, m, weight_variance=0.01, generator=generator(seed + 1), dtype=F64)
    with torch.no_grad():
        model.U.mul_(scale)
        model.a.zero_()
    return model, X, y


def descent_losses(model: nn.Module, X: Tensor, y: Tensor, step: float, steps: int = 10) -> list[float]:
    """|r|^2/2 before each of some steps of gradient descent by autograd; the model is changed."""
    losses = []
    for _ in range(steps):
        loss = (model(X) - y).square().sum() / 2
        losses.append(float(loss.detach()))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(step * gradient)
    return losses


def vec(M: Tensor) -> Tensor:
    """The columns of M on top of each other, as the papers write it."""
    return M.t().reshape(-1)


def commutation(rows: int, columns: int) -> Tensor:
    """K with K vec(M) = vec(M^T) for M of that shape."""
    K = torch.zeros(rows * columns, rows * columns, dtype=F64)
    for i in range(rows):
        for j in range(columns):
            K[i * columns + j, j * rows + i] = 1.0
    return K


def eye(size: int) -> Tensor:
    """The identity in float64."""
    return torch.eye(size, dtype=F64)


def norm2(M: Tensor) -> float:
    """The operator norm, without a graph."""
    return float(torch.linalg.matrix_norm(M.detach(), ord=2))
