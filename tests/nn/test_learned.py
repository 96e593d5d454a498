"""The learned solver: plain before training, quicker after, and never wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.nn import AndersonWeights, LearnedAnderson, train_learned


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


Q = torch.linalg.qr(torch.randn(6, 6, generator=seeded(3), dtype=torch.float64)).Q
# symmetric with eigenvalues up to 0.95: plain iteration creeps, and there is something to learn
W = (Q * torch.linspace(0.6, 0.95, 6, dtype=torch.float64)) @ Q.T


def cell(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(z @ W.T) + x


def inputs(n: int, seed: int = 0) -> Tensor:
    return 0.3 * torch.randn(n, 6, generator=seeded(seed), dtype=torch.float64)


def test_untrained_is_plain_iteration() -> None:
    x = inputs(5)
    a, b = (
        wp.fixed_point(cell, torch.zeros_like(x), solver, args=(x,), rtol=1e-8, max_steps=500)
        for solver in (LearnedAnderson(AndersonWeights(3, generator=seeded(), dtype=torch.float64)), wp.Picard())
    )
    torch.testing.assert_close(a.value, b.value)
    assert torch.equal(a.num_steps, b.num_steps)


def test_weights_sum_to_one_and_ignore_units() -> None:
    weights = AndersonWeights(3, generator=seeded(), dtype=torch.float64)
    with torch.no_grad():
        weights.W.normal_(generator=seeded(1))
    G = torch.randn(4, 3, 7, generator=seeded(2), dtype=torch.float64)
    for filled in (1, 2, 3):
        part = G * (torch.arange(3) < filled).double().reshape(1, 3, 1)
        alpha, beta = weights(part, filled)
        torch.testing.assert_close(alpha.sum(dim=1), torch.ones(4, dtype=torch.float64))
        assert not alpha[:, filled:].any() and bool(((beta > 0) & (beta < 2)).all())
        Q = torch.linalg.qr(torch.randn(7, 7, generator=seeded(5), dtype=torch.float64)).Q
        for same in (1e3 * part, part @ Q):
            torch.testing.assert_close(weights(same, filled)[0], alpha)


def test_training_makes_new_inputs_quicker() -> None:
    weights = AndersonWeights(3, 16, generator=seeded(), dtype=torch.float64)
    x = inputs(24)
    losses = train_learned(cell, weights, x, z0=torch.zeros_like(x), unroll=6, steps=60, step_size=2e-2)
    assert losses[-1] < 0.6 * losses[0]
    new = inputs(24, seed=9)
    learned, plain = (
        wp.fixed_point(cell, torch.zeros_like(new), solver, args=(new,), rtol=1e-3, max_steps=500)
        for solver in (LearnedAnderson(weights), wp.Picard())
    )
    assert learned.converged.all() and plain.converged.all()
    assert float(learned.num_steps.double().mean()) < 0.7 * float(plain.num_steps.double().mean())


def test_a_start_is_learned_too() -> None:
    torch.manual_seed(0)
    start = nn.Linear(6, 6).double()
    x = inputs(24)
    exact = wp.fixed_point(cell, torch.zeros_like(x), args=(x,)).value
    before = float((start(x) - exact).detach().norm())
    weights = AndersonWeights(2, 8, generator=seeded(), dtype=torch.float64)
    train_learned(cell, weights, x, z0=torch.zeros_like(x), start=start, unroll=3, steps=60, step_size=5e-2)
    assert float((start(x) - exact).detach().norm()) < 0.7 * before


def test_bad_proposals_cost_steps_and_no_truth() -> None:
    weights = AndersonWeights(3, generator=seeded(), dtype=torch.float64)
    with torch.no_grad():
        weights.W.normal_(0.0, 3.0, generator=seeded(1))
    x = inputs(5)
    solution = wp.fixed_point(
        cell, torch.zeros_like(x), LearnedAnderson(weights), args=(x,), rtol=1e-6, max_steps=300, on_failure="ignore"
    )
    gap = (cell(solution.value, x) - solution.value).norm(dim=1) / cell(solution.value, x).norm(dim=1)
    torch.testing.assert_close(gap, solution.residual)
    assert torch.equal(solution.converged, gap <= 1e-6)


def test_works_in_a_layer_with_gradients() -> None:
    weights = AndersonWeights(3, generator=seeded(), dtype=torch.float64)
    layer = wp.EquilibriumLayer(cell, LearnedAnderson(weights), on_failure="raise", max_steps=500)
    x = inputs(3).requires_grad_()
    (found,) = torch.autograd.grad(layer(x).square().sum(), x)
    (expected,) = torch.autograd.grad(wp.EquilibriumLayer(cell)(x).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_bad_arguments() -> None:
    x = inputs(2)
    weights = AndersonWeights(2, generator=seeded(), dtype=torch.float64)
    with pytest.raises(wp.NotConverged, match="2 of 2 samples have no equilibrium"):
        train_learned(lambda z, x: 2 * z + 1, weights, x, z0=torch.zeros_like(x), max_steps=5)
    with pytest.raises(wp.InvalidArgument, match="'memory'"):
        AndersonWeights(0)
