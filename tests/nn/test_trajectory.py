"""States along the trajectory: where they are, their gradients, and the loss of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wellposed as wp
from problems import gaussian

W, X = 0.3 * gaussian(4, 4, seed=0), gaussian(5, 4, seed=1)


def layer(**options: Any) -> wp.EquilibriumLayer:
    return wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W + x), on_failure="raise", rtol=1e-10, **options)


@pytest.mark.parametrize("solver", [wp.Picard(), wp.Anderson(), wp.Auto()], ids=repr)
def test_states_approach_the_equilibrium(solver: wp.solve.AbstractSolver) -> None:
    own = layer(solver=solver)
    states = wp.nn.trajectory(own, X, states=4)
    exact = own(X)
    distances = [float((z - exact).detach().norm()) for z in states]
    assert len(states) == 4 and distances[-1] == 0 and distances == sorted(distances, reverse=True)
    assert own.last_solution is not None and own.last_solution.converged.all()


def test_plain_steps_are_the_plain_iterates() -> None:
    """The state after k evaluations is the k-th iterate, however near the marks are to each other."""
    for marks in ([1, 2, 3, 4], [4], [2, 5]):
        states = wp.nn.trajectory(layer(solver=wp.Picard()), X, states=marks)
        assert len(states) == len(marks) + 1
        z, iterates = torch.zeros_like(X), []
        for _ in range(max(marks)):
            z = torch.tanh(z @ W + X)
            iterates.append(z)
        for mark, state in zip(marks, states, strict=False):
            assert (state - iterates[mark - 1]).abs().max() <= 1e-14


def test_states_have_the_dtype_of_the_equilibrium() -> None:
    own = wp.EquilibriumLayer(wp.nn.DenseCell(4, 4, dtype=torch.bfloat16), rtol=1e-2)
    assert {z.dtype for z in own(X.bfloat16(), states=3)} == {torch.bfloat16}


def test_gradients_of_the_states_are_those_of_one_step() -> None:
    x = X.clone().requires_grad_()
    first, last = wp.nn.trajectory(layer(), x, states=[5])
    v = gaussian(5, 4, seed=2)
    step = torch.tanh(first.detach() @ W + x)
    (ours,), (theirs,) = torch.autograd.grad(first, x, v), torch.autograd.grad(step, x, v)
    assert (ours - theirs).abs().max() <= 1e-12
    (exact,) = torch.autograd.grad(layer()(x), x, v)
    assert (torch.autograd.grad(last, x, v)[0] - exact).abs().max() <= 1e-8
    with torch.no_grad():
        assert not any(z.requires_grad for z in wp.nn.trajectory(layer(), x))


@pytest.mark.parametrize("cell", [wp.nn.DenseCell(4, 6, wp.nn.Tanh()), None], ids=["dense", "coupled"])
def test_built_in_and_coupled_cells(cell: Any) -> None:
    own = wp.EquilibriumLayer(cell or (lambda z, x: 0.5 * z.mean(0) + x), coupled=cell is None, on_failure="raise")
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    states = wp.nn.trajectory(own, x)
    assert len(states) == 3 and all(z.shape == states[-1].shape for z in states)
    wp.nn.correction_loss(lambda z: z.square().mean(), states).backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("states", [1, 3, [2, 5]])
def test_states_of_the_layer_are_the_trajectory(states: Any) -> None:
    x = X.clone().requires_grad_()
    own = layer()
    ours, theirs = own(x, states=states), wp.nn.trajectory(own, x, states=states)
    assert len(ours) == len(theirs) == (states if isinstance(states, int) else len(states) + 1)
    v = gaussian(5, 4, seed=2)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) and torch.equal(torch.autograd.grad(a, x, v)[0], torch.autograd.grad(b, x, v)[0])
    with pytest.raises(wp.InvalidArgument, match="integer of at least 1, or rising numbers"):
        own(x, states=0)


def test_states_of_groups_are_those_of_each_group() -> None:
    """Two graphs of 2 and 3 nodes, each node drawn to the mean of its graph."""
    groups = torch.tensor([0, 0, 1, 1, 1])

    def cell(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if len(z) == 5:
            mean = torch.cat([z[:2].mean(0).expand(2, -1), z[2:].mean(0).expand(3, -1)])
        else:
            mean = z.mean(0)
        return 0.5 * torch.tanh(mean) + x

    together = wp.EquilibriumLayer(cell, wp.Picard(), on_failure="raise")(X, groups=groups, states=[4])
    for rows in (slice(0, 2), slice(2, 5)):
        alone = wp.EquilibriumLayer(cell, wp.Picard(), coupled=True, on_failure="raise")(X[rows], states=[4])
        assert all((a[rows] - b).abs().max() <= 1e-11 for a, b in zip(together, alone, strict=True))


def test_correction_loss_is_the_weighted_sum() -> None:
    states = [gaussian(3, 2, seed=k) for k in range(4)]
    y = gaussian(3, 2, seed=9)
    by_hand = sum(0.7 ** (3 - k) * (z - y).square().sum() for k, z in enumerate(states))
    ours = wp.nn.correction_loss(lambda z, y: (z - y).square().sum(), states, y, gamma=0.7)
    assert abs(float(ours - by_hand)) <= 1e-13 * float(by_hand)


def test_the_start_comes_after_x_as_in_the_layer() -> None:
    own, start = layer(), torch.ones_like(X)
    given, named = wp.nn.trajectory(own, X, start, states=2), wp.nn.trajectory(own, X, z0=start, states=2)
    assert len(given) == 2 and all(torch.equal(a, b) for a, b in zip(given, named, strict=True))
    assert not torch.equal(given[0], wp.nn.trajectory(own, X, states=2)[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"states": 0}, "integer of at least 1, or rising numbers"),
        ({"states": [5, 3]}, r"rising numbers of evaluations; got \[5, 3\]"),
        ({"states": "3"}, "rising numbers"),
        ({"states": torch.zeros(9, 9)}, r"rising numbers of evaluations; got Tensor of shape \(9, 9\)\."),
        ({"gradient": wp.UnrolledGradient(2)}, r"take a gradient such as JacobianFree\(\)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(wp.WellposedError, match=message):
        wp.nn.trajectory(layer(), X, **arguments)
    with pytest.raises(wp.InvalidType, match="needs an EquilibriumLayer"):
        wp.nn.trajectory(lambda x: x, X)
    with pytest.raises(wp.InvalidArgument, match="at least one state"):
        wp.nn.correction_loss(torch.sum, [])
