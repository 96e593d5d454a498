"""[nguyen2022], background and tangent kernel: the print, and the numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wellposed.certify import nguyen2022
from wellposed.kernel import tangent_kernel
from wellposed.nn import MonotoneDEQ
from wellposed.solve import PeacemanRachford
from wellposed_lab.papers.audit_problems import F64, commutation, eye, generator, norm2, sphere, vec
from wellposed_lab.papers.findings import Evidence, gap

__all__ = ["Letters"]


class Letters:
    """Samples in columns, Kronecker matrices formed.

    Args:
        seed: Of data and network.
        n: Width. N: Samples. d: Features.
        margin: m.
    """

    def __init__(self, seed: int = 0, n: int = 4, N: int = 3, *, d: int = 2, margin: float = 0.5) -> None:
        X, y = sphere(N, d, seed)
        self.model = MonotoneDEQ(d, n, margin=margin, generator=generator(seed), dtype=F64)
        self.n, self.N, self.X, self.y, self.rows = n, N, X.t(), y, X
        with torch.no_grad():
            self.model.u.copy_(torch.randn(n, generator=generator(seed + 9), dtype=F64))
            self.A, self.u, self.W = self.model.A.clone(), self.model.u.clone(), self.model.recurrent().clone()
            self.Z = self.model.equilibrium(X).t()
            masks = (self.W @ self.Z + self.model.U @ self.X) > 0
        self.D = torch.diag(vec(masks.to(F64)))
        self.Q = eye(n * N) - self.D @ torch.kron(eye(N), self.W)
        self.P_A = -(eye(n * n) + commutation(n, n)) @ torch.kron(eye(n), self.A.t().contiguous())
        self.P_B = eye(n * n) - commutation(n, n)

    def features(self) -> Tensor:
        """Q^(-1) D (Z^T kron I_n): d vec(Z)/d vec(W)."""
        return torch.linalg.solve(self.Q, self.D @ torch.kron(self.Z.t().contiguous(), eye(self.n)))

    def readout(self) -> Tensor:
        """I_N kron u^T."""
        return torch.kron(eye(self.N), self.u.unsqueeze(0))

    def jacobian(self, name: str) -> Tensor:
        """(N, size) by autograd, parameters as vec."""
        outputs = self.model(self.rows)
        parameter: Any = getattr(self.model, name)
        grads = [torch.autograd.grad(output, parameter, retain_graph=True)[0] for output in outputs]
        return torch.stack([vec(g) if g.dim() == 2 else g for g in grads])


def check_lemma_2_3_2_needs_half_the_sum(e: Evidence) -> None:
    W, x = eye(3) / 2, torch.ones(3, dtype=F64)
    e.given("least eigenvalue of W + W^T, W = I/2, m = 1", torch.linalg.eigvalsh(W + W.t())[0], ">=", 1.0)
    e.printed("<x, W x>/|x|^2", x @ W @ x / (x @ x), "<", 1.0)
    e.corrected("<x, W x>/|x|^2", x @ W @ x / (x @ x), ">=", torch.linalg.eigvalsh((W + W.t()) / 2)[0])


def check_2_6_2_8_norm_is_not_spectral_radius(e: Evidence) -> None:
    J = torch.tensor([[0.0, 3.0], [0.0, 0.0]], dtype=F64)
    radius = float(torch.linalg.eigvals(J).abs().max())
    e.printed("norm of a nilpotent J, and its radius", norm2(J), "!=", radius)
    e.printed("sigma_min(I - J), and 1 - radius", torch.linalg.svdvals(eye(2) - J)[-1], "<", 1 - radius)
    J = J / 10
    e.corrected("sigma_min(I - J), and 1 - |J|", torch.linalg.svdvals(eye(2) - J)[-1], ">=", 1 - norm2(J))


def check_definition_2_5_2_smoothness_bounds_from_below(e: Evidence) -> None:
    L, curvature = 10.0, torch.tensor([1.0, 10.0], dtype=F64)
    x = torch.tensor([1.0, 0.5], dtype=F64)
    inner, square = float(x @ (curvature * x)), float((curvature * x).square().sum())
    e.printed("inner product, and |grad diff|^2/L", inner, ">", square / L)
    slack = []
    for seed in range(50):  # convex and L-smooth: curvatures in [0, L]
        g = generator(seed)
        bend, v = L * torch.rand(4, generator=g, dtype=F64), torch.randn(4, generator=g, dtype=F64)
        slack.append(float(v @ (bend * v) - (bend * v).square().sum() / L))
    e.corrected("least inner product - |grad diff|^2/L over 50 quadratics", min(slack), ">=", 0.0)


def check_theorem_2_5_4_rate(e: Evidence) -> None:
    # f = lam x^2/2 has |grad|^2 = 2 lam f, so mu = 2 lam in Definition 2.5.3; a step 1/L with L = 10 lam
    lam = 0.1
    x = torch.tensor(1.7, dtype=F64, requires_grad=True)
    before = lam * x.square() / 2
    (gradient,) = torch.autograd.grad(before, x)
    mu, ratio = float(gradient**2 / before.detach()), float((lam * (x - gradient).square() / 2 / before).detach())
    e.printed("ratio of f in one step, L = 1", ratio, ">", 1 - mu)
    e.corrected("ratio of f in one step, L = 1", ratio, "<=", 1 - mu / 2)


def check_linear_regression_gradient(e: Evidence) -> None:
    Phi, y = torch.randn(5, 3, generator=generator(0), dtype=F64), torch.ones(5, dtype=F64)
    theta = torch.ones(3, dtype=F64, requires_grad=True)
    loss = (Phi @ theta - y).square().sum() / 10  # 1/(2N)
    (gradient,) = torch.autograd.grad(loss, theta)
    r = (Phi @ theta - y).detach()
    e.printed("distance of Phi^T r from the gradient", gap(Phi.t() @ r, gradient), ">", 0.1)
    forward = (Phi @ (theta + 1e-3 * gradient) - y).square().sum() / 10
    e.printed("loss after a step along +grad, and before", forward.detach(), ">", loss.detach())
    e.corrected("distance of (1/N) Phi^T r from the gradient", gap(Phi.t() @ r / 5, gradient), "<=", 1e-12)


def check_forward_backward_endpoint_does_not_contract(e: Evidence) -> None:
    m, w = 0.3, 2.0
    F = torch.tensor([[m, w], [-w, m]], dtype=F64)
    L = norm2(F)
    e.printed("|norm - 1| at the step 2m/L^2", abs(norm2(eye(2) - 2 * m / L**2 * F) - 1), "<=", 1e-12)
    for fraction in (0.25, 0.5, 0.75):
        a = fraction * 2 * m / L**2
        factor = norm2(eye(2) - a * F)
        e.corrected(f"norm at {fraction} of it", factor, "<", 1)
        e.corrected("distance from sqrt(1 - 2am + a^2 L^2)", abs(factor - math.sqrt(1 - 2 * a * m + a**2 * L**2)), "<=", 1e-12)


def check_naive_iteration_diverges(e: Evidence) -> None:
    model = MonotoneDEQ(3, 12, margin=0.2, generator=generator(0), dtype=F64, max_steps=20_000)
    with torch.no_grad():
        model.B.mul_(8)
    X, _ = sphere(2, 3, 0)
    model.layer.solver = PeacemanRachford(step_size=0.1)
    solution = model.solve(X)
    z = torch.zeros_like(solution.value)
    with torch.no_grad():
        for _ in range(200):
            z = torch.relu(z @ model.recurrent().t() + model.injection(X))
    e.printed("|z| after 200 naive steps, over the equilibrium's", z.norm() / solution.value.norm(), ">", 1e6)
    e.corrected("residual that Peaceman-Rachford reaches", solution.residual.max(), "<=", 1e-10)


def check_lemma_3_2_1_identity_has_size_n_squared(e: Evidence) -> None:
    net = Letters()
    reference = torch.autograd.functional.jacobian(lambda A: net.model.parametrization(A, net.model.B), net.A)
    assert isinstance(reference, torch.Tensor)
    columns = [vec(reference[:, :, i, j]) for j in range(net.n) for i in range(net.n)]
    e.printed("size of I_n, and of K that it is added to", net.n, "!=", len(commutation(net.n, net.n)))
    e.corrected("distance of P_A from autograd", gap(net.P_A, torch.stack(columns, dim=1)), "<=", 1e-10)


def check_lemma_c_0_2_has_the_wrong_sign(e: Evidence) -> None:
    net = Letters()
    J, truth = net.readout() @ net.features(), net.jacobian("A")
    e.printed("relative error of the appendix", gap(J @ -net.P_A, truth), ">", 0.1)
    e.corrected("relative error of the main text", gap(J @ net.P_A, truth), "<=", 1e-8)


def check_lemma_3_2_3_kronecker_order(e: Evidence) -> None:
    net = Letters()
    dU = torch.linalg.solve(net.Q, net.D @ torch.kron(net.X.t().contiguous(), eye(net.n)))
    truth = net.jacobian("U")
    printed = torch.kron(net.u.unsqueeze(0), eye(net.N))
    e.printed("relative error of u^T kron I_N", gap(printed @ dU, truth), ">", 0.1)
    e.corrected("relative error of I_N kron u^T", gap(net.readout() @ dU, truth), "<=", 1e-8)


def check_proposition_4_kernel_is_j_j_transposed(e: Evidence) -> None:
    net = Letters()
    parts = [net.jacobian(name) for name in ("A", "B", "U", "u")]
    kernel = torch.stack([J @ J.t() for J in parts]).sum(0)
    e.printed("rows of J_A^T J_A, and of the kernel", parts[0].shape[1], "!=", len(kernel))
    e.corrected("distance from the closed form", gap(kernel, tangent_kernel(net.model, net.rows)), "<=", 1e-8)


def check_products_of_p_a_and_p_b(e: Evidence) -> None:
    net = Letters()
    n, K, S = net.n, commutation(net.n, net.n), net.A.t() @ net.A
    right = (eye(n * n) + K) @ (torch.kron(S, eye(n)) + torch.kron(eye(n), S))
    e.printed("distance of P_A P_A from P_A P_A^T", gap(net.P_A @ net.P_A, net.P_A @ net.P_A.t()), ">", 0.1)
    e.corrected("distance of P_A P_A^T", gap(net.P_A @ net.P_A.t(), right), "<=", 1e-10)
    e.corrected("distance of P_B P_B^T", gap(net.P_B @ net.P_B.t(), 2 * (eye(n * n) - K)), "<=", 1e-10)
    e.corrected("|P_A P_A^T|, and 4|A|^2", norm2(net.P_A @ net.P_A.t()), "<=", 4 * norm2(net.A) ** 2 + 1e-12)
    e.corrected("||P_B P_B^T| - 4|", abs(norm2(net.P_B @ net.P_B.t()) - 4), "<=", 1e-9)


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


def check_norm_of_equilibria(e: Evidence) -> None:
    worst = 0.0
    for seed in range(20):
        net = Letters(seed, margin=0.2 + 0.04 * seed)
        worst = max(worst, float(net.Z.norm() * net.model.margin / (net.X.norm() * norm2(net.model.U))))
    e.corrected("largest ratio to the bound in 20 networks", worst, "<=", 1)


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
