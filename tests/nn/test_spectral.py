"""Spectral: what it promises of the norm, and its derivative."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import wellposed as wp
from equilibria import F64, normal
from wellposed.nn import Spectral


def norm(W: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(W.double(), 2))


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 12),
    seed=st.integers(0, 1000),
    scale=st.floats(1e-8, 1e8),
    bound=st.floats(0.01, 0.99),
)
@example(size=1, seed=1, scale=0.125, bound=0.114)  # bound * (1/bound) is not 1
def test_the_bound_holds_whatever_the_parameter(size, seed, scale, bound):
    V = normal(size, size, seed=seed, scale=scale)
    W = Spectral(bound)(V)
    assert norm(W) <= bound * (1 + 1e-12)
    if norm(V) <= bound * (1 - 1e-12):
        assert torch.equal(W, V)  # inside the ball nothing changes
    else:
        torch.testing.assert_close(W, V * (bound / norm(V)), rtol=1e-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16, torch.float16], ids=str)
def test_the_dtype_is_kept(dtype):
    W = Spectral(0.5)(normal(6, 6).to(dtype))
    assert W.dtype == dtype
    assert norm(W) <= 0.5 * (1 + 4 * torch.finfo(dtype).eps)


def test_zero_stays_zero_and_has_a_derivative():
    V = torch.zeros(3, 3, dtype=F64, requires_grad=True)
    W = Spectral(0.5)(V)
    assert torch.equal(W, torch.zeros_like(W))
    (g,) = torch.autograd.grad((W * normal(3, 3)).sum(), V)
    torch.testing.assert_close(g, normal(3, 3))


@pytest.mark.parametrize("scale", [0.05, 3.0])
def test_gradcheck_inside_and_outside_of_the_ball(scale):
    V = normal(4, 4, scale=scale).requires_grad_()
    assert (norm(V.detach()) > 0.5) == (scale == 3.0)
    assert torch.autograd.gradcheck(Spectral(0.5), V)
    assert torch.autograd.gradgradcheck(Spectral(0.5), V)


def test_it_makes_a_contraction_of_any_cell():
    cell = wp.nn.DenseCell(3, 8, weight=Spectral(0.9), dtype=F64)
    cell.W.data = normal(8, 8, scale=100.0)
    layer = wp.EquilibriumLayer(cell, wp.Picard(), on_failure="raise", max_steps=400)
    layer(normal(16, 3, seed=1))
    rate = layer.last_solution.rate  # NaN for samples that had nothing to do
    assert not bool((rate > 0.9 + 1e-6).any()) and bool((rate > 0.1).any())


def test_it_serves_as_a_parametrization_of_torch():
    linear = torch.nn.utils.parametrize.register_parametrization
    layer = torch.nn.Linear(4, 4, dtype=F64)
    layer.weight.data *= 100
    linear(layer, "weight", Spectral(0.5))
    assert norm(layer.weight.detach()) <= 0.5 * (1 + 1e-12)


@pytest.mark.parametrize("bound", [0.0, 1.0, 1.5, -0.5, "0.5", None, float("nan"), True])
def test_bad_bounds_are_explained(bound):
    with pytest.raises(wp.InvalidArgument, match=r"'bound' parameter of Spectral must be a float in \(0, 1\). Got"):
        Spectral(bound)


def test_repr_and_copies():
    spectral = Spectral(0.7)
    assert repr(spectral) == "Spectral(bound=0.7)"
    for other in (copy.deepcopy(spectral), pickle.loads(pickle.dumps(spectral))):
        assert other.bound == 0.7
    assert not spectral.state_dict()
