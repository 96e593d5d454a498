"""The system of an exact gradient, by a solver of linear systems."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.implicit.adjoint import AbstractPullback
from wellposed.linalg.direct import DenseSolve
from wellposed.linalg.linear_solver import AbstractLinearSolver
from wellposed.solve.solution import Solution
from wellposed.solve.solver import is_built_in
from wellposed.status import Status, StatusArray

#: A product that confirms a solution may differ by this many roundings of its terms.
ROUNDINGS = 4.0


def solve_linear(
    solver: AbstractLinearSolver, pullback: AbstractPullback, rhs: Tensor, *, rtol: float, max_steps: int, strict: bool
) -> Solution:
    """u = rhs + A u by a solver of linear systems.

    Its products hold 0 in the rows of finished samples. Unless the solver is of this package and
    rows are known to be independent (or there is one), a product for the whole batch confirms
    the answer: the last of `max_steps`, or a second one. If it does not, or if samples failed and
    rows depend on each other, which one or two further products show, the solution has a note.
    Unless `strict`, `DenseSolve` takes all its columns, whatever `max_steps` is.
    """
    confirmed = not (is_built_in(solver) and (pullback.built_in or rhs.shape[0] == 1))
    if isinstance(solver, DenseSolve) and not strict:
        max_steps = max(max_steps, rhs.shape[1] + 1 + confirmed)
    linear = solver(lambda u: u - pullback.product(u), rhs, rtol=rtol, max_steps=max(max_steps - confirmed, 1))
    norm = torch.linalg.vector_norm(rhs, dim=1)
    residual, codes, note, steps = linear.residual, linear.status.codes, "", linear.num_steps + confirmed
    if confirmed:
        product = pullback.product(linear.value)
        measured = torch.linalg.vector_norm(rhs + product - linear.value, dim=1)
        terms = norm + torch.linalg.vector_norm(product, dim=1) + torch.linalg.vector_norm(linear.value, dim=1)
        unknown = (norm == 0) & ~measured.isfinite()  # a cotangent of 0 where the Jacobian is not finite
        within = (measured <= rtol * norm + ROUNDINGS * torch.finfo(rhs.dtype).eps * terms) & measured.isfinite()
        wrong = linear.converged & ~(within | unknown)
        residual = torch.where(wrong, measured / norm, residual)
        codes = torch.where(wrong, int(Status.MAX_STEPS), torch.where(unknown, int(Status.NOT_FINITE), codes))
        coupled, spent = (False, 0) if bool(linear.converged.all()) or bool(wrong.any()) else _couples(pullback, rhs)
        steps = steps + spent
        if bool(wrong.any()) or coupled:
            note = f"{type(solver).__name__} claims a solution that a product with the whole system does not confirm."
    rate = torch.full_like(norm, torch.nan)
    return Solution(linear.value, residual, residual * norm, steps, StatusArray(codes), rate, note=note)


def _couples(pullback: AbstractPullback, rhs: Tensor) -> tuple[bool, int]:
    """Whether products of every second row reach the rows between them, or the other way round; and
    how many products that took."""
    if rhs.shape[0] == 1:
        return False, 0
    even = torch.arange(rhs.shape[0], device=rhs.device) % 2 == 0
    entries = torch.cos(torch.arange(rhs.numel(), dtype=rhs.dtype, device=rhs.device) ** 2).reshape(rhs.shape)
    for spent, some in enumerate((even, ~even), start=1):
        product = pullback.product(torch.where(some.unsqueeze(1), entries, 0.0))
        if bool(product[~some].nan_to_num(0.0, 0.0, 0.0).any()):
            return True, spent
    return False, 2
