"""The floor, the best loop we can write by hand for this one map, and the loop everybody writes first."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from . import Run

torch.set_num_threads(2)


def tensors(arrays: dict) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(arrays[name]) for name in ("W", "U", "a", "y", "X"))


def floor(arrays: dict) -> Callable[[], Run]:
    """The products nobody can avoid, and nothing else: no activation, no residual, no allocation.

    Forward: X U^T once and one product with W per Picard step. Backward: one product with W per Neumann step,
    then dW = P^T Z and dU = P^T X. The numbers of steps are those of `problems.solve_plainly`.
    """
    W, U, _, _, X = tensors(arrays)
    forward_steps, adjoint_steps = int(arrays["forward_steps"]), int(arrays["adjoint_steps"])
    z, c = torch.relu(X @ U.T), torch.empty(X.shape[0], W.shape[0])
    dW, dU = torch.empty_like(W), torch.empty_like(U)

    def run() -> Run:
        start = perf_counter()
        torch.mm(X, U.T, out=c)
        for _ in range(forward_steps):
            torch.mm(z, W.T, out=c)
        middle = perf_counter()
        for _ in range(adjoint_steps):
            torch.mm(z, W, out=c)
        torch.mm(z.T, c, out=dW)
        torch.mm(z.T, X, out=dU)
        end = perf_counter()
        return Run(middle - start, end - start, forward_steps=forward_steps, adjoint_steps=adjoint_steps)

    return run


def relative_step(new: Tensor, old: Tensor, scratch: Tensor) -> float:
    torch.sub(new, old, out=scratch)
    return float((scratch.norm(dim=1) / new.norm(dim=1)).max())


def iterate_in_place(step: Callable[[Tensor, Tensor], None], buffers: list[Tensor], rtol: float) -> tuple[Tensor, int]:
    """Run z <- step(z) from the first of three buffers; look at the residual only when its decay says it is worth it."""
    z, other, scratch = buffers
    check, seen = 2, None
    for k in range(1, 5000):
        step(z, other)
        z, other = other, z
        if k < check:
            continue
        residual = relative_step(z, other, scratch)
        if residual <= rtol:
            break
        if seen is None or residual >= seen[1]:
            check = k + 2
        else:
            rate = math.log(seen[1] / residual) / (k - seen[0])
            # Underestimate: a step too few costs a cheap check, a step too many a product.
            check = k + max(1, math.floor(0.95 * math.log(residual / rtol) / rate))
        seen = (k, residual)
    return z, k


def in_place_loop(arrays: dict) -> Callable[[], Run]:
    """A careful loop for this map only: all buffers made once, adjoint by hand."""
    W, U, a, y, X = tensors(arrays)
    rtol = float(arrays["rtol"])
    n, m = X.shape[0], W.shape[0]
    c, v, mask, *buffers = (torch.empty(n, m) for _ in range(7))
    dW, dU = torch.empty_like(W), torch.empty_like(U)

    def forward_step(z: Tensor, out: Tensor) -> None:
        torch.addmm(c, z, W.T, out=out).relu_()

    def adjoint_step(p: Tensor, out: Tensor) -> None:  # p = D u, so p <- D (v + W^T p)
        torch.addmm(v, p, W, out=out).mul_(mask)

    def run() -> Run:
        start = perf_counter()
        torch.mm(X, U.T, out=c)
        torch.clamp(c, min=0.0, out=buffers[0])
        z, forward_steps = iterate_in_place(forward_step, buffers[:3], rtol)
        middle = perf_counter()
        residual = z @ a - y
        torch.mul(residual[:, None], a, out=v)
        torch.gt(z, 0.0, out=mask)
        free = [buffer for buffer in buffers if buffer is not z]
        torch.mul(v, mask, out=free[0])
        p, adjoint_steps = iterate_in_place(adjoint_step, free, rtol)
        torch.mm(p.T, z, out=dW)
        torch.mm(p.T, X, out=dU)
        da = residual @ z
        end = perf_counter()
        return Run(middle - start, end - start, z, dW, dU, da, forward_steps, adjoint_steps)

    return run


def plain_torch_loop(arrays: dict) -> Callable[[], Run]:
    """The loop of every tutorial: a look at the residual at each step, backward through autograd products."""
    W, U, a, y, X = tensors(arrays)
    W, U, a = (parameter.requires_grad_() for parameter in (W, U, a))
    rtol = float(arrays["rtol"])
    steps = {}

    def iterate(f: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, int]:
        count = 0
        while count < 5000:
            z, previous = f(z), z
            count += 1
            if ((z - previous).norm(dim=1) / z.norm(dim=1)).max() <= rtol:
                break
        return z, count

    def equilibrium() -> Tensor:
        c = X @ U.T
        with torch.no_grad():
            z, steps["forward"] = iterate(lambda z: torch.relu(z @ W.T + c), torch.zeros_like(c))
        tracked = torch.relu(z @ W.T + c)
        z0 = z.detach().requires_grad_()
        f0 = torch.relu(z0 @ W.T + c.detach())

        def hook(v: Tensor) -> Tensor:
            u, steps["adjoint"] = iterate(lambda u: torch.autograd.grad(f0, z0, u, retain_graph=True)[0] + v, v)
            return u

        tracked.register_hook(hook)
        return tracked

    def run() -> Run:
        W.grad = U.grad = a.grad = None
        start = perf_counter()
        z = equilibrium()
        middle = perf_counter()
        (0.5 * ((z @ a - y) ** 2).sum()).backward()
        end = perf_counter()
        return Run(
            middle - start,
            end - start,
            z.detach(),
            W.grad,
            U.grad,
            a.grad,
            steps["forward"],
            steps["adjoint"],
        )

    return run


CONTENDERS = {"floor": floor, "in-place loop": in_place_loop, "plain torch loop": plain_torch_loop}
