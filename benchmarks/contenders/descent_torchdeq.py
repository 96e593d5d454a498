"""The same descent as users of torchdeq 0.1.0 would write it: its implicit gradient, its fastest solver here, cold starts.

With a start handed from step to step (`warm`) its forward solve is faster; its backward solve takes no start.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor
from torchdeq import get_deq

from . import Run
from .baseline import tensors

torch.set_num_threads(2)
MAX_STEPS = 60


def descent(*, warm: bool) -> Callable[[dict], Callable[[], Run]]:
    def prepare(arrays: dict) -> Callable[[], Run]:
        W0, U0, a0, y, X = tensors(arrays)
        eta, steps, rtol = float(arrays["step_size"]), int(arrays["steps"]), float(arrays["rtol"])
        settings = {"f_tol": rtol, "b_tol": rtol, "f_stop_mode": "rel", "b_stop_mode": "rel"}
        solver = "fixed_point_iter"
        deq = get_deq(
            ift=True, f_solver=solver, b_solver=solver, f_max_iter=MAX_STEPS, b_max_iter=MAX_STEPS, **settings
        ).train()

        def run() -> Run:
            W, U, a = (start.clone().requires_grad_() for start in (W0, U0, a0))
            optimizer = torch.optim.SGD([W, U, a], lr=eta)
            adjoint: dict[str, Tensor] = {}
            forward_steps = adjoint_steps = 0.0
            z = torch.zeros(X.shape[0], W.shape[0])
            start = perf_counter()
            for _ in range(steps):
                c = X @ U.T
                z0 = z.detach() if warm else torch.zeros_like(c)
                found, info = deq(lambda z, c=c: torch.relu(z @ W.T + c), z0, backward_writer=adjoint.update)
                z = found[-1]
                loss = 0.5 * ((z @ a - y) ** 2).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                forward_steps += float(info["nstep"].max())
                adjoint_steps += float(adjoint["nstep"].max())
            seconds = perf_counter() - start
            note = (
                f"loss {float(loss.detach()):.6g}; evaluations a step {forward_steps / steps:.1f}/{adjoint_steps / steps:.1f}"
            )
            return Run(seconds, seconds, z.detach(), W.detach(), U.detach(), a.detach(), note=note)

        return run

    return prepare


CONTENDERS = {"torchdeq fixed_point_iter": descent(warm=False), "torchdeq fixed_point_iter, warm forward": descent(warm=True)}
