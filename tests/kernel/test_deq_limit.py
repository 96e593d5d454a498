"""The infinite-width tangent kernel: against wide networks written densely, two-dimensional quadrature, and itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import wellposed as wp
from wellposed.errors import InvalidArgument, InvalidType, WellposedWarning
from wellposed.kernel import deq_limit, deq_ntk, population_gram, relu_gram, wide_limits
from wellposed.nn import Identity, ReLU, Tanh

F64 = torch.float64


def samples(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64)


def finite(X, m, generator, *, s, f=torch.relu, slope=lambda v: (v > 0).to(F64), bias=0.0, inputs=1.0, readout=1.0):
    """The parts of the tangent kernel of one network of width m, by definition, divided by m."""
    n, d = X.shape
    W = torch.randn(m, m, generator=generator, dtype=F64) * math.sqrt(2 * s / m)
    U = torch.randn(m, d, generator=generator, dtype=F64) * math.sqrt(2 * inputs / d)
    a = torch.randn(m, generator=generator, dtype=F64) * math.sqrt(readout / m)
    c = X @ U.T + math.sqrt(2 * bias) * torch.randn(m, generator=generator, dtype=F64)
    Z = torch.zeros(n, m, dtype=F64)
    for _ in range(70):
        Z = f(Z @ W.T + c)
    D = slope(Z @ W.T + c)
    P = torch.zeros(n, m, dtype=F64)
    for _ in range(70):
        P = D * (a + P @ W)
    G, PP = Z @ Z.T, P @ P.T
    return {"W": PP * G / m, "U": PP * (X @ X.T) / m, "a": G / m, "b": PP / m}


def test_the_dense_network_above_has_the_gradients_of_autograd():
    """`finite` is what the limit is compared with: its own Hadamard formula against backward through an unrolled network."""
    X, m, s = samples(3, 4), 12, 0.05
    parts = finite(X, m, torch.Generator().manual_seed(3), s=s)
    generator = torch.Generator().manual_seed(3)
    W = (torch.randn(m, m, generator=generator, dtype=F64) * math.sqrt(2 * s / m)).requires_grad_()
    U = (torch.randn(m, 4, generator=generator, dtype=F64) * math.sqrt(2 / 4)).requires_grad_()
    a = (torch.randn(m, generator=generator, dtype=F64) * math.sqrt(1 / m)).requires_grad_()
    Z = torch.zeros(3, m, dtype=F64)
    for _ in range(150):
        Z = torch.relu(Z @ W.T + X @ U.T)
    rows = [torch.autograd.grad(y, (W, U, a), retain_graph=True) for y in Z @ a]
    for name, gradients in zip("WUa", zip(*rows, strict=True), strict=True):
        J = torch.stack([gradient.flatten() for gradient in gradients])
        torch.testing.assert_close(J @ J.T / m, parts[name], rtol=1e-9, atol=1e-12)


CASES = {
    "relu": (ReLU(), torch.relu, lambda v: (v > 0).to(F64), 0.1),
    "tanh": (Tanh(), torch.tanh, lambda v: 1 - torch.tanh(v) ** 2, 0.15),
    "sin": (torch.sin, torch.sin, torch.cos, 0.1),
    "softplus": (torch.nn.functional.softplus, torch.nn.functional.softplus, torch.sigmoid, 0.1),
}


@pytest.mark.parametrize("name", CASES)
def test_wide_networks_part_by_part(name):
    activation, f, slope, s = CASES[name]
    X, m = samples(4, 5), 1200
    options = {"bias": 0.2, "inputs": 0.8, "readout": 1.5}
    generator = torch.Generator().manual_seed(7)
    draws = [finite(X, m, generator, s=s, f=f, slope=slope, **options) for _ in range(4)]
    limit = deq_ntk(
        X,
        weight_variance=s,
        activation=activation,
        width=m,
        bias_variance=0.2,
        input_variance=0.8,
        readout_variance=1.5,
        by_parameter=True,
    )
    assert list(limit) == ["W", "U", "a", "b"]
    for part, expected in limit.items():
        mean = torch.stack([draw[part] for draw in draws]).mean(dim=0)
        assert float((mean - expected).norm() / expected.norm()) < 0.06, part


def test_the_package_s_own_network():
    """The normalisation that the docstring promises: tangent_kernel(GaussianDEQ)/m, parts and all."""
    X, m, s = samples(4, 5), 600, 0.08
    generator = torch.Generator().manual_seed(4)
    models = [wp.GaussianDEQ(5, m, weight_variance=s, generator=generator, dtype=F64) for _ in range(6)]
    draws = [wp.kernel.tangent_kernel(model, X, by_parameter=True) for model in models]
    limit = deq_ntk(X, weight_variance=s, width=m, by_parameter=True)
    assert set(draws[0]) == set(limit)
    for part, expected in limit.items():
        mean = torch.stack([draw[part] for draw in draws]).mean(dim=0) / m
        assert float((mean - expected).norm() / expected.norm()) < 0.08, part


def test_error_falls_like_one_over_the_root_of_the_width():
    X, s = samples(5, 6), 0.08
    limit, generator = deq_ntk(X, weight_variance=s), torch.Generator().manual_seed(11)
    errors = {}
    for m, draws in ((64, 64), (256, 24), (1024, 8)):
        squares = [
            float((sum(p for key, p in finite(X, m, generator, s=s).items() if key != "b") - limit).norm()) ** 2
            for _ in range(draws)
        ]
        errors[m] = math.sqrt(sum(squares) / draws)
    assert -0.7 < math.log(errors[1024] / errors[64]) / math.log(16) < -0.35


@pytest.mark.slow
def test_two_percent_of_wide_networks():
    X, s, m = samples(5, 6), 0.08, 3000
    generator = torch.Generator().manual_seed(11)
    mean = sum(sum(p for k, p in finite(X, m, generator, s=s).items() if k != "b") for _ in range(6)) / 6
    limit = deq_ntk(X, weight_variance=s, width=m)
    assert float((mean - limit).norm() / limit.norm()) < 0.02


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**31), st.floats(0.0, 0.5), st.sampled_from([0.0, 0.3]), st.booleans())
def test_relu_in_closed_form_and_by_its_series(seed, s, bias, ntk):
    X = samples(4, 5, seed)
    directions = torch.nn.functional.normalize(X, dim=1)
    assume(float((directions @ directions.T).fill_diagonal_(0.0).abs().max()) < 0.85)  # else a warning, as in the next test
    options = {"weight_variance": s, "bias_variance": bias, "ntk_parametrization": ntk}
    closed = deq_ntk(X, **options)
    by_series = deq_ntk(X, **options, activation=torch.relu)
    torch.testing.assert_close(by_series, closed, rtol=1e-8, atol=1e-9 * float(closed.max()))


def test_a_kink_and_nearly_parallel_samples_are_reported():
    X = torch.tensor([[1.0, 0.0], [1.0, 1e-3]], dtype=F64)
    with pytest.warns(WellposedWarning, match=r"2 of 4 entries may be off by up to .* pass wp.nn.ReLU") as caught:
        by_series = deq_ntk(X, weight_variance=0.1, activation=torch.relu)
    assert caught[0].filename == __file__
    bound = float(str(caught[0].message).split("up to ")[1].split(" ")[0])
    closed = deq_ntk(X, weight_variance=0.1)
    error = float(((by_series - closed) / closed).abs().max())
    assert 1e-8 < error <= 2 * bound  # the kernel depends on both expectations, each of which obeys the bound


def test_a_kink_away_from_zero_is_reported():
    X = samples(2, 3)
    with pytest.warns(WellposedWarning, match="quadrature of the activation or its derivative is good to"):
        deq_ntk(X, weight_variance=0.1, activation=lambda v: torch.nn.functional.softshrink(v, 0.5))


def quadrature(f, covariance: np.ndarray, h: float = 0.05) -> float:
    """E[f(u) f(v)] by the product trapezoidal rule, which for smooth decaying integrands is spectrally accurate.

    (A product Gauss-Hermite rule with 120 nodes a side is off by 4.5e-8 here, with 240 by 4e-11.)
    """
    x = np.arange(-12, 12 + h / 2, h)
    w = np.exp(-(x**2) / 2) * h / math.sqrt(2 * math.pi)
    L = np.linalg.cholesky(covariance)
    u, v = L[0, 0] * x[:, None] + 0 * x, L[1, 0] * x[:, None] + L[1, 1] * x
    return float(w @ (f(u) * f(v)) @ w)


def test_tanh_solves_its_equations_by_another_quadrature():
    X, s, beta = samples(2, 5), 0.3, 0.1
    parts = deq_ntk(X, weight_variance=s, bias_variance=beta, activation=Tanh(), by_parameter=True)
    K = parts["a"].numpy()
    C = 2 * s * K + 2 * (X @ X.T).numpy() / 5 + 2 * beta
    k = (1 / (2 * s + K / parts["W"].numpy()))[0, 1]  # W's part is K k/(1 - 2 s k)
    assert quadrature(np.tanh, C) == pytest.approx(K[0, 1], rel=1e-12)
    assert quadrature(lambda v: 1 - np.tanh(v) ** 2, C) == pytest.approx(k, rel=1e-12)


def test_identity_in_closed_form():
    """z = (I - W)^(-1) U x: K = 2 X X^T/d/(1 - 2 s), k = 1."""
    X, s = samples(3, 4), 0.3
    K = 2 * (X @ X.T) / 4 / (1 - 2 * s)
    parts = deq_ntk(X, weight_variance=s, activation=Identity(), by_parameter=True)
    scale = float(K.diagonal().max())  # of the terms of an entry, which may cancel
    torch.testing.assert_close(parts["a"], K, rtol=0, atol=1e-12 * scale)
    torch.testing.assert_close(parts["W"], K / (1 - 2 * s), rtol=0, atol=1e-12 * scale / (1 - 2 * s))


def test_slope_and_autograd_agree():
    X = samples(4, 5)
    by_slope, by_autograd = (deq_ntk(X, weight_variance=0.2, activation=f) for f in (Tanh(), torch.tanh))
    torch.testing.assert_close(by_slope, by_autograd, rtol=1e-12, atol=0.0)


def test_normalisations():
    X, s = samples(4, 5), 0.2
    parts = deq_ntk(X, weight_variance=s, by_parameter=True)
    assert list(parts) == ["W", "U", "a"]
    assert torch.equal(parts["U"], torch.zeros(4, 4, dtype=F64))
    torch.testing.assert_close(parts["a"], population_gram(X, s), rtol=0.0, atol=0.0)
    Pi = parts["W"] / parts["a"]
    wide = deq_ntk(X, weight_variance=s, width=50)
    torch.testing.assert_close(wide, sum(parts.values()) + Pi * (X @ X.T) / 50, rtol=1e-13, atol=1e-14)
    ntk = deq_ntk(X, weight_variance=s, ntk_parametrization=True)
    torch.testing.assert_close(ntk, parts["a"] + Pi * 2 * (s * parts["a"] + X @ X.T / 5), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(deq_ntk(X, weight_variance=s, readout_variance=0.0), parts["a"], rtol=0.0, atol=0.0)


def test_the_ntk_is_the_limit_of_its_layers():
    """T_(l+1) = k0 o (s T_l + L), started from 0, is the recursion of a deep network with the weights of one layer."""
    X, s = samples(4, 5), 0.4
    K = population_gram(X, s)
    L = s * K + X @ X.T / 5
    scale = torch.outer(L.diagonal().sqrt(), L.diagonal().sqrt())
    k0 = 1 - torch.arccos((L / scale).fill_diagonal_(1.0)) / math.pi
    T = torch.zeros_like(K)
    for _ in range(100):
        T = k0 * (s * T + L)
    torch.testing.assert_close(deq_ntk(X, weight_variance=s, ntk_parametrization=True), K + T, rtol=1e-12, atol=1e-13)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**31), st.floats(0.0, 0.45), st.sampled_from(["relu", "tanh"]), st.booleans())
def test_positive_semi_definite(seed, s, name, ntk):
    X = samples(5, 3, seed)
    H = deq_ntk(X, weight_variance=s, activation=CASES[name][0], ntk_parametrization=ntk)
    torch.testing.assert_close(H, H.T, rtol=1e-12, atol=1e-13)
    assert torch.linalg.eigvalsh(H)[0] > -1e-12 * H.abs().max()


def test_equal_rows_have_exactly_the_diagonal():
    """Through arccos the slope's expectation would be off by 1e-8."""
    X = samples(1, 7).repeat(3, 1) * torch.tensor([[1.0], [3.0], [1.0]], dtype=F64)
    H = deq_ntk(X, weight_variance=0.9)
    torch.testing.assert_close(H / H[0, 0], torch.tensor([[1, 3, 1], [3, 9, 3], [1, 3, 1]], dtype=F64), rtol=1e-14, atol=0.0)


