"""ConvOptEq: transposes, norms, gradients, the sizes of the paper."""

from __future__ import annotations

import pytest
import torch

import wellposed as wp
from equilibria import F64, normal
from wellposed.convex import L1, ConvOptEq, Decorrelation, GradientStep, SquaredL2, select_equilibrium
from wellposed.convex.conv import ConvolutionMap


def network(channels=(4, 3), **options):
    options = {"dtype": F64, "generator": torch.Generator().manual_seed(0), "on_failure": "raise"} | options
    torch.manual_seed(0)  # extractor and head
    return ConvOptEq(2, channels, state_channels=3, feature_channels=2, out_features=5, **options)


X = normal(2, 2, 6, 5, seed=1)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_operator_as_a_matrix(k):
    op = ConvolutionMap(normal(4, 3, k, k))
    identity = torch.eye(3 * 30, dtype=F64).reshape(90, 3, 6, 5)
    M = op.apply(identity).flatten(1).t()
    v = normal(2, 4, 6, 5, seed=2)
    torch.testing.assert_close(op.transpose(v).flatten(1), v.flatten(1) @ M, rtol=1e-12, atol=1e-12)
    K = op.tensor.clone().requires_grad_()
    z = normal(2, 3, 6, 5, seed=3)
    (expected,) = torch.autograd.grad((v * ConvolutionMap(K).apply(z)).sum(), K)
    torch.testing.assert_close(op.cotangent(v, z), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("prior", [None, L1(0.02), GradientStep(Decorrelation(0.01, across="pixels"), 0.1)], ids=repr)
def test_equilibrium_and_gradients_both_ways(prior):
    model = network(activation=wp.nn.Tanh(), alpha=0.7, prior=prior, rtol=1e-13)
    z = model.equilibrium(X)
    assert z.shape == (2, 3, 6, 5) and model(X).shape == (2, 5)
    torch.testing.assert_close(model.layer.cell(z, model.features(X)), z, rtol=1e-10, atol=1e-11)
    found = []
    for gradient in (wp.ImplicitGradient(), wp.UnrolledGradient(100)):
        model.gradient = gradient
        model.zero_grad()
        model(X).square().sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-8, atol=1e-10)


def test_gradcheck():
    model = network((2,), activation=wp.nn.Tanh(), rtol=1e-14)
    names = [name for name, _ in model.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in model.parameters()]
    x = X[:1, :, :3, :3].clone().requires_grad_()

    def f(x, *values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(f, (x, *values), atol=1e-6, fast_mode=True)


def test_the_norms_are_kept_whatever_training_does():
    model = network(norm_bound=0.9)
    for K in model.W:
        K.data *= 100
    for K, upper in zip(model.kernels(), model.norms_upper(), strict=True):
        identity = torch.eye(3 * 64, dtype=F64).reshape(-1, 3, 8, 8)
        M = ConvolutionMap(K.detach()).apply(identity).flatten(1)
        assert float(torch.linalg.matrix_norm(M, 2)) <= upper <= 0.9 * (1 + 1e-9)
    assert model.contraction_upper() <= 0.81**2 * (1 + 1e-9)


def test_the_sizes_of_the_paper():
    """About 199k and 162k parameters, which is all that the paper says of the channels of the state."""
    for channels, printed in (((16, 32, 64, 128, 128), 199e3), ((16, 32, 64, 64, 128), 162e3)):
        model = ConvOptEq(3, channels)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(printed, rel=0.03)
    assert ConvOptEq(3).channels == (16, 32, 64, 128, 128)


def test_own_extractor_and_head():
    extractor = torch.nn.Conv2d(2, 2, 3, stride=2, padding=1, dtype=F64)
    head = torch.nn.Conv2d(3, 7, 1, dtype=F64)
    model = network(extractor=extractor, head=head)
    assert model(X).shape == (2, 7, 3, 3)


def test_samples_ignore_their_neighbours():
    model = network()
    torch.testing.assert_close(model(X)[1:], model(X[1:]), rtol=1e-10, atol=1e-11)


def test_mixed_precision():
    model = network(dtype=torch.float32, activation=wp.nn.Tanh())
    plain = model(X.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = model.equilibrium(X.float())
        y = model(X.float())
    assert z.dtype == torch.float32
    y.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(y.float(), plain, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("prior", [None, L1(0.02)], ids=repr)
def test_single_precision_agrees_with_double(prior):
    """Kernels have another layout in memory in single precision: neither values nor gradients may notice."""
    double = network((4, 3, 6), activation=wp.nn.Tanh(), alpha=0.7, prior=prior, rtol=1e-12)
    single = network((4, 3, 6), activation=wp.nn.Tanh(), alpha=0.7, prior=prior, rtol=1e-6, dtype=torch.float32)
    single.load_state_dict(double.state_dict())
    assert ConvolutionMap(single.kernels()[0]).tensor.is_contiguous(memory_format=torch.channels_last)
    gradients = []
    for model, x in ((double, X), (single, X.float())):
        y = model(x)
        y.square().sum().backward()
        gradients.append([y.detach().double(), *(p.grad.double() for p in model.parameters())])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_selection_of_images():
    model = network()
    found = select_equilibrium(model, X, SquaredL2(0.5), steps=20)
    assert found.value.shape == (2, 3, 6, 5) and found.value.requires_grad


def test_bad_arguments_are_explained():
    with pytest.raises(wp.InvalidArgument, match="'channels' parameter of ConvOptEq"):
        ConvOptEq(3, 16)
    with pytest.raises(wp.InvalidArgument, match="'kernel_size' parameter"):
        ConvOptEq(3, (4,), kernel_size=2)
    with pytest.raises(wp.InvalidArgument, match=r"expects images \(n, 2, height, width\); got \(2, 3\)"):
        network()(normal(2, 3))
    with pytest.raises(wp.InvalidArgument, match=r"expects features \(n, 2, height, width\)"):
        network(extractor=torch.nn.Conv2d(2, 5, 3, dtype=F64))(X)
