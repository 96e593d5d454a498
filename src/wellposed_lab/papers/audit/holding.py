"""The main claims that hold as they are printed, with their numbers."""

from __future__ import annotations

import math

import torch

from wellposed.certify import ling2022, nguyen2022
from wellposed.convex import OptEq, objective
from wellposed.kernel import population_gram, relu_gram, tangent_kernel
from wellposed.nn import GaussianDEQ, MonotoneDEQ
from wellposed.solve import PeacemanRachford
from wellposed_lab.papers.audit._finding import Evidence, Paper, gap
from wellposed_lab.papers.audit._monotone import Letters
from wellposed_lab.papers.audit._problems import F64, eye, gaussian, generator, norm2, sphere
from wellposed_lab.papers.gao2022 import audit as skip
from wellposed_lab.papers.gao2023 import audit as implicit
from wellposed_lab.papers.ling2022.audit import Q

__all__ = ["PAPERS"]

NGUYEN, XIE, LING, GAO22, GAO23 = (Paper(key) for key in ("nguyen2022", "xie2021", "ling2022", "gao2022", "gao2023"))
PAPERS = (NGUYEN, XIE, LING, GAO22, GAO23)
SAME = "the same"


@NGUYEN.finding("Proposition 1", "W = (1-m)I - A^T A + B - B^T if and only if I - W >= m I", "holds", corrected=SAME)
def check_parametrization_is_monotone(e: Evidence) -> None:
    least, off = math.inf, 0.0
    for seed in range(20):
        g, m = generator(seed), 0.3
        A, B = (torch.randn(5, 5, generator=g, dtype=F64) for _ in range(2))
        W = (1 - m) * eye(5) - A.t() @ A + B - B.t()
        least = min(least, float(torch.linalg.eigvalsh(eye(5) - (W + W.t()) / 2)[0]))
        values, vectors = torch.linalg.eigh((1 - m) * eye(5) - (W + W.t()) / 2)  # the way back
        root = vectors * values.clamp(min=0).sqrt() @ vectors.t()
        half = (W - W.t()) / 4
        off = max(off, gap((1 - m) * eye(5) - root.t() @ root + half - half.t(), W))
    e.corrected("least eigenvalue of sym(I - W), m = 0.3, 20 draws", least, ">=", 0.3 - 1e-12)
    e.corrected("distance of W from its way there and back", off, "<=", 1e-12)


@NGUYEN.finding("Peaceman-Rachford", "converges to the equilibrium for every step a > 0", "holds", corrected=SAME)
def check_peaceman_rachford_converges_for_every_step(e: Evidence) -> None:
    X, _ = sphere(4, 3, 0)
    found = []
    for a in (0.1, 1.0, 10.0):
        model = MonotoneDEQ(
            3, 10, margin=0.3, generator=generator(0), dtype=F64, solver=PeacemanRachford(step_size=a), max_steps=20_000
        )
        solution = model.solve(X)
        e.corrected(f"residual at a = {a:g}", solution.residual.max(), "<=", 1e-10)
        found.append(solution.value)
    e.corrected("largest distance of the three answers", max(gap(z, found[0]) for z in found[1:]), "<=", 1e-8)


@NGUYEN.finding("Lemma 3.3.3", "|Z|_F <= |X|_F |U|/m", "holds", corrected=SAME)
def check_norm_of_equilibria(e: Evidence) -> None:
    worst = 0.0
    for seed in range(20):
        net = Letters(seed, margin=0.2 + 0.04 * seed)
        worst = max(worst, float(net.Z.norm() * net.model.margin / (net.X.norm() * norm2(net.model.U))))
    e.corrected("largest ratio to the bound in 20 networks", worst, "<=", 1)


@NGUYEN.finding(
    "Condition 1 and Theorem 3.3.1",
    "(3.8), (3.9): the flow has the rate exp(-l0^2 t/2)",
    "holds",
    corrected="with the masked lemma",
)
def check_flow_condition_can_hold(e: Evidence) -> None:
    X, y = sphere(3, 5, 0)
    model = MonotoneDEQ(5, 60, margin=0.9, generator=generator(1), dtype=F64)
    with torch.no_grad():
        model.U.mul_(1e4)
        model.u.zero_()
    certificate = nguyen2022(model, X, y, dynamics="flow")
    e.corrected(
        "hypotheses that hold, u(0) = 0 and U scaled by 1e4", sum(h.holds is True for h in certificate.hypotheses), ">", 0
    )
    e.corrected("those that do not", sum(h.holds is not True for h in certificate.hypotheses), "==", 0)


@XIE.finding("Theorem 1", "the equilibrium minimises phi = psi* - |z|^2/2", "holds", corrected=SAME)
def check_equilibrium_minimises_the_objective(e: Evidence) -> None:
    g = generator(0)
    X = torch.randn(1, 3, generator=g, dtype=F64)
    model = OptEq(3, 4, norm_bound=None, generator=g, dtype=F64)
    with torch.no_grad():
        model.W.mul_(0.9 / norm2(model.W))
        z = model.equilibrium(X)
        w = torch.relu(z @ model.W.t() + X @ model.U.t() + model.b)
        near = (w + 0.2 * torch.randn(200, 4, generator=g, dtype=F64)).clamp(min=0) @ model.W  # where phi is finite
        above = objective(model, X.expand(200, 3))(near) - objective(model, X)(z)
    e.given("points where phi is finite, of 200", int(above.isfinite().sum()), ">=", 150)
    e.corrected("least of phi there, minus at the equilibrium", above.min(), ">=", -1e-9)


