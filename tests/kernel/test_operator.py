"""Products with the kernel, against the kernel itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

import wellposed as wp
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.kernel import TangentKernel, _gram_blocks
from wellposed.nn.tangent import GramProduct, TangentFeatures

NETWORKS = [wp.GaussianDEQ, wp.SkipDEQ, wp.ImplicitOnlyDEQ, wp.MonotoneDEQ]


def network(kind: type, width: int = 6) -> nn.Module:
    return kind(3, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("width", [3, 40])  # below and above the samples: both ways to multiply
def test_closed_products(kind: type, cross: bool, width: int) -> None:
    model, X, X2 = network(kind, width), draw(20, 3), draw(13, 3, seed=1) if cross else None
    dense, K = wp.tangent_kernel(model, X, X2), TangentKernel(model, X, X2, block_size=6)
    assert K.shape == tuple(dense.shape) and K.dtype == torch.float64
    for q in (1, 3):
        v, w = draw(dense.shape[1], q, seed=2), draw(dense.shape[0], q, seed=3)
        assert relative(K @ v, dense @ v) < 1e-11
        assert relative(K.transposed_product(w), dense.T @ w) < 1e-11
    assert relative(K @ v[:, 0], dense @ v[:, 0]) < 1e-11
    if not cross:
        assert relative(K.diagonal(), dense.diagonal()) < 1e-13


def test_many_samples_take_no_square_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> Tensor:
        raise AssertionError("blocks of the kernel were formed")

    monkeypatch.setattr(_gram_blocks, "_product_by_blocks", refuse)
    model, X, v = network(wp.MonotoneDEQ), draw(200, 3), draw(200)
    assert relative(TangentKernel(model, X) @ v, wp.tangent_kernel(model, X) @ v) < 1e-11


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), st.integers(0, 10**6))
def test_any_gram_products(n: int, n2: int, k: int, factors: int, seed: int) -> None:
    """Random features, random names, one to three factors."""
    generator = torch.Generator().manual_seed(seed)
    names = ("a", "b", "c")

    class Random(nn.Linear):
        def tangent_features(self, X: Tensor) -> TangentFeatures:
            features = {name: torch.sin((i + 1) * X @ mixing[i]) for i, name in enumerate(names)}
            return TangentFeatures(features, {"weight": tuple(terms)})

    mixing = [torch.randn(2, k, generator=generator, dtype=torch.float64) for _ in names]
    terms = []
    for _ in range(2):
        picks = torch.randint(3, (factors, 2), generator=generator).tolist()
        terms.append(GramProduct(tuple((names[i], names[j]) for i, j in picks), float(torch.randn((), generator=generator))))
    model = Random(2, 1).double()
    X, X2 = (torch.randn(size, 2, generator=generator, dtype=torch.float64) for size in (n, n2))
    dense, v = wp.tangent_kernel(model, X, X2), torch.randn(n2, generator=generator, dtype=torch.float64)
    w = torch.randn(n, generator=generator, dtype=torch.float64)
    K = TangentKernel(model, X, X2)
    bound = 1e-12 * k**factors * (n + n2) * sum(abs(term.coefficient) for term in terms)
    assert float((K @ v - dense @ v).abs().max()) <= bound * float(v.abs().max())
    assert float((K.transposed_product(w) - dense.T @ w).abs().max()) <= bound * float(w.abs().max())


@pytest.mark.parametrize("cross", [False, True])
def test_generic_products(cross: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.zeros(2))
            self.layer = wp.EquilibriumLayer(wp.nn.DenseCell(3, 5, activation=wp.nn.Tanh()))
            self.head = nn.Linear(5, 2)

        def forward(self, X: Tensor) -> Tensor:
            return self.head(self.layer(X))

    model, X, X2 = Model().double(), draw(6, 3), draw(4, 3, seed=1) if cross else None
    dense, K = wp.tangent_kernel(model, X, X2), TangentKernel(model, X, X2)
    assert K.shape == tuple(dense.shape)
    v, w = draw(dense.shape[1], 2, seed=2), draw(dense.shape[0], seed=3)
    assert relative(K @ v, dense @ v) < 1e-9
    assert relative(K.transposed_product(w), dense.T @ w) < 1e-9
    if not cross:
        assert relative(K.diagonal(), dense.diagonal()) < 1e-12
    assert all(parameter.grad is None for parameter in model.parameters())


def test_generic_products_in_batches_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wellposed.kernel._generic.ROWS", 4)
    model, X = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double(), draw(10, 3)
    v = draw(20)
    assert relative(TangentKernel(model, X) @ v, wp.tangent_kernel(model, X) @ v) < 1e-12


@pytest.mark.parametrize("method", ["closed", "generic"])
def test_as_a_scipy_operator(method: str) -> None:
    model, X, X2 = network(wp.GaussianDEQ), draw(12, 3), draw(5, 3, seed=1)
    dense = wp.tangent_kernel(model, X).numpy()
    operator = TangentKernel(model, X, method=method).as_linear_operator()
    assert operator.shape == (12, 12) and operator.dtype == np.float64
    largest = eigsh(operator, k=1, which="LA", v0=np.ones(12))[0][0]
    assert abs(largest - np.linalg.eigvalsh(dense)[-1]) < 1e-9 * largest
    cross = TangentKernel(model, X, X2, method=method).as_linear_operator()
    expected = wp.tangent_kernel(model, X, X2).numpy()
    assert np.allclose(cross @ np.eye(5), expected, rtol=1e-9)
    assert np.allclose(cross.T @ np.ones(12), expected.sum(0), rtol=1e-9)
    assert np.allclose(cross @ np.ones((5, 1)), expected.sum(1, keepdims=True), rtol=1e-9)


def test_errors_say_what_was_wrong() -> None:
    K = TangentKernel(network(wp.GaussianDEQ), draw(4, 3), draw(5, 3))
    assert repr(K) == "TangentKernel(shape=(4, 5), dtype=torch.float64)"
    with pytest.raises(InvalidArgument, match=r"\(5,\) or \(5, q\), got \(4,\)"):
        K @ draw(4)
    with pytest.raises(InvalidArgument, match="must be torch.float64, got torch.float32"):
        K @ draw(5).float()
    with pytest.raises(InvalidType, match="must be a torch.Tensor, got ndarray"):
        K @ np.ones(5)
    with pytest.raises(InvalidArgument, match="Leave X2 out"):
        K.diagonal()
