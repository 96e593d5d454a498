"""The only file that uses private parts of torch: structures, transforms, the compiler, graphs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = [
    "BatchNorm",
    "Edge",
    "concrete",
    "eager",
    "graph_edge",
    "is_legacy_batched",
    "pytree",
    "sequence_number",
    "transforms_active",
]

P = ParamSpec("P")
R = TypeVar("R")
#: A node of the graph and which of its outputs.
Edge = tuple[Any, int]

#: What every batch normalization of torch is.
BatchNorm = nn.modules.batchnorm._BatchNorm


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable` without its import of the compiler, which takes as long as torch.

    A loop that depends on values gains nothing from a trace. Before the compiler is loaded no
    frame can be traced, and the function is called directly.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what a trace of the caller looks for
    return call


def transforms_active() -> bool:
    """Whether a transform of `torch.func`, or forward-mode differentiation, is active."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def concrete(tensor: Tensor) -> Tensor:
    """The values under all transforms; each `vmap` adds one dimension."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_legacy_batched(tensor: Tensor) -> bool:
    """Whether `torch.autograd.grad(is_grads_batched=True)` made this tensor."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def graph_edge(tensor: Tensor) -> Edge:
    """Where the cotangent of a tensor with a graph arrives."""
    return tensor.grad_fn, tensor.output_nr


def sequence_number() -> int:
    """A number that the nodes of the graph made from now on reach or exceed."""
    return torch._C._autograd._get_sequence_nr()
