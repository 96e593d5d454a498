"""Checks behind the findings about [gao2022]: each fails if the printed form were right."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import wellposed as wp
from theorem_problems import generator, sphere

F64 = torch.float64


def network(m: int = 100, gamma: float = 0.2, n: int = 3, d: int = 5) -> tuple[Any, Tensor, Tensor]:
    X, y = sphere(n, d, 0)
    return wp.SkipDEQ(d, m, gamma=gamma, generator=generator(0), dtype=F64), X, y


def test_9_is_about_singular_values() -> None:
    model, _, _ = network()
    R, gamma0 = model.recurrent().detach(), float(torch.linalg.matrix_norm(model.recurrent().detach(), ord=2))
    D = torch.diag((torch.rand(100, generator=generator(1)) < 0.5).to(F64))
    M = torch.eye(100, dtype=F64) - D @ R
    assert float(torch.linalg.eigvals(M).imag.abs().max()) > 0.01  # no least eigenvalue: they are complex
    assert torch.linalg.svdvals(M)[-1] >= 1 - gamma0


def adjoints(model: Any, X: Tensor, *, transposed: bool = True) -> tuple[Tensor, Tensor]:
    """Rows D_i (I - g D_i A)^(-T) u, or with the plain inverse; and Z."""
    with torch.no_grad():
        Z, R = model.equilibrium(X), model.recurrent()
        masks = (Z @ R.t() + model.injection(X) > 0).to(F64)
        rows = []
        for mask in masks:
            M = torch.eye(len(mask), dtype=F64) - mask.unsqueeze(1) * R
            rows.append(mask * torch.linalg.solve(M.t() if transposed else M, model.u))
    return torch.stack(rows), Z


def test_10_lost_the_factor() -> None:
    model, X, y = network()
    r = (model(X) - y).detach()
    (truth,) = torch.autograd.grad((model(X) - y).square().sum() / 2, model.A)
    P, Z = adjoints(model, X)
    printed = (P * r.unsqueeze(1)).t() @ Z
    factor = model.gamma / math.sqrt(100)
    assert torch.allclose(factor * printed, truth, atol=1e-9)
    assert torch.isclose(printed.norm() / truth.norm(), torch.tensor(1 / factor, dtype=F64))


def parts_by_autograd(model: Any, X: Tensor) -> dict[str, Tensor]:
    kernels = {}
    for name, parameter in model.named_parameters():
        J = torch.stack([torch.autograd.grad(o, parameter, retain_graph=True)[0].flatten() for o in model(X)])
        kernels[name] = J @ J.t()
    return kernels


def test_15_one_is_the_matrix_of_ones() -> None:
    model, X, _ = network()
    kernels = parts_by_autograd(model, X)
    P, Z = adjoints(model, X)
    M = P @ P.t() / 100
    truth = kernels["A"] + kernels["u"]
    assert torch.allclose((model.gamma**2 * M + 1) * (Z @ Z.t()), truth, atol=1e-9)
    identity = (model.gamma**2 * M + torch.eye(3, dtype=F64)) * (Z @ Z.t())
    assert (identity - truth).norm() > 0.01 * truth.norm()


def test_17_inverse_transposed() -> None:
    model, X, _ = network()
    truth = parts_by_autograd(model, X)["W"]
    E = (X @ model.W.detach().t() > 0).to(F64)
    kernels = []
    for transposed in (True, False):
        through = E * (adjoints(model, X, transposed=transposed)[0] + model.v.detach())
        kernels.append(through @ through.t() / 100 * (X @ X.t()))
    assert torch.allclose(kernels[0], truth, atol=1e-9)
    assert (kernels[1] - truth).norm() > 1e-3 * truth.norm()


def test_lemma_3_3_is_an_order() -> None:
    X, _ = sphere(4, 6, 0)
    G = wp.kernel.relu_gram(X)

    def error(m: int) -> float:
        gaps = []
        for seed in range(20):
            features = torch.relu(X @ torch.randn(6, m, generator=generator(seed), dtype=F64))
            gaps.append((features @ features.t() / m - G).norm())
        return float(torch.stack(gaps).mean())

    assert 2.5 < error(100) / error(1600) < 6.0  # m^(-1/2): a factor of 4


def test_lemma_3_4_relu_is_not_lipschitz_in_operator_norm() -> None:
    H = torch.ones(1, 1, dtype=F64)
    for _ in range(4):
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    assert math.isclose(torch.linalg.matrix_norm(H, ord=2).item(), 4.0)
    assert torch.linalg.matrix_norm(torch.relu(H), ord=2) > 8.8  # printed: at most |H - 0| = 4
    assert torch.relu(H).norm() <= H.norm()  # in the Frobenius norm it is


def test_lemma_3_5_contradicts_its_own_width() -> None:
    n, d = 8, 10
    X, y = sphere(n, d, 0)
    lambda_0 = float(torch.linalg.eigvalsh(wp.kernel.relu_gram(X))[0])
    X_norm, c, r0 = float(torch.linalg.matrix_norm(X, ord=2)), 2.0, float(y.norm())
    # (ii) at t = 0: sqrt(m) = |u(0)| <= 16 c sqrt(n) r0/lambda_0
    most = (16 * c * math.sqrt(n) * r0 / lambda_0) ** 2
    # the proof of (iv): 128 c n r0^2/(lambda_0^2 sqrt m) <= sqrt(m) lambda_0/(16 c |X|^2)
    least = 128 * c * n * r0**2 / lambda_0**2 * 16 * c * X_norm**2 / lambda_0
    assert math.isclose(least / most, 8 * X_norm**2 / lambda_0) and least > 16 * most
    # lambda_0 <= 1/2 = G_inf's diagonal and |X| >= 1, so this is so for all data
    assert lambda_0 <= 0.5 and X_norm >= 1


def test_theorem_3_1_width_of_the_repaired_proof() -> None:
    # |u|, |v| <= 2 sqrt(m) gives |dW| <= 12 sqrt(n) r0/lambda_0; with Lemma 3.4 (Frobenius) m is of order n^4/lambda_0^4
    def width(n: int, lambda_0: float) -> float:
        c, r0 = 2.0, math.sqrt(n)
        return (12 * math.sqrt(n) * r0 / lambda_0 * 16 * c * n / lambda_0) ** 2

    assert math.isclose(width(20, 0.1) / width(10, 0.1), 2.0**4)
    assert math.isclose(width(10, 0.05) / width(10, 0.1), 2.0**4)
    n, c, lambda_0 = 10, 2.0, 0.1
    assert math.isclose(width(n, lambda_0), 192**2 * c**2 * n * n**2 * n / lambda_0**4)
    assert width(20, 0.1) / width(10, 0.1) > 2.0**2  # n^2, as printed, is not what comes out


def test_lemma_3_6_cross_term_does_not_shrink() -> None:
    rests = []
    for m in (150, 600):
        model, X, y = network(m, n=8, d=10)
        parts = wp.tangent_kernel(model, X, by_parameter=True)
        rests.append(float(torch.linalg.eigvalsh(parts["A"] + parts["W"])[-1]))
    lambda_0 = float(torch.linalg.eigvalsh(wp.kernel.relu_gram(X))[0])
    assert min(rests) > 5 * lambda_0 / 2 and rests[1] > rests[0] / 2  # no width brings it below lambda_0/2
    # and yet descent does what the lemma says: that part of the kernel is positive semidefinite and helps
    step = 0.1 * lambda_0
    losses = []
    for _ in range(10):
        loss = (model(X) - y).square().sum() / 2
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= step * gradient
    assert all(b <= (1 - step * lambda_0 / 2) * a for a, b in zip(losses, losses[1:], strict=False))
