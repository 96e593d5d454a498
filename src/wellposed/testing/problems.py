"""Fixed-point problems with exact answers: easy ones, ill-conditioned ones, and ones without a
solution.

Each entry of `PROBLEMS` builds a `Problem` for a dtype and a batch size. Data are rounded to the
dtype first, and the solution is computed from the rounded data in float64, so it is exact for the
problem that the solver sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from wellposed.nn import ReLU, Tanh
from wellposed.testing._problem import (
    Problem,
    compute_dtype,
    dense_problem,
    gaussian,
    leaves,
    norm,
    peaceman_rachford_reference,
    picard_reference,
    rotations,
    with_norm,
)

# --- problems that contract -------------------------------------------------------------------------------------


def scalar(dtype: torch.dtype, batch: int) -> Problem:
    """0.8 z + 1: z* = 5."""
    slope = float(torch.tensor(0.8, dtype=dtype))
    z0 = torch.linspace(-1, 1, batch, dtype=torch.float64).unsqueeze(1).to(dtype)
    z_star = torch.full((batch, 1), 1 / (1 - slope), dtype=torch.float64)
    return Problem("scalar", lambda z: slope * z + 1, (), z0, z_star, slope, 1 / (1 - slope))


def affine(dtype: torch.dtype, batch: int) -> Problem:
    return dense_problem("affine", with_norm(gaussian(12, 12, seed=1), 0.9), dtype, batch, seed=2)


def rotation(dtype: torch.dtype, batch: int) -> Problem:
    """All eigenvalues complex, of modulus 0.95: plain steps spiral in."""
    return dense_problem("rotation", 0.95 * rotations(8, seed=3), dtype, batch, seed=4)


def relu_by_hand(dtype: torch.dtype, batch: int) -> Problem:
    """The four activity patterns of two units, solved on paper; the third equilibrium is zero."""
    W = torch.tensor([[0.5, 0.25], [0.25, -0.5]], dtype=compute_dtype(dtype))
    cases = [((1, 1), (28 / 11, 12 / 11)), ((1, -1), (2, 0)), ((-1, -1), (0, 0)), ((-1, 3), (0, 2))]
    cases = [cases[i % 4] for i in range(batch)]
    c = torch.tensor([case[0] for case in cases], dtype=torch.float64).reshape(batch, 2).to(dtype)
    z_star = torch.tensor([case[1] for case in cases], dtype=torch.float64).reshape(batch, 2)
    q = norm(W)
    return Problem(
        "relu_by_hand",
        lambda z, c: torch.relu(z @ W.T + c),
        (c,),
        torch.full((batch, 2), 0.5, dtype=dtype),
        z_star,
        lipschitz=q,
        conditioning=1 / (1 - q),
        atol=1e-9,
        matrix=W,
        activation=ReLU(),
    )


def relu_random(dtype: torch.dtype, batch: int) -> Problem:
    return dense_problem("relu_random", with_norm(gaussian(16, 16, seed=5), 0.9), dtype, batch, ReLU(), seed=6)


def tanh(dtype: torch.dtype, batch: int) -> Problem:
    return dense_problem("tanh", with_norm(gaussian(10, 10, seed=7), 0.9), dtype, batch, Tanh(), seed=8)


def slow(dtype: torch.dtype, batch: int) -> Problem:
    """Symmetric with spectral radius 0.999: Picard needs 20 000 steps, Newton a dozen products."""
    Q = torch.linalg.qr(gaussian(6, 6, seed=9))[0]
    eigenvalues = torch.tensor([0.999, 0.9, 0.5, 0.0, -0.3, -0.6], dtype=torch.float64)
    solvers = ("NewtonKrylov", "Auto")
    return dense_problem("slow", Q @ torch.diag(eigenvalues) @ Q.T, dtype, batch, seed=10, solvers=solvers, max_steps=300)


def smoothing(dtype: torch.dtype, batch: int) -> Problem:
    """relu(W z + c), W a circulant Gaussian filter of norm 0.95: slow modes everywhere."""
    n = 32
    k = torch.arange(n)
    kernel = torch.exp(-0.5 * torch.minimum(k, n - k).double() ** 2)
    W = with_norm(kernel[(k[:, None] - k[None]) % n], 0.95)
    return dense_problem("smoothing", W, dtype, batch, ReLU(), seed=11)


def spread(dtype: torch.dtype, batch: int) -> Problem:
    """Differently hard samples: q R z + c with q from 0 to 0.98, hardest neither first nor last."""
    q = torch.linspace(0, 0.98, batch, dtype=torch.float64)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(12))
    return spread_with(q[order], dtype)


def spread_with(q: Tensor, dtype: torch.dtype) -> Problem:
    """q_i R z + c_i with given factors; a row whose q is not finite has no fixed point."""
    R = rotations(6, seed=13).to(dtype).to(compute_dtype(dtype))
    c = gaussian(len(q), 6, seed=14).to(dtype)
    q = q.to(dtype)
    A = torch.eye(6, dtype=torch.float64) - q.double()[:, None, None] * R.double()
    fine = q.isfinite()
    A = torch.where(fine[:, None, None], A, torch.eye(6, dtype=torch.float64))
    z_star = c.double().clone()
    for i in range(len(q)):  # one by one: batched LU is not to be trusted everywhere
        z_star[i] = torch.linalg.solve(A[i], z_star[i])
    z_star[~fine] = torch.nan
    return Problem(
        "spread",
        lambda z, q, c: q.unsqueeze(1) * (z @ R.T) + c,
        (q, c),
        torch.zeros(len(q), 6, dtype=dtype),
        z_star,
        lipschitz=max(q[fine].abs().tolist(), default=0.0) * norm(R),
        conditioning=max((1 / torch.linalg.svdvals(A)[:, -1]).tolist(), default=1.0),
        max_steps=1500,
    )


def staggered(dtype: torch.dtype, batch: int) -> Problem:
    """The affine problem from starts nearer and nearer to the solution."""
    p = affine(dtype, batch)
    distance = torch.logspace(0, -9, batch, dtype=torch.float64).unsqueeze(1)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(24))
    return replace(p, name="staggered", z0=(p.solution + gaussian(batch, 12, seed=25) * distance[order]).to(dtype))


# --- problems with another state --------------------------------------------------------------------------------


def _structured(name: str, pack: Callable[[Tensor], Any], dtype: torch.dtype, batch: int) -> Problem:
    """An affine map of 7 features behind a structure."""
    inner = dense_problem(name, with_norm(gaussian(7, 7, seed=15), 0.8), dtype, batch, seed=16)

    def unpack(state: Any) -> Tensor:
        return torch.cat([leaf.reshape(leaf.shape[0], -1) for leaf in leaves(state)], dim=1)

    def f(state: Any, c: Tensor) -> Any:
        return pack(inner.f(unpack(state), c))

    return replace(inner, f=f, z0=pack(inner.z0), solution=pack(inner.solution), matrix=None, activation=None)


def tuple_state(dtype: torch.dtype, batch: int) -> Problem:
    return _structured("tuple_state", lambda z: (z[:, :3], z[:, 3:].reshape(-1, 2, 2)), dtype, batch)


def dict_state(dtype: torch.dtype, batch: int) -> Problem:
    def pack(z: Tensor) -> Any:
        return {"slow": z[:, 0], "fast": {"left": z[:, 1:3], "right": z[:, 3:].reshape(-1, 1, 4)}}

    return _structured("dict_state", pack, dtype, batch)


def image_state(dtype: torch.dtype, batch: int) -> Problem:
    """State (3, 4, 4): tanh of a circular convolution of norm at most 0.8, channels mixed."""
    kernel = gaussian(3, 3, 3, 3, seed=17)
    # |K| <= sum over taps of the norm of the channel matrix, for circular convolution
    kernel = kernel * (0.8 / float(torch.linalg.matrix_norm(kernel.permute(2, 3, 0, 1), ord=2).sum()))
    kernel = kernel.to(dtype).to(compute_dtype(dtype))
    x = gaussian(batch, 3, 4, 4, seed=18).to(dtype)

    def f(z: Tensor, x: Tensor, kernel: Tensor = kernel) -> Tensor:
        padded = torch.nn.functional.pad(z, (1, 1, 1, 1), mode="circular")
        return torch.tanh(torch.nn.functional.conv2d(padded, kernel) + x)

    z_star = picard_reference(lambda z: f(z, x.double(), kernel.double()), torch.zeros_like(x.double()))
    return Problem("image_state", lambda z, x: f(z, x), (x,), torch.zeros_like(x), z_star, 0.8, 5.0)


def vector_state(dtype: torch.dtype, batch: int) -> Problem:
    """State (batch,), without a trailing shape: 0.7 z + c."""
    slope = float(torch.tensor(0.7, dtype=dtype))
    c = gaussian(batch, seed=19).to(dtype)
    z_star = c.double() / (1 - slope)
    return Problem("vector_state", lambda z, c: slope * z + c, (c,), torch.zeros_like(c), z_star, slope, 1 / (1 - slope))


# --- problems that do not contract -------------------------------------------------------------------------------


def nilpotent(dtype: torch.dtype, batch: int) -> Problem:
    """W^8 = 0, |W| = 3: residuals grow a thousandfold, then vanish after 9 plain evaluations."""
    W = torch.diag(torch.full((7,), 3.0, dtype=torch.float64), 1)
    solvers = ("Picard", "Broyden", "NewtonKrylov", "Auto")
    return dense_problem("nilpotent", W, dtype, batch, seed=20, solvers=solvers)


def monotone(dtype: torch.dtype, batch: int) -> Problem:
    """relu(W z + c), sym(I - W) >= 0.5, |W| about 5: one equilibrium; plain iteration diverges."""
    n, m = 10, 0.5
    A, B = 0.3 * gaussian(n, n, seed=21), gaussian(n, n, seed=22)
    W = (1 - m) * torch.eye(n, dtype=torch.float64) - A.T @ A + B - B.T
    W = W.to(dtype).double()
    F = torch.eye(n, dtype=torch.float64) - W
    margin = float(torch.linalg.eigvalsh((F + F.T) / 2)[0])
    return dense_problem(
        "monotone",
        W,
        dtype,
        batch,
        ReLU(),
        seed=23,
        solution=peaceman_rachford_reference,
        # e = z - z*, g = f(z) - z: monotonicity of the prox gives <(W - I) e - g, e + g> >= 0, so m
        # |e| <= (1 + |F|) |g|.
        conditioning=(1 + norm(F)) / margin,
        solvers=("NewtonKrylov", "PeacemanRachford", "DouglasRachford", "ForwardBackward"),
        max_steps=300,
    )


def expanding(dtype: torch.dtype, batch: int) -> Problem:
    """2 z + 1: plain iteration runs away from the one fixed point, -1."""
    z0 = torch.zeros(batch, 1, dtype=dtype)
    z_star = torch.full((batch, 1), -1.0, dtype=torch.float64)
    solvers = ("Anderson", "Broyden", "NewtonKrylov", "Auto")
    return Problem("expanding", lambda z: 2 * z + 1, (), z0, z_star, 2.0, 1.0, solvers=solvers)


def _without_solution(name: str, f: Callable[[Tensor], Tensor], z0: Tensor, *, lipschitz: float) -> Problem:
    return Problem(name, f, (), z0, None, lipschitz, math.inf, solvers=(), max_steps=100)


def shift(dtype: torch.dtype, batch: int) -> Problem:
    """z + 1, exact in floating point: no fixed point."""
    return _without_solution("shift", lambda z: z + 1, torch.zeros(batch, 2, dtype=dtype), lipschitz=1.0)


def inexact_shift(dtype: torch.dtype, batch: int) -> Problem:
    """z + (0.1, 0.3): no fixed point, and rounding errors that look like curvature."""
    c = torch.tensor([0.1, 0.3], dtype=compute_dtype(dtype))
    return _without_solution("inexact_shift", lambda z: z + c, torch.zeros(batch, 2, dtype=dtype), lipschitz=1.0)


def square_root(dtype: torch.dtype, batch: int) -> Problem:
    """sqrt(z) - 1 from 0.5: negative after one evaluation, NaN after two. No fixed point."""
    z0 = torch.full((batch, 2), 0.5, dtype=dtype)
    return _without_solution("square_root", lambda z: torch.sqrt(z) - 1, z0, lipschitz=10.0)


def overflow(dtype: torch.dtype, batch: int) -> Problem:
    """exp(z) + 1 from 0: no fixed point; the values overflow in every dtype."""
    z0 = torch.zeros(batch, 2, dtype=dtype)
    return _without_solution("overflow", lambda z: torch.exp(z) + 1, z0, lipschitz=10.0)


def ambush(dtype: torch.dtype, batch: int) -> Problem:
    """0.8 z + 1, and NaN where z exceeds a threshold, which only sample 1 reaches."""
    slope = float(torch.tensor(0.8, dtype=dtype))
    threshold = torch.full((batch, 1), 100.0, dtype=dtype)
    threshold[1:2] = 3.0
    z_star = torch.full((batch, 1), 1 / (1 - slope), dtype=torch.float64)
    z_star[1:2] = torch.nan

    def f(z: Tensor, threshold: Tensor) -> Tensor:
        return torch.where(z > threshold, torch.nan, slope * z + 1)

    z0 = torch.zeros(batch, 1, dtype=dtype)
    return Problem("ambush", f, (threshold,), z0, z_star, slope, 1 / (1 - slope), solvers=())


_CONTRACTIONS = (scalar, affine, rotation, relu_by_hand, relu_random, tanh, slow, smoothing, spread, staggered)
_STRUCTURED = (tuple_state, dict_state, image_state, vector_state)
_OTHERS = (nilpotent, monotone, expanding, shift, inexact_shift, square_root, overflow, ambush)

#: Builds a problem of that name for a dtype and a batch size.
PROBLEMS: dict[str, Callable[[torch.dtype, int], Problem]] = {
    build.__name__: build for build in (*_CONTRACTIONS, *_STRUCTURED, *_OTHERS)
}


@cache
def problem(name: str, dtype: torch.dtype = torch.float64, batch: int = 4) -> Problem:
    """The problem of that name, built once."""
    return PROBLEMS[name](dtype, batch)
