"""Monotone convolutions: the margin really holds; products, transposes, resolvents and derivatives against dense matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import wellposed as wp
from wellposed.linalg import least_eigenvalue_lower, spectral_norm_upper
from wellposed.nn.maps.operator import AbstractOperator
from wellposed.nn.monotone import TierWeights
from wellposed.nn.monotone._lattice import Lattice, largest_norm_upper, symbol

F64 = torch.float64
#: channels of the tiers, (height, width), kernel size
SHAPES = [
    ((3,), (5, 4), 3),
    ((2,), (4, 4), 2),
    ((2,), (3, 3), 5),
    ((1,), (1, 1), 1),
    ((2, 3), (4, 6), 3),
    ((2, 1), (4, 2), 4),
    ((2, 1, 2), (8, 4), 3),
]
every_shape = pytest.mark.parametrize(("channels", "size", "kernel"), SHAPES)
every_padding = pytest.mark.parametrize("padding", ["circular", "zeros"])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(channels, size, kernel, padding, *, margin=0.3, scale=1.0, seed=1) -> tuple[TierWeights, AbstractOperator, Tensor]:
    weights = TierWeights(channels, kernel, margin=margin, padding=padding, scale=scale, dtype=F64, generator=generator(seed))
    operator = weights.operator(*size)
    n = sum(lattice.features for lattice in weights.lattices(*size))
    return weights, operator, operator.dense(n)


def plain(weights: TierWeights, size) -> Tensor:
    """W from the definition: dense A and B by PyTorch's own convolutions of unit images, W = (1 - m) I - A^T A + B - B^T."""
    mode = {"circular": "circular", "zeros": "constant"}[weights.padding]
    lattices = weights.lattices(*size)
    offsets = [0]
    for lattice in lattices:
        offsets.append(offsets[-1] + lattice.features)
    n = offsets[-1]

    def dense(kernel: Tensor, lattice: Lattice, stride: int) -> Tensor:
        k = kernel.shape[-1]
        x = torch.eye(lattice.features, dtype=F64).reshape(-1, lattice.channels, lattice.height, lattice.width)
        for axis, length in ((2, lattice.height), (3, lattice.width)):  # wraps as often as it must
            before, after = k // 2, (k - 1) // 2
            if mode == "circular":
                index = torch.arange(-before, length + after) % length
                x = x.index_select(axis, index)
            else:
                pad = (before, after, 0, 0) if axis == 3 else (0, 0, before, after)
                x = torch.nn.functional.pad(x, pad)
        return torch.nn.functional.conv2d(x, kernel.detach(), stride=stride).flatten(1).T

    A, B = torch.zeros(n, n, dtype=F64), torch.zeros(n, n, dtype=F64)
    for i, lattice in enumerate(lattices):
        own = slice(offsets[i], offsets[i + 1])
        A[own, own] = dense(weights.A[i], lattice, 1)
        B[own, own] = dense(weights.B[i], lattice, 1)
        if i > 0:
            before = slice(offsets[i - 1], offsets[i])
            A[own, before] = dense(weights.C[i - 1], lattices[i - 1], 2)
            B[own, before] = -A[own, own].T @ A[own, before]
    return (1 - weights.margin) * torch.eye(n, dtype=F64) - A.T @ A + B - B.T


@every_shape
@every_padding
def test_the_operator_is_its_definition(channels, size, kernel, padding):
    weights, operator, W = make(channels, size, kernel, padding)
    torch.testing.assert_close(W, plain(weights, size), rtol=0, atol=1e-13)
    n = W.shape[0]
    identity = torch.eye(n, dtype=F64)
    torch.testing.assert_close(operator.transposed(identity), W, rtol=0, atol=1e-13)
    torch.testing.assert_close(operator.tracked(identity).detach().T, W, rtol=0, atol=1e-13)
    symmetric = identity - (W + W.T) / 2
    torch.testing.assert_close(operator.symmetric(identity, 0.5), symmetric + 0.5 * identity, rtol=0, atol=1e-13)


