"""Newton's method with a Krylov solver inside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wellposed._checks import check_interval
from wellposed.errors import InvalidType
from wellposed.linalg import GMRES, AbstractLinearSolver, DenseSolve
from wellposed.linalg.linear_solver import LinearSolution, LinearSystems, Matvec
from wellposed.solve.map import AbstractMap, RowsCoupled
from wellposed.solve.solver import AbstractSolver, Point, Step
from wellposed.status import Status, advice

#: Evaluations that a linear solve needs at least: two record J, one product, one evaluation of the new point.
LEAST_BUDGET = 4
#: Products that a linear solve may always use, if its sample has them left.
FEW_PRODUCTS = 20


@dataclass(frozen=True)
class NewtonKrylov(AbstractSolver):
    r"""Inexact Newton method: (I - J) s = f(z) - z by a Krylov solver, z <- z + t s [knoll2004].

    J is the Jacobian of f at z, or for ReLU and other kinks the element of the generalized Jacobian
    that autograd (or the cell) picks: the method is then semismooth Newton [qi1993], and for
    piecewise linear maps it ends after finitely many steps once the active set is right. The linear
    system is solved to the relative accuracy

        eta = min(forcing, (r_k / r_{k-1})^2)                            [eisenstat1996, choice 2]

    but not beyond half of what the tolerance asks, and at once to that if f is known to be affine.
    The t of each sample is halved until its residual decreases. Needs I - J invertible, not that f
    contracts.

    Costs, per step, one evaluation for t = 1, and one product with J per Krylov step (plus the two
    evaluations with which automatic differentiation records J, unless the map has its own
    Jacobian); all are counted.

    Args:
        linear_solver: Gets products u - J u.
        forcing: The loosest relative accuracy of the linear solve, in (0, 1).

    Examples:
        >>> import torch, wellposed as wp
        >>> f = lambda z: z - (z**3 - 8) / 2
        >>> solution = wp.fixed_point(f, torch.full((1, 1), 3.0, dtype=torch.float64), wp.NewtonKrylov())
        >>> round(solution.value.item(), 6)
        2.0
    """

    linear_solver: AbstractLinearSolver = field(default_factory=lambda: GMRES(restart=40))
    forcing: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.linear_solver, AbstractLinearSolver):
            raise InvalidType(
                f"The 'linear_solver' of NewtonKrylov must be a linear solver such as GMRES(); got {self.linear_solver!r}."
            )
        check_interval("NewtonKrylov", "forcing", self.forcing, low=0.0, high=1.0, closed="neither")

    def init(self, f: AbstractMap, point: Point) -> dict[str, Any]:
        return {"r": torch.full_like(point.r, torch.inf)}

    def step(self, state: dict[str, Any], f: AbstractMap, point: Point) -> Step:
        eta = ((point.r / state["r"]) ** 2).clamp(max=self.forcing)
        eta = torch.where(state["r"].isinf(), torch.full_like(eta, self.forcing), eta)
        enough = 0.5 * point.target / point.r
        eta = enough if f.is_affine else torch.maximum(eta, enough)
        state["r"] = point.r
        direction, used = point.g.clone(), torch.zeros_like(point.evaluations)
        dense = isinstance(self.linear_solver, DenseSolve)  # it takes every column or none
        least = LEAST_BUDGET + (point.z.shape[1] if dense else 0)
        rows = (point.budget >= least).nonzero().squeeze(1)  # the others take a plain step
        if rows.shape[0]:
            part = f if rows.shape[0] == point.z.shape[0] else f.take(rows)
            jacobian = part.jacobian(point.z[rows])
            products = point.budget[rows] - jacobian.setup - 1
            # A singular system would use up everything: beyond a few products, half of what is left must do.
            products = products if dense else torch.maximum(products // 2, products.clamp(max=FEW_PRODUCTS))
            linear = self._direction(f, point, rows, lambda u: u - jacobian.mv(u), eta[rows], products)
            useful = linear.value.isfinite().all(dim=1) & (linear.value != 0).any(dim=1)
            direction[rows[useful]] = linear.value[useful]
            used[rows] = linear.num_steps + jacobian.setup
        return backtrack(f, point, direction, accept=point.r * (1 - 1e-4), halvings=5, used=used)

    def _direction(
        self, f: AbstractMap, point: Point, rows: Tensor, matvec: Matvec, rtol: Tensor, max_steps: Tensor
    ) -> LinearSolution:
        """(I - J) s = g for some rows; J g = f(fz) - fz where f is affine and f(fz) known."""
        solver, g, every = self.linear_solver, point.g, rows.shape[0] == point.g.shape[0]
        if point.ahead is None or not f.is_affine or not isinstance(solver, GMRES):
            return solver(matvec, g if every else g[rows], rtol=rtol, max_steps=max_steps)
        known = g - (point.ahead - point.fz)
        g, known = (g, known) if every else (g[rows], known[rows])
        systems = LinearSystems(matvec, g, None, rtol, 0.0, max_steps)
        systems.known = known
        solver.run(systems)
        return systems.solution()

    def advice(self, status: Status, rate: float) -> str:
        return advice(status, rate, ("Auto()",))


def backtrack(f: AbstractMap, point: Point, direction: Tensor, *, accept: Tensor, halvings: int, used: Tensor) -> Step:
    """Tries z + t direction for t = 1, 1/2, 1/4, ... until |f(z) - z| <= accept.

    Only samples that still search take part in an evaluation, and none beyond its budget.

    Args:
        f: The map.
        point: Where the search starts.
        direction: (batch, features).
        accept: (batch,) the |f(z) - z| that ends a sample's search.
        halvings: How often t is halved at most.
        used: (batch,) evaluations that were spent on finding the direction.
    """
    z = point.z + direction
    fz = _evaluate(f, z, used)
    r = torch.linalg.vector_norm(fz - z, dim=1)
    used = used + 1
    t = 1.0
    for _ in range(halvings):
        rows = (~(r <= accept) & (used < point.budget)).nonzero().squeeze(1)
        if rows.shape[0] == 0:
            break
        t *= 0.5
        z_try = torch.add(point.z[rows], direction[rows], alpha=t)
        f_try = _evaluate(f.take(rows), z_try, used)
        r_try = torch.linalg.vector_norm(f_try - z_try, dim=1)
        used = used.index_add(0, rows, torch.ones_like(rows))
        better = (r_try < r[rows]) | ~r[rows].isfinite()
        z = z.index_copy(0, rows[better], z_try[better])
        fz = fz.index_copy(0, rows[better], f_try[better])
        r = r.index_copy(0, rows[better], r_try[better])
    return Step(z, fz, used)


def _evaluate(f: AbstractMap, z: Tensor, used: Tensor) -> Tensor:
    """f(z); if rows are found to be coupled, the error holds what the step has used before."""
    try:
        return f(z)
    except RowsCoupled as found:
        found.within += int(used.max())
        raise
