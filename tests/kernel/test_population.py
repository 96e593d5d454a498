"""K of an infinitely wide equilibrium: against its matrix equation, high precision, its layers, and wide networks."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.errors import InvalidArgument
from wellposed.kernel import population_gram, population_gram_layers, relu_gram

F64 = torch.float64


def samples(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64)


def iterated(X: torch.Tensor, s: float, layers: int) -> list[torch.Tensor]:
    """Definition 1 of [ling2022], as matrices: L = s K + X X^T/d, K = 2 E[relu relu] by the usual formula."""
    K = [torch.zeros(len(X), len(X), dtype=X.dtype)]
    for _ in range(layers):
        L = s * K[-1] + X @ X.T / X.shape[1]
        scale = torch.outer(L.diagonal().sqrt(), L.diagonal().sqrt())
        c = (L / scale).clamp(-1, 1)
        K.append(scale * (torch.sqrt(1 - c * c) + (math.pi - torch.arccos(c)) * c) / math.pi)
    return K


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.floats(0.0, 0.8), st.integers(1, 6))
def test_it_is_the_root_of_the_matrix_equation(seed, s, n):
    X = samples(n, 4, seed)
    torch.testing.assert_close(population_gram(X, s), iterated(X, s, 200)[-1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("s", [0.0, 1e-9, 0.08, 0.5, 0.9, 0.99, 0.999999])
@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-3, 0.7, 2.0, 3.0, math.pi])
def test_equation_14_in_fifty_digits(s, angle):
    """On the circle, with |x| = sqrt(d): c = s Q(c) + (1 - s) cos(angle), K = Q(c)/(1 - s)."""
    X = math.sqrt(2) * torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=F64)
    with mpmath.workdps(50):
        given_angle = mpmath.atan2(mpmath.mpf(float(X[1, 1])), mpmath.mpf(float(X[1, 0])))

        def Q(t):
            return (mpmath.sin(t) + (mpmath.pi - t) * mpmath.cos(t)) / mpmath.pi

        low, high, S = mpmath.mpf(0), mpmath.pi, mpmath.mpf(s)
        for _ in range(170):  # c - s Q(c) falls as the angle grows: bisection
            t = (low + high) / 2
            inside = mpmath.cos(t) - S * Q(t) > (1 - S) * mpmath.cos(given_angle)
            low, high = (t, high) if inside else (low, t)
        truth = Q(t) / (1 - S)
    K = population_gram(X, s)[0, 1]
    assert abs(float(mpmath.mpf(float(K)) - truth)) <= 2e-15 / (1 - s)
    if s > 0:  # opposite samples and a small s make a small K; it keeps its digits too
        assert float(K) == pytest.approx(float(truth), rel=1e-13, abs=0.0)


def test_zero_variance_is_one_layer():
    X = samples(5, 3)
    torch.testing.assert_close(population_gram(X, 0.0), 2 * relu_gram(X) / 3, rtol=1e-14, atol=0.0)


def test_diagonal_in_closed_form():
    X = samples(5, 3)
    torch.testing.assert_close(population_gram(X, 0.7).diagonal(), (X * X).sum(1) / (3 * 0.3), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("s", [0.0, 0.12, 0.6])
def test_layers_follow_definition_1(s):
    X = samples(5, 3)
    X[4] = -2 * X[0]
    torch.testing.assert_close(population_gram_layers(X, s, 8), torch.stack(iterated(X, s, 8)), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(population_gram_layers(X[:4], s, 8), torch.stack(iterated(X[:4], s, 8)), rtol=1e-13, atol=1e-14)


def test_the_printed_index_of_equation_13_is_wrong():
    """rho^(l-1) for rho^(l): off in the second layer by far more than rounding."""
    X = samples(2, 3)
    X *= math.sqrt(3) / X.norm(dim=1, keepdim=True)
    s, inner = 0.12, X[0] @ X[1] / 3

    def Q(c):
        return (torch.sqrt(1 - c * c) + (math.pi - torch.arccos(c)) * c) / math.pi

    rho = [0.0, 1.0, 1.0 + s]
    right, wrong = (rho[2] * Q((1 - 1 / r) * Q(inner) + inner / r) for r in (rho[2], rho[1]))
    K = population_gram_layers(X, s, 2)[2, 0, 1]
    assert abs(K - right) < 1e-14
    assert abs(K - wrong) > 1e-3


@pytest.mark.parametrize("s", [0.05, 0.12, 0.5])
def test_layers_converge_like_l_times_s_to_the_l(s):
    X = samples(4, 6)
    last = int(math.log(1e-11) / math.log(s))
    errors = (population_gram_layers(X, s, last) - population_gram(X, s)).flatten(1).norm(dim=1)
    bound = [len(X) * (layer + 1) * s**layer * float(errors[0]) for layer in range(last + 1)]
    assert all(float(error) <= limit + 1e-14 for error, limit in zip(errors, bound, strict=True))
    assert float(errors[-1] / errors[-2]) == pytest.approx(s, rel=0.35)  # not sqrt(s), as the paper's rate would have it


def test_wide_networks_approach_it_like_one_over_the_root_of_the_width():
    X, s = samples(6, 8), 0.08
    K = population_gram(X, s)
    generator = torch.Generator().manual_seed(5)
    widths, errors = [64, 256, 1024], []
    for m in widths:
        deviations = []
        for _ in range(4096 // m * 2):
            W = torch.randn(m, m, generator=generator, dtype=F64) * math.sqrt(2 * s / m)
            C = X @ (torch.randn(m, 8, generator=generator, dtype=F64) * math.sqrt(2 / 8)).T
            Z = torch.relu(C)
            for _ in range(60):
                Z = torch.relu(Z @ W.T + C)
            deviations.append(Z @ Z.T / m - K)
        errors.append(math.sqrt(sum(float(deviation.norm()) ** 2 for deviation in deviations) / len(deviations)))
    slope = math.log(errors[-1] / errors[0]) / math.log(widths[-1] / widths[0])
    assert -0.65 < slope < -0.35
    # No bias beyond that of order 1/m: the mean over networks is nearer by the root of their number.
    assert float((sum(deviations) / len(deviations)).norm()) < 3 * errors[-1] / math.sqrt(len(deviations))


def test_gradients():
    X = samples(4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda X: population_gram(X, 0.6), (X,))
    assert torch.autograd.gradcheck(lambda X, Y: population_gram(X, 0.6, Y), (X, samples(2, 3, 1).requires_grad_()))
    Y = torch.tensor([[1.0, 2.0], [1.0, 2.0], [-1.0, -2.0], [0.0, 0.0]], dtype=F64, requires_grad=True)
    population_gram(Y, 0.3).sum().backward()
    assert torch.isfinite(Y.grad).all()


def test_a_second_derivative_is_refused():
    X = samples(3, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(population_gram(X, 0.3)[0, 1], X, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented|once_differentiable"):
        torch.autograd.grad(gradient.sum(), X)


@pytest.mark.parametrize("s", [-0.1, 1.0, 2, math.nan, "0.1", True])
def test_wrong_variance(s):
    with pytest.raises(InvalidArgument, match=r"'weight_variance' must be a number in \[0, 1\)"):
        population_gram(samples(2, 2), s)


@pytest.mark.parametrize("layers", [-1, 2.0])
def test_wrong_number_of_layers(layers):
    with pytest.raises(InvalidArgument, match="'num_layers' must be an integer of at least 0"):
        population_gram_layers(samples(2, 2), 0.1, layers)


def test_no_layer_is_zero():
    assert torch.equal(population_gram_layers(samples(2, 2), 0.1, 0), torch.zeros(1, 2, 2, dtype=F64))