@every_padding
@settings(deadline=None, max_examples=25)
@given(
    shape=st.sampled_from(SHAPES),
    margin=st.floats(0.01, 2.0),
    scale=st.floats(0.05, 4.0),
    seed=st.integers(0, 2**20),
)
@example(shape=((1,), (1, 1), 1), margin=0.0625, scale=0.05078125, seed=771)  # a norm of one rounding more
def test_the_margin_holds(padding, shape, margin, scale, seed):
    """Whatever the kernels: sym(I - W) >= m by a rigorous bound on the dense matrix; the operator's own bounds hold too."""
    channels, size, kernel = shape
    _, operator, W = make(channels, size, kernel, padding, margin=margin, scale=scale, seed=seed)
    F = torch.eye(W.shape[0], dtype=F64) - W
    rounding = 1e-11 * (1 + float(F.abs().max()))
    assert least_eigenvalue_lower((F + F.T) / 2) >= margin - rounding
    m, L = operator.monotonicity()
    assert margin - rounding <= m <= margin
    assert float(torch.linalg.eigvalsh((F + F.T) / 2)[0]) >= m
    assert float(torch.linalg.matrix_norm(F, 2)) <= L


@every_padding
def test_tiers_are_coupled_from_fine_to_coarse_only(padding):
    weights, _, W = make((2, 1, 2), (8, 4), 3, padding)
    sizes = [lattice.features for lattice in weights.lattices(8, 4)]
    assert sizes == [64, 8, 4]
    blocks = [list(rows.split(sizes, dim=1)) for rows in W.split(sizes, dim=0)]
    for i in range(3):
        for j in range(3):
            expected_zero = j > i or j < i - 1
            assert (float(blocks[i][j].abs().max()) <= 1e-13) == expected_zero


