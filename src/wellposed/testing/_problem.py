"""A fixed-point problem with its exact answer, and linear algebra to make problems.

The helpers do not use the solvers of the library, so that they cannot share their mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wellposed.nn import AbstractActivation, DenseCell, Identity
from wellposed.solve import AbstractMap

LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Problem:
    """z = f(z, *args), row by row.

    Attributes:
        name: What messages call it.
        f: The map.
        args: Per-sample data, batch first.
        z0: The start.
        solution: The fixed point in float64, structured like z0; None if there is none.
        lipschitz: |f(z) - f(y)| <= lipschitz |z - y| for every sample; where there is no such
            number, one near z0.
        conditioning: |z - z*| <= conditioning |f(z) - z| for every sample and every z.
        solvers: Names of the classes that must solve it; None for every solver.
        max_steps: Enough for those.
        atol: What a solve needs besides a relative tolerance: where z* = 0, no relative residual is
            small.
        matrix: W, if f is activation(W z + c) with c = args[0].
        activation: Of that f.
    """

    name: str
    f: Callable[..., Any]
    args: tuple[Tensor, ...]
    z0: Any
    solution: Any
    lipschitz: float
    conditioning: float
    solvers: tuple[str, ...] | None = None
    max_steps: int = 1000
    atol: float = 0.0
    matrix: Tensor | None = None
    activation: AbstractActivation | None = None

    @property
    def contracts(self) -> bool:
        return self.lipschitz < 1

    @property
    def batch(self) -> int:
        return flat(self.z0).shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return leaves(self.z0)[0].dtype

    def take(self, rows: Any) -> Problem:
        """The same problem for some of its samples."""
        return replace(
            self,
            args=tuple(arg[rows] for arg in self.args),
            z0=map_leaves(lambda leaf: leaf[rows], self.z0),
            solution=None if self.solution is None else map_leaves(lambda leaf: leaf[rows], self.solution),
        )

    def image(self, z: Any) -> Any:
        """f(z) in the precision in which it is solved: float32 for low-precision data."""
        return self.f(z, *(arg.to(compute_dtype(arg.dtype)) for arg in self.args))

    def residual(self, z: Any) -> tuple[Tensor, Tensor]:
        """(batch,) |f(z) - z| and |f(z)| by other means than the library's."""
        fz = flat(self.image(z))
        return (fz - flat(z)).norm(dim=1), fz.norm(dim=1)

    def distance(self, z: Any) -> Tensor:
        """(batch,) |z - z*|."""
        return (flat(z) - flat(self.solution)).norm(dim=1)

    def rounding(self, z: Any) -> Tensor:
        """(batch,) what rounding may change in one evaluation of f - z."""
        zero = map_leaves(torch.zeros_like, z)
        largest = (1 + self.lipschitz) * flat(z).norm(dim=1) + flat(self.image(zero)).norm(dim=1)
        return 32 * torch.finfo(compute_dtype(self.dtype)).eps * largest

    def dense_map(self) -> AbstractMap:
        """The same f as the map of a `DenseCell`, which also knows its resolvent."""
        assert self.matrix is not None and self.activation is not None
        n = self.matrix.shape[0]
        cell = DenseCell(n, n, self.activation, bias=False, dtype=self.matrix.dtype)
        with torch.no_grad():
            cell.W.copy_(self.matrix)
            cell.U.copy_(torch.eye(n))
            return cell.bind(self.args[0])


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in LOW_PRECISION else dtype


def leaves(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    return [leaf for part in (state.values() if isinstance(state, dict) else state) for leaf in leaves(part)]


def map_leaves(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, dict):
        return {key: map_leaves(function, part) for key, part in state.items()}
    return tuple(map_leaves(function, part) for part in state)


def flat(state: Any) -> Tensor:
    """(batch, features) in float64."""
    return torch.cat([leaf.double().reshape(leaf.shape[0], math.prod(leaf.shape[1:])) for leaf in leaves(state)], dim=1)


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm(W: Tensor) -> float:
    return float(torch.linalg.matrix_norm(W.double(), ord=2))


def with_norm(W: Tensor, value: float) -> Tensor:
    return W * (value / norm(W))


def rotations(n: int, seed: int) -> Tensor:
    """Orthogonal (n, n) whose eigenvalues are complex pairs all around the circle."""
    blocks = []
    for angle in torch.linspace(0.4, 3.0, n // 2, dtype=torch.float64).tolist():
        c, s = math.cos(angle), math.sin(angle)
        blocks.append(torch.tensor([[c, -s], [s, c]], dtype=torch.float64))
    Q = torch.linalg.qr(gaussian(n, n, seed=seed))[0]
    return Q @ torch.block_diag(*blocks) @ Q.T


def picard_reference(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The fixed point of a contraction in float64, by plain iteration to the last digits."""
    for _ in range(20000):
        fz = f(z)
        if z.numel() == 0 or float((fz - z).abs().max()) <= 1e-15 * float(fz.abs().max()):
            return fz
        z = fz
    raise AssertionError("the reference iteration did not converge")


def peaceman_rachford_reference(W: Tensor, c: Tensor) -> Tensor:
    """The fixed point of relu(W z + c) for monotone I - W, in float64."""
    F = torch.eye(W.shape[0], dtype=torch.float64) - W
    a = 1.0 / norm(F)
    inverse = torch.linalg.inv(torch.eye(W.shape[0], dtype=torch.float64) + a * F)
    u = z = torch.zeros_like(c)
    for _ in range(4000):
        reflected = 2 * z - u
        u_next = 2 * (reflected + a * c) @ inverse.T - reflected
        if u.numel() == 0 or float((u_next - u).abs().max()) <= 1e-15 * float(u_next.abs().max()):
            return torch.relu(u_next)
        u, z = u_next, torch.relu(u_next)
    raise AssertionError("the reference iteration did not converge")


def dense_problem(
    name: str,
    W: Tensor,
    dtype: torch.dtype,
    batch: int,
    activation: AbstractActivation | None = None,
    *,
    seed: int,
    solution: Callable[[Tensor, Tensor], Tensor] | None = None,
    conditioning: float | None = None,
    **options: Any,
) -> Problem:
    """activation(W z + c) with Gaussian c and start; affine maps are solved here."""
    activation = Identity() if activation is None else activation
    n = W.shape[0]
    c = gaussian(batch, n, seed=seed).to(dtype)
    W = W.to(dtype).to(compute_dtype(dtype))
    exact = W.double()
    if isinstance(activation, Identity):
        A = torch.eye(n, dtype=torch.float64) - exact
        z_star = torch.linalg.solve(A, c.double().T).T
        conditioning = 1.0 / float(torch.linalg.svdvals(A)[-1])
    else:
        reference = solution or (lambda W, c: picard_reference(lambda z: activation(z @ W.T + c), torch.zeros_like(c)))
        z_star = reference(exact, c.double())
        if conditioning is None:  # Banach
            conditioning = 1.0 / (1.0 - norm(exact))
    return Problem(
        name,
        lambda z, c: activation(z @ W.T + c),
        (c,),
        gaussian(batch, n, seed=seed + 1).to(dtype),
        z_star,
        lipschitz=norm(exact),
        conditioning=conditioning,
        matrix=W,
        activation=activation,
        **options,
    )
