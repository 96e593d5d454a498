"""Whether tensors of a model share memory; all theorems about training assume that none do."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


def shared_memory(model: nn.Module) -> str:
    """Which tensors of a model, or entries of one, share memory, in a sentence; empty if none do.

    A copy of a model does not share what the model did: ask the model itself.
    """
    places: list[tuple[str, int, int, str]] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            continue
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if _overlaps(tensor, extent):
            return _sentence(f"Entries of {name}")
        start = tensor.data_ptr()
        places.append((str(tensor.device), start, start + extent * tensor.element_size(), name))
    for (device, _, end, first), (other, start, _, second) in itertools.pairwise(sorted(places)):
        if device == other and start < end:
            return _sentence(f"{first} and {second}")
    return ""


def _overlaps(tensor: Tensor, extent: int) -> bool:
    """Whether two of its entries are one place, as in an expanded tensor."""
    if tensor.is_contiguous():
        return False
    return len(torch.arange(extent).as_strided(tensor.shape, tensor.stride()).unique()) < tensor.numel()


def _sentence(who: str) -> str:
    return (
        f"{who} share memory, so a step of one moves the other, which no theorem covers; give each its own, e.g. by .clone()."
    )
