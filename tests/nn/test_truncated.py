"""Training by few steps: their value and gradient, the penalty, and what is recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import wellposed as wp
from equilibria import CASES, F64, flat, leaf, like, normal


def written_out(f: Any, z: Tensor, steps: int, recorded: int) -> tuple[Tensor, Tensor]:
    """The state after the steps, and the mean squared relative length of the last one."""
    with torch.no_grad():
        for _ in range(steps - recorded):
            z = f(z)
    for _ in range(recorded):
        z, before = f(z), z
    return z, ((z - before).square().sum(1) / z.detach().square().sum(1)).mean()


@pytest.mark.parametrize("recorded", [1, 3, 5])
@pytest.mark.parametrize(
    "name", ["relu", "tanh, spectral", "function of a tensor with a graph", "module", "tuple", "convolution"]
)
def test_value_penalty_and_gradients_are_those_of_the_steps(name, recorded):
    case = CASES[name]()
    layer = case.layer()
    state, penalty = wp.nn.truncated(layer, case.x, case.z0, steps=5, recorded=recorded)
    start = torch.zeros_like(flat(state)) if case.z0 is None else flat(case.z0)
    rows, expected = written_out(lambda z: flat(layer.cell(like(z, state), case.x)), start, 5, recorded)
    torch.testing.assert_close(flat(state), rows)
    torch.testing.assert_close(penalty, expected)
    v = normal(*rows.shape, seed=9)
    ours = grad([flat(state), 3 * penalty], case.leaves, [v, torch.ones_like(penalty)], retain_graph=True)
    theirs = grad([rows, 3 * expected], case.leaves, [v, torch.ones_like(expected)], retain_graph=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_the_residual_is_recorded_and_few_steps_are_not_a_failure():
    calls = []
    W, x = normal(3, 3, scale=0.3), normal(2, 3, seed=1)

    def cell(z: Tensor, x: Tensor) -> Tensor:
        calls.append(1)
        return torch.tanh(z @ W.T + x)

    layer = wp.EquilibriumLayer(cell, on_failure="raise")
    fz, penalty = wp.nn.truncated(layer, x, steps=4)
    assert len(calls) == 4
    solution = layer.last_solution
    z = solution.value  # before the last step
    torch.testing.assert_close(cell(z, x), fz)
    torch.testing.assert_close(solution.residual, (fz - z).norm(dim=1) / fz.norm(dim=1))
    torch.testing.assert_close(penalty, solution.residual.square().mean())
    assert solution.num_steps.tolist() == [4, 4] and not solution.converged.any() and not layer.failure_counts
    loose = wp.EquilibriumLayer(cell, rtol=0.5)
    wp.nn.truncated(loose, x, steps=4)
    assert bool(loose.last_solution.converged.all())


def test_coupled_rows_and_groups_have_their_residuals():
    def cell(z: Tensor, x: Tensor) -> Tensor:
        return 0.3 * torch.tanh(z.mean(0, keepdim=True)) + x

    x = normal(4, 3, seed=1)
    layer = wp.EquilibriumLayer(cell, coupled=True)
    fz, penalty = wp.nn.truncated(layer, x, steps=3, recorded=2)
    z = layer.last_solution.value
    torch.testing.assert_close(cell(z, x), fz)
    torch.testing.assert_close(penalty, ((fz - z).norm() / fz.norm()).square())
    assert z.shape == (4, 3) and layer.last_solution.residual.shape == (4,)


def test_training_with_the_penalty_makes_the_steps_converge():
    """A map that expands at first: with the penalty alone the residual after the steps falls by a factor of ten."""
    torch.manual_seed(0)
    W, x = leaf(8, 8, scale=0.6), normal(16, 8, seed=1)
    layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W.T + x), on_failure="ignore")
    optimizer = torch.optim.Adam([W], 0.02)
    residuals = []
    for _ in range(60):
        _, penalty = wp.nn.truncated(layer, x, steps=6, recorded=1)
        optimizer.zero_grad()
        penalty.backward()
        optimizer.step()
        residuals.append(float(layer.last_solution.residual.mean()))
    assert residuals[-1] < 0.1 * residuals[0]


def test_an_equilibrium_at_zero_has_no_penalty():
    layer = wp.EquilibriumLayer(lambda z, x: 0.5 * z + x, atol=1e-9)
    x = torch.zeros(2, 3, requires_grad=True)
    _, penalty = wp.nn.truncated(layer, x)
    penalty.backward()
    assert float(penalty.detach()) == 0.0 and bool((x.grad == 0).all())


def test_low_precision_keeps_its_dtype():
    layer = wp.EquilibriumLayer(wp.nn.DenseCell(3, 4, wp.nn.Tanh(), dtype=torch.bfloat16))
    z, penalty = wp.nn.truncated(layer, normal(2, 3, dtype=torch.bfloat16))
    assert z.dtype == torch.bfloat16 and penalty.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda layer, x: wp.nn.truncated(layer.cell, x), "needs an EquilibriumLayer; got DenseCell"),
        (lambda layer, x: wp.nn.truncated(layer, x, steps=2, recorded=3), "'recorded' .* at most steps=2. Got 3"),
        (lambda layer, x: wp.nn.truncated(layer, x, steps=0), "'steps' parameter"),
        (lambda layer, x: torch.func.grad(lambda x: wp.nn.truncated(layer, x)[1])(x), "Call the layer itself"),
    ],
)
def test_bad_arguments_are_explained(make, words):
    layer, x = wp.EquilibriumLayer(wp.nn.DenseCell(3, 4, dtype=F64)), normal(2, 3)
    with pytest.raises(wp.WellposedError, match=words):
        make(layer, x)
