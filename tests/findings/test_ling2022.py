"""Checks behind the findings about [ling2022]: each fails if the printed form were right."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

import wellposed as wp
from theorem_problems import gaussian, generator, sphere, vec
from wellposed.certify import ling2022

F64 = torch.float64


def Q(c: torch.Tensor) -> torch.Tensor:
    """[ling2022, (11)]."""
    c = c.clamp(-1, 1)
    return ((1 - c.square()).clamp(min=0).sqrt() + (math.pi - torch.arccos(c)) * c) / math.pi


def test_lemma_1_threshold_is_the_spectral_edge() -> None:
    m, draws = 100, 60
    g = generator(0)
    norms = torch.stack([torch.linalg.matrix_norm(torch.randn(m, m, generator=g, dtype=F64), ord=2) for _ in range(draws)])
    norms /= 2 * math.sqrt(m)  # |W|/(2 sqrt2 sigma_w)
    assert float((norms <= 1).double().mean()) < 0.97  # printed: with probability 1 - exp(-Omega(m))
    assert bool((norms <= 1.1).all())


def test_lemma_2_kronecker_order() -> None:
    n, m, d = 3, 5, 2
    X, _ = sphere(n, d, 0)
    model = wp.GaussianDEQ(d, m, generator=generator(0), dtype=F64)
    with torch.no_grad():
        Z = model.equilibrium(X)
        masks = (Z @ model.W.t() + X @ model.U.t()) > 0
        D = torch.diag(masks.double().reshape(-1))  # samples in columns, vec: sample after sample
        J = torch.eye(n * m, dtype=F64) - D @ torch.kron(torch.eye(n, dtype=F64), model.W)
        inner = torch.linalg.solve(J, D)
        one = torch.eye(n, dtype=F64)
        corrected = torch.kron(one, model.a.unsqueeze(0)) @ inner
        printed = torch.kron(model.a.unsqueeze(0), one) @ inner  # (a kron I_n), transposed to fit at all
        features = torch.kron(X, torch.eye(m, dtype=F64))
    truth = torch.stack([vec(torch.autograd.grad(o, model.U, retain_graph=True)[0]) for o in model(X)])
    assert torch.allclose(corrected @ features, truth, atol=1e-9)
    assert (printed @ features - truth).norm() > 0.1 * truth.norm()


def test_lemma_3_and_13_index_of_rho() -> None:
    s, inner = 0.12, torch.tensor(0.3, dtype=F64)  # sigma_w^2 and x_i . x_j/d
    K_ii, K_ij = torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)
    rho, cosines = [K_ii], [inner]
    for _ in range(6):  # Definition 1
        L_ii, L_ij = s * K_ii + 1, s * K_ij + inner
        cosine = L_ij / L_ii
        if len(rho) > 1:
            assert abs(L_ij / (s * K_ij + 1) - cosine) > 1e-4  # the denominator that Lemma 3 prints
        K_ii, K_ij = L_ii, L_ii * Q(cosine)
        rho.append(K_ii)
        cosines.append(cosine)
    for level in range(2, 7):
        previous = Q(cosines[level - 1])
        corrected = (1 - 1 / rho[level]) * previous + inner / rho[level]
        printed = (1 - 1 / rho[level - 1]) * previous + inner / rho[level - 1]
        assert abs(corrected - cosines[level]) < 1e-12
        assert abs(printed - cosines[level]) > 1e-8  # and at level 1 it divides by 0
    assert rho[0] == 0


def test_theorem_2_is_an_order() -> None:
    n, d, s = 4, 8, 0.05
    X, _ = sphere(n, d, 0, math.sqrt(d))
    K = wp.kernel.population_gram(X, s)

    def error(m: int) -> float:
        gaps = []
        for seed in range(4):
            model = wp.GaussianDEQ(d, m, weight_variance=s, generator=generator(seed), dtype=F64)
            with torch.no_grad():
                Z = model.equilibrium(X)
            gaps.append((Z @ Z.t() / m - K).norm())
        return float(torch.stack(gaps).mean())

    assert 2.0 < error(25) / error(400) < 8.0  # m^(-1/2): a factor of 4


def test_9_constant_eight() -> None:
    C, E = 1.0, 7.0
    eta = 2 * C / E**2  # the printed step

    def factor(lambda_0: float) -> float:
        return 1 - eta * lambda_0 + 2 * eta * C + eta**2 * E**2

    assert factor(4 * C) > 1 - eta * 4 * C / 2 and math.isclose(factor(4 * C), 1)
    assert math.isclose(factor(8 * C), 1 - eta * 8 * C / 2)


def test_9_can_never_hold_under_assumption_1() -> None:
    d, n = 10, 3
    X, y = sphere(n, d, 0, math.sqrt(d))
    ratios = []
    for m in (30, 120, 480):
        model = wp.GaussianDEQ(d, m, weight_variance=0.01, generator=generator(m), dtype=F64)
        with torch.no_grad():
            Z = model.equilibrium(X)
        W, U, a = (torch.linalg.norm(p.detach(), ord=2) for p in (model.W, model.U, model.a))
        least, X_F = torch.linalg.eigvalsh(Z @ Z.t())[0], X.norm()
        assert least <= U**2 * X_F**2 / (n * (1 - W) ** 2) * (1 + 1e-9)
        assert a > (1 - W) / (2 * math.sqrt(n))  # so the printed constant fails as well, without any radius
        ratios.append(float(least / (4 * ((U * a / (1 - W) ** 2) ** 2 + (a / (1 - W)) ** 2) * X_F**2)))
        assert ling2022(model, X, y).hypotheses[2].holds is False
    assert max(ratios) < 0.1 and max(ratios) < 30 * min(ratios)  # flat in m: no width helps


def one_radius_suffices(scale: float) -> bool:
    """Whether some single delta satisfies (7), (8) and (9), on a fine grid."""
    model, X, y = gaussian(10, 20, 50, 0, scale)
    with torch.no_grad():
        Z, r0 = model.equilibrium(X), float((model(X) - y).norm())
    W0, U0 = (float(torch.linalg.matrix_norm(p.detach(), ord=2)) for p in (model.W, model.U))
    least, X_F = float(torch.linalg.eigvalsh(Z @ Z.t())[0]), float(X.norm())
    delta = torch.logspace(-6, math.log10((1 - W0) * 0.999), 20_000, dtype=F64)
    W, U, a = W0 + delta, U0 + delta, delta
    w, u, c = U * a / (1 - W) ** 2, a / (1 - W), U / (1 - W)
    seven = least >= 4 / delta * torch.maximum(torch.maximum(w, u), c) * X_F * r0
    eight = least**1.5 >= 4 * (2 + math.sqrt(2)) / a * (w**2 + u**2) * X_F**2 * r0
    return bool((seven & eight & (least >= 8 * (w**2 + u**2) * X_F**2)).any())


def separate_radii_suffice(scale: float) -> bool:
    return ling2022(*gaussian(10, 20, 50, 0, scale)).certified


def least_scale(suffices: Callable[[float], bool]) -> float:
    low, high = 1e2, 1e5
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def test_one_radius_for_all_is_poorer() -> None:
    single, separate = least_scale(one_radius_suffices), least_scale(separate_radii_suffice)
    assert separate < 0.99 * single  # a smaller input scale is enough
