"""Operations of torch by what they do, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wellposed._torch import pytree

#: Operations that read a number or take a decision.
READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"}
#: Operations whose result depends on the shape of a tensor alone.
BLANK = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("zeros", "ones", "full", "empty", "arange", "eye", "linspace", "scalar_tensor", "empty_strided", "new_empty_strided"),
}
#: Linear operations of one tensor that only move entries, or repeat or leave out some.
MOVES = (
    *("view", "_unsafe_view", "_reshape_alias", "expand", "permute", "transpose", "t", "slice", "select", "unsqueeze"),
    *("squeeze", "clone", "alias", "flip", "roll", "diagonal", "repeat", "lift_fresh", "contiguous", "unfold"),
    *("pixel_shuffle", "pixel_unshuffle", "tril", "triu", "reflection_pad1d", "reflection_pad2d", "replication_pad1d"),
    *("replication_pad2d", "upsample_nearest1d", "upsample_nearest2d", "narrow", "diag_embed"),
)
#: Linear operations of one tensor that add up entries with positive coefficients.
SUMS = ("sum", "mean", "avg_pool1d", "avg_pool2d", "_adaptive_avg_pool2d", "upsample_bilinear2d", "cumsum", "im2col", "col2im")
#: Several linear results.
SPLITS = ("split", "split_with_sizes", "unbind", "chunk", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")


def values_read(func: Any, name: str, args: tuple[Any, ...]) -> list[Tensor]:
    """The arguments of which values are read: they decide how many entries the result has, as in
    x[x > 0], or become numbers."""
    made_of_numbers = name in BLANK and not (name.endswith("_like") or name.startswith("new_"))
    sized = torch.Tag.dynamic_output_shape in func.tags or name == "_pack_padded_sequence"
    if not (name in READS or made_of_numbers or sized):
        return []
    if name == "index":
        return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]


def narrows(tensors: Sequence[Tensor], outputs: Any) -> bool:
    """Whether the result has a low precision that not all arguments have: it is rounded to it, and
    may overflow, in whatever operation."""
    made = {leaf.dtype for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    given = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return any(dtype not in (torch.float32, torch.float64) and bool(given - {dtype}) for dtype in made)
