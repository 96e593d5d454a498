"""Groups of rows: one equilibrium per graph, the same as graph by graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from conformance import every_method
from problems import gaussian
from wellposed.solve._graph_data import take_nodes

F64 = torch.float64
SIZES = (3, 1, 6, 4)
W = 0.4 * gaussian(3, 3, seed=0) / torch.linalg.matrix_norm(gaussian(3, 3, seed=0), 2)


def graph(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """(2, edges) a ring and random chords; (size, 3) the input of its nodes, of another scale for each graph."""
    nodes = torch.arange(size)
    chords = torch.randint(size, (2, size), generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.stack([nodes, nodes.roll(1)]), chords], dim=1), gaussian(size, 3, seed=seed) * 10.0 ** (seed - 2)


def cell(z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
    """tanh of W times the mean over the neighbours, and an input."""
    x, edges = x
    degree = torch.zeros(len(z), dtype=z.dtype).index_add(0, edges[1], torch.ones(edges.shape[1], dtype=z.dtype))
    mean = torch.zeros_like(z).index_add(0, edges[1], z[edges[0]]) / degree.clamp_min(1).unsqueeze(1)
    return torch.tanh(mean @ W.T + 0.5 * z) + x


def batch() -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    graphs = [graph(size, seed) for seed, size in enumerate(SIZES)]
    starts = torch.tensor((0, *SIZES[:-1])).cumsum(0)
    edges = torch.cat([e + start for (e, _), start in zip(graphs, starts, strict=True)], dim=1)
    groups = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    return torch.cat([x for _, x in graphs]), edges, groups, graphs


@every_method
def test_a_batch_of_graphs_is_solved_graph_by_graph(solver: Any) -> None:
    x, edges, groups, graphs = batch()
    options = {"rtol": 1e-10, "on_failure": "raise"}
    sol = wp.fixed_point(cell, torch.zeros_like(x), solver, args=((x, edges),), groups=groups, **options)
    assert sol.value.shape == x.shape and sol.residual.shape == sol.num_steps.shape == sol.status.shape == (4,)
    for i, (e, part) in enumerate(graphs):
        alone = wp.fixed_point(cell, torch.zeros_like(part), solver, args=((part, e),), coupled=True, **options)
        value = sol.value[groups == i]
        assert int(sol.num_steps[i]) == int(alone.num_steps[0])
        assert (value - alone.value).norm() <= 1e-9 * value.norm()
        fz = cell(value, (part, e))
        assert (fz - value).norm() <= 1.001e-10 * fz.norm()  # the norm of a sample is that of its graph


def test_gradients_are_those_of_each_graph() -> None:
    x, edges, groups, graphs = batch()
    v = gaussian(*x.shape, seed=9)
    layer = wp.EquilibriumLayer(cell, rtol=1e-12, on_failure="raise", state_shape=(3,))
    x.requires_grad_()
    z = layer((x, edges), groups=groups)
    (g,) = torch.autograd.grad(z, x, v)
    assert layer.last_solution.status.shape == layer.last_adjoint.status.shape == (4,) and not layer.last_solution.note
    for i, (e, part) in enumerate(graphs):
        alone = wp.EquilibriumLayer(cell, rtol=1e-12, on_failure="raise", state_shape=(3,), coupled=True)
        part = part.clone().requires_grad_()
        (exact,) = torch.autograd.grad(alone((part, e)), part, v[groups == i])
        assert (g[groups == i] - exact).norm() <= 1e-9 * exact.norm()


def test_second_derivatives_and_other_gradient_modes() -> None:
    x, edges, groups, _ = batch()
    layer = wp.EquilibriumLayer(cell, rtol=1e-13, on_failure="raise", state_shape=(3,))
    few = (x[:4] / x[:4].norm()).requires_grad_()
    small = edges[:, (edges < 4).all(dim=0)]
    call = lambda x: layer((x, small), groups=groups[:4])  # noqa: E731
    assert torch.autograd.gradcheck(call, (few,)) and torch.autograd.gradgradcheck(call, (few,))
    inexact = wp.EquilibriumLayer(cell, gradient=wp.JacobianFree(), state_shape=(3,))
    assert inexact((few, small), groups=groups[:4]).shape == few.shape


def test_finished_graphs_leave() -> None:
    x, edges, groups, _ = batch()
    seen: list[int] = []

    def watched(z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(len(z))
        return cell(z, x)

    sol = wp.fixed_point(watched, torch.zeros_like(x), wp.Picard(), args=((x, edges),), groups=groups, on_failure="raise")
    assert len(set(sol.num_steps.tolist())) > 1
    assert seen[0] == seen[-1] == 14 and min(seen) < 14 and set(seen) <= {14, 13, 11, 10, 9, 8, 7, 6, 5, 4, 3, 1}


def test_captured_edges_work_without_leaving() -> None:
    x, edges, groups, _ = batch()
    by_args = wp.fixed_point(cell, torch.zeros_like(x), args=((x, edges),), groups=groups, rtol=1e-10, on_failure="raise")
    captured = wp.fixed_point(lambda z: cell(z, (x, edges)), torch.zeros_like(x), groups=groups, rtol=1e-10, on_failure="raise")
    assert (by_args.value - captured.value).norm() <= 1e-9 * by_args.value.norm()


def test_graphs_that_depend_on_each_other_are_found() -> None:
    x, edges, groups, _ = batch()
    between = torch.cat([edges, torch.tensor([[0, 13, 5], [13, 0, 3]])], dim=1)  # edges between graphs
    x = x / x.norm(dim=1, keepdim=True)
    with pytest.warns(wp.errors.CoupledRowsWarning, match="Groups depend on each other.*Correct groups or the edges"):
        sol = wp.fixed_point(cell, torch.zeros_like(x), args=((x, between),), groups=groups, rtol=1e-9, on_failure="warn")
    fz = cell(sol.value, (x, between))
    assert sol.converged.all() and (fz - sol.value).norm() <= 1.001e-9 * fz.norm()


@pytest.mark.parametrize(
    ("groups", "error", "match"),
    [
        (torch.tensor([0, 1, 0]), wp.InvalidArgument, r"sorted.*row 2 is in group 0, after a row of group 1.*argsort"),
        (torch.tensor([0, 2, 2]), wp.InvalidArgument, r"without gaps; group 1 has no row"),
        (torch.tensor([1, 1, 2]), wp.InvalidArgument, r"without gaps; group 0 has no row"),
        (torch.tensor([-1, 0, 1]), wp.InvalidArgument, r"numbered 0, 1, 2, \.\.\.; got the index -1"),
        (torch.tensor([0, 0]), wp.InvalidArgument, r"each of the 3 rows; got shape \(2,\)"),
        (torch.tensor([], dtype=torch.int64), wp.InvalidArgument, r"each of the 3 rows; got shape \(0,\)"),
        (torch.tensor([0.0, 0.0, 1.0]), wp.InvalidType, r"tensor of integers.*got torch\.float32"),
        ([0, 0, 1], wp.InvalidType, r"tensor of integers.*got list"),
    ],
)
def test_bad_groups_are_explained(groups: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        wp.fixed_point(lambda z: 0.5 * z + 1, torch.zeros(3, 2), groups=groups)


def test_groups_and_coupled_exclude_each_other() -> None:
    with pytest.raises(wp.InvalidArgument, match="give only one"):
        wp.fixed_point(lambda z: 0.5 * z, torch.zeros(3, 2), groups=torch.tensor([0, 0, 1]), coupled=True)


def test_no_rows() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    sol = wp.fixed_point(lambda z: z, torch.zeros(0, 3), groups=empty)
    assert sol.value.shape == (0, 3) and sol.status.shape == (0,)


def weighted(z: Tensor, x: dict[str, Tensor]) -> Tensor:
    """Every node takes from its neighbours by the weight of the edge, then a map that all graphs share."""
    edges = x["edges"]
    gathered = torch.zeros_like(z).index_add(0, edges[1], x["edge_weight"].unsqueeze(1) * z[edges[0]])
    return torch.tanh(0.5 * gathered @ x["shared_W"][:3] + x["x"])


@pytest.mark.parametrize("chords", [0, 3], ids=["as many edges as nodes", "more edges"])
def test_data_of_edges_and_shared_data(chords: int) -> None:
    """Rings of 3, 4 and 5 nodes have as many edges; their edges stand in another order than their nodes."""
    sizes, starts = (3, 4, 5), (0, 3, 7)
    rings = [torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]) + s for n, s in zip(sizes, starts, strict=True)]
    chord = torch.tensor([[0, 4, 9], [2, 6, 7]])[:, :chords]
    edges = torch.cat([*rings[::-1], chord], dim=1)
    weight, W = gaussian(edges.shape[1], seed=0).abs(), gaussian(12, 3, seed=1) / 3
    x = gaussian(12, 3, seed=2) * torch.tensor([1e-3] * 3 + [0.1] * 4 + [1.0] * 5, dtype=torch.float64).unsqueeze(1)
    groups = torch.tensor([0] * 3 + [1] * 4 + [2] * 5)
    data = {"x": x, "edges": edges, "edge_weight": weight, "shared_W": W}
    seen: list[int] = []

    def watched(z: Tensor, x: dict[str, Tensor]) -> Tensor:
        seen.append(len(z))
        return weighted(z, x)

    sol = wp.fixed_point(watched, torch.zeros_like(x), wp.Picard(), args=(data,), groups=groups, rtol=1e-10, on_failure="raise")
    assert min(seen) < 12, "no graph has left, so nothing was shown"
    for g in range(3):
        nodes, of_g = groups == g, groups[edges[0]] == g
        part = {"x": x[nodes], "edges": edges[:, of_g] - starts[g], "edge_weight": weight[of_g], "shared_W": W}
        alone = wp.fixed_point(weighted, torch.zeros_like(part["x"]), args=(part,), coupled=True, rtol=1e-12)
        assert (sol.value[nodes] - alone.value).norm() <= 1e-8 * alone.value.norm()


def test_what_follows_nodes_edges_or_stays() -> None:
    """By size; by name where sizes agree; of two lists of edges the one before it."""
    edges, others = torch.tensor([[0, 2, 3], [1, 2, 3]]), torch.tensor([[3, 2, 0], [3, 2, 1]])
    four, three = torch.arange(4), torch.arange(3)
    args = (four, edges, three, 7, {"edge_a": three, "shared": four}, others, three)
    taken = take_nodes(args, torch.tensor([2, 3]), 4)
    expected = (four[2:], edges[:, 1:] - 2, three[1:], 7, {"edge_a": three[1:], "shared": four}, others[:, :2] - 2, three[:2])
    assert repr(taken) == repr(expected)
    square = torch.tensor([[0, 1, 3, 2], [1, 0, 2, 3]])
    named = take_nodes(({"edges": square, "edge_weight": four, "x": four},), torch.tensor([0, 1]), 4)[0]
    assert named["edge_weight"].tolist() == [0, 1] and named["x"].tolist() == [0, 1]
    named = take_nodes(({"edges": square.flip(1), "edge_weight": four, "x": four},), torch.tensor([0, 1]), 4)[0]
    assert named["edge_weight"].tolist() == [2, 3] and named["x"].tolist() == [0, 1]


def test_words_of_two_nodes_are_not_edges() -> None:
    words = torch.tensor([[11, 12, 13], [21, 22, 23]])
    assert take_nodes((words, words - 12), torch.tensor([1]), 2)[1].tolist() == [[9, 10, 11]]
    assert take_nodes((words,), torch.tensor([1]), 2)[0].tolist() == [[21, 22, 23]]


def named_cell(z: Tensor, x: Any) -> Tensor:
    edges, nodes = (x["edges"], x["nodes"]) if isinstance(x, dict) else x
    return cell(z, (nodes, edges))


def test_edges_may_stand_before_the_nodes() -> None:
    """The rows of the state are those of `groups`, or of what is not named like data of edges."""
    x, edges, groups, _ = batch()
    wanted = wp.EquilibriumLayer(named_cell, rtol=1e-10)({"nodes": x, "edges": edges}, torch.zeros_like(x), groups)
    layer = wp.EquilibriumLayer(named_cell, rtol=1e-10, state_shape=(3,))
    weights = torch.ones(edges.shape[1])  # of another dtype than the state
    named = {"edge_weight": weights, "edges": edges, "scale": torch.tensor(1.0), "nodes": x}
    for given in (named, (edges, x)):
        assert torch.equal(layer(given, groups=groups), wanted)
    whole = wp.EquilibriumLayer(named_cell, rtol=1e-10, state_shape=(3,), coupled=True)
    assert (whole(named) - wanted).norm() <= 1e-8 * wanted.norm()
    assert len(wp.certify(whole, named).error_bound) == len(x)  # the batch is one sample, with one bound for its rows
    with pytest.raises(wp.InvalidArgument, match=r"one index for each of the 14 rows; got shape \(13,\)"):
        layer(named, groups=groups[1:])


@pytest.mark.parametrize("coupled", [False, True])
def test_rows_of_the_wrong_tensor_are_named(coupled: bool) -> None:
    x, edges, _, _ = batch()
    layer = wp.EquilibriumLayer(named_cell, state_shape=(3,), coupled=coupled)
    for call in (layer, lambda given: wp.certify(layer, given)):
        with pytest.raises(wp.InvalidArgument, match=r"as many rows as the tensor \(2, 28\).*put the nodes first, or give z0"):
            call((edges, x))