@every_shape
@every_padding
@pytest.mark.parametrize("a", [0.05, 0.7, 9.0])
def test_resolvents(channels, size, kernel, padding, a):
    _, operator, W = make(channels, size, kernel, padding)
    n = W.shape[0]
    v = torch.randn(3, n, dtype=F64, generator=generator(2))
    M = (1 + a) * torch.eye(n, dtype=F64) - a * W
    torch.testing.assert_close(operator.resolvent(v, a), torch.linalg.solve(M, v.T).T, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(operator.resolvent(v, a, transpose=True), torch.linalg.solve(M.T, v.T).T, rtol=1e-10, atol=1e-11)


def test_symmetric_systems_take_plain_conjugate_gradients():
    weights = TierWeights((2,), 3, padding="zeros", dtype=F64, generator=generator(3))
    with torch.no_grad():
        weights.B[0].zero_()
    operator = weights.operator(4, 4)
    W = operator.dense(32)
    v = torch.randn(3, 32, dtype=F64, generator=generator(4))
    v[1] = 0
    M = 1.5 * torch.eye(32, dtype=F64) - 0.5 * W
    torch.testing.assert_close(operator.resolvent(v, 0.5), torch.linalg.solve(M, v.T).T, rtol=1e-10, atol=1e-12)


@every_shape
@every_padding
def test_cotangents(channels, size, kernel, padding):
    """The closed form, carried on to the kernels by autograd, against autograd of <p, W z> itself."""
    weights, operator, W = make(channels, size, kernel, padding)
    p, z = torch.randn(2, 3, W.shape[0], dtype=F64, generator=generator(5)).unbind()
    parameters = list(weights.parameters())
    expected = torch.autograd.grad((p * weights.operator(*size).tracked(z)).sum(), parameters)
    parts = operator.cotangents(p, z, (True,) * len(operator.tensors))
    ours = torch.autograd.grad(operator.tensors, parameters, parts)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert all(part is None for part in operator.cotangents(p, z, (False,) * len(operator.tensors)))


def test_factorizations_are_kept_until_a_parameter_changes(monkeypatch):
    """Also when the change goes through `.data`, which moves no version counter."""
    from wellposed.nn.monotone import _fourier

    calls = []
    true = _fourier.batched_solve
    monkeypatch.setattr(_fourier, "batched_solve", lambda *args: calls.append(1) or true(*args))
    cell = wp.nn.MonotoneConvCell(1, 2, dtype=F64, generator=generator(0))
    layer = wp.EquilibriumLayer(cell, wp.PeacemanRachford(), wp.ImplicitGradient(wp.PeacemanRachford()), on_failure="raise")
    x = torch.randn(2, 1, 4, 4, dtype=F64, generator=generator(1))
    for _ in range(3):
        layer(x).sum().backward()
    assert len(calls) == 1  # forward, backward and repetition
    before = layer(x)
    cell.weights.A[0].data += 0.1
    after = layer(x)
    assert len(calls) == 2 and not torch.allclose(before, after)
    fresh = wp.EquilibriumLayer(cell, wp.NewtonKrylov(), on_failure="raise")
    torch.testing.assert_close(after, fresh(x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [(4, 4), (5, 3), (6, 1)])
@pytest.mark.parametrize("phases", [1, 2])
def test_lattices_transform_and_weigh(size, phases):
    height, width = phases * size[0], phases * size[1]
    lattice = Lattice(3, height, width, phases)
    x, y = torch.randn(2, 2, lattice.features, dtype=F64, generator=generator(0)).unbind()
    X, Y = lattice.spectrum(x), lattice.spectrum(y)
    torch.testing.assert_close(lattice.field(X), x)
    inner = (X.conj() * Y).real.sum(dim=2)
    torch.testing.assert_close((inner * lattice.weights(X)[:, None]).sum(dim=0), (x * y).sum(dim=1))


@settings(deadline=None, max_examples=25)
@given(
    batch=st.integers(1, 4), n=st.integers(1, 9), k=st.integers(1, 9), scale=st.floats(1e-30, 1e30), seed=st.integers(0, 999)
)
def test_norms_are_bounded_from_above_and_closely(batch, n, k, scale, seed):
    M = scale * torch.randn(batch, n, k, dtype=torch.complex128, generator=generator(seed))
    true = max(float(torch.linalg.matrix_norm(x, 2)) for x in M)
    upper = largest_norm_upper(M)
    assert true <= upper * (1 + 1e-12) and upper <= 1.05 * true
    assert largest_norm_upper(0 * M) == 0.0


def test_norm_of_a_symbol_is_the_norm_of_the_convolution():
    kernel = torch.randn(2, 3, 3, 3, dtype=F64, generator=generator(0))
    x = torch.nn.functional.pad(torch.eye(60, dtype=F64).reshape(60, 3, 4, 5), (1, 1, 1, 1), mode="circular")
    dense = torch.nn.functional.conv2d(x, kernel).flatten(1).T
    assert largest_norm_upper(symbol(kernel, (4, 5))) == pytest.approx(spectral_norm_upper(dense), rel=0.05)


def test_bad_arguments():
    with pytest.raises(wp.InvalidArgument, match="'padding' parameter must be one of circular, zeros. Got 'reflect'"):
        TierWeights((2,), padding="reflect")
    with pytest.raises(wp.InvalidArgument, match="margin"):
        TierWeights((2,), margin=0.0)
    with pytest.raises(wp.InvalidArgument, match=r"3 tiers need a height and width divisible by 4; got 6 x 8"):
        TierWeights((2, 2, 2)).operator(6, 8)


@pytest.mark.parametrize(("size", "phases"), [((4, 6), 1), ((5, 7), 1), ((1, 4), 1), ((8, 4), 2)])
def test_products_with_transforms_are_fast_transforms(size, phases, monkeypatch):
    from wellposed.nn.monotone import _lattice

    lattice = Lattice(3, *size, phases)
    x = torch.randn(2, lattice.features, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spectrum = lattice.spectrum(x)
    monkeypatch.setattr(_lattice, "LARGEST_PRODUCT", 0)
    torch.testing.assert_close(lattice.spectrum(x), spectrum)
    torch.testing.assert_close(lattice.field(spectrum), x)
