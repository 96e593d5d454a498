"""How many threads a run takes: one for small products, torch's number for large ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["largest_product", "on_threads", "threads_for"]

#: Products of fewer floating point operations run on one thread. A product of 1e8 takes 1 to 4 ms on one thread, so that a
#: second thread saves 2 ms at most. Where other processes use the same cores, the threads wait for each other in every product,
#: 24 ms and more (measured on two busy cores: 0.39 ms became 24 ms at 1.7e7 operations, 2.2 ms became 65 ms at 6.7e7).
SMALL = 1e8


@contextlib.contextmanager
def on_threads(count: int | None = None) -> Iterator[int]:
    """Gives the number of threads that torch has now, sets another one, and sets the old one again at the end."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def largest_product(model: nn.Module, shape: tuple[int, ...], batch: int) -> float:
    """Floating point operations of the largest product of a batch with one parameter.

    A matrix multiplies every sample once, a kernel of a convolution once at every pixel.

    Args:
        model: The network.
        shape: Of one input.
        batch: Samples that go through the network together.
    """
    pixels = math.prod(shape[1:])
    matrices = (parameter for parameter in model.parameters() if parameter.dim() >= 2)
    return max((2.0 * batch * m.numel() * (pixels if m.dim() > 2 else 1) for m in matrices), default=0.0)


def threads_for(model: nn.Module, X: Tensor, *, batch: int | None = None, available: int | None = None) -> int:
    """1 if the largest product of a batch of X is small, else what is available.

    Args:
        model: The network.
        X: (n, *shape) inputs.
        batch: How many go through the network together; all if not given.
        available: What large products get; the number that torch has now if not given.
    """
    product = largest_product(model, tuple(X.shape[1:]), len(X) if batch is None else batch)
    return 1 if product < SMALL else available or torch.get_num_threads()
