"""GraphCell: against dense algebra, graph by graph, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import wellposed as wp
from wellposed.nn import GraphCell
from wellposed.nn.graph import _normalised

EPS = 2.0**-52


def random_graph(seed: int, nodes: int, edges: int, features: int = 3) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, features, generator=draws, dtype=torch.float64)
    return x, torch.randint(0, nodes, (2, edges), generator=draws)


def make_cell(seed: int, *, scale: float = 3.0, **options: object) -> GraphCell:
    cell = GraphCell(3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        cell.W += scale * torch.randn(5, 5, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return cell


def dense_adjacency(edges: Tensor, nodes: int) -> Tensor:
    A = torch.zeros(nodes, nodes, dtype=torch.float64)
    for source, target in edges.T.tolist():
        A[target, source] += 1
    incoming, outgoing = A.sum(1, keepdim=True), A.sum(0, keepdim=True)
    return A / (incoming * outgoing).sqrt().clamp(min=1)


def joined(*graphs: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """One graph of several, and the graph of each node."""
    offsets = torch.tensor([0, *(len(x) for x, _ in graphs)]).cumsum(0)
    edges = torch.cat([e + offsets[i] for i, (_, e) in enumerate(graphs)], dim=1)
    groups = torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor([len(x) for x, _ in graphs]))
    return (torch.cat([x for x, _ in graphs]), edges), groups


@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 12), edges=st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_the_normalised_adjacency_has_norm_at_most_one(seed: int, nodes: int, edges: int) -> None:
    _, ends = random_graph(seed, nodes, edges)
    A = dense_adjacency(ends, nodes)
    weights = _normalised(ends, nodes, torch.float64)
    ours = torch.zeros(nodes, nodes, dtype=torch.float64).index_put((ends[1], ends[0]), weights, accumulate=True)
    torch.testing.assert_close(ours, A, rtol=64 * EPS, atol=0)
    assert float(torch.linalg.matrix_norm(ours, ord=2)) <= 1 + 8 * nodes * EPS


@given(seed=st.integers(0, 10**6), condition=st.sampled_from(["norm", "perron_frobenius"]))
@settings(max_examples=30, deadline=None)
def test_the_condition_holds_for_every_parameter(seed: int, condition: str) -> None:
    W = make_cell(seed, condition=condition, bound=0.9).recurrent().detach()
    if condition == "norm":
        assert float(torch.linalg.matrix_norm(W, ord=2)) <= 0.9 * (1 + 8 * EPS)
    else:
        assert float(W.abs().sum(1).max()) <= 0.9 * (1 + 8 * EPS)
        _, ends = random_graph(seed, 6, 15)
        product = torch.kron(dense_adjacency(ends, 6), W.abs())  # of |A| x |W|, row by row
        assert float(torch.linalg.eigvals(product).abs().max()) <= 0.9 * (1 + 1e-12)


@pytest.mark.parametrize("condition", ["norm", "perron_frobenius"])
def test_value_and_gradient_against_dense_algebra(condition: str) -> None:
    """With the linear activation z = (I - A x W)^-1 (X U^T), and autograd through the inverse."""
    cell = GraphCell(
        3, 5, wp.nn.Identity(), condition=condition, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        cell.W += torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x, edges = random_graph(3, 8, 20)
    x.requires_grad_()
    z = wp.EquilibriumLayer(cell, on_failure="raise")((x, edges))
    system = torch.eye(40, dtype=torch.float64) - torch.kron(dense_adjacency(edges, 8), cell.recurrent())
    dense = torch.linalg.solve(system, (x @ cell.U.T).reshape(-1)).reshape(8, 5)
    torch.testing.assert_close(z, dense, rtol=1e-10, atol=1e-10)
    wanted = (x, cell.W, cell.U)
    weights = torch.randn(8, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours = torch.autograd.grad((z * weights).sum(), wanted)
    for a, b in zip(ours, torch.autograd.grad((dense * weights).sum(), wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_batch_of_graphs_equals_the_graphs_one_by_one() -> None:
    """Values, gradients, statuses; graphs that converge early leave the computation."""
    cell = make_cell(0, bound=0.9)
    graphs = [random_graph(seed, nodes, edges) for seed, nodes, edges in [(0, 4, 6), (1, 9, 30), (2, 1, 0), (3, 6, 5)]]
    x, groups = joined(*graphs)
    layer = wp.EquilibriumLayer(cell, wp.Picard(), on_failure="raise", max_steps=2000)
    z = layer(x, groups=groups)
    assert layer.last_solution is not None and len(layer.last_solution.status) == 4
    assert len(set(layer.last_solution.num_steps.tolist())) > 1
    alone = torch.cat([layer(graph) for graph in graphs])
    torch.testing.assert_close(z, alone, rtol=1e-9, atol=1e-10)
    gradients = [torch.autograd.grad(value.square().sum(), cell.W)[0] for value in (z, alone)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


def test_the_contraction_factor_holds() -> None:
    cell = make_cell(5, bound=0.8)
    x = random_graph(5, 7, 20)
    draws = torch.Generator().manual_seed(0)
    for _ in range(20):
        a, b = torch.randn(2, 7, 5, generator=draws, dtype=torch.float64)
        assert float((cell(a, x) - cell(b, x)).detach().norm()) <= 0.8 * float((a - b).norm()) * (1 + 64 * EPS)


def test_bad_input_gets_one_sentence() -> None:
    cell = make_cell(0)
    x, edges = random_graph(0, 4, 6)
    for value, expected in [
        (x, "pair .features, edge_index"),
        ((x[:, :2], edges), r"\(nodes, 3\); got torch.float64, \(4, 2\)"),
        ((x, edges.float()), "int64"),
        ((x, edges + 1), "nodes 0 to 3"),
    ]:
        with pytest.raises((wp.InvalidArgument, wp.InvalidType), match=expected):
            wp.EquilibriumLayer(cell)(value)
    with pytest.raises(wp.InvalidArgument, match="one of norm, perron_frobenius"):
        GraphCell(3, 5, condition="spectral")
    with pytest.raises(wp.InvalidArgument, match="bound"):
        GraphCell(3, 5, bound=1.0)
    crossing = torch.tensor([[0, 1, 2], [1, 2, 3]])
    cell.W.data.zero_()
    cell.W.data[0, 0] = 0.9
    start = torch.zeros(4, 3, dtype=torch.float64)
    start[3] = 1  # the two groups need different numbers of steps
    with pytest.raises(wp.InvalidArgument, match="the edge from node 2 to node 1"):
        wp.EquilibriumLayer(cell, wp.Picard())((start, crossing.flip(0)), groups=torch.tensor([0, 0, 1, 1]))


def test_data_of_pytorch_geometric() -> None:
    geometric = pytest.importorskip("torch_geometric.data", reason="torch_geometric is not installed")
    graphs = [random_graph(seed, 5, 9) for seed in (0, 1)]
    batch = geometric.Batch.from_data_list([geometric.Data(x=x, edge_index=edges) for x, edges in graphs])
    layer = wp.EquilibriumLayer(make_cell(0), on_failure="raise")
    z = layer((batch.x, batch.edge_index), groups=batch.batch)
    torch.testing.assert_close(z, torch.cat([layer(graph) for graph in graphs]), rtol=1e-9, atol=1e-10)


def star(leaves: int) -> Tensor:
    return torch.stack([torch.arange(1, leaves + 1), torch.zeros(leaves, dtype=torch.int64)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("condition", ["norm", "perron_frobenius"])
def test_the_bound_holds_in_low_precision(condition: str, dtype: torch.dtype) -> None:
    """For the numbers as they are stored; a star has more edges than float16 can count.

    The ball of bfloat16 is several per cent smaller: see `Spectral`.
    """
    nodes, width = 4097, 64
    cell = GraphCell(2, width, wp.nn.Identity(), condition=condition, bound=0.95, dtype=dtype)
    with torch.no_grad():
        cell.W.copy_(torch.randn(width, width, generator=torch.Generator().manual_seed(0)))
        W = cell.recurrent()
        assert W.dtype == dtype
        size = torch.linalg.matrix_norm(W.double(), ord=2) if condition == "norm" else W.double().abs().sum(1).max()
        assert 0.8 < float(size) <= 0.95
        cell.W.copy_(0.95 * torch.eye(width))
        a, b = (torch.full((nodes, width), value, dtype=dtype) for value in (0.0, 1.0))
        a[0] = b[0] = 0
        x = torch.zeros(nodes, 2, dtype=dtype), star(nodes - 1)
        ratio = (cell(b, x) - cell(a, x)).double().norm() / (b - a).double().norm()
        assert cell(b, x).dtype == dtype
        assert 0.85 < float(ratio) <= 0.95 * (1 + torch.finfo(dtype).eps)
        layer = wp.EquilibriumLayer(cell, rtol=1e-3, on_failure="raise")
        assert layer((torch.rand(nodes, 2).to(dtype), star(nodes - 1))).dtype == dtype


def test_an_activation_that_expands_is_refused() -> None:
    class Twice(wp.nn.ReLU):
        slope_bounds = (0.0, 2.0)  # type: ignore[assignment]

        def __call__(self, v: Tensor) -> Tensor:
            return 2 * torch.relu(v)

    with pytest.raises(wp.InvalidArgument, match="must be 1-Lipschitz.*the slopes of Twice reach 2"):
        GraphCell(3, 5, Twice())


def test_a_bound_assigned_later_holds() -> None:
    for condition in ("norm", "perron_frobenius"):
        cell = make_cell(0, condition=condition, bound=0.9)
        cell.bound = 0.3
        W = cell.recurrent().detach()
        size = torch.linalg.matrix_norm(W, ord=2) if condition == "norm" else W.abs().sum(1).max()
        assert 0.29 < float(size) <= 0.3 and "bound=0.3" in repr(cell)
        with pytest.raises(wp.InvalidArgument, match="'bound'"):
            cell.bound = 1.0


def test_features_of_another_dtype_get_one_sentence() -> None:
    x, edges = random_graph(0, 4, 6)
    with pytest.raises(wp.InvalidType, match="has torch.float64 parameters and got features of torch.bfloat16"):
        make_cell(0)(torch.zeros(4, 5, dtype=torch.float64), (x.bfloat16(), edges))
