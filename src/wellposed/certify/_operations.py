"""Operations of torch by what they do, by name."""

from __future__ import annotations

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


def decide_size(func: Any, name: str, args: tuple[Any, ...]) -> list[Tensor]:
    """The arguments of which the values decide how many entries the result has, as in
    x[x > 0]."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return []
    if name == "index":
        return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
