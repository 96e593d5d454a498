"""NormBall and ConvNormBall: what they promise of norms, and their derivatives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import wellposed as wp
from equilibria import F64, normal
from wellposed.nn import ConvNormBall, NormBall
from wellposed.nn.parametrizations import conv_norm_upper


def conv_norm(K, height, width, mode):
    """The spectral norm of the convolution as a matrix."""
    c, p = K.shape[1], K.shape[2] // 2
    identity = torch.eye(c * height * width, dtype=F64).reshape(-1, c, height, width)
    padded = functional.pad(identity, (p, p, p, p), mode=mode)
    return float(torch.linalg.matrix_norm(functional.conv2d(padded, K).flatten(1), 2))


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    seed=st.integers(0, 1000),
    scale=st.floats(1e-6, 1e6),
    bound=st.floats(0.1, 10.0),
)
def test_a_matrix_is_projected_onto_the_ball(shape, seed, scale, bound):
    V = normal(*shape, seed=seed, scale=scale)
    W = NormBall(bound)(V)
    norm = float(torch.linalg.matrix_norm(V, 2))
    assert float(torch.linalg.matrix_norm(W, 2)) <= bound * (1 + 1e-12)
    torch.testing.assert_close(W, V * min(1.0, bound / norm), rtol=1e-11, atol=0)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 3, 5])),
    size=st.tuples(st.integers(3, 8), st.integers(3, 8)),
    seed=st.integers(0, 1000),
    mode=st.sampled_from(["constant", "circular"]),
    grid=st.integers(5, 20),
    smooth=st.booleans(),
)
def test_the_norm_of_a_convolution_is_bounded_for_both_paddings(shape, size, seed, mode, grid, smooth):
    h, c, k = shape
    K = normal(h, c, k, k, seed=seed)
    if smooth:
        K = K.abs()  # the maximum is at frequency 0
    upper = float(conv_norm_upper(K, grid=grid))
    assert conv_norm(K, *size, mode) <= upper * (1 + 1e-12)


def test_the_correction_of_the_grid_is_needed_and_small():
    """A kernel whose maximum lies between the points of a coarse grid: without the correction the bound would be false."""
    K = torch.zeros(2, 2, 3, 3, dtype=F64)
    angle = torch.tensor(2 * torch.pi / 5 / 2, dtype=F64)  # halfway between two of five frequencies
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    K[:, :, 1, 0], K[:, :, 1, 1], K[:, :, 1, 2] = turn / 2, torch.eye(2, dtype=F64), turn.t() / 2
    blocks = torch.fft.fft2(K, s=(5, 5)).permute(2, 3, 0, 1)
    on_grid = float(torch.linalg.matrix_norm(blocks, 2).max())
    true = conv_norm(K, 3, 200, "circular")
    assert true > on_grid * 1.05
    assert true <= float(conv_norm_upper(K, grid=5))
    assert float(conv_norm_upper(K, grid=12)) <= 1.08 * true
    assert float(conv_norm_upper(K, grid=60)) <= 1.01 * true


def test_the_correction_is_sharp_in_two_dimensions():
    """4 |sin w_1 sin w_2| has its maximum in the middle of the cells of a 6 x 6 grid: the bound is attained."""
    edge = torch.tensor([1.0, 0.0, -1.0], dtype=F64)
    K = torch.outer(edge, edge)[None, None]
    assert conv_norm(K, 8, 8, "circular") == pytest.approx(4.0)
    assert float(conv_norm_upper(K, grid=6)) == pytest.approx(4.0, rel=1e-9)


def test_replicated_borders_can_amplify_more():
    """Why the bound speaks of zeros and of wrapping only."""
    K = torch.tensor([[[[0.0, 0, 0], [1, 0, 0], [0, 0, 0]]]], dtype=F64)  # a shift
    assert conv_norm(K, 4, 4, "constant") == pytest.approx(1.0)
    assert conv_norm(K, 4, 4, "replicate") > 1.4
    assert float(conv_norm_upper(K)) < 1.1


@pytest.mark.parametrize("scale", [0.01, 3.0], ids=["inside", "outside"])
def test_gradcheck(scale):
    V = normal(3, 5, scale=scale).requires_grad_()
    assert torch.autograd.gradcheck(NormBall(0.5), V)
    K = normal(3, 2, 3, 3, scale=scale).requires_grad_()
    assert torch.autograd.gradcheck(ConvNormBall(0.5), K)


def test_zero_and_dtypes():
    for ball, shape in ((NormBall(), (3, 4)), (ConvNormBall(), (3, 4, 3, 3))):
        V = torch.zeros(shape, requires_grad=True)
        ball(V).sum().backward()
        assert torch.equal(V.grad, torch.ones(shape))
        assert ball(100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).dtype == torch.float32


def test_bad_arguments_are_explained():
    with pytest.raises(wp.InvalidArgument, match="'bound' parameter of NormBall"):
        NormBall(0.0)
    with pytest.raises(wp.InvalidArgument, match="k odd"):
        conv_norm_upper(torch.zeros(2, 2, 2, 2))
    with pytest.raises(wp.InvalidArgument, match="grid > k - 1 = 4"):
        conv_norm_upper(torch.zeros(2, 2, 5, 5), grid=4)
    assert repr(NormBall(0.5)) == "NormBall(bound=0.5)"
    assert repr(ConvNormBall(0.5)) == "ConvNormBall(bound=0.5, grid=12)"
