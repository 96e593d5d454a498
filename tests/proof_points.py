"""The start of a small problem as `prove` sees it, and its predictions as functions for autograd."""

from __future__ import annotations

import math
from typing import Any

import torch

from wellposed.prove._jacobian import PredictionJacobian
from wellposed.prove._network import read_network
from wellposed.prove._point import Evaluator

__all__ = ["I64", "at_start", "flat", "slopes_of"]

I64 = torch.float64


def at_start(model: Any, X: torch.Tensor, y: torch.Tensor) -> tuple[Any, Any, Any, Any]:
    read = read_network(model, X, y)
    assert read is not None
    found, at = read
    evaluator = Evaluator(found)
    evaluator.contraction.update(at.R)
    point = evaluator.evaluate(at)
    return found, point, PredictionJacobian(found, point, evaluator.contraction), evaluator.contraction


def prediction(kind: str, theta: list[torch.Tensor], x: torch.Tensor, D: Any, scales: tuple[float, float]) -> torch.Tensor:
    """f with the slopes of ReLU fixed, or with the smooth activation by unrolling, differentiable twice."""
    k, ell = scales
    if kind == "implicit_only":
        A, c, w = theta[0].T * k, D[2], D[3]
        z = torch.linalg.solve(torch.eye(len(c), dtype=I64) - D[0][:, None] * A, D[0] * c)
        return w @ z
    if kind == "skip":
        A, W, u, v = theta
        c = D[1] * (ell * W @ x)
        z = torch.linalg.solve(torch.eye(len(c), dtype=I64) - D[0][:, None] * (k * A), D[0] * c)
        return u @ z + v @ c
    W, U, a = theta
    if kind == "relu":
        z = torch.linalg.solve(torch.eye(len(a), dtype=I64) - D[0][:, None] * W, D[0] * (U @ x))
    else:
        s = {"tanh": torch.tanh, "softplus": lambda v: torch.logaddexp(v, torch.zeros_like(v)) - math.log(2)}[kind]
        z = torch.zeros(len(a), dtype=I64)
        for _ in range(45):  # |W| is below 0.5
            z = s(W @ z + U @ x)
    return a @ z


def flat(kind: str, model: Any, D: list[Any]) -> tuple[torch.Tensor, Any]:
    """theta as one vector, and the predictions as a function of it."""
    values = [value.detach() for value in model.parameters()]
    scales = (1.0, 1.0)
    if kind == "skip":
        scales = (model.gamma / math.sqrt(model.width), 1 / math.sqrt(model.width))
    if kind == "implicit_only":
        scales = (model.gamma, 1.0)

    def f(t: torch.Tensor, x: torch.Tensor, i: int) -> torch.Tensor:
        parts = torch.split(t, [value.numel() for value in values])
        theta = [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
        return prediction(kind, theta, x, D[i], scales)

    return torch.cat([value.flatten() for value in values]), f


def slopes_of(kind: str, model: Any, point: Any) -> list[Any]:
    found = []
    for i in range(point.Z.shape[0]):
        D_c = point.D_c[i] if point.D_c is not None else None
        fixed = (point.C[i], model.readout_weight().detach()) if kind == "implicit_only" else (None, None)
        found.append((point.D[i], D_c, *fixed))
    return found
