"""Descent of GaussianDEQ with wellposed: what `wp.descend` does, and the same from cold starts."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

import wellposed as wp

from . import Run
from .baseline import tensors

torch.set_num_threads(2)


def descent(*, warm_start: bool) -> Callable[[dict], Callable[[], Run]]:
    def prepare(arrays: dict) -> Callable[[], Run]:
        W, U, a, y, X = tensors(arrays)
        eta, steps = float(arrays["step_size"]), int(arrays["steps"])
        model = wp.GaussianDEQ(U.shape[1], W.shape[0], rtol=float(arrays["rtol"]))

        def run() -> Run:
            with torch.no_grad():
                for parameter, start in zip((model.W, model.U, model.a), (W, U, a), strict=True):
                    parameter.copy_(start)
            start = perf_counter()
            history = wp.descend(model, X, y, step_size=eta, steps=steps, warm_start=warm_start)
            seconds = perf_counter() - start
            z = model.equilibrium(X).detach()
            evaluations = [round(float(history[column].mean()), 1) for column in ("equilibrium_steps", "adjoint_steps")]
            note = f"loss {float(history.loss[-2]):.6g}; evaluations a step {evaluations[0]}/{evaluations[1]}"
            return Run(seconds, seconds, z, model.W.detach(), model.U.detach(), model.a.detach(), note=note)

        return run

    return prepare


CONTENDERS = {"wellposed": descent(warm_start=True), "wellposed, cold starts": descent(warm_start=False)}
