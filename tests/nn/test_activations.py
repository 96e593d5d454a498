"""Activations: values, slopes, proximal operators and potentials, against autograd, quadrature and the definitions."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate
from torch import Tensor

import wellposed as wp
from wellposed.nn import AbstractActivation, Identity, LeakyReLU, ReLU, Sigmoid, Softplus, SoftThreshold, Tanh
from wellposed.nn.activations import ACTIVATIONS

F64 = torch.float64
REFERENCES = {
    ReLU(): torch.relu,
    Tanh(): torch.tanh,
    Identity(): lambda v: v,
    LeakyReLU(): torch.nn.LeakyReLU(),
    LeakyReLU(0.3): torch.nn.LeakyReLU(0.3),
    SoftThreshold(): torch.nn.Softshrink(0.1),
    SoftThreshold(0.5): torch.nn.Softshrink(0.5),
    Sigmoid(): torch.sigmoid,
    Softplus(): lambda v: torch.nn.functional.softplus(v, threshold=1e9),
}
every_activation = pytest.mark.parametrize("s", REFERENCES, ids=repr)
V = torch.tensor([[-30.0, -2.0, -0.3, 0.0, 1e-9, 0.7, 3.0, 40.0]], dtype=F64)
#: Where the potential is finite.
DOMAINS = {Tanh: (-1.0, 1.0), Sigmoid: (0.0, 1.0), Softplus: (0.0, math.inf), ReLU: (0.0, math.inf)}


def test_the_table_has_one_of_each():
    assert {type(s) for s in ACTIVATIONS} == {type(s) for s in REFERENCES} and len(ACTIVATIONS) == 7


@every_activation
def test_values(s):
    expected = REFERENCES[s](V)
    torch.testing.assert_close(s(V), expected, rtol=1e-15, atol=0)
    v = V.clone()
    out = s.apply_(v)
    assert out.data_ptr() == v.data_ptr()  # in place
    torch.testing.assert_close(out, expected, rtol=1e-15, atol=0)


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
    torch.testing.assert_close(slope, expected, atol=1e-12 if dtype == F64 else 1e-6, rtol=1e-6)
    torch.testing.assert_close(s.derivative(v.detach()), expected, atol=1e-12 if dtype == F64 else 1e-6, rtol=1e-6)


@every_activation
def test_slopes_stay_in_their_interval_and_come_near_its_ends(s):
    v = torch.linspace(-40, 40, 8001, dtype=F64)
    slopes = s.derivative(v)
    low, high = s.slope_bounds
    assert bool((slopes >= low).all()) and bool((slopes <= high).all())
    assert float(slopes.min()) == pytest.approx(low, abs=1e-9) and float(slopes.max()) == pytest.approx(high, abs=1e-9)
    assert s.lipschitz == high


@every_activation
def test_it_does_not_decrease_and_does_not_stretch(s):
    v = torch.linspace(-5, 5, 1001, dtype=F64)
    steps = s(v).diff()
    assert bool((steps >= 0).all()) and bool((steps <= s.lipschitz * v.diff() * (1 + 1e-10)).all())


@every_activation
def test_the_prox_at_step_size_one_is_the_activation(s):
    torch.testing.assert_close(s.prox(V, 1.0), s(V))
    torch.testing.assert_close(s.prox(V, torch.ones(1, 1, dtype=F64)), s(V))


@every_activation
@settings(deadline=None, max_examples=25)
@given(v=st.floats(-6, 6), a=st.floats(0.02, 30))
def test_the_prox_minimises_its_objective(s, v, a):
    """prox(v) minimises (y - v)^2/2 + a p(y): no point of a fine grid does better, and the grid's best is near."""
    low, high = DOMAINS.get(type(s), (-math.inf, math.inf))
    y = s.prox(torch.tensor([v], dtype=F64), a)
    grid = torch.linspace(max(low, -8.0), min(high, 8.0), 20001, dtype=F64)

    def objective(y: Tensor) -> Tensor:
        return (y - v).square() / 2 + a * s.potential(y)

    best = objective(grid).min()
    assert float(objective(y)) <= float(best) + 1e-12
    assert float(y) == pytest.approx(float(grid[objective(grid).argmin()]), abs=2e-3)


