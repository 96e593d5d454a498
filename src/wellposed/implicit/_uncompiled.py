"""Compiled functions as the Python code that they were made of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["uncompiled"]

T = TypeVar("T")


def uncompiled(call: Callable[[], T]) -> T:
    """The result of `call()`, in which every function made by `torch.compile` runs as plain Python.

    Compiled code does not pass through a `TorchFunctionMode`: it holds the tensors that it was traced with, or a trace of the
    mode itself. What a mode puts in the place of a tensor reaches a compiled function only in this way.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and the import takes seconds
        return call()

    def run() -> T:
        with torch.compiler.set_stance("force_eager"):
            return call()

    return torch.compiler.disable(run)()  # a stance cannot be set while an outer function is being traced
