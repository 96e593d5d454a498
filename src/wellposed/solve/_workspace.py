"""Memory that the solves of a thread use one after another.

A fresh tensor of a few megabytes costs a page fault for every 4 KiB of it, which adds some per cent to a short solve on a
processor. The buffers that a solve needs only while it runs are therefore kept for the next one: at most a handful, of the size
last asked for. (Other devices have allocators that do this.)
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["give", "take"]

#: A solve uses four; a second solve inside a cell may use as many.
MOST_KEPT = 8

_local = threading.local()


def take(like: Tensor) -> Tensor:
    """A buffer of the shape, dtype and device of `like`, with anything in it."""
    kept = _kept()
    for i, buffer in enumerate(kept):
        if buffer.shape == like.shape and buffer.dtype == like.dtype and buffer.device == like.device:
            return kept.pop(i)
    kept.clear()  # of another size: that time is over
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def give(buffer: Tensor) -> None:
    """Returns a buffer that nobody reads any more; one made in inference mode could not be written to outside of it."""
    kept = _kept()
    if buffer.device.type == "cpu" and not buffer.is_inference() and len(kept) < MOST_KEPT:
        kept.append(buffer)


def _kept() -> list[Tensor]:
    if not hasattr(_local, "kept"):
        _local.kept = []
    kept: list[Tensor] = _local.kept
    return kept
