"""Solves with a positive definite matrix, by factor or by products, with a measured residual."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, NotConverged

Product = Callable[[Tensor], Tensor]


def conjugate_gradients(product: Product, b: Tensor, precondition: Product, *, rtol: float, max_steps: int) -> Tensor:
    """a with |A a - b| <= rtol |b|, column by column.

    Args:
        product: v (n, q) -> A v, A positive definite.
        b: (n, q) finite.
        precondition: Approximately A^(-1), positive definite.
        rtol: Of the residual that is measured at the end.
        max_steps: Products; `NotConverged` is raised after them.
    """
    target = rtol * torch.linalg.vector_norm(b, dim=0)
    a, r, p, rho = torch.zeros_like(b), b, torch.zeros_like(b), torch.ones_like(target)
    for _ in range(max_steps):
        z = precondition(r)
        rho, before = (r * z).sum(0), rho
        p = z + _ratio(rho, before) * p
        q = product(p)
        alpha = _ratio(rho, (p * q).sum(0))
        a, r = a + alpha * p, r - alpha * q
        if (torch.linalg.vector_norm(r, dim=0) <= target).all():
            # what the recurrence says is rounded: measured, and begun again
            r, p = b - product(a), torch.zeros_like(p)
            if (torch.linalg.vector_norm(r, dim=0) <= target).all():
                return a
    norm = torch.linalg.vector_norm(b, dim=0)
    error = float(_ratio(torch.linalg.vector_norm(b - product(a), dim=0), norm).max())
    raise NotConverged(
        f"solve: the residual is {error:.1e} of |y| after max_steps={max_steps}, above rtol={rtol:g}. Raise the noise, rank or"
        " max_steps."
    )


def check_tolerance(rtol: float, dtype: torch.dtype) -> None:
    """Raises unless a residual of `rtol` can be measured in numbers of this kind."""
    least = 8 * torch.finfo(dtype).eps
    if not least <= rtol < 1:
        raise InvalidArgument(
            f"solve: rtol must be from {least:.0e} (a few roundings of {dtype}) to below 1, got {rtol:g}."
            + (" Use rtol=1e-5, or float64." if dtype == torch.float32 else "")
        )


def factored_solve(A: Tensor, b: Tensor, *, rtol: float) -> Tensor | None:
    """The same from a Cholesky factor of A (n, n), with two refinements at most; None if that is
    not accurate enough, or A has no factor."""
    target = rtol * torch.linalg.vector_norm(b, dim=0)
    L, info = torch.linalg.cholesky_ex(A)
    if int(info) != 0:
        return None
    a = torch.cholesky_solve(b, L)
    for _ in range(3):
        r = b - A @ a
        if (torch.linalg.vector_norm(r, dim=0) <= target).all():
            return a
        a = a + torch.cholesky_solve(r, L)
    return None


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a/b, and 0 where b is 0: nothing is left to do in that column."""
    return torch.where(b != 0, a / torch.where(b != 0, b, 1.0), 0.0)
