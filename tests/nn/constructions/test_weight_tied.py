"""weight_tied: a perceptron and its equilibrium form have the same outputs, the same gradients, and the same parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import wellposed as wp
from equilibria import F64, normal
from wellposed.nn import weight_tied
from wellposed.nn.constructions import WeightTiedCell


def perceptron(sizes, *, seed=0, scale=1.0, bias=True, relu_last=False, linear_after=()):
    """Linear layers of the given sizes with a ReLU in between, except after those in `linear_after`."""
    modules = []
    for layer, (n, m) in enumerate(zip(sizes, sizes[1:], strict=False)):
        linear = nn.Linear(n, m, bias=bias, dtype=F64)
        linear.weight.data = normal(m, n, seed=seed + 2 * layer, scale=scale)
        if bias:
            linear.bias.data = normal(m, seed=seed + 2 * layer + 1)
        modules.append(linear)
        last = layer == len(sizes) - 2
        if relu_last if last else layer not in linear_after:
            modules.append(nn.ReLU())
    return nn.Sequential(*modules)


def layer_of(cell, **options):
    options = {"solver": wp.Picard(), "gradient": wp.ImplicitGradient(wp.Picard()), "on_failure": "raise", **options}
    return wp.EquilibriumLayer(cell, max_steps=options.pop("max_steps", cell.depth + 1), **options)


def agree(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, float(b.detach().abs().max())))


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=7),
    seed=st.integers(0, 10**6),
    scale=st.floats(0.1, 5.0),
    bias=st.booleans(),
    relu_last=st.booleans(),
    skip=st.sets(st.integers(0, 5)),
)
def test_outputs_and_gradients_for_any_perceptron(sizes, seed, scale, bias, relu_last, skip):
    mlp = perceptron(sizes, seed=seed, scale=scale, bias=bias, relu_last=relu_last, linear_after=skip)
    cell, x = weight_tied(mlp), normal(4, sizes[0], seed=seed + 99).requires_grad_()
    layer, v = layer_of(cell), normal(4, sizes[-1], seed=seed + 100)
    y = cell.output(layer(x))
    agree(y, mlp(x))
    leaves = [x, *mlp.parameters()]
    ours = torch.autograd.grad((y * v).sum(), leaves)
    theirs = torch.autograd.grad((mlp(x) * v).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        agree(a, b)
    assert int(layer.last_solution.num_steps.max()) <= cell.depth + 2  # not every step is measured


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_exactly_after_as_many_steps_as_layers_and_from_any_start(depth):
    mlp = perceptron([3] + [5] * depth, scale=3.0)
    cell, x = weight_tied(mlp), normal(4, 3, seed=50)
    for start in (torch.zeros(4, 5 * depth, dtype=F64), normal(4, 5 * depth, seed=51, scale=1e3)):
        z = start
        for step in range(1, depth + 1):
            z = cell(z, x)
            hidden = x
            for layer in range(step):  # after k steps the first k layers are right
                hidden = mlp[2 * layer](hidden)
                hidden = torch.relu(hidden) if layer < depth - 1 else hidden
                agree(z[:, 5 * layer : 5 * (layer + 1)], hidden)
        agree(cell.output(z), mlp(x))
        assert torch.equal(cell(z, x), z)  # and nothing moves any more
    if depth > 1:
        early = torch.zeros(4, 5 * depth, dtype=F64)
        for _ in range(depth - 1):
            early = cell(early, x)
        assert not torch.allclose(cell.output(early), mlp(x))


def test_the_matrix_is_nilpotent_whatever_its_norm():
    cell = weight_tied(perceptron([3, 4, 5, 2], scale=10.0))
    W = cell.recurrent()
    assert W.shape == (11, 11) and float(torch.linalg.matrix_norm(W.detach(), 2)) > 10
    assert not torch.linalg.matrix_power(W, 3).any() and torch.linalg.matrix_power(W, 2).any()
    assert torch.equal(W[4:9, :4], cell.W_2) and torch.equal(W[9:, 4:9], cell.W_3)


@pytest.mark.parametrize("solver", [wp.Picard(), wp.Auto(), wp.NewtonKrylov()], ids=lambda s: type(s).__name__)
def test_other_solvers_find_it_too(solver):
    mlp = perceptron([3, 6, 6, 6, 2], scale=0.7)
    cell, x = weight_tied(mlp), normal(5, 3, seed=9)
    layer = wp.EquilibriumLayer(cell, solver, on_failure="raise")
    agree(cell.output(layer(x)), mlp(x), 1e-9)
    for a, b in zip(
        torch.autograd.grad(cell.output(layer(x)).sum(), list(mlp.parameters())),
        torch.autograd.grad(mlp(x).sum(), list(mlp.parameters())),
        strict=True,
    ):
        agree(a, b, 1e-9)


def test_a_deep_one():
    mlp = perceptron([4] + [8] * 30, scale=8**-0.5)
    cell, x = weight_tied(mlp), normal(3, 4, seed=9)
    y = cell.output(layer_of(cell)(x))
    agree(y, mlp(x))
    ours = torch.autograd.grad(y.sum(), list(mlp.parameters()))
    for a, b in zip(ours, torch.autograd.grad(mlp(x).sum(), list(mlp.parameters())), strict=True):
        agree(a, b)


def test_second_derivatives():
    mlp = perceptron([2, 3, 1])
    cell = weight_tied(mlp)
    options = {"gradient": wp.ImplicitGradient(), "max_steps": cell.depth + 2}  # one evaluation confirms a second derivative
    layer, x = layer_of(cell, **options), normal(2, 2, seed=7).requires_grad_()

    def penalty(y):
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), list(mlp.parameters()), allow_unused=True)

    for a, b in zip(penalty(cell.output(layer(x))), penalty(mlp(x)), strict=True):
        agree(a, b, 1e-9)


def test_parameters_are_shared_and_training_one_trains_the_other():
    mlp = perceptron([3, 5, 2])
    cell, x = weight_tied(mlp), normal(4, 3, seed=9)
    assert {id(p) for p in cell.parameters()} == {id(p) for p in mlp.parameters()}
    layer, optimizer = layer_of(cell), torch.optim.SGD(cell.parameters(), lr=0.01)
    before = mlp(x).detach()
    for _ in range(3):
        optimizer.zero_grad()
        cell.output(layer(x)).square().sum().backward()
        optimizer.step()
    assert bool(mlp(x).square().sum() < before.square().sum())
    agree(cell.output(layer(x)), mlp(x))


def test_lists_of_tensors():
    weights, biases = [normal(5, 3), normal(2, 5, seed=1)], [normal(5, seed=2), None]
    x = normal(4, 3, seed=3)
    cell = weight_tied(weights, biases)
    assert not list(cell.parameters())
    agree(cell.output(layer_of(cell)(x)), torch.relu(x @ weights[0].T + biases[0]) @ weights[1].T)
    agree(weight_tied(weights).output(layer_of(weight_tied(weights))(x)), torch.relu(x @ weights[0].T) @ weights[1].T)
    leaves = [w.clone().requires_grad_() for w in weights]
    cell = weight_tied(leaves)
    ours = torch.autograd.grad(cell.output(layer_of(cell)(x)).sum(), leaves)
    theirs = torch.autograd.grad((torch.relu(x @ leaves[0].T) @ leaves[1].T).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        agree(a, b)


def test_state_dict_copy_and_dtype():
    cell, x = weight_tied(perceptron([3, 5, 2])), normal(4, 3, seed=9)
    y = cell.output(layer_of(cell)(x))
    assert set(cell.state_dict()) == {"W_1", "b_1", "W_2", "b_2"}
    other = weight_tied(perceptron([3, 5, 2], seed=7))
    other.load_state_dict(cell.state_dict())
    agree(other.output(layer_of(other)(x)), y)
    single = copy.deepcopy(cell).float()
    agree(single.output(layer_of(single)(x.float())).double(), y, 1e-5)
    half = copy.deepcopy(cell).bfloat16()
    z = layer_of(half)(x.bfloat16())
    assert z.dtype == torch.bfloat16
    agree(half.output(z).double(), y, 0.1)


def test_jacobian_of_its_map_is_that_of_autograd():
    cell, x = weight_tied(perceptron([3, 4, 2], linear_after={0})), normal(3, 3, seed=9)
    z, u = normal(3, 6, seed=10), normal(3, 6, seed=11)
    ours, theirs = cell.bind(x).jacobian(z), wp.linalg.Jacobian(lambda z: cell(z, x), z)
    agree(ours.mv(u), theirs.mv(u))
    agree(ours.rmv(u), theirs.rmv(u))
    agree(cell.bind(x)(z.clone()), cell(z, x).detach())


def test_what_is_refused():
    W = normal(3, 3)
    with pytest.raises(wp.errors.InvalidType, match="module 1 is Tanh"):
        weight_tied(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    with pytest.raises(wp.errors.InvalidType, match="begins with an nn.Linear; module 0 is ReLU"):
        weight_tied(nn.Sequential(nn.ReLU(), nn.Linear(3, 3)))
    with pytest.raises(wp.errors.InvalidType, match="got Linear"):
        weight_tied(nn.Linear(3, 3))
    with pytest.raises(wp.errors.InvalidType, match="got Tensor"):
        weight_tied(W)
    with pytest.raises(wp.errors.InvalidArgument, match="at least one weight"):
        weight_tied(nn.Sequential())
    with pytest.raises(wp.errors.InvalidArgument, match="2 weights and 1 biases"):
        weight_tied([W, W], [None])
    with pytest.raises(wp.errors.InvalidArgument, match=r"W_2 must have shape \(n, 3\); got \(3, 4\)"):
        weight_tied([W, normal(3, 4)])
    with pytest.raises(wp.errors.InvalidArgument, match=r"W_1 must have shape .*got \(3,\)"):
        weight_tied([normal(3), W])
    with pytest.raises(wp.errors.InvalidArgument, match=r"b_1 must have shape \(3,\); got \(2,\)"):
        weight_tied([W], [normal(2)])
    with pytest.raises(wp.errors.InvalidType, match="one dtype"):
        weight_tied([W, W.float()])
    with pytest.raises(wp.errors.InvalidType, match="must be tensors"):
        weight_tied([[1.0, 2.0]])
    with pytest.raises(wp.errors.InvalidArgument, match="has its own"):
        weight_tied(nn.Sequential(nn.Linear(3, 3)), [None])
    layer = layer_of(weight_tied([W, W]))
    with pytest.raises(wp.errors.InvalidArgument, match=r"WeightTiedCell expects x of shape \(batch, 3\); got \(2, 4\)"):
        layer(normal(2, 4))
    with pytest.raises(wp.errors.InvalidType, match="float64 weights and got x of torch.float32"):
        layer(normal(2, 3).float())


def test_its_name_shows_its_widths():
    cell = weight_tied(perceptron([3, 5, 2]))
    assert isinstance(cell, WeightTiedCell) and repr(cell) == "WeightTiedCell(3, widths=(5, 2))"
    assert cell.widths == (5, 2) and cell.depth == 2 and cell.in_features == 3