@every_activation
def test_the_prox_takes_one_step_size_per_sample(s):
    a = torch.tensor([[0.2], [1.0], [5.0]], dtype=F64)
    rows = V.expand(3, -1)
    expected = torch.cat([s.prox(V, float(step)) for step in a])
    torch.testing.assert_close(s.prox(rows, a), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("s", [Tanh(), Sigmoid(), Softplus()], ids=repr)
@pytest.mark.parametrize("a", [1e-6, 1e-2, 0.5, 2.0, 1e4])
def test_the_prox_solves_its_equation_where_step_sizes_are_extreme(s, a):
    """y + a p'(y) = v with p' by autograd of the potential."""
    v = torch.linspace(-3, 3, 101, dtype=F64)
    y = s.prox(v, a).requires_grad_()
    (slope,) = torch.autograd.grad(s.potential(y).sum(), y)
    inside = (y > 1e-9) if isinstance(s, (Sigmoid, Softplus)) else (y.abs() < 1 - 1e-9)
    if isinstance(s, Sigmoid):
        inside &= y < 1 - 1e-9
    assert bool(inside.any())
    assert float((y + a * slope - v)[inside].detach().abs().max()) <= 1e-7 * max(1.0, a)


@every_activation
def test_the_primitive_is_the_integral(s):
    for v in (-5.0, -0.6, 0.0, 0.3, 2.0, 9.0):
        kinks = [k for k in (-0.5, -0.1, 0.1, 0.5) if min(0.0, v) < k < max(0.0, v)] or None
        expected, _ = integrate.quad(lambda t: float(s(torch.tensor(t, dtype=F64))), 0.0, v, epsabs=1e-12, points=kinks)
        assert float(s.primitive(torch.tensor(v, dtype=F64))) == pytest.approx(expected, abs=1e-9)


@every_activation
@settings(deadline=None, max_examples=25)
@given(v=st.floats(-8, 8))
def test_moreau(s, v):
    """At y = s(v): p(y) + (y - v)^2/2 = v^2/2 - S(v) + const, and p(y) + p*(v - y) = (v - y) y, Fenchel's equality."""
    v = torch.tensor(v, dtype=F64)
    zero = torch.zeros((), dtype=F64)

    def envelope(v: Tensor) -> Tensor:
        return s.potential(s(v)) + (s(v) - v).square() / 2

    assert float(envelope(v) - envelope(zero)) == pytest.approx(float(v.square() / 2 - s.primitive(v)), abs=1e-10)
    if isinstance(s, (SoftThreshold, Identity)):
        return  # their conjugates are indicators, and v - s(v) may round to the outside
    y = s(v)
    assert float(s.potential(y) + s.conjugate(v - y)) == pytest.approx(float((v - y) * y), abs=1e-9)


@every_activation
def test_the_conjugate_is_a_supremum(s):
    low, high = DOMAINS.get(type(s), (-math.inf, math.inf))
    y = torch.linspace(max(low, -60.0), min(high, 60.0), 200001, dtype=F64)
    for w in (-2.0, -0.4, -0.05, 0.0, 0.05, 0.4, 2.0):
        seen = float((w * y - s.potential(y)).max())
        ours = float(s.conjugate(torch.tensor(w, dtype=F64)))
        if math.isinf(ours):
            assert seen > abs(w)  # grows with the grid
        else:
            assert ours == pytest.approx(seen, abs=2e-4)


@every_activation
def test_potentials_are_infinite_outside_their_domain(s):
    low, high = DOMAINS.get(type(s), (-math.inf, math.inf))
    ends = torch.tensor([low, high], dtype=F64)
    outside = torch.tensor([low - 1e-3, high + 1e-3], dtype=F64)
    for end, beyond in zip(ends, outside, strict=True):
        if end.isfinite():
            assert bool(s.potential(end).isfinite()) and bool(s.potential(beyond).isinf())


@every_activation
def test_equality_and_repr(s):
    assert s == dataclasses.replace(s) and hash(s) == hash(dataclasses.replace(s)) and repr(s).startswith(type(s).__name__)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, "a"])
def test_bad_parameters(value):
    with pytest.raises(wp.InvalidArgument, match="negative_slope"):
        LeakyReLU(value)
    if value != 1.0:
        with pytest.raises(wp.InvalidArgument, match="threshold"):
            SoftThreshold(value)


class Leaky(AbstractActivation):
    """One's own: the four abstract methods and nothing else."""

    def __call__(self, v: Tensor) -> Tensor:
        return torch.nn.functional.leaky_relu(v, 0.2)

    def apply_(self, v: Tensor) -> Tensor:
        return torch.nn.functional.leaky_relu_(v, 0.2)

    def slope(self, y: Tensor) -> Tensor:
        return torch.full_like(y, 0.2).masked_fill(y > 0, 1.0)

    def prox(self, v: Tensor, step_size: float | Tensor) -> Tensor:
        return torch.where(v > 0, v, v / (1 + 4 * step_size))


def test_an_activation_of_ones_own():
    """The interface is enough for a cell: a leaky ReLU, with its exact gradient and a prox for every step size."""
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


@pytest.mark.parametrize("what", ["potential", "primitive", "conjugate"])
def test_what_an_activation_of_ones_own_does_not_tell(what):
    assert Leaky().slope_bounds == (0.0, 1.0)
    with pytest.raises(wp.InvalidArgument, match=f"Leaky has no {what}. Implement {what}"):
        getattr(Leaky(), what)(V)


def test_a_centred_softplus_is_a_shifted_one():
    s, plain, c = Softplus(centred=True), Softplus(), math.log(2)
    assert float(s(torch.zeros((), dtype=F64))) == 0.0
    torch.testing.assert_close(s(V), plain(V) - c, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(s.slope(s(V)), plain.derivative(V), rtol=1e-10, atol=1e-12)
    y, w = torch.linspace(-0.6, 4, 50, dtype=F64), torch.linspace(-3, 0.5, 50, dtype=F64)
    torch.testing.assert_close(s.potential(y), plain.potential(y + c) + c * y)
    torch.testing.assert_close(s.conjugate(w), plain.conjugate(w - c) - c * (w - c))
    torch.testing.assert_close(s.primitive(V), plain.primitive(V) - c * V)
    for a in (0.3, 2.0):
        root = s.prox(V, a)  # y + a p'(y) = v with p'(y) = w - y where s(w) = y
        inside = root > -c + 1e-9
        inverse = torch.log(torch.expm1(root + c))
        torch.testing.assert_close((root + a * (inverse - root))[inside], V[inside], rtol=1e-7, atol=1e-7)
