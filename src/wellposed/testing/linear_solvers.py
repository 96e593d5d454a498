"""What every linear solver must do."""

from __future__ import annotations

import abc
import pickle
from typing import ClassVar

import torch
from torch import Tensor

from wellposed.linalg import AbstractLinearSolver
from wellposed.status import Status
from wellposed.testing._checks import require
from wellposed.testing._problem import gaussian, rotations, with_norm

#: What the systems are solved to.
RTOL = {torch.float64: 1e-9, torch.float32: 1e-4}


class LinearSolverConformance(abc.ABC):
    """Tests that a solver of linear systems inherits: define `linear_solver`.

        >>> import wellposed as wp
        >>> from wellposed.testing import LinearSolverConformance
        >>> class TestGMRES(LinearSolverConformance):
        ...     def linear_solver(self):
        ...         return wp.GMRES()
        >>> TestGMRES().test_solves_its_systems()

    Attributes:
        max_steps: The budget of a solve.
    """

    max_steps: ClassVar[int] = 500

    @abc.abstractmethod
    def linear_solver(self) -> AbstractLinearSolver:
        """The solver under test."""

    def systems(self) -> dict[str, Tensor]:
        """Name -> (batch, m, m) matrices I - J with |J| < 1, so that Neumann's series converges."""
        identity = torch.eye(8, dtype=torch.float64)
        J = torch.stack([with_norm(gaussian(8, 8, seed=k), q) for k, q in enumerate((0.0, 0.3, 0.6, 0.9))])
        R = torch.stack([q * rotations(8, seed=k) for k, q in enumerate((0.2, 0.5, 0.8))])
        Q = torch.linalg.qr(gaussian(8, 8, seed=5))[0]
        symmetric = (Q @ torch.diag(torch.linspace(0.2, 1.7, 8, dtype=torch.float64)) @ Q.T).expand(3, 8, 8)
        return {"identity": identity.expand(3, 8, 8), "nonsymmetric": identity - J, "rotations": identity - R, "spd": symmetric}

    def test_solves_its_systems(self) -> None:
        """The solution is that of a dense solve, up to tolerance times condition number."""
        for dtype, rtol in RTOL.items():
            for name, matrices in self.systems().items():
                A, b = matrices.to(dtype), gaussian(*matrices.shape[:2], seed=6).to(dtype)
                found = self.linear_solver()(_products(A), b, rtol=rtol, max_steps=self.max_steps)
                require(found.converged, f"{name} in {dtype}: {self.linear_solver()!r} must converge; got {found}")
                exact = torch.linalg.solve(A.double(), b.double())
                error = (found.value.double() - exact).norm(dim=1) / exact.norm(dim=1)
                allowed = 2 * rtol * torch.linalg.cond(A.double())
                require(error <= allowed, f"{name} in {dtype}: the solution is wrong by {float(error.max()):.1e}")

    def test_every_scale_and_start(self) -> None:
        """Small and large right-hand sides, and a random x0, lead to the same solution."""
        for name, A in self.systems().items():
            b, x0 = gaussian(*A.shape[:2], seed=6), gaussian(*A.shape[:2], seed=7)
            exact, condition = torch.linalg.solve(A, b), torch.linalg.cond(A)
            for scale in (1e-8, 1.0, 1e8):
                for start in (None, scale * x0):
                    found = self.linear_solver()(_products(A), scale * b, start, rtol=1e-9, max_steps=self.max_steps)
                    error = (found.value / scale - exact).norm(dim=1) / exact.norm(dim=1)
                    where = f"{name}, b of size {scale:g}, {'no x0' if start is None else 'a random x0'}"
                    require(found.converged, f"{where}: it must converge; got {found}")
                    require(error <= 2e-9 * condition, f"{where}: the solution is wrong by {float(error.max()):.1e}")

    def test_reports_are_true(self) -> None:
        """Residuals are true and decide what has converged, also with a small budget."""
        for name, A in self.systems().items():
            b = gaussian(*A.shape[:2], seed=6)
            for budget in (1, 2, 3, self.max_steps):
                found = self.linear_solver()(_products(A), b, rtol=1e-9, max_steps=budget)
                residual = (b - _products(A)(found.value)).norm(dim=1) / b.norm(dim=1)
                off = float((found.residual - residual).abs().max())
                require(off <= 1e-13, f"{name}: the reported residuals differ from the true ones by {off:.1e}")
                require(found.converged == (found.residual <= 1e-9), f"{name}: converged contradicts the residual in {found}")
                require(found.residual <= 1 + 1e-12, f"{name}: the value is worse than zero in {found}")

    def test_steps_are_counted(self) -> None:
        """`num_steps` is the number of products, and never exceeds `max_steps`."""
        for name, A in self.systems().items():
            for budget in (1, 2, 5, self.max_steps):
                calls = [0]

                def matvec(v: Tensor, A: Tensor = A, calls: list[int] = calls) -> Tensor:
                    calls[0] += 1
                    return _products(A[:1])(v)

                found = self.linear_solver()(matvec, gaussian(1, A.shape[1], seed=6), rtol=1e-9, max_steps=budget)
                reported = int(found.num_steps)
                require(reported == calls[0], f"{name}: num_steps is {reported}, but there were {calls[0]} products")
                require(reported <= budget, f"{name}: {reported} products exceed max_steps={budget}")

    def test_samples_are_independent(self) -> None:
        """A system alone gives what it gives in a batch, to rounding."""
        A = self.systems()["nonsymmetric"]
        b = gaussian(*A.shape[:2], seed=6)
        together = self.linear_solver()(_products(A), b, rtol=1e-9, max_steps=self.max_steps)
        for i in range(len(A)):
            rows = slice(i, i + 1)
            alone = self.linear_solver()(_products(A[rows]), b[rows], rtol=1e-9, max_steps=self.max_steps)
            gap = float((alone.value - together.value[rows]).norm() / together.value[rows].norm())
            require(gap <= 1e-11, f"system {i} alone differs from itself in a batch by {gap:.1e}")

    def test_zero_and_nan(self) -> None:
        """b = 0 gives 0; NaN in one right-hand side does not reach the others."""
        A = self.systems()["nonsymmetric"]
        b = gaussian(*A.shape[:2], seed=6)
        b[1], b[2] = 0.0, torch.nan
        found = self.linear_solver()(_products(A), b, rtol=1e-9, max_steps=self.max_steps)
        require(found.value[1] == 0, "the solution for b = 0 must be 0")
        require(found.status[2] == Status.NOT_FINITE, f"a right-hand side of NaN must be NOT_FINITE; got {found.status[2]}")
        require(found.value.isfinite(), "the value must be finite even where b is not")
        require(found.converged[[0, 1, 3]], f"the other systems must converge; got {found}")

    def test_arguments_are_not_changed(self) -> None:
        """b and x0 keep their values, no graph is recorded, and a good x0 is used."""
        A = self.systems()["spd"]
        b = gaussian(*A.shape[:2], seed=6).requires_grad_()
        x0 = torch.linalg.solve(A, b.detach())
        before = b.detach().clone(), x0.clone()
        found = self.linear_solver()(_products(A), b, x0, rtol=1e-9, max_steps=self.max_steps)
        require(torch.equal(b.detach(), before[0]) and torch.equal(x0, before[1]), "the solve changed b or x0")
        require(not found.value.requires_grad, "the value must not require a gradient")
        require(found.converged, f"started at the solution, it must converge; got {found}")

    def test_a_linear_solver_is_a_value(self) -> None:
        """Equal options make equal solvers, also after pickling."""
        solver = self.linear_solver()
        for other in (self.linear_solver(), pickle.loads(pickle.dumps(solver))):
            require(other == solver and hash(other) == hash(solver), f"{other!r} must equal {solver!r}: use a frozen dataclass")


def _products(A: Tensor):  # type: ignore[no-untyped-def]
    return lambda v: torch.einsum("bij,bj->bi", A, v)
