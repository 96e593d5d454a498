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
    """A solve of n evaluations ends at the (n-2)-th iterate: one evaluation measures it, one confirms."""
    states = wp.nn.trajectory(layer(solver=wp.Picard()), X, states=[4])
    z = torch.zeros_like(X)
    for _ in range(2):
        z = torch.tanh(z @ W + X)
    assert len(states) == 2 and (states[0] - z).abs().max() <= 1e-14


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


def test_correction_loss_is_the_weighted_sum() -> None:
    states = [gaussian(3, 2, seed=k) for k in range(4)]
    y = gaussian(3, 2, seed=9)
    by_hand = sum(0.7 ** (3 - k) * (z - y).square().sum() for k, z in enumerate(states))
    ours = wp.nn.correction_loss(lambda z, y: (z - y).square().sum(), states, y, gamma=0.7)
    assert abs(float(ours - by_hand)) <= 1e-13 * float(by_hand)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"states": 0}, "integer of at least 1, or rising numbers"),
        ({"states": [5, 3]}, r"rising numbers of evaluations; got \[5, 3\]"),
        ({"states": "3"}, "rising numbers"),
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
