"""A cell made by torch.compile: derivatives of both orders are those of the function that was compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import wellposed as wp
from problems import gaussian

# torch.compile's own: deprecated modules that it imports, and its look at .grad of tensors that cross a graph break.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def derivatives(z: Tensor, *inputs: Tensor) -> list[Tensor]:
    """First derivatives of a function of z, recorded, and the derivatives of a function of those."""
    first = torch.autograd.grad(z.pow(3).sum(), inputs, create_graph=True)
    total = torch.stack([g.square().sum() for g in first]).sum()
    return [g.detach() for g in (*first, *torch.autograd.grad(total, inputs, retain_graph=True))]


@pytest.mark.parametrize("captured", ["leaf", "made of a leaf"])
def test_derivatives_of_both_orders_with_a_recorded_graph(captured: str) -> None:
    V = (0.2 * gaussian(3, 3, seed=0)).requires_grad_()
    x = gaussian(3, 3, seed=1).requires_grad_()
    W = V if captured == "leaf" else torch.tanh(V)

    def plain(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ W + x)

    z = torch.zeros(3, 3, dtype=torch.float64)
    for _ in range(120):
        z = plain(z, x)
    layer = wp.EquilibriumLayer(torch.compile(plain, backend="eager"), rtol=1e-13, on_failure="raise")
    for ours, exact in zip(derivatives(layer(x), V, x), derivatives(z, V, x), strict=True):
        assert (ours - exact).norm() <= 1e-10 * exact.norm()
    assert layer.last_adjoint.converged.all()
