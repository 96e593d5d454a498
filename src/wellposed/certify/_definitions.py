"""Definitions that a tape can follow, in the place of PyTorch's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def pad_circular(input: Tensor, pad: Any, mode: str = "constant", value: Any = None) -> Tensor:
    """Without writing into parts of a new tensor, as PyTorch does."""
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = input.dim() - 1 - i
        size = input.shape[dim]
        parts = [input.narrow(dim, size - before, before), input, input.narrow(dim, 0, after)]
        input = torch.cat([part for part in parts if part.shape[dim]], dim)
    return input


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Its definition: which of several fused kernels PyTorch chooses depends on the machine."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    logits = _matmul(query, key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = torch.exp(logits)
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        kept = attn_mask > -torch.inf
        weights, attn_mask = weights * torch.exp(torch.where(kept, attn_mask, 0.0)), kept
    if attn_mask is not None:
        weights = weights * attn_mask.to(weights.dtype)
    if dropout_p:
        weights = torch.dropout(weights, dropout_p, True)  # refused: it is random
    return _matmul(weights / weights.sum(-1, keepdim=True), value)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b by operations that are known, also where composite ones are not taken apart."""
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    a, b = (t.expand(*shape[:-2], *t.shape[-2:]).clone(memory_format=torch.contiguous_format) for t in (a, b))
    return torch.bmm(*(t.view(-1, *t.shape[-2:]) for t in (a, b))).view(shape)
