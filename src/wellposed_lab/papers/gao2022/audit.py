"""[gao2022], ReLU implicit networks with a feature path: the print, and the numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.kernel import relu_gram, tangent_kernel
from wellposed.nn import SkipDEQ
from wellposed_lab.papers.audit_problems import F64, descent_losses, eye, generator, norm2, sphere
from wellposed_lab.papers.findings import Evidence, gap
from wellposed_lab.papers.ling2022.audit import Q

__all__ = ["adjoints", "network", "parts_by_autograd"]


def network(m: int = 100, gamma: float = 0.2, n: int = 3, *, d: int = 5) -> tuple[SkipDEQ, Tensor, Tensor]:
    """A SkipDEQ and data on the unit sphere."""
    X, y = sphere(n, d, 0)
    return SkipDEQ(d, m, gamma=gamma, generator=generator(0), dtype=F64), X, y


def adjoints(model: SkipDEQ, X: Tensor, *, transposed: bool = True) -> tuple[Tensor, Tensor]:
    """Rows D_i (I - g D_i A)^(-T) u, or with the plain inverse; and Z."""
    with torch.no_grad():
        Z, R = model.equilibrium(X), model.recurrent()
        masks = (Z @ R.t() + model.injection(X) > 0).to(F64)
        rows = []
        for mask in masks:
            M = eye(len(mask)) - mask.unsqueeze(1) * R
            rows.append(mask * torch.linalg.solve(M.t() if transposed else M, model.u))
    return torch.stack(rows), Z


def parts_by_autograd(model: SkipDEQ, X: Tensor) -> dict[str, Tensor]:
    """The parts of the tangent kernel, parameter by parameter."""
    kernels = {}
    for name, parameter in model.named_parameters():
        J = torch.stack([torch.autograd.grad(o, parameter, retain_graph=True)[0].flatten() for o in model(X)])
        kernels[name] = J @ J.t()
    return kernels


def check_9_is_about_singular_values(e: Evidence) -> None:
    model, _, _ = network()
    R = model.recurrent().detach()
    D = torch.diag((torch.rand(100, generator=generator(1)) < 0.5).to(F64))
    M = eye(100) - D @ R
    e.printed("largest imaginary part of an eigenvalue", torch.linalg.eigvals(M).imag.abs().max(), ">", 0.01)
    e.corrected("sigma_min, and 1 - gamma_0", torch.linalg.svdvals(M)[-1], ">=", 1 - norm2(R))


def check_10_lost_the_factor(e: Evidence) -> None:
    model, X, y = network()
    r = (model(X) - y).detach()
    (truth,) = torch.autograd.grad((model(X) - y).square().sum() / 2, model.A)
    P, Z = adjoints(model, X)
    printed = (P * r.unsqueeze(1)).t() @ Z
    factor = model.gamma / math.sqrt(100)
    e.printed("|printed gradient| over |gradient|, 1/g = 50", printed.norm() / truth.norm(), ">", 10)
    e.corrected("relative error with g", gap(factor * printed, truth), "<=", 1e-8)


def check_15_one_is_the_matrix_of_ones(e: Evidence) -> None:
    model, X, _ = network()
    kernels = parts_by_autograd(model, X)
    P, Z = adjoints(model, X)
    M, truth = P @ P.t() / 100, kernels["A"] + kernels["u"]
    e.printed("relative error with the identity", gap((model.gamma**2 * M + eye(3)) * (Z @ Z.t()), truth), ">", 0.01)
    e.corrected("with the matrix of ones", gap((model.gamma**2 * M + 1) * (Z @ Z.t()), truth), "<=", 1e-8)


def check_17_inverse_transposed(e: Evidence) -> None:
    model, X, _ = network()
    truth = parts_by_autograd(model, X)["W"]
    E = (X @ model.W.detach().t() > 0).to(F64)
    kernels = []
    for transposed in (True, False):
        through = E * (adjoints(model, X, transposed=transposed)[0] + model.v.detach())
        kernels.append(through @ through.t() / 100 * (X @ X.t()))
    e.printed("relative error with the inverse", gap(kernels[1], truth), ">", 1e-3)
    e.corrected("with the inverse transposed", gap(kernels[0], truth), "<=", 1e-8)


def check_lemma_3_3_is_an_order(e: Evidence) -> None:
    X, _ = sphere(4, 6, 0)
    G = relu_gram(X)

    def error(m: int) -> float:
        gaps = []
        for seed in range(20):
            features = torch.relu(X @ torch.randn(6, m, generator=generator(seed), dtype=F64))
            gaps.append((features @ features.t() / m - G).norm())
        return float(torch.stack(gaps).mean())

    slope = math.log(error(1600) / error(100)) / math.log(16)
    e.corrected("slope of log error against log m, m = 100 and 1600", slope, ">", -0.65)
    e.corrected("the same slope", slope, "<", -0.33)


def check_lemma_3_4_relu_is_not_lipschitz_in_operator_norm(e: Evidence) -> None:
    H = torch.ones(1, 1, dtype=F64)
    for _ in range(4):
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    e.printed("|relu(H) - relu(0)|, and |H - 0|, Hadamard 16", norm2(torch.relu(H)), ">", norm2(H))
    e.corrected("the same in the Frobenius norm", torch.relu(H).norm(), "<=", H.norm())


def check_lemma_3_5_contradicts_its_own_width(e: Evidence) -> None:
    n, d = 8, 10
    X, y = sphere(n, d, 0)
    lambda_0 = float(torch.linalg.eigvalsh(relu_gram(X))[0])
    X_norm, c, r0 = norm2(X), 2.0, float(y.norm())
    # (ii) at t = 0: sqrt(m) = |u(0)| <= 16 c sqrt(n) r0/lambda_0
    most = (16 * c * math.sqrt(n) * r0 / lambda_0) ** 2
    # the proof of (iv): 128 c n r0^2/(lambda_0^2 sqrt m) <= sqrt(m) lambda_0/(16 c |X|^2)
    least = 128 * c * n * r0**2 / lambda_0**2 * 16 * c * X_norm**2 / lambda_0
    e.printed("least width that the proof needs, and the most that (ii) allows", least, ">", 16 * most)
    e.corrected("relative error of their ratio 8|X|^2/lambda_0", abs(least / most / (8 * X_norm**2 / lambda_0) - 1), "<=", 1e-9)
    # so it is for all data: G_inf has the diagonal 1/2, and unit rows have |X| >= 1
    e.given("lambda_0", lambda_0, "<=", 0.5)
    e.given("|X|", X_norm, ">=", 1)


def check_theorem_3_1_width_of_the_repaired_proof(e: Evidence) -> None:
    # |u|, |v| <= 2 sqrt(m) gives |dW| <= 12 sqrt(n) r0/lambda_0; with Lemma 3.4 (Frobenius) m is of order n^4/lambda_0^4
    def width(n: int, lambda_0: float) -> float:
        c, r0 = 2.0, math.sqrt(n)
        return (12 * math.sqrt(n) * r0 / lambda_0 * 16 * c * n / lambda_0) ** 2

    e.printed("factor of the width when n doubles", width(20, 0.1) / width(10, 0.1), ">", 2.0**2 + 1e-9)
    e.corrected("its distance from 2^4", abs(width(20, 0.1) / width(10, 0.1) - 2.0**4), "<=", 1e-9)
    e.corrected("that when lambda_0 halves", abs(width(10, 0.05) / width(10, 0.1) - 2.0**4), "<=", 1e-9)
    n, c, lambda_0 = 10, 2.0, 0.1
    stated = 192**2 * c**2 * n * n**2 * n / lambda_0**4
    e.corrected("relative error of 192^2 c^2 n |X|_F^4 r0^2/lambda_0^4", abs(width(n, lambda_0) / stated - 1), "<=", 1e-9)


def check_lemma_3_6_cross_term_does_not_shrink(e: Evidence) -> None:
    rests = []
    for m in (150, 600):
        model, X, y = network(m, n=8, d=10)
        parts = tangent_kernel(model, X, by_parameter=True)
        rests.append(float(torch.linalg.eigvalsh(parts["A"] + parts["W"])[-1]))
    lambda_0 = float(torch.linalg.eigvalsh(relu_gram(X))[0])
    e.printed("least norm of the rest over lambda_0/2, m = 150 and 600", min(rests) / (lambda_0 / 2), ">", 5)
    e.printed("its factor from m = 150 to 600", rests[1] / rests[0], ">", 0.5)
    # and yet descent does what the lemma says: that part of the kernel is positive semidefinite and helps
    step = 0.1 * lambda_0
    losses = descent_losses(model, X, y, step)
    worst = max(b / a for a, b in zip(losses, losses[1:], strict=False))
    e.corrected("worst ratio of losses in 10 steps, and the claimed one", worst, "<=", 1 - step * lambda_0 / 2)


def check_skip_kernel(e: Evidence) -> None:
    model, X, _ = network(40)
    parts, truth = tangent_kernel(model, X, by_parameter=True), parts_by_autograd(model, X)
    for name in ("W", "u", "v"):
        e.corrected(f"relative distance from autograd, {name}", gap(parts[name], truth[name]), "<=", 1e-9)


def check_relu_gram(e: Evidence) -> None:
    X, _ = sphere(4, 5, 0)
    features = torch.relu(X @ torch.randn(5, 200_000, generator=generator(0), dtype=F64))
    e.corrected("distance from 200000 draws", gap(features @ features.t() / 200_000, relu_gram(X)), "<=", 0.02)
    e.corrected("distance from Q/2", gap(Q(X @ X.t()) / 2, relu_gram(X)), "<=", 1e-8)
