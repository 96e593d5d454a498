"""wellposed: once with the dense cell, once with a function it knows nothing about."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

import wellposed as wp

from . import Run
from .baseline import tensors

torch.set_num_threads(2)
MAX_STEPS = 1000


def steps_of(record: object) -> int | None:
    """Most steps any sample took, or None if there is no record."""
    num_steps = getattr(record, "num_steps", None)
    return None if num_steps is None else int(torch.as_tensor(num_steps).max())


def timed(layer: torch.nn.Module, given: Callable[[], Tensor], arrays: dict, W: Tensor, U: Tensor) -> Callable[[], Run]:
    _, _, a, y, _ = tensors(arrays)
    a.requires_grad_()

    def run() -> Run:
        W.grad = U.grad = a.grad = None
        start = perf_counter()
        z = layer(given())
        middle = perf_counter()
        (0.5 * ((z @ a - y) ** 2).sum()).backward()
        end = perf_counter()
        steps = steps_of(layer.last_solution), steps_of(layer.last_adjoint)
        return Run(middle - start, end - start, z.detach(), W.grad, U.grad, a.grad, *steps)

    return run


def dense_cell(arrays: dict) -> Callable[[], Run]:
    W, U, _, _, X = tensors(arrays)
    cell = wp.nn.DenseCell(in_features=U.shape[1], width=W.shape[0], activation=wp.nn.ReLU(), bias=False)
    with torch.no_grad():
        cell.W.copy_(W)
        cell.U.copy_(U)
    layer = wp.EquilibriumLayer(cell, rtol=float(arrays["rtol"]), max_steps=MAX_STEPS)
    return timed(layer, lambda: X, arrays, cell.W, cell.U)


def any_function(arrays: dict) -> Callable[[], Run]:
    W, U, _, _, X = tensors(arrays)
    W, U = W.requires_grad_(), U.requires_grad_()
    layer = wp.EquilibriumLayer(lambda z, c: torch.relu(z @ W.T + c), rtol=float(arrays["rtol"]), max_steps=MAX_STEPS)
    return timed(layer, lambda: X @ U.T, arrays, W, U)


CONTENDERS = {"wellposed": dense_cell, "wellposed, any function": any_function}
