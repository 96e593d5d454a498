"""[ling2022], global convergence of equilibrium models: the print, and the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from wellposed.certify import ling2022
from wellposed.kernel import population_gram, tangent_kernel
from wellposed.nn import GaussianDEQ
from wellposed_lab.papers.audit_problems import F64, descent_losses, eye, gaussian, generator, norm2, sphere, vec
from wellposed_lab.papers.findings import Evidence, gap

__all__ = ["Q"]


def check_lemma_1_threshold_is_the_spectral_edge(e: Evidence) -> None:
    m, draws = 100, 60
    g = generator(0)
    norms = torch.stack([torch.linalg.matrix_norm(torch.randn(m, m, generator=g, dtype=F64), ord=2) for _ in range(draws)])
    norms /= 2 * math.sqrt(m)  # |W|/(2 sqrt2 sigma_w)
    e.printed("share of 60 draws within the threshold, m = 100", (norms <= 1).double().mean(), "<", 0.97)
    e.corrected("share within 1.1 times the threshold", (norms <= 1.1).double().mean(), "==", 1)


def check_lemma_2_kronecker_order(e: Evidence) -> None:
    n, m, d = 3, 5, 2
    X, _ = sphere(n, d, 0)
    model = GaussianDEQ(d, m, generator=generator(0), dtype=F64)
    with torch.no_grad():
        Z = model.equilibrium(X)
        masks = (Z @ model.W.t() + X @ model.U.t()) > 0
        D = torch.diag(masks.double().reshape(-1))  # samples in columns, vec: sample after sample
        inner = torch.linalg.solve(eye(n * m) - D @ torch.kron(eye(n), model.W), D)
        corrected = torch.kron(eye(n), model.a.unsqueeze(0)) @ inner
        printed = torch.kron(model.a.unsqueeze(0), eye(n)) @ inner  # (a kron I_n), transposed to fit at all
        features = torch.kron(X, eye(m))
    truth = torch.stack([vec(torch.autograd.grad(o, model.U, retain_graph=True)[0]) for o in model(X)])
    e.printed("relative error of a kron I_n", gap(printed @ features, truth), ">", 0.1)
    e.corrected("of I_n kron a^T", gap(corrected @ features, truth), "<=", 1e-8)


def Q(c: Tensor) -> Tensor:
    """[ling2022, (11)]."""
    c = c.clamp(-1, 1)
    return ((1 - c.square()).clamp(min=0).sqrt() + (math.pi - torch.arccos(c)) * c) / math.pi


def _recursion() -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """By Definition 1: rho^(l), cos^(l), the cosine as in Lemma 3, and x_i . x_j/d."""
    s, inner = 0.12, torch.tensor(0.3, dtype=F64)  # sigma_w^2 and x_i . x_j/d
    K_ii, K_ij = torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)
    rho, cosines, printed = [K_ii], [inner], [inner]
    for _ in range(6):
        L_ii, L_ij = s * K_ii + 1, s * K_ij + inner
        printed.append(L_ij / (s * K_ij + 1))
        cosines.append(L_ij / L_ii)
        K_ii, K_ij = L_ii, L_ii * Q(cosines[-1])
        rho.append(K_ii)
    return rho, cosines, printed, inner


def check_lemma_3_index_of_rho(e: Evidence) -> None:
    rho, cosines, printed, inner = _recursion()
    off = [abs(float(a - b)) for a, b in zip(printed[2:], cosines[2:], strict=True)]
    e.printed("least error of the printed cosine, l = 2..6", min(off), ">", 1e-4)
    s = 0.12
    worst = max(abs(float(s * rho[level - 1] + 1 - rho[level])) for level in range(1, 7))
    e.corrected("largest |sigma_w^2 K_ii + 1 - rho^(l)|", worst, "<=", 1e-12)


def check_13_index_of_rho(e: Evidence) -> None:
    rho, cosines, _, inner = _recursion()
    right, wrong = [], []
    for level in range(2, 7):
        previous = Q(cosines[level - 1])
        corrected = (1 - 1 / rho[level]) * previous + inner / rho[level]
        printed = (1 - 1 / rho[level - 1]) * previous + inner / rho[level - 1]
        right.append(abs(float(corrected - cosines[level])))
        wrong.append(abs(float(printed - cosines[level])))
    e.printed("rho^(0), which is divided by at l = 1", rho[0], "==", 0)
    e.printed("least error of (13) with rho^(l-1), l = 2..6", min(wrong), ">", 1e-8)
    e.corrected("largest error with rho^(l)", max(right), "<=", 1e-12)


def check_theorem_2_is_an_order(e: Evidence) -> None:
    n, d, s = 4, 8, 0.05
    X, _ = sphere(n, d, 0, math.sqrt(d))
    K = population_gram(X, s)

    def error(m: int) -> float:
        """Root mean square over 32 draws: the slope has a standard deviation of about 0.03."""
        gaps = []
        for seed in range(32):
            model = GaussianDEQ(d, m, weight_variance=s, generator=generator(seed), dtype=F64)
            with torch.no_grad():
                Z = model.equilibrium(X)
            gaps.append((Z @ Z.t() / m - K).square().sum())
        return float(torch.stack(gaps).mean().sqrt())

    slope = math.log(error(400) / error(25)) / math.log(16)
    e.corrected("slope of log error against log m, m = 25 and 400", slope, ">", -0.6)
    e.corrected("the same slope", slope, "<", -0.4)


def check_9_constant_eight(e: Evidence) -> None:
    C, E = 1.0, 7.0
    eta = 2 * C / E**2  # the printed step

    def factor(lambda_0: float) -> float:
        return 1 - eta * lambda_0 + 2 * eta * C + eta**2 * E**2

    e.printed("factor of the loss with 4, and the promised one", factor(4 * C), ">", 1 - eta * 4 * C / 2)
    e.corrected("distance from the promised factor with 8", abs(factor(8 * C) - (1 - eta * 8 * C / 2)), "<=", 1e-12)


def check_9_can_never_hold_under_assumption_1(e: Evidence) -> None:
    d, n = 10, 3
    X, y = sphere(n, d, 0, math.sqrt(d))
    ratios, shares, readouts, refused = [], [], [], 0
    for m in (30, 120, 480):
        model = GaussianDEQ(d, m, weight_variance=0.01, generator=generator(m), dtype=F64)
        with torch.no_grad():
            Z = model.equilibrium(X)
        W, U, a = norm2(model.W), norm2(model.U), float(model.a.detach().norm())
        least, X_F = float(torch.linalg.eigvalsh(Z @ Z.t())[0]), float(X.norm())
        shares.append(least * n * (1 - W) ** 2 / (U * X_F) ** 2)
        readouts.append(a / ((1 - W) / (2 * math.sqrt(n))))
        ratios.append(least / (4 * ((U * a / (1 - W) ** 2) ** 2 + (a / (1 - W)) ** 2) * X_F**2))
        refused += ling2022(model, X, y).hypotheses[2].holds is False
    e.printed("largest lambda_0/(4C), m = 30, 120, 480", max(ratios), "<", 0.1)
    e.printed("its largest over its least: no width helps", max(ratios) / min(ratios), "<", 30)
    e.corrected("lambda_0 over its upper bound", max(shares), "<=", 1 + 1e-9)
    e.corrected("least |a(0)| over what (9) allows", min(readouts), ">", 1)
    e.corrected("certificates that refuse (9), of 3", refused, "==", 3)


def _one_radius_suffices(scale: float) -> bool:
    """Whether some single delta satisfies (7), (8) and (9), on a fine grid."""
    model, X, y = gaussian(10, 20, 50, 0, scale)
    with torch.no_grad():
        Z, r0 = model.equilibrium(X), float((model(X) - y).norm())
    W0, U0 = norm2(model.W), norm2(model.U)
    least, X_F = float(torch.linalg.eigvalsh(Z @ Z.t())[0]), float(X.norm())
    delta = torch.logspace(-6, math.log10((1 - W0) * 0.999), 20_000, dtype=F64)
    W, U, a = W0 + delta, U0 + delta, delta
    w, u, c = U * a / (1 - W) ** 2, a / (1 - W), U / (1 - W)
    seven = least >= 4 / delta * torch.maximum(torch.maximum(w, u), c) * X_F * r0
    eight = least**1.5 >= 4 * (2 + math.sqrt(2)) / a * (w**2 + u**2) * X_F**2 * r0
    return bool((seven & eight & (least >= 8 * (w**2 + u**2) * X_F**2)).any())


def _least_scale(suffices: Callable[[float], bool]) -> float:
    low, high = 1e2, 1e5
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def check_one_radius_for_all_is_poorer(e: Evidence) -> None:
    single = _least_scale(_one_radius_suffices)
    separate = _least_scale(lambda scale: ling2022(*gaussian(10, 20, 50, 0, scale)).certified)
    e.corrected("least input scale with separate radii, over with one", separate / single, "<", 0.99)


def check_gaussian_kernel(e: Evidence) -> None:
    X, _ = sphere(4, 3, 0)
    model = GaussianDEQ(3, 8, generator=generator(0), dtype=F64)
    rows = []
    for output in model(X):
        grads = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    J = torch.stack(rows)
    e.corrected("relative distance of the closed form from autograd", gap(tangent_kernel(model, X), J @ J.t()), "<=", 1e-9)
    with torch.no_grad():
        Z = model.equilibrium(X)
    e.corrected("least eigenvalue of H - G", torch.linalg.eigvalsh(J @ J.t() - Z @ Z.t())[0], ">=", -1e-10)


def check_population_gram(e: Evidence) -> None:
    d, s = 6, 0.12
    X, _ = sphere(3, d, 0, math.sqrt(d))
    inner = X @ X.t() / d
    K = torch.zeros_like(inner)
    for _ in range(60):  # Definition 1, level after level
        L = s * K + inner
        scale = L.diagonal().sqrt()
        K = scale.unsqueeze(0) * scale.unsqueeze(1) * Q(L / (scale.unsqueeze(0) * scale.unsqueeze(1)))
    e.corrected("distance from 60 levels of Definition 1", gap(population_gram(X, s), K), "<=", 1e-6)


def check_constant_of_eight(e: Evidence) -> None:
    e.corrected("|4(2 + sqrt2) - 8/(2 - sqrt2)|", abs(4 * (2 + math.sqrt(2)) - 8 / (2 - math.sqrt(2))), "<=", 1e-12)


def check_descent_keeps_the_certified_rate(e: Evidence) -> None:
    model, X, y = gaussian(10, 20, 50, 0, 2e4)
    certificate = ling2022(model, X, y)
    step = certificate.step_size
    assert isinstance(step, float)
    with torch.no_grad():
        Z = model.equilibrium(X)
    promised = 1 - step * float(torch.linalg.eigvalsh(Z @ Z.t())[0]) / 2
    losses = descent_losses(model, X, y, step)
    e.given(
        "hypotheses that do not hold, a(0) = 0 and U scaled by 2e4",
        sum(h.holds is not True for h in certificate.hypotheses),
        "==",
        0,
    )
    e.given("1 - the promised factor", 1 - promised, ">", 1e-9)  # above rounding
    worst = max(after / before for before, after in zip(losses, losses[1:], strict=False))
    e.corrected("worst factor of 10 steps, minus the promised one", worst - promised, "<=", 0)