def test_blocks_are_the_matrix(monkeypatch):
    """Blocks of 4 rows and columns; of one set of samples, those on and below the diagonal."""
    X, X2, sizes, angles = samples(10, 3), samples(7, 3, seed=1), [], deq_limit.angles

    def seen(A, B):
        sizes.append((len(A), len(B)))
        return angles(A, B)

    for second, blocks in ((None, 6), (X2, 6)):
        whole = deq_ntk(X, second, weight_variance=0.2, width=5, by_parameter=True)
        grams = (relu_gram(X, second), population_gram(X, 0.2, second))
        with monkeypatch.context() as patch:
            patch.setattr(wide_limits, "BLOCK", 4)
            patch.setattr(deq_limit, "angles", seen)
            parts = deq_ntk(X, second, weight_variance=0.2, width=5, by_parameter=True)
            assert len(sizes) == blocks and max(max(size) for size in sizes) <= 4
            found = (relu_gram(X, second), population_gram(X, 0.2, second))
            s = torch.tensor(0.2, dtype=F64, requires_grad=True)
            assert deq_ntk(X, second, weight_variance=s).requires_grad and len(sizes) == blocks + 1  # in one piece
        sizes.clear()
        for a, b in [*((parts[name], whole[name]) for name in whole), *zip(found, grams, strict=True)]:
            torch.testing.assert_close(a, b, rtol=16 * torch.finfo(F64).eps, atol=0.0)
            assert second is not None or torch.equal(a, a.T)


