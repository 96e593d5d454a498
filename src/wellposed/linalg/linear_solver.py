"""Linear solvers: the interface, the result, and systems with residuals and budgets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.status import Status, StatusArray

_RUNNING = -1

Matvec = Callable[[Tensor], Tensor]
"""(batch, m) -> (batch, m), linear, row by row."""


@dataclass(frozen=True, eq=False)
class LinearSolution:
    """The answer of a linear solver to a batch of systems `A_i x_i = b_i`.

    Attributes:
        value: (batch, m) best `x` found; finite, with no larger residual than `x0` or zero.
        residual: (batch,) `||b - A x|| / ||b||` measured at `value` by a product with `A`. 0 where
            `b` and `x` are zero; `inf` where `b` is not finite.
        num_steps: (batch,) int64, products with `A` of the sample, measurements included.
        status: (batch,) how each sample ended.

    Examples:
        >>> import torch, wellposed as wp
        >>> solution = wp.GMRES()(lambda u: 2 * u, torch.ones(3, 4, dtype=torch.float64))
        >>> solution.value.shape, solution.status, bool((solution.residual < 1e-6).all())
        (torch.Size([3, 4]), StatusArray(CONVERGED: 3), True)
    """

    value: Tensor
    residual: Tensor
    num_steps: Tensor
    status: StatusArray

    @property
    def converged(self) -> Tensor:
        """(batch,) bool: where the measured residual met the tolerance."""
        return self.status.codes == Status.CONVERGED

    def __repr__(self) -> str:
        if not len(self.status):
            return "LinearSolution(empty batch)"
        worst, steps = float(self.residual.max()), int(self.num_steps.max())
        return f"LinearSolution({self.status!r}, largest residual {worst:.2e}, most steps {steps})"


class AbstractLinearSolver(ABC):
    """Solves a batch of linear systems given only products with their matrices."""

    @abstractmethod
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
        """Solve `A_i x_i = b_i` until `||b_i - A_i x_i|| <= max(rtol ||b_i||, atol)`.

        Records no graph and changes no argument. A failed solve sets the status and never raises.

        Args:
            matvec: `(batch, m) -> (batch, m)`, the products `A_i v_i`; ignored where rows are done.
            b: (batch, m) right-hand sides, float32 or float64.
            x0: (batch, m) first guess; zero if None, or where it is worse than zero.
            rtol: Tolerance relative to `||b_i||`; a number, or (batch,) one for each sample.
            atol: Absolute tolerance on `||b_i - A_i x_i||`; a number, or (batch,).
            max_steps: Bound on the products of a sample, an integer >= 1, or (batch,).
        """

    def advice(self, status: Status, rate: float) -> str:
        """What to try when a sample ended with `status`; `rate` is not known, NaN."""
        if status is Status.NOT_FINITE:
            return "Check f and its input for NaN, overflow or division by zero near this sample."
        return (
            "I - J may be nearly singular: raise max_steps, try GMRES() or Auto(), or constrain the cell, e.g. with Spectral()."
        )


class AbstractMeasuredSolver(AbstractLinearSolver):
    """A solver on `LinearSystems`, which measure every residual and keep every budget."""

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
        _check_arguments(matvec, b, x0, rtol, atol, max_steps)
        systems = LinearSystems(matvec, b, x0, rtol, atol, max_steps)
        self.run(systems)
        return systems.solution()

    @abstractmethod
    def run(self, systems: LinearSystems) -> None:
        """Works on the systems until none is running."""


class LinearSystems:
    """A batch of systems `A_i x_i = b_i` while a solver works on it.

    Each sample has its best point `x`, its residual `r = b - A x`, *measured* by a product, and its
    number of products. A solver proposes corrections; `correct` measures them and keeps those that
    help, so a failure in a sample costs products and nothing else.

    Row i is divided by a power of two near `max |b_i|`: no digit changes, and squares in norms do
    not underflow. (A cotangent of 1e-25 in float32 would otherwise be a zero right-hand side.)

    Attributes:
        b, x, r: (batch, m), scaled.
        norm, tolerance: (batch,) `||r||` and what it must not exceed, scaled.
        num_steps: (batch,) products so far. max_steps: Their bound.
        running: (batch,) bool, samples still to be solved.
        known: (batch, m) `A b` if given, NaN in rows where it is unknown; None once `r` is not `b`.
    """

    def __init__(
        self, matvec: Matvec, b: Tensor, x0: Tensor | None, rtol: float | Tensor, atol: float | Tensor, max_steps: int | Tensor
    ) -> None:
        self._matvec, self.max_steps = matvec, max_steps
        self.known: Tensor | None = None
        largest = _largest(b.detach())
        self._finite_b = torch.isfinite(largest)
        self._scale = _power_of_two_below(torch.where(self._finite_b, largest, 0.0))
        self.b = keep_rows(self._finite_b, b.detach() / self._scale.unsqueeze(1))
        self._b_norm = row_norm(self.b)
        self.tolerance = torch.maximum(rtol * self._b_norm, atol / self._scale).to(b.dtype)
        self.num_steps = torch.zeros(len(b), dtype=torch.int64, device=b.device)
        self._codes = torch.where(self._finite_b, _RUNNING, int(Status.NOT_FINITE))
        self.running = self._finite_b.clone()

        # Zero is the first point, as its residual b is known without a product.
        self.x, self.r, self.norm = torch.zeros_like(self.b), self.b, self._b_norm
        if x0 is not None:
            measured = self.running & self.affords(1)
            x = keep_rows(measured, x0.detach() / self._scale.unsqueeze(1))
            r = self.b - self.product(x, measured)
            self.keep_better(x, row_norm(r), r)

    def product(self, v: Tensor, taking_part: Tensor) -> Tensor:
        """`A v`, counted for the samples in the mask `taking_part`."""
        out = self._matvec(v)
        if not isinstance(out, Tensor) or out.shape != v.shape or out.dtype != v.dtype:
            seen = f"{tuple(out.shape)} of {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
            raise InvalidArgument(
                f"matvec(v) must keep the shape and dtype of v: expected {tuple(v.shape)} of {v.dtype}, got {seen}."
            )
        self.num_steps += taking_part
        return out.detach()

    def first_product(self, v: Tensor, taking_part: Tensor) -> Tensor:
        """The same for `v = r / norm`, without a product where it is `known`."""
        if self.known is None:
            return self.product(v, taking_part)
        known, self.known = self.known / (self._scale * self.norm).unsqueeze(1), None
        if bool((unknown := taking_part & known[:, 0].isnan()).any()):
            known = torch.where(unknown.unsqueeze(1), self.product(v, unknown), known)
        return keep_rows(taking_part, known)

    def affords(self, products: int) -> Tensor:
        """(batch,) bool: where so many more products stay within max_steps."""
        return self.num_steps + products <= self.max_steps

    def correct(self, d: Tensor, broken: Tensor, next_cost: int = 2) -> bool:
        """Measure the residual at `x + d`, by one product, and go there if it is smaller.

        Args:
            d: (batch, m) proposed corrections.
            broken: (batch,) bool, samples in which a product gave NaN or infinity: they end here.
            next_cost: As for `settle`.

        Returns whether any sample is still running.
        """
        usable = self.running & torch.isfinite(row_norm(d))
        x = torch.where(usable.unsqueeze(1), self.x + d, self.x)
        r = self.b - self.product(x, self.running)
        norm = row_norm(r)
        self.keep_better(x, norm, r)
        return self.settle(not_finite=broken | ~torch.isfinite(norm), next_cost=next_cost)

    def keep_better(self, x: Tensor, norm: Tensor, r: Tensor | None = None) -> None:
        """Go to `x` where its measured residual is smaller; without `r`, ours is out of date."""
        better = self.running & (norm < self.norm)  # false for NaN
        rows = better.unsqueeze(1)
        self.x = torch.where(rows, x, self.x)
        if r is not None:
            self.r = torch.where(rows, r, self.r)
        self.norm = torch.where(better, norm, self.norm)

    def settle(self, *, not_finite: Tensor | None = None, diverged: Tensor | None = None, next_cost: int = 2) -> bool:
        """End the samples that converged, else those that failed, else those out of budget.

        Args:
            not_finite, diverged: (batch,) bool, samples that end with that status.
            next_cost: Products that the next step of the solver needs, with its measurement.

        Returns whether any sample is still running.
        """
        self._end(self.norm <= self.tolerance, Status.CONVERGED)
        if not_finite is not None:
            self._end(not_finite, Status.NOT_FINITE)
        if diverged is not None:
            self._end(diverged, Status.DIVERGED)
        self._end(self.num_steps + next_cost > self.max_steps, Status.MAX_STEPS)
        return bool(self.running.any())

    def _end(self, where: Tensor, status: Status) -> None:
        self._codes = torch.where(self.running & where, int(status), self._codes)
        self.running = self.running & ~where

    def solution(self) -> LinearSolution:
        """What was found, in the caller's scale. Call when nothing is running."""
        value = self.x * self._scale.unsqueeze(1)
        residual = torch.where(self._b_norm > 0.0, self.norm / self._b_norm, 0.0)
        residual = torch.where(self._finite_b, residual, torch.inf)
        # A solution too large for the dtype: zero is the best possible value.
        overflow = ~torch.isfinite(_largest(value))
        value = keep_rows(~overflow, value)
        residual = torch.where(overflow, 1.0, residual)
        codes = torch.where(overflow, int(Status.NOT_FINITE), self._codes)
        return LinearSolution(value, residual, self.num_steps, StatusArray(codes))


