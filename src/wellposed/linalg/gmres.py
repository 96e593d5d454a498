"""GMRES for a batch of systems."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument
from wellposed.linalg._linear_systems import LinearSystems
from wellposed.linalg.linear_solver import AbstractLinearSolver, LinearSolution, Matvec, keep_rows, row_norm

__all__ = ["GMRES"]


@dataclass(frozen=True)
class GMRES(AbstractLinearSolver):
    r"""Restarted generalized minimal residuals, GMRES(restart) of [saad1986], on all samples at once.

    After `k` steps from a residual `r`, the correction `d` minimises `||r - A d||` over the Krylov space
    `span(r, A r, ..., A^(k-1) r)`. Needs only that `A` is invertible, and ends in at most `m` steps when
    `restart >= m`; with a smaller `restart` it may stagnate (on a cyclic shift it never moves), which ends in
    `MAX_STEPS`.

    Arnoldi's basis is made by classical Gram-Schmidt, twice, which keeps it orthogonal to working precision
    [giraud2005] and is two batched products instead of `k` (modified Gram-Schmidt would be cheaper by half in
    operations and slower by far in launches). The least-squares problem is updated by one Givens rotation per
    step. At each restart the residual is measured by a product, and only a smaller one is accepted.

    Costs per step: one product with `A` and four passes over the basis. Memory: `restart + 1` vectors per
    sample.

    Args:
        restart: Steps between restarts.
    """

    restart: int = 30

    def __post_init__(self) -> None:
        if not isinstance(self.restart, int) or self.restart < 1:
            raise InvalidArgument(f"The 'restart' parameter of GMRES must be an integer >= 1. Got {self.restart!r} instead.")

    def __call__(
        self,
        matvec: Matvec,
        b: Tensor,
        x0: Tensor | None = None,
        *,
        rtol: float | Tensor = 1e-6,
        atol: float | Tensor = 0.0,
        max_steps: int | Tensor = 200,
    ) -> LinearSolution:
        """Solve `A_i x_i = b_i`; see `AbstractLinearSolver.__call__`."""
        systems = LinearSystems(matvec, b, x0, rtol=rtol, atol=atol, max_steps=max_steps)
        batch, m = b.shape
        budget = int(torch.as_tensor(max_steps).max()) if batch else 0
        length = max(min(self.restart, m, budget), 0)
        # Orthonormal rows, one basis per sample, written anew by each restart.
        V = systems.b.new_empty(batch, length + 1, m)
        running = systems.settle()
        while running:
            running = systems.correct(*_cycle(systems, V))
        return systems.solution()


def _cycle(systems: LinearSystems, V: Tensor) -> tuple[Tensor, Tensor]:
    """The steps between two restarts: a correction per sample, and where a product was not finite.

    A sample leaves the cycle (`active` turns false) when its estimated residual meets the tolerance, its
    Krylov space is exhausted, its budget is spent or a product is not finite. From then on its basis vectors
    are zero and its columns of `R` are those of the identity, so that it neither changes nor disturbs the
    others.
    """
    length = V.shape[1] - 1
    eps = torch.finfo(V.dtype).eps
    least_squares = _GivensLeastSquares(systems.norm, length)
    broken = torch.zeros_like(systems.running)
    active = systems.running
    v = keep_rows(active, systems.r / systems.norm.unsqueeze(1))
    k = 0
    while k < length:
        V[:, k] = v
        w = systems.product(v, active)
        w_norm = row_norm(w)
        finite = torch.isfinite(w_norm)
        broken |= active & ~finite
        active = active & finite

        # Gram-Schmidt twice, with the basis on the right: (batch, 1, m) rows are the fast layout for bmm.
        basis, w = V[:, : k + 1], w.unsqueeze(1)
        h = torch.bmm(w, basis.transpose(1, 2))
        w = torch.baddbmm(w, h, basis, alpha=-1)
        h2 = torch.bmm(w, basis.transpose(1, 2))
        w = w.baddbmm_(h2, basis, alpha=-1).squeeze(1)
        h = (h + h2).squeeze(1)

        # Below this, what is left of A v after the projection is rounding: the Krylov space is exhausted, and
        # dividing by it would make a basis vector out of noise.
        rest = row_norm(w)
        exhausted = rest <= 10 * eps * w_norm
        residual = least_squares.append(k, h, rest, w_norm, active)
        k += 1
        # One more product and the measurement must stay within the budget.
        active = active & ~exhausted & (residual > systems.tolerance) & systems.affords(2)
        any_active, all_finite = torch.stack((active.any(), finite.all())).tolist()
        if not any_active:
            break
        v = w * torch.where(active, 1.0 / rest, 0.0).unsqueeze(1)
        if not all_finite:  # 0 * NaN is NaN; masking costs more than the line above, and is rarely needed
            v = keep_rows(active, v)
    y = least_squares.solve(k)
    return torch.bmm(y.unsqueeze(1), V[:, :k]).squeeze(1), broken


class _GivensLeastSquares:
    """`min_y ||beta e_1 - H y||` for a batch of Hessenberg matrices, one column at a time.

    `Q H = R` is triangular, `Q` a product of rotations kept as a matrix, so that a new column costs a fixed
    number of batched operations rather than one per rotation. `g = beta Q e_1` is the rotated right-hand
    side, and its entry after the last column is the residual.
    """

    def __init__(self, beta: Tensor, length: int) -> None:
        batch = len(beta)
        self._beta = beta
        self._Q = beta.new_zeros(batch, length + 1, length + 1)
        self._Q[:, 0, 0] = 1.0
        self._R = torch.eye(length, dtype=beta.dtype, device=beta.device).repeat(batch, 1, 1)
        self._g = beta.new_zeros(batch, length)

    def append(self, k: int, h: Tensor, rest: Tensor, size: Tensor, active: Tensor) -> Tensor:
        """Add column `k`: entries `h` (batch, k + 1) and below them `rest` (batch,), for the active samples.

        A column that depends on those before it (the matrix is singular on the Krylov space) is left out.

        Args:
            size: (batch,) norm of the column, the scale for "is zero".

        Returns:
            (batch,) new residuals.
        """
        Q = self._Q
        t = torch.bmm(Q[:, : k + 1, : k + 1], h.unsqueeze(2)).squeeze(2)
        pivot = torch.hypot(t[:, k], rest)
        usable = active & (pivot > 10 * torch.finfo(h.dtype).eps * size)
        safe = torch.where(usable, pivot, 1.0)
        c = torch.where(usable, t[:, k], 1.0) / safe
        s = torch.where(usable, rest, 0.0) / safe
        self._R[:, :k, k] = keep_rows(usable, t[:, :k])
        self._R[:, k, k] = safe

        # Rows k and k + 1 of [[Q, 0], [0, 1]] rotated by [[c, s], [-s, c]].
        row = Q[:, k, : k + 1].clone()
        Q[:, k, : k + 1] = c.unsqueeze(1) * row
        Q[:, k, k + 1] = s
        Q[:, k + 1, : k + 1] = -s.unsqueeze(1) * row
        Q[:, k + 1, k + 1] = c
        g = self._beta * row[:, 0]
        self._g[:, k] = torch.where(usable, c * g, 0.0)
        return (s * g).abs()

    def solve(self, k: int) -> Tensor:
        """(batch, k) minimisers over the first `k` columns."""
        R, g = self._R[:, :k, :k], self._g[:, :k, None]
        return torch.linalg.solve_triangular(R, g, upper=True).squeeze(2)
