"""NodeClassifier: chains against edges, batches against single graphs, learning at seconds size."""

from __future__ import annotations

import types

import pytest
import torch

import wellposed as wp
from wellposed.tasks.graphs import chain_edges


def make(dtype: torch.dtype = torch.float32, **options: object) -> wp.tasks.NodeClassifier:
    generator = torch.Generator().manual_seed(0)
    model = wp.tasks.NodeClassifier(20, 24, 20, generator=generator, dtype=dtype, on_failure="raise", **options)
    with torch.no_grad():  # a cell that is not a multiple of the identity
        model.layer.cell.W += 0.05 * torch.randn(24, 24, generator=generator, dtype=dtype)
    return model


def test_a_batch_equals_its_graphs_one_by_one() -> None:
    model, data = make(torch.float64, rtol=1e-12), wp.data.load("chains", n=6, size=30, dtype=torch.float64)
    together = model(data.X)
    assert together.shape == (6, 20, 30)
    alone = torch.cat([model(x.unsqueeze(0)) for x in data.X])
    assert float((together - alone).detach().abs().max()) <= 1e-6


def test_every_reported_equilibrium_is_one() -> None:
    """Its residual by one more evaluation of the formula, in float64."""
    model, data = make(), wp.data.load("chains", n=5, size=40)
    model(data.X)
    solution, cell = model.layer.last_solution, model.layer.cell
    assert solution is not None and bool(solution.converged.all())
    A = torch.diag(torch.ones(39, dtype=torch.float64), -1)
    Z = solution.value.double().reshape(5, 40, 24)
    image = torch.relu(A @ Z @ cell.recurrent().double().T + data.X.double() @ cell.U.double().T)
    residual = (image - Z).flatten(1).norm(dim=1) / image.flatten(1).norm(dim=1)
    assert float(residual.detach().max()) <= 1.1e-5


def test_chains_are_graphs_with_an_edge_to_the_next_node() -> None:
    edges, groups = chain_edges(2, 3)
    assert edges.tolist() == [[0, 1, 3, 4], [1, 2, 4, 5]] and groups.tolist() == [0, 0, 0, 1, 1, 1]
    model, data = make(), wp.data.load("chains", n=2, size=3)
    by_edges = model(data.X.flatten(0, 1), edges, groups).reshape(2, 3, 20).movedim(2, 1)
    assert torch.equal(model(data.X), by_edges)
    with pytest.raises(wp.InvalidArgument, match=r"\(n, length, features\); got \(6, 20\)"):
        model(data.X.flatten(0, 1))


def test_a_class_is_carried_over_twenty_edges() -> None:
    generator = torch.Generator().manual_seed(0)
    model = wp.tasks.NodeClassifier(20, 32, 20, generator=generator, on_failure="raise")
    data = wp.data.load("chains", n=20, n_test=20, size=21, noise=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data.X), data.y).backward()
        optimizer.step()
    assert data.X_test is not None
    with torch.no_grad():
        right = model(data.X_test).argmax(1) == data.y_test
    assert float(right[:, -1].float().mean()) >= 0.7  # far beyond the reach of five layers, which is chance, 0.05


def test_data_of_pytorch_geometric() -> None:
    geometric = pytest.importorskip("torch_geometric.data", reason="torch_geometric is not installed")
    model, data = make(), wp.data.load("chains", n=3, size=9)
    edges, _ = chain_edges(1, 9)
    batch = geometric.Batch.from_data_list([geometric.Data(x=x, edge_index=edges) for x in data.X])
    logits = model(batch.x, batch.edge_index, batch.batch)
    torch.testing.assert_close(logits.reshape(3, 9, 20).movedim(2, 1), model(data.X), rtol=1e-5, atol=1e-5)


def test_bad_input_gets_one_sentence() -> None:
    for x, seen in ((None, "NoneType"), ([1.0], "list")):
        with pytest.raises(wp.InvalidType, match=f"a tensor of features, or a graph with x and edge_index; got {seen}"):
            make()(x)


def test_an_object_with_features_and_edges_is_a_graph() -> None:
    model, data = make(), wp.data.load("chains", n=2, size=3)
    edges, groups = chain_edges(2, 3)
    graph = types.SimpleNamespace(x=data.X.flatten(0, 1), edge_index=edges, batch=groups)
    assert torch.equal(model(graph), model(graph.x, edges, groups))
    assert model.layer.last_solution is not None and len(model.layer.last_solution.status) == 2
    graph.batch = graph.edge_attr = None
    assert torch.equal(model(graph), model(graph.x, edges))
    for name in ("edge_weight", "edge_attr"):
        weighted = types.SimpleNamespace(x=graph.x, edge_index=edges, **{name: torch.ones(edges.shape[1])})
        with pytest.raises(wp.InvalidArgument, match=f"edges without weights or features, and this graph has {name}"):
            model(weighted)
