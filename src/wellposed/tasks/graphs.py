"""Classes of the nodes of graphs, read off an equilibrium."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.implicit import ImplicitGradient
from wellposed.nn import EquilibriumLayer, GraphCell
from wellposed.nn.pretrained import Pretrained
from wellposed.solve import Picard


class NodeClassifier(Pretrained):
    r"""Logits of every node: V norm(z) + v on the equilibrium z = s(A z W^T + X U^T) of its graph.

        >>> import torch, wellposed as wp
        >>> model = wp.tasks.NodeClassifier(3, 16, 2)
        >>> features, edges = torch.randn(4, 3), torch.tensor([[0, 1, 2], [1, 2, 3]])
        >>> model(features, edges).shape
        torch.Size([4, 2])

    The equilibrium exists and is unique for all parameters: see `wellposed.nn.GraphCell`. What a
    node receives from k edges away has a factor of at most bound^k, hence the normalization of each
    node before the linear read-out. `rtol` is relative to all states of a graph: nodes at the end
    of long paths need a smaller one.

    Args:
        in_features, width, classes: Features and states of a node, outputs.
        bound, condition: Of the cell.
        rtol, max_steps, on_failure: As for `EquilibriumLayer`.
        generator, device, dtype: Of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        classes: int,
        *,
        bound: float = 0.99,
        condition: str = "norm",
        rtol: float = 1e-5,
        max_steps: int = 2000,
        on_failure: Any = "warn",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        cell = GraphCell(in_features, width, bound=bound, condition=condition, generator=generator, **made)
        gradient = ImplicitGradient(Picard())
        self.layer = EquilibriumLayer(cell, Picard(), gradient, rtol=rtol, max_steps=max_steps, on_failure=on_failure)
        # far from the source a state is small, and its variance is the square of that
        self.norm = nn.LayerNorm(width, eps=1e-24 if dtype == torch.float64 else 1e-12, **made)
        self.head = nn.Linear(width, classes, **made)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(classes, width, generator=generator, **made) / math.sqrt(width))
            self.head.bias.zero_()

    def forward(self, x: Any, edge_index: Tensor | None = None, groups: Tensor | None = None) -> Tensor:
        """(nodes, classes) logits; of chains (n, classes, length).

        Args:
            x: (nodes, d) features. Without edges (n, length, d): chains, with an edge from every
                node to the next. Or a `Data` or `Batch` object of PyTorch Geometric alone, without
                `edge_weight` and `edge_attr`.
            edge_index: (2, edges) sources and targets.
            groups: (nodes,) the graph of each node, `batch` of PyTorch Geometric.
        """
        if edge_index is None and groups is None and hasattr(x, "edge_index"):
            weighted = [name for name in ("edge_weight", "edge_attr") if getattr(x, name, None) is not None]
            if weighted:
                raise InvalidArgument(
                    f"NodeClassifier takes edges without weights or features, and this graph has {weighted[0]}. To do without "
                    "it, call model(data.x, data.edge_index, data.batch)."
                )
            x, edge_index, groups = x.x, x.edge_index, getattr(x, "batch", None)
        if not isinstance(x, Tensor):
            raise InvalidType(
                f"NodeClassifier expects a tensor of features, or a graph with x and edge_index; got {type(x).__name__}."
            )
        if edge_index is not None:
            logits: Tensor = self.head(self.norm(self.layer((x, edge_index), groups=groups)))
            return logits
        if x.dim() != 3:
            raise InvalidArgument(
                f"NodeClassifier without edges takes chains of shape (n, length, features); got {tuple(x.shape)}. For other "
                "graphs give (nodes, features) and edge_index."
            )
        n, length, _ = x.shape
        return self(x.flatten(0, 1), *chain_edges(n, length, x.device)).unflatten(0, (n, length)).movedim(2, 1)


def chain_edges(n: int, length: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """The edges of n chains, each from a node to the next, and the chain of every node."""
    nodes = torch.arange(n * length, device=device).reshape(n, length)
    edges = torch.stack([nodes[:, :-1].reshape(-1), nodes[:, 1:].reshape(-1)])
    return edges, torch.arange(n, device=device).repeat_interleave(length)
