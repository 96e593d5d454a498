"""BiCGStab for a batch of systems."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.linalg._linear_systems import LinearSystems
from wellposed.linalg.linear_solver import (
    AbstractLinearSolver,
    LinearSolution,
    Matvec,
    keep_rows,
    row_dot,
    row_norm,
)

__all__ = ["BiCGStab"]


@dataclass(frozen=True)
class BiCGStab(AbstractLinearSolver):
    r"""Stabilized biconjugate gradients [vandervorst1992], on all samples at once.

    Short recurrences: eight vectors per sample whatever the number of steps, where `GMRES` keeps its whole
    basis. Two products per iteration. The residual does not fall monotonically and no theorem bounds the
    steps; on matrices with large skew part (eigenvalues near the imaginary axis) it may stagnate.

    A breakdown, `(r~, r) ~ 0` or `omega = 0`, is met by starting again from the current point with `r~ = r`.
    When the residual of the recurrence rises by `1 / sqrt(eps)` above the least one, half of its digits are
    lost: the sample goes back to its best point, where the residual is measured anew.
    """

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
        running = systems.settle()
        while running:
            running = systems.correct(*_cycle(systems))
        return systems.solution()


def _cycle(systems: LinearSystems) -> tuple[Tensor, Tensor]:
    """Iterate each running sample until its recurrence says it is done; its correction, and where it broke.

    The letters are those of [vandervorst1992]; `d` is the correction to `systems.x`. A sample that left the
    cycle has `alpha = omega = 0` and zero rows in `p`. If it broke, its rows of `r`, `s` and `d` may hold
    NaN; they are its own, and `best_d` never takes them.
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
