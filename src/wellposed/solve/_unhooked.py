"""Graphs that a solver records are gone when it ends: hooks of the caller must not see them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["unhooked"]


def unhooked() -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which graphs save their tensors as they are, whatever hooks are active outside.

    The hooks of `torch.utils.checkpoint` would run the whole forward pass again for each product with a Jacobian.
    """
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor
