"""Activations: their values, slopes and proximal operators, against autograd and against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wellposed as wp
from wellposed.nn import AbstractActivation, Identity, ReLU, Tanh

F64 = torch.float64
REFERENCES = {ReLU(): torch.relu, Tanh(): torch.tanh, Identity(): lambda v: v}
every_activation = pytest.mark.parametrize("s", REFERENCES, ids=repr)
V = torch.tensor([[-30.0, -2.0, -0.3, 0.0, 1e-9, 0.7, 3.0, 40.0]], dtype=F64)


@every_activation
def test_values(s):
    expected = REFERENCES[s](V)
    assert torch.equal(s(V), expected)
    v = V.clone()
    out = s.apply_(v)
    assert out.data_ptr() == v.data_ptr()  # in place
    assert torch.equal(out, expected)


@every_activation
def test_the_value_leaves_its_argument_alone(s):
    v = V.clone()
    s(v)
    assert torch.equal(v, V)


@every_activation
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_the_slope_is_the_derivative_as_autograd_takes_it(s, dtype):
    """Also at the kink of ReLU: both take 0 there."""
    v = V.to(dtype).requires_grad_()
    y = s(v)
    (expected,) = torch.autograd.grad(y.sum(), v)
    slope = s.slope(y.detach())
    slope = torch.ones_like(expected) if slope is None else slope
    assert slope.dtype == dtype
    torch.testing.assert_close(slope, expected)


@every_activation
def test_it_does_not_decrease_and_does_not_stretch(s):
    v = torch.linspace(-5, 5, 1001, dtype=F64)
    steps = s(v).diff()
    assert bool((steps >= 0).all()) and bool((steps <= v.diff() * (1 + 1e-12)).all())


@every_activation
def test_the_prox_at_step_size_one_is_the_activation(s):
    torch.testing.assert_close(s.prox(V, 1.0), s(V))


@pytest.mark.parametrize("step_size", [0.1, 1.0, 3.0])
def test_prox_of_the_potentials_that_are_known(step_size):
    """prox(v) minimises (z - v)^2 / 2 + step_size p(z), with p = 0, or infinite below 0."""
    grid = torch.linspace(-4, 4, 80001, dtype=F64)
    for s, allowed in ((ReLU(), grid >= 0), (Identity(), grid > -torch.inf)):
        for v in (-1.7, 0.2, 2.5):
            objective = torch.where(allowed, (grid - v).square() / 2, torch.inf)
            expected = grid[objective.argmin()]
            ours = s.prox(torch.tensor(v, dtype=F64), step_size)
            assert float(ours) == pytest.approx(float(expected), abs=1e-3)


def test_the_prox_of_tanh_is_known_at_one_only():
    with pytest.raises(wp.InvalidArgument, match=r"prox of Tanh\(\) is known for step_size 1 only; got 0.5.*step_size=1.0"):
        Tanh().prox(V, 0.5)


@every_activation
def test_equality_and_repr(s):
    assert s == type(s)() and hash(s) == hash(type(s)()) and repr(s) == f"{type(s).__name__}()"


def test_an_activation_of_ones_own():
    """The interface is enough for a cell: a leaky ReLU, with its exact gradient and a prox for every step size."""

    class Leaky(AbstractActivation):
        def __call__(self, v: Tensor) -> Tensor:
            return torch.nn.functional.leaky_relu(v, 0.2)

        def apply_(self, v: Tensor) -> Tensor:
            return torch.nn.functional.leaky_relu_(v, 0.2)

        def slope(self, y: Tensor) -> Tensor:
            return torch.full_like(y, 0.2).masked_fill(y > 0, 1.0)

        def prox(self, v: Tensor, step_size: float) -> Tensor:
            return torch.where(v > 0, v, v / (1 + 4 * step_size))

    cell = wp.nn.DenseCell(2, 3, Leaky(), dtype=F64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(4, 2, dtype=F64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    values = []
    for options in (
        {},
        {"gradient": wp.UnrolledGradient(400)},
        {"solver": wp.PeacemanRachford(0.7), "max_steps": 1000},
    ):
        layer = wp.EquilibriumLayer(cell, on_failure="raise", **options)
        values.append(torch.autograd.grad(layer(x).square().sum(), (x, *cell.parameters())))
    for other in values[1:]:
        for a, b in zip(values[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
