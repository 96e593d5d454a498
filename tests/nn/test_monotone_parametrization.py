"""Monotone: the margin holds for all parameters, every such matrix is reached, and derivatives."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wellposed as wp
from equilibria import F64, normal
from wellposed.nn import Monotone

sizes, seeds = st.integers(1, 10), st.integers(0, 10**6)


def least(W):
    """The least eigenvalue of sym(I - W)."""
    F = torch.eye(len(W), dtype=W.dtype) - W
    return float(torch.linalg.eigvalsh((F + F.T) / 2)[0])


@settings(deadline=None, max_examples=30)
@given(m=sizes, k=sizes, seed=seeds, margin=st.floats(1e-3, 5.0), scale=st.floats(0.0, 100.0))
def test_the_margin_holds_whatever_the_parameters(m, k, seed, margin, scale):
    A, B = normal(k, m, seed=seed, scale=scale), normal(m, m, seed=seed + 1, scale=scale)
    W = Monotone(margin)(A, B)
    assert W.shape == (m, m)
    assert least(W) >= margin - 1e-13 * (1 + float(W.abs().max()) * m)


@settings(deadline=None, max_examples=30)
@given(m=sizes, seed=seeds, margin=st.floats(1e-3, 5.0))
def test_every_monotone_matrix_is_reached(m, seed, margin):
    V = normal(m, m, seed=seed)
    W = V - torch.eye(m, dtype=F64) * max(0.0, margin - least(V))  # shifted just as far as needed, so on the boundary at times
    A, B = Monotone(margin).right_inverse(W)
    torch.testing.assert_close(Monotone(margin)(A, B), W, rtol=0, atol=1e-11 * (1 + float(W.abs().max())))
    torch.testing.assert_close(B, -B.T)
    torch.testing.assert_close(A, A.T)


def test_a_symmetric_skew_split():
    """B enters by its skew part alone, A by A^T A alone."""
    A, B, S = normal(4, 4), normal(4, 4, seed=1), normal(4, 4, seed=2)
    W = Monotone(0.3)(A, B)
    torch.testing.assert_close(Monotone(0.3)(A, B + S + S.T), W)
    Q = torch.linalg.qr(normal(4, 4, seed=3))[0]
    torch.testing.assert_close(Monotone(0.3)(Q @ A, B), W)


def test_the_margin_is_half_the_symmetric_sum():
    """[nguyen2022, Lemma 2.3.2] asks for W + W^T >= m I where (W + W^T)/2 >= m I is meant: I/2 meets the first with m = 1."""
    W = Monotone(0.5)(torch.zeros(3, 3, dtype=F64), torch.zeros(3, 3, dtype=F64))
    F = torch.eye(3, dtype=F64) - W
    assert torch.equal(F + F.T, torch.eye(3, dtype=F64)) and least(W) == 0.5


def test_gradcheck():
    A, B = normal(3, 4).requires_grad_(), normal(4, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(Monotone(0.2), (A, B))
    assert torch.autograd.gradgradcheck(Monotone(0.2), (A, B))


def test_the_differential_has_the_minus_sign():
    """dW = -(A^T dA + dA^T A) + dB - dB^T (the sign that [nguyen2022, Lemma 3.3.6] drops)."""
    A, B, dA, dB = (normal(4, 4, seed=s) for s in range(4))
    _, dW = torch.autograd.functional.jvp(Monotone(0.2), (A, B), (dA, dB))
    torch.testing.assert_close(dW, -(A.T @ dA + dA.T @ A) + dB - dB.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_dtype_is_kept(dtype):
    W = Monotone(0.2)(normal(5, 5).to(dtype), normal(5, 5, seed=1).to(dtype))
    assert W.dtype == dtype


def test_copies_and_name():
    parametrization = Monotone(0.25)
    for clone in (copy.deepcopy(parametrization), pickle.loads(pickle.dumps(parametrization))):
        assert clone.margin == 0.25 and not list(clone.parameters())
    assert repr(parametrization) == "Monotone(margin=0.25)"


@pytest.mark.parametrize("bad", [0, -0.1, math.nan, math.inf, True, None])
def test_a_bad_margin(bad):
    with pytest.raises(wp.errors.InvalidArgument, match="'margin' parameter of Monotone"):
        Monotone(bad)


def test_right_inverse_refuses_a_matrix_without_the_margin():
    W = torch.eye(3, dtype=F64) * 0.9
    Monotone(0.1).right_inverse(W)
    with pytest.raises(wp.errors.InvalidArgument, match=r"right_inverse.*least eigenvalue.*0\.1.*margin.*0\.2"):
        Monotone(0.2).right_inverse(W)
