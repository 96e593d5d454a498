"""What docs/solving.md says about evaluations that are counted, and about those that are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from problems import gaussian

W, X = 0.1 * gaussian(10, 10, seed=0), gaussian(6, 10, seed=1)


class Counted(nn.Module):
    def __init__(self, W: Tensor) -> None:
        super().__init__()
        self.calls, self.W = 0, W

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(z @ self.W.T + x)


def after_the_solve(W: Tensor, **options: object) -> tuple[int, int]:
    """Evaluations of a forward pass that are not counted, and those of backward, where no sample leaves before others."""
    cell = Counted(W)
    layer = wp.EquilibriumLayer(cell, wp.Picard(), on_failure="ignore", **options)  # type: ignore[arg-type]
    z = layer(X[:1])
    forward = cell.calls
    z.sum().backward()
    assert layer.last_solution is not None
    return forward - int(layer.last_solution.num_steps.max()), cell.calls - forward


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, (0, 1)),
        ({"max_steps": 5}, (0, 1)),
        ({"max_steps": 1}, (1, 1)),
        ({"gradient": wp.JacobianFree()}, (1, 0)),
        ({"gradient": wp.PhantomGradient(steps=3)}, (3, 0)),
    ],
)
def test_evaluations_that_are_not_counted(captured: bool, options: dict[str, object], more: tuple[int, int]) -> None:
    weight = nn.Parameter(W.clone())
    exact = "gradient" not in options
    assert after_the_solve(weight.tanh() if captured else weight, **options) == (more[0] + (captured and exact), more[1])


def test_backward_evaluates_the_remaining_samples_once_more_when_others_leave() -> None:
    cell = Counted(nn.Parameter(torch.diag(torch.linspace(0.1, 0.97, 10, dtype=torch.float64))))
    layer = wp.EquilibriumLayer(cell)
    z = layer(torch.diag(torch.linspace(0.01, 1, 10, dtype=torch.float64)))
    forward = cell.calls
    z.sum().backward()
    assert cell.calls - forward > 1
