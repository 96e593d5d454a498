"""The lemmas of [xie2021] as constructions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wellposed as wp
from equilibria import F64, normal
from wellposed.convex.constructions import feedforward_as_deep_opteq, feedforward_as_units, multi_block


def low_rank(rows, columns, rank, seed):
    return normal(rows, rank, seed=seed) @ normal(rank, columns, seed=seed + 1)


def forward_plain(weights, U, b, z, x):
    for W, Uk, bk in zip(weights[:-1], U, b, strict=True):
        z = torch.relu(z @ W.t() + x @ Uk.t() + bk)
    return z @ weights[-1].t()


def forward_units(bars, U, b, z, x):
    z = z @ bars[0]
    for W, Uk, bk in zip(bars[1:-1], U, b, strict=True):
        z = torch.relu(z @ W.t() + x @ Uk.t() + bk) @ W
    return z @ bars[-1].t()


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=5), rank=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_lemma_1_for_weights_of_any_rank(sizes, rank, seed):
    weights = [low_rank(a, b, min(rank, a, b), seed + 2 * k) for k, (b, a) in enumerate(zip(sizes, sizes[1:], strict=False))]
    U = [normal(W.shape[0], 3, seed=seed + 50 + k) for k, W in enumerate(weights[:-1])]
    b = [normal(W.shape[0], seed=seed + 70 + k) for k, W in enumerate(weights[:-1])]
    bars = feedforward_as_units(weights)
    width = max(a + b for a, b in zip(sizes, sizes[1:], strict=False))
    assert [tuple(W.shape) for W in bars] == [(size, width) for size in sizes]
    for W, above, below in zip(weights, bars[1:], bars, strict=False):
        torch.testing.assert_close(above @ below.t(), W, rtol=1e-7, atol=1e-7)
    z, x = normal(4, sizes[0], seed=seed + 90), normal(4, 3, seed=seed + 91)
    torch.testing.assert_close(forward_units(bars, U, b, z, x), forward_plain(weights, U, b, z, x), rtol=1e-6, atol=1e-6)


def test_lemma_1_the_width_of_the_paper_is_not_enough_for_singular_weights():
    """max n_k = 4 suffices for generic square weights and fails for singular ones, which need more, up to 8."""
    good = [normal(4, 4, seed=k) for k in range(3)]
    bars = feedforward_as_units(good, width=4)
    torch.testing.assert_close(bars[1] @ bars[0].t(), good[0], rtol=1e-8, atol=1e-8)
    singular = [normal(4, 4, seed=0), low_rank(4, 4, 2, seed=5), normal(4, 4, seed=2)]
    with pytest.raises(wp.InvalidArgument, match="width=4 is too small.*rank 2.*8 suffices"):
        feedforward_as_units(singular, width=4)
    for width in (6, 8):
        bars = feedforward_as_units(singular, width=width)
        for W, above, below in zip(singular, bars[1:], bars, strict=False):
            torch.testing.assert_close(above @ below.t(), W, rtol=1e-8, atol=1e-8)
    with pytest.raises(wp.InvalidArgument, match="below the largest layer"):
        feedforward_as_units(good, width=3)


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=6), seed=st.integers(0, 10_000))
def test_lemma_2_every_feedforward_network_is_a_deep_opteq(sizes, seed):
    A = [normal(a, b, seed=seed + k) for k, (b, a) in enumerate(zip(sizes, sizes[1:], strict=False))]
    b = [normal(W.shape[0], seed=seed + 20 + k) for k, W in enumerate(A)]
    w = normal(sizes[-1], seed=seed + 40)
    X = normal(3, sizes[0], seed=seed + 41)
    h = X
    for W, bias in zip(A, b, strict=True):
        h = torch.relu(h @ W.t() + bias)
    model = feedforward_as_deep_opteq(A, b, w)
    assert len(model.widths) == max(3, len(A))
    start = normal(3, model.width, seed=seed + 42)
    twice = model.bind(X)(model.bind(X)(start))  # two sweeps, from anywhere
    torch.testing.assert_close(twice @ model.w.detach(), h @ w, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(X), h @ w, rtol=1e-9, atol=1e-9)


def test_lemma_2_with_the_matrix_of_the_paper_outputs_zero():
    """W_1 = 0 makes f_1 zero, and with U_l = 0, b = 0 afterwards everything."""
    A = [normal(3, 2, seed=k) if k == 0 else normal(3, 3, seed=k) for k in range(3)]
    model = feedforward_as_deep_opteq(A, [torch.zeros(3, dtype=F64)] * 3, normal(3))
    X = normal(4, 2)
    assert float(model(X).detach().abs().max()) > 1e-3
    model.W[0].data.zero_()
    assert float(model(X).detach().abs().max()) == 0.0


def test_lemma_2_needs_three_layers():
    """With two, W_1 W_2^T = A_2 is not zero and the second sweep starts from the wrong place."""
    A, b = [normal(3, 2), normal(3, 3, seed=1, scale=0.3)], [normal(3, seed=2), normal(3, seed=3)]
    model = wp.DeepOptEq(2, (3, 3), width=6, norm_bound=None, dtype=F64, on_failure="ignore")
    eye = torch.eye(3, dtype=F64)
    model.W[0].data = torch.cat([eye, torch.zeros(3, 3, dtype=F64)], dim=1)
    model.W[1].data = torch.cat([A[1], eye], dim=1)
    model.U[0].data, model.b[0].data, model.b[1].data = A[0], b[0], b[1]
    model.U[1].data.zero_()
    X = normal(4, 2, seed=4)
    h = torch.relu(torch.relu(X @ A[0].t() + b[0]) @ A[1].t() + b[1])
    assert float((model.solve(X).value[:, 3:] - h).abs().max()) > 1e-3
    three = feedforward_as_deep_opteq(A, b, normal(3))
    torch.testing.assert_close(three.solve(X).value[:, -3:], h, rtol=1e-10, atol=1e-10)


def test_lemma_2_other_activations():
    A = [normal(3, 2, seed=k) if k == 0 else normal(3, 3, seed=k) for k in range(3)]
    b = [normal(3, seed=9 + k) for k in range(3)]
    X = normal(4, 2)
    h = X
    for W, bias in zip(A, b, strict=True):
        h = torch.tanh(h @ W.t() + bias)
    model = feedforward_as_deep_opteq(A, b, torch.ones(3, dtype=F64), activation=wp.nn.Tanh())
    torch.testing.assert_close(model(X), h.sum(dim=1), rtol=1e-10, atol=1e-10)
    with pytest.raises(wp.InvalidArgument, match="only ReLU allows"):
        feedforward_as_deep_opteq(A[:2], b[:2], torch.ones(3, dtype=F64), activation=wp.nn.Tanh())
    with pytest.raises(wp.InvalidArgument, match="one bias of shape"):
        feedforward_as_deep_opteq(A, b[:2], torch.ones(3, dtype=F64))
    with pytest.raises(wp.InvalidArgument, match="fit one another"):
        feedforward_as_units([normal(3, 2), normal(3, 4)])


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_lemma_3_the_blocks_are_one_wide_equilibrium(alpha):
    model = wp.DeepOptEq(3, (4, 6, 3), width=5, alpha=alpha, dtype=F64, generator=torch.Generator().manual_seed(0))
    for b in model.b:
        b.data = normal(*b.shape, seed=3)
    X = normal(4, 3)
    states = model.bind(X).states(model.solve(X).value)  # z_0, z_1, .., z_L = z_0
    stacked = torch.cat([*states[1:-1], states[0]], dim=1)
    wide = multi_block(model)
    torch.testing.assert_close(wide(stacked, X), stacked, rtol=1e-10, atol=1e-11)
    assert torch.equal(wide.P @ wide.P.t(), torch.eye(15, dtype=F64))
    # (P z)_1 = z_L, (P z)_2 = z_1
    z = torch.arange(15, dtype=F64)
    assert torch.equal(wide.P @ z, torch.cat([z[10:], z[:10]]))
    # and conversely: iterating the wide map reaches the blocks of the deep equilibrium
    other = torch.zeros_like(stacked)
    for _ in range(2000):
        other = wide(other, X)
    torch.testing.assert_close(other, stacked, rtol=1e-8, atol=1e-9)
    with pytest.raises(wp.InvalidArgument, match="without a prior"):
        multi_block(wp.OptEq(3, 4, prior=wp.convex.L1()))
