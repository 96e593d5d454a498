"""Checks behind the findings about [gao2023]: each fails if the printed form were right."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import wellposed as wp
from theorem_problems import generator, sphere

F64 = torch.float64


def network(m: int = 60, init: str = "gaussian", gamma0: float = 0.3, n: int = 3, seed: int = 0) -> tuple[Any, Tensor, Tensor]:
    X, y = sphere(n, 5, 0)
    return wp.ImplicitOnlyDEQ(5, m, gamma0=gamma0, init=init, generator=generator(seed), dtype=F64), X, y


def test_lemma_3_2_derivative_of_j() -> None:
    n, m, gamma = 2, 3, 0.1
    g = generator(0)
    A, dA = (torch.randn(m, m, generator=g, dtype=F64) for _ in range(2))
    b = torch.randn(m, 1, generator=g, dtype=F64)
    one = torch.eye(n, dtype=F64)
    D = torch.diag((torch.rand(n * m, generator=g) < 0.6).to(F64))  # frozen masks
    B = torch.kron(b, one)

    def U(M: Tensor) -> Tensor:
        return torch.eye(n * m, dtype=F64) - gamma * torch.kron(M, one) @ D

    def J_transposed(M: Tensor) -> Tensor:
        return D @ torch.linalg.solve(U(M), B)

    h = 1e-6
    difference = (J_transposed(A + h * dA) - J_transposed(A - h * dA)) / (2 * h)
    corrected = gamma * D @ torch.linalg.solve(U(A), torch.kron(dA, one) @ J_transposed(A))
    assert torch.allclose(difference, corrected, atol=1e-8)
    assert dA.shape[1] != J_transposed(A).shape[0]  # dA alone, as printed, does not fit


def test_drift_of_the_kernel_comes_with_changing_masks() -> None:
    model, X, y = network(m=100, n=6)

    def masks() -> Tensor:
        with torch.no_grad():
            return model.equilibrium(X) > 0

    before, H0 = masks(), wp.tangent_kernel(model, X)
    for _ in range(100):
        (gradient,) = torch.autograd.grad((model(X) - y).square().sum() / 2, model.A)
        with torch.no_grad():
            model.A -= 0.5 / float(torch.linalg.eigvalsh(H0)[-1]) * gradient
    assert bool((masks() != before).any())  # (13)-(15) assume sigma'' = 0, so that none changes
    assert (wp.tangent_kernel(model, X) - H0).norm() > 1e-3 * H0.norm()


def test_gaussian_norm_is_two_root_m() -> None:
    A = torch.randn(400, 400, generator=generator(0), dtype=F64)
    norm = float(torch.linalg.matrix_norm(A, ord=2)) / 20
    assert 1.9 < norm < 2.1  # "without loss of generality" 1
    assert 0.9 * norm > 1  # gamma0 = 0.9 is allowed by the paper, and is no contraction
    assert (1 / 3) * (norm + 1) < 1.05  # gamma0 < 1/3 leaves room for |A(t) - A(0)| <= sqrt(m)


def test_half_normal_start_has_no_equilibrium() -> None:
    m, gamma0 = 400, 0.1
    g = generator(0)
    A = torch.randn(m, m, generator=g, dtype=F64).abs()
    assert abs(float(torch.linalg.matrix_norm(A, ord=2)) / (m * math.sqrt(2 / math.pi)) - 1) < 0.02
    gamma = gamma0 / math.sqrt(m)
    assert m > math.pi / (2 * gamma0**2)
    phi = torch.relu(torch.randn(m, generator=g, dtype=F64))
    z = torch.zeros(m, dtype=F64)
    for _ in range(300):
        z = torch.relu(gamma * A.t() @ z + phi)
    assert z.norm() > 1e10  # diverges
    formula = torch.linalg.solve(torch.eye(m, dtype=F64) - gamma * A.t(), phi)
    assert bool((formula < 0).any())  # Z(0) = Phi (I - gamma A)^(-1), as printed, is no equilibrium of a ReLU network


def test_repair_by_scaling_entries_and_not_by_the_norm() -> None:
    def least(m: int, by_norm: bool) -> float:
        values = []
        for seed in range(4):
            model, X, _ = network(m, "half_normal", 0.3, seed=seed)
            if by_norm:  # gamma = gamma0/|A| for unscaled half-normal entries
                with torch.no_grad():
                    model.A *= math.sqrt(m)
                model.gamma = 0.3 / float(torch.linalg.matrix_norm(model.A.detach(), ord=2))
            values.append(float(torch.linalg.eigvalsh(wp.tangent_kernel(model, X))[0]))
        return sum(values) / 4

    by_norm = math.log(least(400, True) / least(50, True)) / math.log(8)
    by_entries = math.log(least(400, False) / least(50, False)) / math.log(8)
    assert by_norm < -0.6  # lambda_min decays like 1/m
    assert abs(by_entries) < 0.35
    model, X, _ = network(80, "half_normal")
    with torch.no_grad():
        Phi = model.injection(X)
        closed = torch.linalg.solve(torch.eye(80, dtype=F64) - model.gamma * model.A.t(), Phi.t()).t()
        assert torch.allclose(model.equilibrium(X), closed, atol=1e-8)  # all units active, as the paper wants


def test_25_lower_bound() -> None:
    model, X, _ = network(80, "half_normal")
    H = wp.tangent_kernel(model, X)
    with torch.no_grad():
        Phi, A = model.injection(X), float(torch.linalg.matrix_norm(model.A, ord=2))
    lower = model.gamma**2 / (1 + model.gamma * A) ** 4 * Phi @ Phi.t()
    assert torch.linalg.eigvalsh(H - lower)[0] >= -1e-12
    n, m = Phi.shape
    inflated = torch.kron(torch.eye(m, dtype=F64), Phi @ Phi.t())  # D (I kron Z Z^T) D of (25) is of this size
    assert H.shape == (n, n) != inflated.shape


def machine(model: Any, X: Tensor, y: Tensor, x0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    H = wp.tangent_kernel(model, X)
    with torch.no_grad():
        r, f0 = y - model(X), model(x0)
        return f0, wp.tangent_kernel(model, x0, X) @ torch.linalg.solve(H, r), r


def test_lemma_4_2_the_offset_is_not_in_the_ball() -> None:
    model, X, y = network()
    x0 = sphere(1, 5, 77)[0]
    f0, change, r = machine(model, X, y, x0)
    # in F_B means |f(x0)| <= B sqrt(k(x0, x0)) restricted to the span of the sample: with y = u0 the ball is {0}
    with torch.no_grad():
        fitted = model(X)
    _, nothing, zero = machine(model, X, fitted, x0)
    assert float(zero.norm()) < 1e-12 and float(nothing.abs()) < 1e-9
    assert float(f0.abs()) > 1e-3  # f_inf = f_0 is not in {0}; f_inf - f_0 is
    assert float(change.abs()) <= math.sqrt(float(r @ torch.linalg.solve(wp.tangent_kernel(model, X), r))) * math.sqrt(
        float(wp.tangent_kernel(model, x0))
    )


def test_theorem_a_3_needs_the_square_root() -> None:
    model, X, _ = network(n=12)
    K = wp.tangent_kernel(model, X)
    K = K / (4 * K.trace())  # any kernel may be scaled
    signs = torch.randint(0, 2, (2000, 12), generator=generator(1)).double() * 2 - 1
    complexity = float(((signs @ K) * signs).sum(1).sqrt().mean()) / 12  # of the unit ball
    assert complexity > float(K.trace()) / 12  # printed
    assert complexity <= math.sqrt(float(K.trace())) / 12


def test_theorem_4_1_scales_like_a_square_root() -> None:
    # doubling the residual doubles the complexity: (y - u0)^T H^(-1) (y - u0) without its root would quadruple it
    model, X, y = network()
    with torch.no_grad():
        u0 = model(X)
    first = wp.generalization_bound(model, X, y)
    second = wp.generalization_bound(model, X, u0 + 2 * (y - u0))
    assert math.isclose(second.dominating, 2 * first.dominating, rel_tol=1e-9)


def test_spectral_form() -> None:
    model, X, y = network()
    H = wp.tangent_kernel(model, X)
    with torch.no_grad():
        r = y - model(X)
    values, vectors = torch.linalg.eigh(H)
    truth = r @ torch.linalg.solve(H, r)
    projections = (vectors.t() @ r).square()
    assert torch.isclose((projections / values).sum(), truth)
    assert not torch.isclose((projections / values.square()).sum(), truth, rtol=0.1)  # lambda^(-2), as printed
    assert torch.isclose(values.sum(), H.trace()) and not torch.isclose(values.sum(), H.norm(), rtol=0.01)


def test_lemma_4_3_time_factor() -> None:
    # one sample, H0 = l, H(t) = l/2, which Theorem 3.1 allows: u - uhat = r0 (exp(-l t/2) - exp(-l t))
    level, r0 = 1.0, 1.0
    ratios = []
    for t in (0.25, 4.0, 12.0):
        gap = r0 * (math.exp(-level * t / 2) - math.exp(-level * t))
        ratios.append(gap / math.exp(-level * t))
        assert gap <= 2 / level * (level / 2) * r0 * math.exp(-level * t / 2)  # corrected
    assert ratios[0] < 0.2 and ratios[2] > 400  # printed: bounded


def test_proof_of_3_1_signs() -> None:
    # gamma0 = gamma M is the contraction factor (printed gamma/M), and d|r|^2/dt <= -l0 |r|^2 (printed >=)
    A = torch.randn(50, 50, generator=generator(0), dtype=F64)
    M, gamma = float(torch.linalg.matrix_norm(A, ord=2)), 0.05
    assert math.isclose(float(torch.linalg.matrix_norm(gamma * A, ord=2)), gamma * M)
    assert gamma / M < 0.01 < gamma * M
    model, X, y = network()
    H = wp.tangent_kernel(model, X)
    with torch.no_grad():
        r = model(X) - y
    assert -2 * r @ H @ r <= -2 * torch.linalg.eigvalsh(H)[0] * (r @ r) + 1e-12
