"""Small problems on which the theorems of the papers hold, and the descent that they are about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import wellposed as wp
from wellposed_lab.papers.audit_problems import commutation, gaussian, generator, sphere, vec
from wellposed_lab.papers.nguyen2022.audit_training import literal_counterexample

__all__ = [
    "commutation",
    "gaussian",
    "generator",
    "literal_counterexample",
    "monotone",
    "sphere",
    "steps",
    "vec",
]


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
