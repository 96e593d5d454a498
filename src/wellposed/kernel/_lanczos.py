"""Lanczos' method for one end of the spectrum, with an answer and an honest error bar whenever it stops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["extreme_eigenvector"]

_CHECK_EVERY = 5


def extreme_eigenvector(
    product: Callable[[Tensor], Tensor], size: int, *, largest: bool, max_steps: int, rtol: float = 1e-10
) -> Tensor:
    """(n,) unit Ritz vector of the least (or largest) Ritz value after at most `max_steps` products.

    All vectors are kept and orthogonalized twice against each other, (steps, n) of memory: without that a converged end of the
    spectrum comes back as copies. Stops at a residual below `rtol` times the norm.

    Args:
        product: v -> A v for a symmetric float64 A, on the CPU.
        size: n.
        largest: Which end.
        max_steps: Most products.
        rtol: Relative to the largest |Ritz value|.
    """
    steps = min(max_steps, size)
    Q = torch.empty(steps, size, dtype=torch.float64)
    start = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # any; the same every time
    Q[0] = start / start.norm()
    T = torch.zeros(steps, steps, dtype=torch.float64)
    k = 0
    for k in range(steps):
        w = product(Q[k])
        T[k, k] = w @ Q[k]
        for _ in range(2):
            w = w - Q[: k + 1].mT @ (Q[: k + 1] @ w)
        beta = float(w.norm())
        done = k + 1 == steps
        if done or k % _CHECK_EVERY == _CHECK_EVERY - 1 or beta == 0.0:
            values, vectors = torch.linalg.eigh(T[: k + 1, : k + 1])
            end = -1 if largest else 0
            scale = float(values.abs().max())
            if done or beta * abs(float(vectors[k, end])) <= rtol * scale or beta <= 2.0**-52 * scale:
                q = Q[: k + 1].mT @ vectors[:, end]
                return q / q.norm()
        Q[k + 1] = w / beta
        T[k, k + 1] = T[k + 1, k] = beta
    raise AssertionError("the last step returns")
