"""[gao2023], generalization and the kernel machine: the print, and the numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.certify import generalization_bound
from wellposed.kernel import tangent_kernel
from wellposed.nn import ImplicitOnlyDEQ
from wellposed_lab.papers.audit_problems import F64, generator, norm2, sphere
from wellposed_lab.papers.findings import Evidence
from wellposed_lab.papers.gao2023.audit import network


def _machine(model: ImplicitOnlyDEQ, X: Tensor, y: Tensor, *, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f_0(point), the change that the kernel machine makes there, and y - u_0."""
    H = tangent_kernel(model, X)
    with torch.no_grad():
        r, f0 = y - model(X), model(point)
        return f0, tangent_kernel(model, point, X) @ torch.linalg.solve(H, r), r


def check_lemma_4_2_the_offset_is_not_in_the_ball(e: Evidence) -> None:
    model, X, y = network()
    x0 = sphere(1, 5, 77)[0]
    f0, change, r = _machine(model, X, y, point=x0)
    # with y = u0 the ball is {0}: f_inf = f_0 is not in it, f_inf - f_0 is
    with torch.no_grad():
        fitted = model(X)
    _, nothing, _ = _machine(model, X, fitted, point=x0)
    e.printed("|f_0(x)| where the ball is {0}", f0.abs(), ">", 1e-3)
    e.corrected("|f_inf - f_0| there", nothing.abs(), "<", 1e-9)
    B = math.sqrt(float(r @ torch.linalg.solve(tangent_kernel(model, X), r)))
    e.corrected("|f_inf - f_0|, and B sqrt(k(x, x))", change.abs(), "<=", B * math.sqrt(float(tangent_kernel(model, x0))))


def check_theorem_a_3_needs_the_square_root(e: Evidence) -> None:
    model, X, _ = network(n=12)
    K = tangent_kernel(model, X)
    K = K / (4 * K.trace())  # any kernel may be scaled
    signs = torch.randint(0, 2, (2000, 12), generator=generator(1)).double() * 2 - 1
    complexity = float(((signs @ K) * signs).sum(1).sqrt().mean()) / 12  # of the unit ball
    e.printed("complexity in 2000 draws, and tr K/n", complexity, ">", float(K.trace()) / 12)
    e.corrected("complexity, and sqrt(tr K)/n", complexity, "<=", math.sqrt(float(K.trace())) / 12)


def check_theorem_4_1_scales_like_a_square_root(e: Evidence) -> None:
    # doubling the residual doubles the complexity: (y - u0)^T H^(-1) (y - u0) without its root would quadruple it
    model, X, y = network()
    with torch.no_grad():
        u0 = model(X)
    ratio = generalization_bound(model, X, u0 + 2 * (y - u0)).dominating / generalization_bound(model, X, y).dominating
    H = tangent_kernel(model, X)
    r = y - u0
    form = [float(s * r @ torch.linalg.solve(H, s * r)) for s in (1.0, 2.0)]
    e.printed("factor of the form without its root when r doubles", form[1] / form[0], ">", 3)
    e.corrected("distance of the bound's factor from 2", abs(ratio - 2), "<=", 1e-8)


def check_spectral_form(e: Evidence) -> None:
    model, X, y = network()
    H = tangent_kernel(model, X)
    with torch.no_grad():
        r = y - model(X)
    values, vectors = torch.linalg.eigh(H)
    truth = float(r @ torch.linalg.solve(H, r))
    projections = (vectors.t() @ r).square()
    e.printed("relative error with lambda^(-2)", abs(float((projections / values.square()).sum()) / truth - 1), ">", 0.1)
    e.printed("relative distance of the sum of lambda from |H|_F", abs(float(values.sum() / H.norm()) - 1), ">", 0.01)
    e.corrected("relative error with lambda^(-1)", abs(float((projections / values).sum()) / truth - 1), "<=", 1e-8)
    e.corrected("that of the sum from the trace", abs(float(values.sum() / H.trace()) - 1), "<=", 1e-10)


def check_lemma_4_3_time_factor(e: Evidence) -> None:
    # one sample, H0 = l, H(t) = l/2, which Theorem 3.1 allows: u - uhat = r0 (exp(-l t/2) - exp(-l t))
    level, r0 = 1.0, 1.0
    ratios, worst = [], 0.0
    for t in (0.25, 4.0, 12.0):
        distance = r0 * (math.exp(-level * t / 2) - math.exp(-level * t))
        ratios.append(distance / math.exp(-level * t))
        worst = max(worst, distance / (2 / level * (level / 2) * r0 * math.exp(-level * t / 2)))
    e.given("ratio to exp(-lambda_0 t) at t = 1/4", ratios[0], "<", 0.2)
    e.printed("the same ratio at t = 12", ratios[2], ">", 400)
    e.corrected("ratio to the corrected bound", worst, "<=", 1)


def check_proof_of_3_1_signs(e: Evidence) -> None:
    # gamma0 = gamma M is the contraction factor (printed gamma/M), and d|r|^2/dt <= -l0 |r|^2 (printed >=)
    A = torch.randn(50, 50, generator=generator(0), dtype=F64)
    M, gamma = norm2(A), 0.05
    e.printed("|gamma A| over gamma/M", norm2(gamma * A) / (gamma / M), ">", 10)
    e.corrected("relative distance of |gamma A| from gamma M", abs(norm2(gamma * A) / (gamma * M) - 1), "<=", 1e-12)
    model, X, y = network()
    H = tangent_kernel(model, X)
    with torch.no_grad():
        r = model(X) - y
    slope, least = float(-2 * r @ H @ r / (r @ r)), float(torch.linalg.eigvalsh(H)[0])
    e.printed("d|r|^2/dt over |r|^2, and -lambda_0", slope, "<", -least)
    e.corrected("the same, and -2 lambda_min", slope, "<=", -2 * least + 1e-12)
