"""Activations as gradients of convex functions, and the conjugates of these."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wellposed as wp
from equilibria import F64
from wellposed.convex.blocks import primitive_conjugate, value_range

ACTIVATIONS = [
    wp.nn.Identity(),
    wp.nn.ReLU(),
    wp.nn.LeakyReLU(0.2),
    wp.nn.SoftThreshold(0.3),
    wp.nn.Tanh(),
    wp.nn.Sigmoid(),
    wp.nn.Softplus(),
]
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)


@every_activation
def test_conjugate_is_the_largest_gap_on_a_grid(activation):
    """S*(y) = max_v v y - S(v), the definition, on a fine grid of v."""
    v = torch.linspace(-12, 12, 240_001, dtype=F64)
    y = activation(torch.linspace(-2.0, 2.0, 9, dtype=F64))
    brute = (y[:, None] * v - activation.primitive(v)).amax(dim=1)
    torch.testing.assert_close(primitive_conjugate(activation, y), brute, rtol=0, atol=1e-7)


@every_activation
@settings(max_examples=25, deadline=None)
@given(v=st.floats(-6, 6), other=st.floats(-6, 6))
def test_fenchel_young(activation, v, other):
    a, b = torch.tensor(v, dtype=F64), activation(torch.tensor(other, dtype=F64))
    gap = activation.primitive(a) + primitive_conjugate(activation, b) - a * b
    assert gap >= -1e-12
    y = activation(a)
    equality = activation.primitive(a) + primitive_conjugate(activation, y) - a * y
    assert abs(float(equality)) <= 1e-12 * (1 + v * v)


def test_relu_by_hand():
    y = torch.tensor([-1.0, 0.0, 2.0], dtype=F64)
    assert primitive_conjugate(wp.nn.ReLU(), y).tolist() == [math.inf, 0.0, 2.0]


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (wp.nn.ReLU(), (0.0, math.inf)),
        (wp.nn.Tanh(), (-1.0, 1.0)),
        (wp.nn.Sigmoid(), (0.0, 1.0)),
        (wp.nn.Softplus(), (0.0, math.inf)),
        (wp.nn.Identity(), (-math.inf, math.inf)),
        (wp.nn.SoftThreshold(0.3), (-math.inf, math.inf)),
    ],
    ids=repr,
)
def test_ranges(activation, expected):
    assert value_range(activation) == expected
