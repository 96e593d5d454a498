"""Solvers of `A x = b`, for a batch, given only `v -> A v`: Krylov methods and Neumann's series."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed._checks import check_positive_integer
from wellposed.errors import InvalidArgument
from wellposed.linalg.linear_solver import AbstractMeasuredSolver, LinearSystems, keep_rows, row_dot, row_norm


@dataclass(frozen=True)
class GMRES(AbstractMeasuredSolver):
    r"""Restarted generalized minimal residuals [saad1986], on all samples at once.

    After `k` steps from a residual `r`, the correction `d` minimises `||r - A d||` over the Krylov
    space `span(r, A r, ..., A^(k-1) r)`. Needs only that `A` is invertible, and ends in at most `m`
    steps when `restart >= m`; with a smaller `restart` it may stagnate (on a cyclic shift it never
    moves), which ends in `MAX_STEPS`.

    Arnoldi's basis is made by classical Gram-Schmidt, twice, which keeps it orthogonal to working
    precision [giraud2005] and is two batched products instead of `k` (modified Gram-Schmidt would
    be cheaper by half in operations and slower by far in launches). The least-squares problem is
    updated by one Givens rotation per step. At each restart the residual is measured by a product,
    and only a smaller one is accepted.

    Costs per step: one product with `A` and four passes over the basis. Memory: `restart + 1`
    vectors per sample.

    Args:
        restart: Steps between restarts.

    Examples:
        >>> import torch, wellposed as wp
        >>> A = torch.tensor([[2.0, 1.0], [0.0, 3.0]], dtype=torch.float64)
        >>> b = torch.tensor([[4.0, 3.0]], dtype=torch.float64)
        >>> wp.GMRES()(lambda u: u @ A.T, b).value.round(decimals=6).tolist()
        [[1.5, 1.0]]
    """

    restart: int = 30

    def __post_init__(self) -> None:
        check_positive_integer("GMRES", "restart", self.restart)

    def run(self, systems: LinearSystems) -> None:
        batch, m = systems.b.shape
        budget = int(torch.as_tensor(systems.max_steps).max()) if batch else 0
        length = max(min(self.restart, m, budget), 0)
        # Orthonormal rows, one basis per sample, written anew by each restart.
        V = systems.b.new_empty(batch, length + 1, m)
        running = systems.settle()
        while running:
            running = systems.correct(*_arnoldi_cycle(systems, V))


def _arnoldi_cycle(systems: LinearSystems, V: Tensor) -> tuple[Tensor, Tensor]:
    """The steps between two restarts: a correction per sample, and where a product was not finite.

    A sample leaves the cycle (`active` turns false) when its estimated residual meets the
    tolerance, its Krylov space is exhausted, its budget is spent or a product is not finite. From
    then on its basis vectors are zero and its columns of `R` are those of the identity, so that it
    neither changes nor disturbs the others.
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
        w = systems.product(v, active) if k else systems.first_product(v, active)
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

    `Q H = R` is triangular, `Q` a product of rotations kept as a matrix, so that a new column costs
    a fixed number of batched operations rather than one per rotation. `g = beta Q e_1` is the
    rotated right-hand side, and its entry after the last column is the residual.
    """

    def __init__(self, beta: Tensor, length: int) -> None:
        batch = len(beta)
        self._beta = beta
        self._Q = beta.new_zeros(batch, length + 1, length + 1)
        self._Q[:, 0, 0] = 1.0
        self._R = torch.eye(length, dtype=beta.dtype, device=beta.device).repeat(batch, 1, 1)
        self._g = beta.new_zeros(batch, length)

    def append(self, k: int, h: Tensor, rest: Tensor, size: Tensor, active: Tensor) -> Tensor:
        """Add column `k`: entries `h` (batch, k + 1) and below them `rest` (batch,).

        A column that depends on those before it (the matrix is singular on the Krylov space) is
        left out.

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


@dataclass(frozen=True)
class BiCGStab(AbstractMeasuredSolver):
    r"""Stabilized biconjugate gradients [vandervorst1992], on all samples at once.

    Short recurrences: eight vectors per sample for any number of steps, where `GMRES` keeps
    its whole basis. Two products per iteration. The residual does not fall monotonically and no
    theorem bounds the steps; on matrices with large skew part (eigenvalues near the imaginary axis)
    it may stagnate.

    A breakdown, `(r~, r) ~ 0` or `omega = 0`, is met by starting again from the current point with
    `r~ = r`. When the residual of the recurrence rises by `1 / sqrt(eps)` above the least one, half
    of its digits are lost: the sample goes back to its best point, where the residual is measured
    anew.

    Examples:
        >>> import torch, wellposed as wp
        >>> A = torch.tensor([[2.0, 1.0], [0.0, 3.0]], dtype=torch.float64)
        >>> solution = wp.BiCGStab()(lambda u: u @ A.T, torch.ones(5, 2, dtype=torch.float64))
        >>> solution.status
        StatusArray(CONVERGED: 5)
    """

    def run(self, systems: LinearSystems) -> None:
        running = systems.settle()
        while running:
            running = systems.correct(*_bicgstab_cycle(systems))


