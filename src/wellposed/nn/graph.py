r"""Equilibria on graphs [gu2020]: the states of the nodes are one fixed point per graph.

Nodes are rows. A batch of graphs is one large graph without edges between its parts, and a vector
that says which graph a node belongs to, as in PyTorch Geometric:

    layer = wp.EquilibriumLayer(wp.nn.GraphCell(3, 16))
    z = layer((data.x, data.edge_index), groups=data.batch)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval, check_positive_integer
from wellposed._tree import LOW_PRECISION
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn._activation import check_activation
from wellposed.nn.activations import AbstractActivation, ReLU
from wellposed.nn.cell import AbstractCell
from wellposed.nn.parametrizations import Spectral
from wellposed.solve.map import AbstractMap

#: What bounds W: "norm" its spectral norm, "perron_frobenius" the sums of |W_ij| along rows.
CONDITIONS = ("norm", "perron_frobenius")


class GraphCell(AbstractCell):
    r"""f(Z, (X, E)) = s(A Z W^T + X U^T) for the nodes of graphs with the edges E.

    A is the adjacency matrix with A_ij = 1/sqrt(in_i out_j) for an edge from node j to node i, so
    that |A| <= 1 for every graph, directed or not. W is kept in a ball by a parametrization, for
    all values of its parameter:

    - `condition="norm"`: |W| <= bound < 1. The cell contracts with the factor `bound` in the
      Euclidean norm of all states.
    - `condition="perron_frobenius"`: the largest row sum of |W| is at most bound < 1. The spectral
      radius of |A| x |W| is then at most `bound` [gu2020, Theorem 4.1], and the equilibrium exists
      and is unique.

    Both hold of W as its dtype stores it. In float16 and bfloat16 the cell is computed in float32.

    Args:
        in_features: d, features of a node.
        width: m, states of a node.
        activation: s, 1-Lipschitz; `ReLU()` if not given.
        condition: See above.
        bound: In (0, 1). A state reaches a node k edges away with a factor of at most bound^k.
            It can be assigned later.
        generator, device, dtype: Of the parameters.

    Attributes:
        W: (m, m), `bound` times the identity at the start: nodes pass on what they receive.
        U: (m, d).

    Examples:
        >>> import torch, wellposed as wp
        >>> cell = wp.nn.GraphCell(3, 16, bound=0.9)
        >>> layer = wp.EquilibriumLayer(cell, coupled=True)
        >>> X, edges = torch.ones(4, 3), torch.tensor([[0, 1, 2], [1, 2, 3]])  # 0 -> 1 -> 2 -> 3
        >>> layer((X, edges)).shape
        torch.Size([4, 16])
    """

    couples_rows = True

    def __init__(
        self,
        in_features: int,
        width: int,
        activation: AbstractActivation | None = None,
        *,
        condition: str = "norm",
        bound: float = 0.95,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive_integer("GraphCell", "in_features", in_features)
        check_positive_integer("GraphCell", "width", width)
        check_interval("GraphCell", "bound", bound, low=0.0, high=1.0, closed="neither")
        activation = check_activation("GraphCell", ReLU() if activation is None else activation)
        if condition not in CONDITIONS:
            raise InvalidArgument(f"The 'condition' of GraphCell must be one of {', '.join(CONDITIONS)}; got {condition!r}.")
        self.in_features, self.width, self.activation = in_features, width, activation
        slope = max(map(abs, activation.slope_bounds))
        if not slope <= 1.0:
            raise InvalidArgument(
                f"The 'activation' parameter of GraphCell must be 1-Lipschitz, or the bound would not hold; the slopes of "
                f"{type(activation).__name__} reach {slope:g}. Divide it by that."
            )
        self.condition = condition
        self._ball = Spectral(bound)
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.W = nn.Parameter(bound * torch.eye(width, **factory_kwargs))
        self.U = nn.Parameter(
            torch.randn(width, in_features, generator=generator, **factory_kwargs) * math.sqrt(2 / in_features)
        )

    @property
    def bound(self) -> float:
        """Of W, in (0, 1); another value holds from the next call on."""
        return self._ball.bound

    @bound.setter
    def bound(self, bound: float) -> None:
        check_interval("GraphCell", "bound", bound, low=0.0, high=1.0, closed="neither")
        self._ball.bound = bound

    def recurrent(self) -> Tensor:
        """(m, m) W inside its ball, as the dtype of the parameter stores it."""
        if self.condition == "norm":
            W: Tensor = self._ball(self.W)
            return W
        V, stored = _lifted(self.W), torch.finfo(self.W.dtype)
        sums = V.abs().sum(dim=1, keepdim=True)
        # of the sums, then of the entries where their dtype is a lower one
        rounding = (self.width + 8) * torch.finfo(V.dtype).eps
        if V.dtype != self.W.dtype:
            rounding += stored.eps * (1 + self.width * stored.tiny / self.bound)
        limit = self.bound * (1 - rounding)
        return (V * torch.where(sums > limit, limit / sums, torch.ones_like(sums))).to(self.W.dtype)

    def state_shape(self, x: Any) -> tuple[int, ...]:
        features, _ = _checked(x, self.in_features)
        return (features.shape[0], self.width)

    def state_dtype(self, x: Any) -> torch.dtype:
        return _checked(x, self.in_features)[0].dtype

    def bind(self, x: Any) -> AbstractMap:
        features, edges = _checked(x, self.in_features)
        features, U = _lifted(features), _lifted(self.U)
        if features.dtype != U.dtype:
            raise InvalidType(
                f"GraphCell has {self.U.dtype} parameters and got features of {x[0].dtype}; convert one, e.g. "
                f"features.to({self.U.dtype})."
            )
        weights = _normalised(edges, features.shape[0], features.dtype)
        return GraphMap(_lifted(self.recurrent()), features @ U.T, edges, weights, self.activation)

    def forward(self, z: Tensor, x: Any) -> Tensor:
        """f(z, x).

        Args:
            z: (nodes, m).
            x: The pair of (nodes, d) features and (2, edges) int64 edges: the row of sources and
                the row of targets.
        """
        return self.bind(x).tracked(_lifted(z)).to(z.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.width}, {self.activation!r}, condition={self.condition!r}, bound={self.bound:g}"


class GraphMap(AbstractMap):
    """z -> s(A z W^T + drive), with A given by its edges.

    Args:
        W: (m, m). drive: (nodes, m).
        edges: (2, edges) sources and targets. weights: (edges,) the entries of A.
        activation: s.
    """

    leaves_at_once = False

    def __init__(self, W: Tensor, drive: Tensor, edges: Tensor, weights: Tensor, activation: AbstractActivation) -> None:
        self._W, self._drive, self._edges, self._weights, self._activation = W, drive, edges, weights, activation

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        sent = z.index_select(0, self._edges[0]) * self._weights.unsqueeze(1)
        mixed = torch.zeros_like(z).index_add(0, self._edges[1], sent)
        return self._activation(torch.addmm(self._drive, mixed, self._W.T))

    def inputs(self) -> tuple[Tensor, ...]:
        return self._W, self._drive

    def with_inputs(self, *inputs: Tensor) -> GraphMap:
        W, drive = inputs
        return GraphMap(W, drive, self._edges, self._weights, self._activation)

    def take(self, rows: Tensor) -> GraphMap:
        """The map of whole graphs, given by their nodes."""
        place = rows.new_full((self._drive.shape[0],), -1)
        place[rows] = torch.arange(len(rows), device=rows.device)
        edges = place[self._edges]
        kept = edges >= 0
        if bool((kept[0] != kept[1]).any()):
            source, target = self._edges[:, int((kept[0] != kept[1]).nonzero()[0])].tolist()
            raise InvalidArgument(
                f"groups must name whole graphs, but the edge from node {source} to node {target} joins two of them."
            )
        inside = kept.all(dim=0)
        return GraphMap(self._W, self._drive[rows], edges[:, inside], self._weights[inside], self._activation)


def _lifted(value: Tensor) -> Tensor:
    """In float32 if the dtype has less digits."""
    return value.float() if value.dtype in LOW_PRECISION else value


def _normalised(edges: Tensor, nodes: int, dtype: torch.dtype) -> Tensor:
    """(edges,) 1/sqrt(in(target) out(source)): a matrix of norm at most 1, by the test of Schur.

    Args:
        edges, nodes: Of the graph.
        dtype: float32 or float64.
    """
    source, target = edges
    ones = torch.ones(edges.shape[1], dtype=torch.int64, device=edges.device)
    count = ones.new_zeros(nodes)  # integers: a float16 count ends at 2048, a bfloat16 one at 256
    leaving, entering = (count.index_add(0, ends, ones).to(dtype) for ends in (source, target))
    # rounded towards zero, so that the bound holds for the numbers as they are stored
    return (leaving[source] * entering[target]).rsqrt() * (1 - 4 * torch.finfo(dtype).eps)


def _checked(x: Any, in_features: int) -> tuple[Tensor, Tensor]:
    """Features and edges of a graph."""
    if not (isinstance(x, (tuple, list)) and len(x) == 2 and all(isinstance(part, Tensor) for part in x)):
        seen = type(x).__name__
        raise InvalidType(
            f"The input of GraphCell must be a pair (features, edge_index); got {seen}. Of a Data object of PyTorch Geometric "
            "give (data.x, data.edge_index)."
        )
    features, edges = x
    if features.dim() != 2 or features.shape[1] != in_features or not features.is_floating_point():
        raise InvalidArgument(
            f"The features of GraphCell must be floating point, (nodes, {in_features}); got {features.dtype}, "
            f"{tuple(features.shape)}."
        )
    if edges.dim() != 2 or edges.shape[0] != 2 or edges.dtype != torch.int64:
        raise InvalidArgument(f"The edges of GraphCell must be int64, (2, edges); got {edges.dtype}, {tuple(edges.shape)}.")
    if edges.numel() and (int(edges.min()) < 0 or int(edges.max()) >= features.shape[0]):
        raise InvalidArgument(
            f"The edges of GraphCell must name nodes 0 to {features.shape[0] - 1}; got {int(edges.min())} to "
            f"{int(edges.max())}."
        )
    return features, edges
