"""The Gram matrix of random ReLU units: against high precision, Monte Carlo, and the formula everybody writes."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.kernel import deq_ntk, diagonal_limit, population_gram, population_gram_layers, relu_gram

F64 = torch.float64
EPS = torch.finfo(F64).eps


def exact(x: torch.Tensor, y: torch.Tensor) -> mpmath.mpf:
    """|x||y| (sin t + (pi - t) cos t)/(2 pi) for the stored numbers, in 60 digits."""
    with mpmath.workdps(60):
        a, b = ([mpmath.mpf(float(entry)) for entry in v] for v in (x, y))
        dot = mpmath.fdot(a, b)
        lengths = mpmath.sqrt(mpmath.fdot(a, a)) * mpmath.sqrt(mpmath.fdot(b, b))
        if lengths == 0:
            return mpmath.mpf(0)
        t = mpmath.acos(max(-1, min(1, dot / lengths)))
        return lengths * (mpmath.sin(t) + (mpmath.pi - t) * mpmath.cos(t)) / (2 * mpmath.pi)


def pair(angle: float) -> torch.Tensor:
    """Two rows of different lengths at about this angle, in 7 dimensions, along no axis."""
    basis, _ = torch.linalg.qr(torch.randn(7, 2, generator=torch.Generator().manual_seed(3), dtype=F64))
    return torch.stack([1.7 * basis[:, 0], 0.3 * (math.cos(angle) * basis[:, 0] + math.sin(angle) * basis[:, 1])])


@pytest.mark.parametrize("angle", [0.0, 1e-15, 1e-12, 1e-8, 1e-4, 0.1, 0.99, 1.0, 1.01, 1.5, 2.0, 2.14, 2.15, 3.0])
def test_sixty_digits(angle):
    X = pair(angle)
    G = relu_gram(X)
    for i in range(2):
        for j in range(2):
            truth = exact(X[i], X[j])
            assert abs(float((mpmath.mpf(float(G[i, j])) - truth) / truth)) <= 20 * EPS


@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-5, 1e-8, 1e-12])
def test_nearly_antiparallel_rows_keep_what_their_rounding_allows(gap):
    """The angle is off by a few roundings, so pi - t = gap by a relative eps/gap, and gap^3 by three times that."""
    X = pair(math.pi - gap)
    truth = exact(X[0], X[1])
    error = abs(float((mpmath.mpf(float(relu_gram(X)[0, 1])) - truth) / truth))
    assert error <= 20 * EPS * (1 + 1 / gap)


@pytest.mark.parametrize("gap", [1e-3, 1e-8, 1e-12])
def test_nearly_opposite_rows_without_rounding_keep_every_digit(gap):
    """Here a + b is exact, and so must be pi - t: taken as a difference it would be lost."""
    X = torch.tensor([[1.0, 0.0], [-1.0, gap]], dtype=F64)
    assert float(relu_gram(X)[0, 1]) == pytest.approx(float(exact(X[0], X[1])), rel=20 * EPS, abs=0.0)


def test_the_usual_formula_is_worse_where_it_should_be():
    X = pair(math.pi - 1e-5)
    rho = (X[0] @ X[1]) / (X[0].norm() * X[1].norm())
    t = torch.arccos(rho.clamp(-1, 1))
    usual = X[0].norm() * X[1].norm() * (torch.sin(t) + (math.pi - t) * torch.cos(t)) / (2 * math.pi)
    truth = exact(X[0], X[1])
    errors = [abs(float((mpmath.mpf(float(value)) - truth) / truth)) for value in (relu_gram(X)[0, 1], usual)]
    assert errors[0] < 1e-9
    assert errors[1] > 1e-3


def test_monte_carlo():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(5, 3, generator=generator, dtype=F64)
    X[4] = 0.0
    w = torch.randn(3, 400_000, generator=generator, dtype=F64)
    features = torch.relu(X @ w)
    products = features[:, None] * features
    deviation = products.std(dim=2) / math.sqrt(w.shape[1])
    assert ((products.mean(dim=2) - relu_gram(X)).abs() <= 5 * deviation).all()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 5), st.sampled_from([1e-150, 1e-3, 1.0, 1e150]))
def test_symmetric_psd_homogeneous(seed, n, d, scale):
    X = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64)
    G = relu_gram(X)
    assert torch.equal(G, G.T)
    assert torch.linalg.eigvalsh(G)[0] >= -1e-14 * G.abs().max()
    torch.testing.assert_close(G.diagonal(), (X * X).sum(dim=1) / 2, rtol=1e-14, atol=0.0)
    rounding = 1e-14 * float(G.max())  # not of each entry: those of nearly opposite rows amplify the rounding of their angle
    torch.testing.assert_close(relu_gram(scale * X, X) / scale, G, rtol=0.0, atol=rounding)
    torch.testing.assert_close(relu_gram(X, X.clone()), G, rtol=0.0, atol=rounding)
    torch.testing.assert_close(relu_gram(X.float()), G.float(), rtol=1e-4, atol=1e-5 * float(G.abs().max()))


def test_gradients():
    X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(relu_gram, (X,))
    # Equal, opposite and zero rows: the formula through arccos has NaN here.
    Y = torch.tensor([[1.0, 2.0], [1.0, 2.0], [-1.0, -2.0], [0.0, 0.0]], dtype=F64, requires_grad=True)
    relu_gram(Y).sum().backward()
    assert torch.isfinite(Y.grad).all()


KERNELS = {
    "relu_gram": lambda X, X2=None: relu_gram(X, X2),
    "diagonal_limit": lambda X, X2=None: diagonal_limit(X, 0.5, X2),
    "population_gram": lambda X, X2=None: population_gram(X, 0.3, X2),
    "population_gram_layers": lambda X, X2=None: population_gram_layers(X, 0.3, 3, X2=X2)[-1],
    "deq_ntk": lambda X, X2=None: deq_ntk(X, X2, weight_variance=0.3),
    "deq_ntk tanh": lambda X, X2=None: deq_ntk(X, X2, weight_variance=0.3, activation=torch.tanh),
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_shapes_dtypes_and_the_cross_kernel(kernel, dtype):
    X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=F64).to(dtype)
    K = kernel(X)
    assert K.shape == (5, 5)
    assert K.dtype == dtype
    torch.testing.assert_close(kernel(X[:2], X[2:]), K[:2, 2:], rtol=100 * torch.finfo(dtype).eps, atol=1e-12)
    assert kernel(X[:1]).shape == (1, 1)
    torch.testing.assert_close(kernel(X[:1]), K[:1, :1], rtol=100 * torch.finfo(dtype).eps, atol=0.0)


@every_kernel
def test_equal_and_zero_rows(kernel):
    X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    X[1], X[2] = X[0], 0.0
    K = kernel(X)
    torch.testing.assert_close(K[:2, :2], K[0, 0].expand(2, 2), rtol=1e-11, atol=0.0)
    assert torch.equal(K[2], torch.zeros(4, dtype=F64))


@every_kernel
@pytest.mark.parametrize(
    ("X", "X2", "error", "match"),
    [
        (torch.ones(3), None, InvalidArgument, r"must be \(n, d\).*got \(3,\)"),
        (torch.ones(0, 3), None, InvalidArgument, r"got \(0, 3\)"),
        (torch.ones(3, 0), None, InvalidArgument, r"got \(3, 0\)"),
        (torch.ones(3, 2, dtype=torch.int64), None, InvalidArgument, "float32 or float64, got torch.int64"),
        (torch.tensor([[1.0], [math.nan]]), None, InvalidArgument, "1 rows with NaN or infinity .first: row 1"),
        ([[1.0]], None, InvalidType, "must be a tensor, got list"),
        (torch.ones(3, 2), torch.ones(3, 4), InvalidArgument, r"expected \(n2, 2\), got \(3, 4\)"),
        (torch.ones(3, 2), torch.ones(3, 2, dtype=F64), InvalidArgument, "dtype and device of X"),
    ],
)
def test_wrong_samples(kernel, X, X2, error, match):
    with pytest.raises(error, match=match):
        kernel(X, X2)