def test_gradients_by_the_weight_variance():
    """Of every part, also for parallel, opposite, zero and equal rows; for ReLU only."""
    X = torch.cat([samples(3, 4), -samples(1, 4), torch.zeros(1, 4, dtype=F64), 2 * samples(1, 4)])
    s = torch.tensor(0.3, dtype=F64, requires_grad=True)
    options = {"bias_variance": 0.1, "width": 10, "by_parameter": True}
    assert torch.autograd.gradcheck(lambda s: tuple(deq_ntk(X, weight_variance=s, **options).values()), (s,))
    assert torch.autograd.gradcheck(lambda s: deq_ntk(X, samples(2, 4, 1), weight_variance=s, ntk_parametrization=True), (s,))
    assert torch.autograd.gradcheck(lambda s: population_gram(X, s), (s,))
    assert torch.equal(deq_ntk(X, weight_variance=s.detach()), deq_ntk(X, weight_variance=0.3))
    single = torch.tensor(0.3, requires_grad=True)
    (gradient,) = torch.autograd.grad(deq_ntk(X.float(), weight_variance=single).sum(), single)
    assert gradient.dtype == torch.float32 and bool(torch.isfinite(gradient))
    with pytest.raises(InvalidArgument, match="only ReLU's kernel is differentiable, and weight_variance requires a gradient"):
        deq_ntk(X, weight_variance=s, activation=Tanh())
    with pytest.raises(InvalidArgument, match=r"'weight_variance' must be a finite number at least 0, got tensor"):
        deq_ntk(X, weight_variance=torch.tensor([0.3]))


