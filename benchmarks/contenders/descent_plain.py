"""The careful loop for this one map: buffers made once, every solve started from the last one, gradients by hand."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from . import Run
from .baseline import iterate_in_place, tensors

torch.set_num_threads(2)


def plain_loop(arrays: dict) -> Callable[[], Run]:
    W0, U0, a0, y, X = tensors(arrays)
    eta, steps, rtol = float(arrays["step_size"]), int(arrays["steps"]), float(arrays["rtol"])
    c, mask = (torch.empty(X.shape[0], W0.shape[0]) for _ in range(2))

    def run() -> Run:
        W, U, a = W0.clone(), U0.clone(), a0.clone()
        z, p = torch.zeros_like(c), torch.zeros_like(c)
        forward_steps = adjoint_steps = 0

        def forward_step(z: Tensor, out: Tensor) -> None:
            torch.addmm(c, z, W.T, out=out).relu_()

        def adjoint_step(p: Tensor, out: Tensor) -> None:  # p <- D (a + W^T p)
            torch.mm(p, W, out=out).add_(a).mul_(mask)

        start = perf_counter()
        for _ in range(steps):
            torch.mm(X, U.T, out=c)
            z, count = iterate_in_place(forward_step, [z, torch.empty_like(z), torch.empty_like(z)], rtol)
            forward_steps += count
            torch.gt(z, 0.0, out=mask)
            p, count = iterate_in_place(adjoint_step, [p, torch.empty_like(p), torch.empty_like(p)], rtol)
            adjoint_steps += count
            residual = z @ a - y
            weighted = p * residual[:, None]
            W.addmm_(weighted.T, z, alpha=-eta)
            U.addmm_(weighted.T, X, alpha=-eta)
            a.addmv_(z.T, residual, alpha=-eta)
        seconds = perf_counter() - start
        loss = float(0.5 * residual @ residual)
        note = f"loss {loss:.6g}; evaluations a step {forward_steps / steps:.1f}/{adjoint_steps / steps:.1f}"
        return Run(seconds, seconds, z, W, U, a, note=note)

    return run


CONTENDERS = {"plain loop, warm": plain_loop}