@XIE.finding("regularizers", "the proximal operator of lam |z|_1 shrinks by lam", "holds", corrected=SAME)
def check_soft_threshold_is_a_prox(e: Evidence) -> None:
    grid, lam, worst = torch.linspace(-3, 3, 60_001, dtype=F64), 0.4, 0.0
    for v in (-2.0, -0.3, 0.1, 1.5):
        best = float(grid[(lam * grid.abs() + (grid - v).square() / 2).argmin()])
        worst = max(worst, abs(best - math.copysign(max(abs(v) - lam, 0.0), v)))
    e.corrected("largest distance of the minimiser on a grid", worst, "<=", 2e-4)


@LING.finding("tangent kernel", "H = H_1 + H_2 + H_3", "holds", corrected="H = G + (P P^T) o (G + X X^T)")
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


@LING.finding("(14)", "K = Q(c)/(1 - s), c = s Q(c) + (1 - s) x_i . x_j/d, s = sigma_w^2", "holds", corrected=SAME)
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


@LING.finding("(8)", "the constant 4(2 + sqrt2)", "holds", corrected="8/(2 - sqrt2)")
def check_constant_of_eight(e: Evidence) -> None:
    e.corrected("|4(2 + sqrt2) - 8/(2 - sqrt2)|", abs(4 * (2 + math.sqrt(2)) - 8 / (2 - math.sqrt(2))), "<=", 1e-12)


@LING.finding("Theorem 1", "the loss falls by 1 - eta lambda_0/2 in every step", "holds", corrected="with 8 in (9)")
def check_descent_keeps_the_certified_rate(e: Evidence) -> None:
    model, X, y = gaussian(10, 20, 50, 0, 2e4)
    certificate = ling2022(model, X, y)
    step, losses = certificate.step_size, []
    assert isinstance(step, float)
    with torch.no_grad():
        Z = model.equilibrium(X)
    promised = 1 - step * float(torch.linalg.eigvalsh(Z @ Z.t())[0]) / 2
    for _ in range(10):
        loss = (model(X) - y).square().sum() / 2
        losses.append(float(loss.detach()))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(step * gradient)
    e.given(
        "hypotheses that do not hold, a(0) = 0 and U scaled by 2e4",
        sum(h.holds is not True for h in certificate.hypotheses),
        "==",
        0,
    )
    e.given("1 - the promised factor", 1 - promised, ">", 1e-9)  # above rounding
    worst = max(after / before for before, after in zip(losses, losses[1:], strict=False))
    e.corrected("worst factor of 10 steps, minus the promised one", worst - promised, "<=", 0)


@GAO22.finding("(11)-(13)", "gradients for W, u, v; the kernel", "holds", corrected=SAME)
def check_skip_kernel(e: Evidence) -> None:
    model, X, _ = skip.network(40)
    parts, truth = tangent_kernel(model, X, by_parameter=True), skip.parts_by_autograd(model, X)
    for name in ("W", "u", "v"):
        e.corrected(f"relative distance from autograd, {name}", gap(parts[name], truth[name]), "<=", 1e-9)


@GAO22.finding("G_inf", "E relu(w . x_i) relu(w . x_j)", "holds", corrected="Q(x_i . x_j)/2 for unit inputs")
def check_relu_gram(e: Evidence) -> None:
    X, _ = sphere(4, 5, 0)
    features = torch.relu(X @ torch.randn(5, 200_000, generator=generator(0), dtype=F64))
    e.corrected("distance from 200000 draws", gap(features @ features.t() / 200_000, relu_gram(X)), "<=", 0.02)
    e.corrected("distance from Q/2", gap(Q(X @ X.t()) / 2, relu_gram(X)), "<=", 1e-8)


@GAO23.finding(
    "gradient and H", "(b^T kron I_n) Q^(-1) D, samples in rows", "holds", corrected="H = (gamma^2/m)(P P^T) o (Z Z^T)"
)
def check_implicit_only_kernel(e: Evidence) -> None:
    model, X, _ = implicit.network(20)
    J = torch.stack([torch.autograd.grad(o, model.A, retain_graph=True)[0].flatten() for o in model(X)])
    e.corrected("relative distance from autograd", gap(tangent_kernel(model, X), J @ J.t()), "<=", 1e-9)


@GAO23.finding("kernel machine", "f_t = f_0 + k(x, X) H^(-1)(I - exp(-H t))(y - u_0)", "holds", corrected=SAME)
def check_kernel_machine(e: Evidence) -> None:
    model, X, y = implicit.network(40)
    H = tangent_kernel(model, X)
    with torch.no_grad():
        u = u0 = model(X)
    values, vectors = torch.linalg.eigh(H)
    t, steps = 2.0 / float(values[-1]), 20_000
    for _ in range(steps):  # Euler for du/dt = -H (u - y)
        u = u - t / steps * H @ (u - y)
    closed = u0 + vectors @ ((1 - torch.exp(-values * t)) * (vectors.t() @ (y - u0)))
    e.corrected("relative distance from Euler in 20000 steps", gap(closed, u), "<=", 1e-4)