def _largest(v: Tensor) -> Tensor:
    """(batch,) `max_j |v_ij|`, NaN where a row has one; 0 for rows without entries."""
    return v.abs().amax(dim=1) if v.shape[1] else v.new_zeros(len(v))


def _power_of_two_below(largest: Tensor) -> Tensor:
    """(batch,) powers of two in `(largest / 2, largest]`, as far as the dtype reaches; 1 for 0."""
    mantissa, _ = torch.frexp(largest)
    # The quotient is a power of two, so division is exact (torch.ldexp computes in float32, and overflows).
    scale = (largest / (2.0 * mantissa)).clamp(min=torch.finfo(largest.dtype).tiny)
    return torch.where(largest > 0.0, scale, 1.0)


def _check_arguments(
    matvec: Matvec, b: Tensor, x0: Tensor | None, rtol: float | Tensor, atol: float | Tensor, max_steps: int | Tensor
) -> None:
    if not callable(matvec):
        raise InvalidType(
            f"matvec must be a function (batch, m) -> (batch, m), got {type(matvec).__name__}. For dense "
            "matrices A (batch, m, m) pass lambda v: torch.einsum('bij,bj->bi', A, v)."
        )
    if not isinstance(b, Tensor):
        raise InvalidType(f"b must be a torch.Tensor, got {type(b).__name__}.")
    if b.ndim != 2:
        raise InvalidArgument(
            f"b must have shape (batch, m), got {tuple(b.shape)}. Flatten each sample: b.flatten(1), or b[None] for one."
        )
    if b.dtype not in (torch.float32, torch.float64):
        raise InvalidArgument(f"b must be float32 or float64, got {b.dtype}. Convert it with b.float().")
    if x0 is not None and (x0.shape != b.shape or x0.dtype != b.dtype or x0.device != b.device):
        raise InvalidArgument(
            f"x0 must match b in shape, dtype and device: expected {tuple(b.shape)} of {b.dtype} on "
            f"{b.device}, got {tuple(x0.shape)} of {x0.dtype} on {x0.device}."
        )
    for name, option in (("rtol", rtol), ("atol", atol), ("max_steps", max_steps)):
        if isinstance(option, Tensor) and option.shape not in ((), b.shape[:1]):
            raise InvalidArgument(
                f"{name} must be a number or one number per sample, shape {tuple(b.shape[:1])}; got shape "
                f"{tuple(option.shape)}."
            )
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if not isinstance(tolerance, Tensor) and not 0.0 <= tolerance < float("inf"):
            raise InvalidArgument(f"{name} must be a finite number >= 0. Got {tolerance!r} instead.")
    if not isinstance(max_steps, Tensor) and (not isinstance(max_steps, int) or max_steps < 1):
        raise InvalidArgument(f"max_steps must be an integer >= 1. Got {max_steps!r} instead.")


def row_norm(v: Tensor) -> Tensor:
    """(batch,) Euclidean norms of the rows of `v` (batch, m)."""
    return torch.linalg.vector_norm(v, dim=1)


def row_dot(u: Tensor, v: Tensor) -> Tensor:
    """(batch,) inner products of the rows of `u` and `v`, both (batch, m)."""
    return torch.linalg.vecdot(u, v, dim=1)


def keep_rows(mask: Tensor, v: Tensor) -> Tensor:
    """`v` (batch, m) with zero, not 0 * NaN, in the rows where `mask` (batch,) is false."""
    return torch.where(mask.unsqueeze(1), v, 0.0)
