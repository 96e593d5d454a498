"""Arguments of a map of nodes: which have the rows of nodes, and what of them some graphs take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wellposed._torch import pytree
from wellposed._tree import first_tensor


def take_nodes(args: Any, rows: Tensor, batch: int) -> Any:
    """The arguments for some nodes, which are numbered anew.

    Integer tensors of shape (2, edges) are edges if all their entries are numbers of nodes. Other
    tensors belong to nodes or edges by their first dimension, to nodes if both are as many. In a
    dict or a named tuple a name that begins with `edge` or `shared` decides instead. Data of edges
    belong to the edges before them, if there are several of this number.

    Args:
        args: Any structure.
        rows: The nodes. batch: How many nodes there are.
    """
    new = torch.full((batch,), -1, dtype=torch.int64, device=rows.device)
    new[rows] = torch.arange(rows.shape[0], device=rows.device)
    entries, structure = pytree.tree_flatten_with_path(args)
    kept = [(i, (new[leaf] >= 0).all(dim=0)) for i, (_, leaf) in enumerate(entries) if _are_edges(leaf, batch)]

    def take(i: int, path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        if i in dict(kept):
            return new[leaf[:, dict(kept)[i]]]
        name = _name(path)
        if name.startswith("shared"):
            return leaf
        if leaf.shape[0] == batch and not name.startswith("edge"):
            return leaf.index_select(0, rows)
        masks = [(j, mask) for j, mask in kept if mask.shape[0] == leaf.shape[0]]
        before = [mask for j, mask in masks if j < i]
        return leaf[(before or [masks[0][1]])[-1]] if masks else leaf

    return pytree.tree_unflatten([take(i, path, leaf) for i, (path, leaf) in enumerate(entries)], structure)


def _are_edges(leaf: Any, batch: int) -> bool:
    """Whether these are pairs of nodes: other integers, such as words, are data of two nodes."""
    if not (isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.shape[0] == 2 and leaf.dtype == torch.int64):
        return False
    return not leaf.numel() or (int(leaf.min()) >= 0 and int(leaf.max()) < batch)


def tensor_of_rows(x: Any, groups: Any = None) -> Tensor:
    """The tensor of x that has one row for each row of the state.

    That is the first tensor with dimensions whose name does not begin with `edge` or `shared`, if
    there is one; with `groups` the first of these that has as many rows as `groups`. Where all are
    data of edges, `groups` itself has the rows.

    Args:
        x: Any structure. groups: (rows,) the graph of each row, or None.
    """
    first = first_tensor(x)
    if isinstance(x, Tensor):
        return first
    entries = pytree.tree_flatten_with_path(x)[0]
    with_rows = [(path, leaf) for path, leaf in entries if isinstance(leaf, Tensor) and leaf.dim() > 0]
    possible = [leaf for path, leaf in with_rows if not _name(path).startswith(("edge", "shared"))]
    if isinstance(groups, Tensor) and groups.dim() == 1:
        fitting = [leaf for leaf in possible if leaf.shape[0] == groups.shape[0]]
        possible = fitting or possible or [groups]
    return possible[0] if possible else first


def _name(path: Any) -> str:
    """The key or the name of a leaf, if it has one."""
    return str(getattr(path[-1], "key", getattr(path[-1], "name", ""))) if path else ""
