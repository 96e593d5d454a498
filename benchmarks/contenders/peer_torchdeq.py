"""torchdeq 0.1.0 with its implicit gradient, each solver with the best settings we found for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor
from torchdeq import get_deq
from torchdeq.solver import get_solver, register_solver

from . import Run
from .baseline import tensors

torch.set_num_threads(2)

# torchdeq hands no solver options to the backward solve, so a variant is registered as a solver of its own.
register_solver("anderson-1e-10", functools.partial(get_solver("anderson"), lam=1e-10))


def solver(name: str, *, extra_steps: float) -> Callable[[dict], Callable[[], Run]]:
    """A contender with the same solver forward and backward.

    `extra_steps` bounds the steps by that multiple of the Picard count. It is no mere safety net: Broyden
    allocates two (n, m, max_iter) buffers up front, so a generous bound would cost it time.
    """

    def prepare(arrays: dict) -> Callable[[], Run]:
        W, U, a, y, X = tensors(arrays)
        W, U, a = (parameter.requires_grad_() for parameter in (W, U, a))
        rtol = float(arrays["rtol"])
        limit = int(extra_steps * max(arrays["forward_steps"], arrays["adjoint_steps"])) + 5
        settings = {"f_tol": rtol, "b_tol": rtol, "f_stop_mode": "rel", "b_stop_mode": "rel"}
        deq = get_deq(ift=True, f_solver=name, b_solver=name, f_max_iter=limit, b_max_iter=limit, **settings).train()
        adjoint: dict[str, Tensor] = {}

        def run() -> Run:
            W.grad = U.grad = a.grad = None
            start = perf_counter()
            c = X @ U.T
            z, info = deq(lambda z: torch.relu(z @ W.T + c), torch.zeros_like(c), backward_writer=adjoint.update)
            z = z[-1]
            middle = perf_counter()
            (0.5 * ((z @ a - y) ** 2).sum()).backward()
            end = perf_counter()
            steps = int(info["nstep"].max()), int(adjoint["nstep"].max())
            return Run(middle - start, end - start, z.detach(), W.grad, U.grad, a.grad, *steps)

        return run

    return prepare


CONTENDERS = {
    "torchdeq fixed_point_iter": solver("fixed_point_iter", extra_steps=1.5),
    "torchdeq anderson": solver("anderson", extra_steps=4.0),
    "torchdeq anderson, lam=1e-10": solver("anderson-1e-10", extra_steps=4.0),
    "torchdeq broyden": solver("broyden", extra_steps=1.0),
}