def test_gradients_for_relu_only():
    X = samples(3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda X: deq_ntk(X, weight_variance=0.3, bias_variance=0.1, width=10), (X,))
    with pytest.raises(InvalidArgument, match="only ReLU's kernel is differentiable"):
        deq_ntk(X, weight_variance=0.3, activation=Tanh())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"weight_variance": 1.0}, r"'weight_variance' must be a number in \[0, 1\), got 1.0"),
        ({"weight_variance": -0.1}, "'weight_variance' must be a finite number at least 0"),
        ({"weight_variance": 0.1, "input_variance": 0.0}, "'input_variance' must be a finite number above 0"),
        ({"weight_variance": 0.1, "bias_variance": -1.0}, "'bias_variance' must be a finite number at least 0"),
        ({"weight_variance": 0.1, "readout_variance": math.inf}, "'readout_variance' must be a finite number at least 0"),
        ({"weight_variance": 0.1, "width": 0}, "'width' must be a positive integer or None, got 0"),
        ({"weight_variance": 0.1, "width": 9, "ntk_parametrization": True}, "no term depends on the width, got width=9"),
        ({"weight_variance": 0.6, "activation": Identity()}, r"has 2 s E\[f'\^2\] = .*, which must be below 1"),
        ({"weight_variance": 3.0, "activation": lambda v: 2 * torch.sin(v)}, "not stable and no limit exists"),
        ({"weight_variance": 0.1, "activation": lambda v: v.sum()}, "must keep shape and dtype"),
        ({"weight_variance": 0.1, "activation": torch.log}, "is not finite on"),
    ],
)
def test_wrong_arguments(options, match):
    with pytest.raises(InvalidArgument, match=match):
        deq_ntk(samples(2, 3), **options)


def test_an_activation_must_be_a_function():
    with pytest.raises(InvalidType, match="must be a function of a tensor"):
        deq_ntk(samples(2, 3), weight_variance=0.1, activation="tanh")
