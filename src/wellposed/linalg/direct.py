"""Direct solves of a batch of dense systems, or of systems whose matrices are formed first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg.linear_solver import AbstractMeasuredSolver, LinearSystems
from wellposed.status import Status

# Up to here one batched call is right on every machine we know of, and 2 to 40 times faster than a loop (64
# to 1000 matrices of size 2 to 64); above it the gain fades, and `batched_solve_ex` names the danger.
_LARGEST_BATCHED = 64
# Size up to which LAPACK inverts a matrix whose symmetric part is positive definite.
_LARGEST_LAPACK = 256


def batched_solve(A: Tensor, B: Tensor) -> Tensor:
    r"""Solve `A_i X_i = B_i` by LU with partial pivoting; differentiable in both arguments.

    Costs `2/3 k^3` operations per matrix. A matrix that is nearly singular, without an exactly zero
    pivot, gives a large `X_i` without an error, as LAPACK does.

    Args:
        A: (batch, k, k) matrices; batch may be 0.
        B: (batch, k) or (batch, k, c) right-hand sides, same dtype and device.

    Returns:
        `X`, shaped like `B`.

    Raises:
        InvalidArgument: A matrix is singular (the message names the first), or shapes or dtypes do
            not fit.
    """
    X, info = batched_solve_ex(A, B)
    singular = torch.nonzero(info)
    if len(singular):
        first = int(singular[0])
        raise InvalidArgument(
            f"batched_solve: {len(singular)} of {len(A)} matrices are singular (first: index {first}, pivot "
            f"{int(info[first])} of {A.shape[-1]} is exactly zero). Add a multiple of the identity, or use "
            "a least-squares solve."
        )
    return X


def batched_solve_ex(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """`(X, info)` without an error: `info` (batch,) is positive where `A_i` is singular.

    `X_i` is meaningless where `info_i > 0`; the others are not affected.

    On the CPU large matrices are solved one at a time. The batched LU of some builds (oneMKL 2024.2
    under torch 2.13, two threads or more, `k >= 160`, `batch >= 8`, and rows that pivoting really
    exchanges) prints "Parameter 6 was incorrect on entry to SLASWP" and then fails, hangs or
    returns wrong numbers. No other place of this package may call a batched LU
    (`torch.linalg.solve`, `inv`, `lu_factor` on three dimensions), and `torch.vmap` over this
    function would bring it back.
    """
    _check(A, B)
    rhs = B.unsqueeze(-1) if B.ndim == 2 else B
    if A.device.type != "cpu" or A.shape[-1] <= _LARGEST_BATCHED or len(A) == 0:
        X, info = torch.linalg.solve_ex(A, rhs)
    else:
        # unbind, not indexing: the backward of each A[i] would fill a zero tensor as large as A.
        solved = [torch.linalg.solve_ex(a, c) for a, c in zip(A.unbind(), rhs.unbind(), strict=True)]
        X = torch.stack([result for result, _ in solved])
        info = torch.stack([one_info for _, one_info in solved])
    return X.reshape(B.shape), info


def _check(A: Tensor, B: Tensor) -> None:
    for name, tensor in (("A", A), ("B", B)):
        if not isinstance(tensor, Tensor):
            raise InvalidType(f"batched_solve: {name} must be a torch.Tensor, got {type(tensor).__name__}.")
    if A.ndim != 3 or A.shape[1] != A.shape[2]:
        raise InvalidArgument(
            f"batched_solve: A must have shape (batch, k, k), got {tuple(A.shape)}. Add a batch dimension "
            "to a single matrix with A[None]."
        )
    if B.ndim not in (2, 3) or B.shape[:2] != A.shape[:2]:
        raise InvalidArgument(
            "batched_solve: B must have shape (batch, k) or (batch, k, c) with (batch, k) = "
            f"{tuple(A.shape[:2])} as in A, got {tuple(B.shape)}. Expand a shared right-hand side with "
            "B.expand."
        )
    if A.dtype != B.dtype or A.device != B.device:
        raise InvalidArgument(
            f"batched_solve: A and B must agree in dtype and device, got {A.dtype} on {A.device} and "
            f"{B.dtype} on {B.device}. Convert one with .to."
        )


def inverse_of_positive(M: Tensor) -> Tensor:
    r"""M^(-1) by blocks, for sym(M) positive definite:

        [P Q]^(-1)   [P^(-1) + X S^(-1) Y   -X S^(-1)]
        [R T]      = [          -S^(-1) Y      S^(-1)],    X = P^(-1) Q,  Y = R P^(-1),  S = T - R X

    P and the Schur complement S have positive definite symmetric parts as well, so that no pivots
    are needed [higham2002, Section 10.4], and nearly all of the 2 n^3 operations are products of
    large blocks: at 1000 units in four fifths of the time of LAPACK's inverse.

    Args:
        M: (n, n) real; nothing checks that it is positive.
    """
    inverse = torch.empty_like(M)
    _invert(M, inverse)
    return inverse


def _invert(M: Tensor, out: Tensor) -> None:
    """Writes the inverse into `out`, block by block; allocates only X, Y and S."""
    n = M.shape[0]
    if n <= _LARGEST_LAPACK:
        out.copy_(torch.linalg.inv(M))
        return
    k = n // 2
    R = M[k:, :k]
    P, above, left, S = out[:k, :k], out[:k, k:], out[k:, :k], out[k:, k:]
    _invert(M[:k, :k], P)
    X, Y = P @ M[:k, k:], R @ P
    _invert(torch.addmm(M[k:, k:], R, X, alpha=-1), S)
    torch.addmm(left, S, Y, beta=0, alpha=-1, out=left)
    torch.addmm(above, X, S, beta=0, alpha=-1, out=above)
    P.addmm_(X, left, alpha=-1)


@dataclass(frozen=True)
class DenseSolve(AbstractMeasuredSolver):
    """Form each `A_i` by products with unit vectors, and solve by LU: the reference for the others.

    Costs `m` products, and one to measure the residual: with a smaller `max_steps` it takes none of
    them and ends in `MAX_STEPS`. Needs `2/3 m^3` operations and `m^2` numbers per sample (if rows
    depend on each other, `m` is the size of the whole batch). For tests and for small `m`.

    A singular matrix ends in `DIVERGED`, one with NaN or infinite entries in `NOT_FINITE`, and a
    solution whose residual misses the tolerance (ill-conditioned, or a tolerance below rounding) in
    `MAX_STEPS`.

    Examples:
        >>> import torch, wellposed as wp
        >>> layer = wp.EquilibriumLayer(wp.nn.DenseCell(4, 16), gradient=wp.ImplicitGradient(wp.DenseSolve()))
        >>> layer(torch.ones(2, 4)).sum().backward()
        >>> layer.last_adjoint.num_steps.tolist()
        [17, 17]
    """

    def run(self, systems: LinearSystems) -> None:
        if systems.settle(next_cost=systems.b.shape[1] + 1):
            A = _matrices(systems)
            finite = torch.isfinite(A).all(dim=2).all(dim=1)
            # LAPACK is not defined on NaN; the identity stands in, and the sample is marked.
            identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
            d, info = batched_solve_ex(torch.where(finite[:, None, None], A, identity), systems.r)
            systems.correct(d, ~finite, next_cost=0)
            systems.settle(diverged=info > 0, next_cost=2**62)

    def advice(self, status: Status, rate: float) -> str:
        usual = super().advice(status, rate)
        if status is not Status.MAX_STEPS:
            return usual
        return (
            "DenseSolve takes one product per feature of a sample (of the batch, if rows depend on each other) and one more: "
            f"give as many max_steps. If there were enough: {usual}"
        )


def _matrices(systems: LinearSystems) -> Tensor:
    """(batch, m, m), one product per column."""
    batch, m = systems.b.shape
    columns = systems.b.new_empty(m, batch, m)
    for j in range(m):
        unit = systems.b.new_zeros(batch, m)
        unit[:, j] = 1.0
        columns[j] = systems.product(unit, systems.running)
    return columns.permute(1, 2, 0)