def _bicgstab_cycle(systems: LinearSystems) -> tuple[Tensor, Tensor]:
    """Iterate until the recurrence of each sample is done; its correction, and where it broke.

    The letters are those of [vandervorst1992]; `d` is the correction to `systems.x`. A sample that
    left the cycle has `alpha = omega = 0` and zero rows in `p`. If it broke, its rows of `r`, `s`
    and `d` may hold NaN; they are its own, and `best_d` never takes them.
    """
    eps = torch.finfo(systems.b.dtype).eps
    active, broken = systems.running, torch.zeros_like(systems.running)
    r = keep_rows(active, systems.r)
    d = best_d = torch.zeros_like(r)
    best_norm = systems.norm
    shadow, shadow_norm, p = r, systems.norm, r
    rho = systems.norm * systems.norm
    while True:
        v = systems.product(p, active)
        v_norm = row_norm(v)
        broken |= active & ~torch.isfinite(v_norm)
        active = active & ~broken
        sigma = row_dot(shadow, v)
        alpha = _ratio(rho, sigma, active & (sigma.abs() > eps * shadow_norm * v_norm))
        s = r - alpha.unsqueeze(1) * v

        # The second product only where it is needed and paid for (with the measurement); elsewhere omega = 0.
        halfway = active & (row_norm(s) > systems.tolerance) & systems.affords(2)
        omega, t = torch.zeros_like(alpha), torch.zeros_like(s)
        if halfway.any():
            t = systems.product(keep_rows(halfway, s), halfway)
            tt = row_dot(t, t)
            finite = torch.isfinite(tt)
            broken |= halfway & ~finite
            omega = _ratio(row_dot(t, s), tt, halfway & finite & (tt > 0.0))
        d = d + alpha.unsqueeze(1) * p + omega.unsqueeze(1) * s
        r = s - omega.unsqueeze(1) * t

        norm = row_norm(r)
        better = active & (norm < best_norm)
        best_d = torch.where(better.unsqueeze(1), d, best_d)
        best_norm = torch.where(better, norm, best_norm)
        lost = ~(norm * eps**0.5 < best_norm)
        active = active & ~broken & ~lost & (norm > systems.tolerance) & systems.affords(2)
        if not active.any():
            return best_d, broken

        # Inner products below eps times their norms are nothing but rounding: r~ = p = r instead.
        rho_next = row_dot(shadow, r)
        again = (rho_next.abs() <= eps * shadow_norm * norm) | (alpha == 0.0) | (rho * omega == 0.0)
        beta = _ratio(rho_next * alpha, rho * omega, active & ~again)
        p = keep_rows(active, r + beta.unsqueeze(1) * (p - omega.unsqueeze(1) * v))
        shadow = torch.where(again.unsqueeze(1), r, shadow)
        shadow_norm = torch.where(again, norm, shadow_norm)
        rho = torch.where(again, norm * norm, rho_next)


def _ratio(numerator: Tensor, denominator: Tensor, where: Tensor) -> Tensor:
    """The quotient where the mask is true, and zero elsewhere."""
    return torch.where(where, numerator, 0.0) / torch.where(where, denominator, 1.0)


@dataclass(frozen=True)
class Neumann(AbstractMeasuredSolver):
    r"""Neumann's series: `x <- x + (b - A x)`, which for `A = I - J` is `x <- J x + b`.

    From zero, step `k` gives `x = b + J b + ... + J^(k-1) b`. Converges for every `b` if and only
    if the spectral radius of `J = I - A` is below 1 ([saad2003], Chapter 4), at that rate; a large
    `||J||` lets the residual grow first. Costs one product per step, which also measures the
    residual, and no memory.

    Args:
        growth_limit: A sample is `DIVERGED` when its residual exceeds its least one by this factor.

    Examples:
        >>> import torch, wellposed as wp
        >>> layer = wp.EquilibriumLayer(wp.nn.DenseCell(4, 16), gradient=wp.ImplicitGradient(wp.Neumann()))
        >>> layer(torch.ones(2, 4)).sum().backward()
        >>> layer.last_adjoint.status
        StatusArray(CONVERGED: 2)
    """

    growth_limit: float = 1e4

    def __post_init__(self) -> None:
        if not self.growth_limit > 1.0:
            raise InvalidArgument(
                f"The 'growth_limit' parameter of Neumann must be a float > 1. Got {self.growth_limit!r} instead."
            )

    def run(self, systems: LinearSystems) -> None:
        running = systems.settle(next_cost=1)
        x, r = systems.x, systems.r
        while running:
            # Rows that are done become zero, so that they do not grow.
            x = keep_rows(systems.running, x + r)
            r = systems.b - systems.product(x, systems.running)
            norm = row_norm(r)
            systems.keep_better(x, norm)
            diverged = norm > self.growth_limit * systems.norm
            running = systems.settle(not_finite=~torch.isfinite(norm), diverged=diverged, next_cost=1)
