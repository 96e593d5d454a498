"""[nguyen2022], the convergence theorems: the print, and the numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wellposed.nn import MonotoneDEQ
from wellposed.solve import PeacemanRachford
from wellposed_lab.papers.audit_problems import F64, descent_losses, eye, generator, norm2, sphere
from wellposed_lab.papers.findings import Evidence, gap
from wellposed_lab.papers.nguyen2022.audit_kernel import Letters


def literal_counterexample() -> tuple[Any, Tensor, Tensor, dict[str, float]]:
    """A = B = 0, u = 0, two samples, margin 1e-5: meets [nguyen2022, (3.16)-(3.18)] as printed with
    these radii, and diverges.

    W = (1 - m) I, so z = relu(U x)/m: the powers of 1/m that the thesis lost make sigma_min(Z) as
    large as one likes.
    """
    X = torch.eye(2, dtype=F64)
    y = torch.tensor([0.8, -0.6], dtype=F64)
    model = MonotoneDEQ(2, 3, margin=1e-5, solver=PeacemanRachford(step_size=1e5), dtype=F64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.U.copy_(torch.tensor([[1.0, 0.2], [0.2, 1.0], [0.3, 0.3]]))
    return model, X, y, {"A": 1e-3, "B": 0.1, "U": 1e-3, "u": 1e-3}


def check_lemma_3_3_2_is_false_without_the_mask(e: Evidence) -> None:
    worst = masked = 0.0
    for seed in range(200):
        g = generator(seed)
        n, m = 6, 0.3
        A, B = (torch.randn(n, n, generator=g, dtype=F64) for _ in range(2))
        W = (1 - m) * eye(n) - A.t() @ A + 3 * (B - B.t())
        D = torch.diag((torch.rand(n, generator=g) < 0.5).to(F64))
        u = torch.randn(n, generator=g, dtype=F64)
        row = torch.linalg.solve((eye(n) - D @ W).t(), u)  # u^T Q^(-1)
        worst = max(worst, float(row.norm() / (u.norm() / m)))
        masked = max(masked, float((D @ row).norm() / (u.norm() / m)))
    e.printed("largest ratio to the bound in 200 draws, without mask", worst, ">", 1.5)
    e.corrected("with mask", masked, "<=", 1 + 1e-12)


def check_lemma_3_3_6_sign(e: Evidence) -> None:
    net = Letters()
    dA, dB = (1e-2 * torch.randn(net.n, net.n, generator=generator(s), dtype=F64) for s in (1, 2))
    with torch.no_grad():
        change = net.model.parametrization(net.A + dA, net.model.B + dB) - net.W
    quadratic = net.A.t() @ dA + dA.t() @ net.A + dA.t() @ dA
    e.printed("relative error with the printed sign", gap(quadratic + dB - dB.t(), change), ">", 0.1)
    e.corrected("relative error", gap(-quadratic + dB - dB.t(), change), "<=", 1e-10)
    bound = 2 * norm2(net.A) * dA.norm() + dA.norm() ** 2 + 2 * dB.norm()
    e.corrected("|dW|, and its bound", norm2(change), "<=", bound)


def check_lemma_3_3_7_has_the_step_size(e: Evidence) -> None:
    net = Letters()
    loss = (net.model(net.rows) - net.y).square().sum() / 2
    (gradient,) = torch.autograd.grad(loss, net.model.U)
    before, eta = net.model.U.detach().clone(), 0.01
    with torch.no_grad():
        net.model.U.sub_(eta * gradient)
    moved = float((net.model.U.detach() - before).norm())
    e.printed("|U(k+1) - U(k)| over |grad|, eta = 0.01", moved / float(gradient.norm()), "<", 0.5)
    e.corrected("relative error of eta |grad|", abs(moved / (eta * float(gradient.norm())) - 1), "<=", 1e-9)


def check_flow_proof_exponent(e: Evidence) -> None:
    # all that is known is sigma_min(Z) >= l0/2: a residual may decay exactly like exp(-(l0/2)^2 s)
    l0, s = 0.5, 10.0
    slowest = math.exp(-((l0 / 2) ** 2) * s)
    e.printed("slowest residual, and exp(-(l0/4) s)", slowest, ">", math.exp(-l0 / 4 * s))
    e.corrected("slowest residual, and exp(-l0^2 s/4)", slowest, "<=", math.exp(-(l0**2) / 4 * s))
    # (3.13): the gradient with respect to u is Z r, bounded by |U|, not by |u|
    net = Letters()
    with torch.no_grad():
        net.model.u.mul_(1e-6)
    r = (net.model(net.rows) - net.y).detach()
    X_F, u, U = float(net.X.norm()), float(net.model.u.detach().norm()), norm2(net.model.U)
    gradient, scale = float((net.Z @ r).norm()), float(r.norm()) / net.model.margin
    e.printed("|grad_u|, and the bound (3.13) with l_u", gradient, ">", X_F * u * scale)
    e.corrected("|grad_u|, and the bound (3.13) with l_U", gradient, "<=", X_F * U * scale)


def check_3_17_is_short_of_a_factor_two(e: Evidence) -> None:
    least, most = math.inf, 0.0
    for A, U in ((0.0, 1.0), (1.0, 1.0), (2.0, 5.0)):
        u = X = r0 = 1.0
        l0 = (8 * X**2 * r0 * u * (1 + 6 * U**2 * A**2 + 4 * U**2)) ** (1 / 3)  # printed (3.17) with equality, m = 1
        moved = X**2 * r0 * (8 * u + 16 * (3 * A**2 + 2) * U**2 * u) / l0**2  # the proof of Proposition 6
        least = min(least, moved / (l0 / 2))
        for bracket in (1 + (6 * A**2 + 4) * U**2, 1 + 4 * (A**2 + 1) * U**2):
            fixed = (16 * X**2 * r0 * u * bracket) ** (1 / 3)
            most = max(most, 8 * X**2 * r0 * u * bracket / fixed**2 / (fixed / 2))
    e.printed("the proof's bound of |dZ| over l0/2, at equality in (3.17)", least, ">", 1.9)
    e.corrected("the same at equality in the corrected condition", most, "<=", 1 + 1e-12)


def check_3_18_can_never_hold(e: Evidence) -> None:
    largest = share = 0.0
    for seed in range(30):
        N = 1 + seed % 5
        X, _ = sphere(N, 4, seed)
        model = MonotoneDEQ(4, 8, margin=0.2 + 0.05 * (seed % 10), generator=generator(seed), dtype=F64, max_steps=5000)
        with torch.no_grad():
            model.u.zero_()
            model.U.mul_(10.0 ** (seed % 4))
            l0 = float(torch.linalg.svdvals(model.equilibrium(X))[-1])
        most = float(X.norm()) ** 2 * norm2(model.U) ** 2 / model.margin**2
        share, largest = max(share, l0**2 / (20 * most)), max(largest, l0**2 * N / most)
    # the term l_U^2 of (3.18) alone, with its power of m, without any radius
    e.printed("l0^2 over 20|X|_F^2|U|^2/m^2, largest in 30 networks", share, "<", 1)
    e.corrected("l0^2 N m^2/(|X|_F^2|U|^2), which proves it", largest, "<=", 1 + 1e-9)


def check_theorem_3_3_5_literal_counterexample_diverges(e: Evidence) -> None:
    model, X, y, R = literal_counterexample()
    with torch.no_grad():
        Z = model.equilibrium(X)
        r0 = float((model(X) - y).norm())
    l0, X_F, m = float(torch.linalg.svdvals(Z)[-1]), float(X.norm()), model.margin
    U, A, u = norm2(model.U) + R["U"], R["A"], R["u"]
    terms = (2 * U * u * A / (m**2 * R["A"]), 2 * U * u / (m**2 * R["B"]), u / (m * R["U"]), U / (m * R["u"]))
    printed = u**2 + 4 * (U * u) ** 2 + 4 * (U * u * A) ** 2 + U**2
    e.given("(3.16): l0^2", l0**2, ">=", 8 * X_F * r0 * max(terms))
    e.given("(3.17): l0^3", l0**3, ">=", 8 * X_F**2 * r0 * u * (1 + 6 * (U * A) ** 2 + 4 * U**2))
    e.given("(3.18): l0^2", l0**2, ">=", 20 * X_F**2 * printed)
    step = min(4 / l0**2, 1 / (X_F**2 * printed), 1 / (2 * X_F * l0 * U * u * A), 1 / (6 * l0**2 * (u * A) ** 2))
    before, after = descent_losses(model, X, y, step, steps=2)
    e.printed("loss after one step, over before", after / before, ">", 5)
    C_p = X_F**2 * (u**2 / m**2 + 4 * U**2 * u**2 * (A**2 + 1) / m**4)
    e.corrected("the corrected (3.18) refuses: l0^2/(20 C_p)", l0**2 / (20 * C_p), "<", 1)


def check_square_of_the_step_bound(e: Evidence) -> None:
    eta, l0, C11, C12 = 0.3, 0.7, 2.0, 5.0
    square = (eta * C11 + eta**2 * l0**2 * C12) ** 2
    common = eta**2 * C11**2 + 2 * eta**3 * l0**2 * C11 * C12
    e.printed("relative error with eta^4 l0 C_12^2", abs((common + eta**4 * l0 * C12**2) / square - 1), ">", 1e-3)
    e.corrected("with eta^4 l0^4 C_12^2", abs((common + eta**4 * l0**4 * C12**2) / square - 1), "<=", 1e-12)


def check_proposition_5_divides_by_lambda_squared(e: Evidence) -> None:
    l0, eta = 0.1, 1.0
    path = sum(eta * (1 - eta * l0**2 / 4) ** (k / 2) for k in range(40_000))
    e.printed("eta sum_k (1 - eta l0^2/4)^(k/2), l0 = 0.1", path, ">", 8)
    e.corrected("the same, and 8/l0^2", path, "<=", 8 / l0**2)
