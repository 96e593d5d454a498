"""Checks behind the findings about [nguyen2022]: each fails if the printed form were right."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import wellposed as wp
from theorem_problems import commutation, generator, literal_counterexample, sphere, vec

F64 = torch.float64


class Dense:
    """A small MonotoneDEQ in the letters of the thesis: samples in columns, Kronecker matrices formed."""

    def __init__(self, seed: int = 0, n: int = 4, N: int = 3, d: int = 2, margin: float = 0.5) -> None:
        X, y = sphere(N, d, seed)
        self.model = wp.MonotoneDEQ(d, n, margin=margin, generator=generator(seed), dtype=F64)
        self.n, self.N, self.X, self.y, self.rows = n, N, X.t(), y, X
        with torch.no_grad():
            self.model.u.copy_(torch.randn(n, generator=generator(seed + 9), dtype=F64))
            self.A, self.u, self.W = self.model.A.clone(), self.model.u.clone(), self.model.recurrent().clone()
            self.Z = self.model.equilibrium(X).t()
            masks = (self.W @ self.Z + self.model.U @ self.X) > 0
        self.D = torch.diag(vec(masks.to(F64)))
        self.Q = torch.eye(n * N, dtype=F64) - self.D @ torch.kron(torch.eye(N, dtype=F64), self.W)
        identity = torch.eye(n * n, dtype=F64)
        self.P_A = -(identity + commutation(n, n)) @ torch.kron(torch.eye(n, dtype=F64), self.A.t().contiguous())
        self.P_B = identity - commutation(n, n)

    def features(self) -> Tensor:
        """Q^(-1) D (Z^T kron I_n): d vec(Z)/d vec(W)."""
        return torch.linalg.solve(self.Q, self.D @ torch.kron(self.Z.t().contiguous(), torch.eye(self.n, dtype=F64)))

    def readout(self) -> Tensor:
        return torch.kron(torch.eye(self.N, dtype=F64), self.u.unsqueeze(0))

    def jacobian(self, name: str) -> Tensor:
        """(N, size) by autograd, parameters as vec."""
        outputs = self.model(self.rows)
        parameter: Any = getattr(self.model, name)
        grads = [torch.autograd.grad(output, parameter, retain_graph=True)[0] for output in outputs]
        return torch.stack([vec(g) if g.dim() == 2 else g for g in grads])


def test_lemma_2_3_2_needs_half_the_sum() -> None:
    W = torch.eye(3, dtype=F64) / 2
    assert torch.linalg.eigvalsh(W + W.t())[0] >= 1.0  # the printed condition with m = 1
    x = torch.ones(3, dtype=F64)
    assert x @ W @ x < 1.0 * (x @ x)  # but not strongly monotone with 1
    assert x @ W @ x >= torch.linalg.eigvalsh((W + W.t()) / 2)[0] * (x @ x)


def test_2_6_2_8_norm_is_not_spectral_radius() -> None:
    J = torch.tensor([[0.0, 3.0], [0.0, 0.0]], dtype=F64)
    radius, norm = torch.linalg.eigvals(J).abs().max(), torch.linalg.matrix_norm(J, ord=2)
    assert radius == 0 and norm == 3
    least = torch.linalg.svdvals(torch.eye(2, dtype=F64) - J)[-1]
    assert least < 1 - radius  # (2.8) would have it at least 1
    J = J / 10
    assert torch.linalg.svdvals(torch.eye(2, dtype=F64) - J)[-1] >= 1 - torch.linalg.matrix_norm(J, ord=2)


def test_definition_2_5_2_smoothness_bounds_from_below() -> None:
    L, curvature = 10.0, torch.tensor([1.0, 10.0], dtype=F64)
    x = torch.tensor([1.0, 0.5], dtype=F64)
    inner, square = float(x @ (curvature * x)), float((curvature * x).square().sum())
    assert inner > square / L  # printed: <=
    assert inner >= square / L  # convex and L-smooth: >=


def test_theorem_2_5_4_rate() -> None:
    # f = lam x^2/2 has |grad|^2 = 2 lam f, so mu = 2 lam in Definition 2.5.3; a step 1/L with L = 10 lam
    mu, ratio = 0.2, (1 - 0.1) ** 2
    assert ratio > 1 - mu / 1.0  # printed: 0.810 <= 0.800
    assert ratio <= 1 - mu / 2.0


def test_linear_regression_gradient() -> None:
    Phi, y = torch.randn(5, 3, generator=generator(0), dtype=F64), torch.ones(5, dtype=F64)
    theta = torch.ones(3, dtype=F64, requires_grad=True)
    loss = (Phi @ theta - y).square().sum() / 10  # 1/(2N)
    (gradient,) = torch.autograd.grad(loss, theta)
    r = (Phi @ theta - y).detach()
    assert torch.allclose(gradient, Phi.t() @ r / 5)
    assert not torch.allclose(gradient, Phi.t() @ r)  # printed without 1/N
    forward = (Phi @ (theta + 1e-3 * gradient) - y).square().sum() / 10
    assert forward > loss  # d theta/dt = +grad climbs


def test_forward_backward_endpoint_does_not_contract() -> None:
    m, w = 0.3, 2.0
    F = torch.tensor([[m, w], [-w, m]], dtype=F64)
    L = float(torch.linalg.matrix_norm(F, ord=2))
    for fraction in (0.25, 0.5, 0.75):
        a = fraction * 2 * m / L**2
        factor = float(torch.linalg.matrix_norm(torch.eye(2, dtype=F64) - a * F, ord=2))
        assert factor < 1 and abs(factor - math.sqrt(1 - 2 * a * m + a**2 * L**2)) < 1e-12
    endpoint = torch.linalg.matrix_norm(torch.eye(2, dtype=F64) - 2 * m / L**2 * F, ord=2)
    assert abs(float(endpoint) - 1) < 1e-12  # printed closed interval: this step would contract


def test_naive_iteration_diverges() -> None:
    model = wp.MonotoneDEQ(3, 12, margin=0.2, generator=generator(0), dtype=F64, max_steps=20_000)
    with torch.no_grad():
        model.B *= 8
    X, _ = sphere(2, 3, 0)
    model.layer.solver = wp.PeacemanRachford(step_size=0.1)
    exact = model.solve(X).value
    z = torch.zeros_like(exact)
    with torch.no_grad():
        for _ in range(200):
            z = torch.relu(z @ model.recurrent().t() + model.injection(X))
    assert z.norm() > 1e6 * exact.norm()


def test_lemma_3_2_1_identity_has_size_n_squared() -> None:
    net = Dense()
    reference = torch.autograd.functional.jacobian(lambda A: net.model.parametrization(A, net.model.B), net.A)
    columns = [vec(reference[:, :, i, j]) for j in range(net.n) for i in range(net.n)]
    assert torch.allclose(torch.stack(columns, dim=1), net.P_A)
    assert net.P_A.shape == (net.n**2, net.n**2)  # I_n as printed could not be added to K


def test_lemma_c_0_2_has_the_wrong_sign() -> None:
    net = Dense()
    J = net.readout() @ net.features()
    assert torch.allclose(J @ net.P_A, net.jacobian("A"), atol=1e-9)  # the main text
    assert not torch.allclose(J @ -net.P_A, net.jacobian("A"), atol=1e-3)  # the appendix


def test_lemma_3_2_3_kronecker_order() -> None:
    net = Dense()
    dU = torch.linalg.solve(net.Q, net.D @ torch.kron(net.X.t().contiguous(), torch.eye(net.n, dtype=F64)))
    truth = net.jacobian("U")
    printed = torch.kron(net.u.unsqueeze(0), torch.eye(net.N, dtype=F64))
    assert torch.allclose(net.readout() @ dU, truth, atol=1e-9)
    assert (printed @ dU - truth).norm() > 0.1 * truth.norm()


def test_proposition_4_kernel_is_j_j_transposed() -> None:
    net = Dense()
    parts = [net.jacobian(name) for name in ("A", "B", "U", "u")]
    kernel = sum(J @ J.t() for J in parts)
    assert isinstance(kernel, Tensor) and torch.allclose(kernel, wp.tangent_kernel(net.model, net.rows), atol=1e-9)
    assert (parts[0].t() @ parts[0]).shape != kernel.shape  # J^T J, as printed, is n^2 x n^2


def test_products_of_p_a_and_p_b() -> None:
    net = Dense()
    n, K, S = net.n, commutation(net.n, net.n), net.A.t() @ net.A
    identity, one = torch.eye(n * n, dtype=F64), torch.eye(n, dtype=F64)
    assert torch.allclose(net.P_A @ net.P_A.t(), (identity + K) @ (torch.kron(S, one) + torch.kron(one, S)))
    assert torch.allclose(net.P_B @ net.P_B.t(), 2 * (identity - K))
    assert not torch.allclose(net.P_A @ net.P_A, net.P_A @ net.P_A.t())  # printed without transposes
    norm_A = torch.linalg.matrix_norm(net.A, ord=2)
    assert torch.linalg.matrix_norm(net.P_A @ net.P_A.t(), ord=2) <= 4 * norm_A**2 + 1e-12
    assert abs(torch.linalg.matrix_norm(net.P_B @ net.P_B.t(), ord=2) - 4) < 1e-9


def test_lemma_3_3_2_is_false_without_the_mask() -> None:
    worst = masked = 0.0
    for seed in range(200):
        g = generator(seed)
        n, m = 6, 0.3
        A, B = (torch.randn(n, n, generator=g, dtype=F64) for _ in range(2))
        W = (1 - m) * torch.eye(n, dtype=F64) - A.t() @ A + 3 * (B - B.t())
        D = torch.diag((torch.rand(n, generator=g) < 0.5).to(F64))
        u = torch.randn(n, generator=g, dtype=F64)
        row = torch.linalg.solve((torch.eye(n, dtype=F64) - D @ W).t(), u)  # u^T Q^(-1)
        worst = max(worst, float(row.norm() / (u.norm() / m)))
        masked = max(masked, float((D @ row).norm() / (u.norm() / m)))
    assert worst > 1.5  # printed: at most 1
    assert masked <= 1 + 1e-12


def test_lemma_3_3_6_sign() -> None:
    net = Dense()
    dA, dB = (1e-2 * torch.randn(net.n, net.n, generator=generator(s), dtype=F64) for s in (1, 2))
    with torch.no_grad():
        change = net.model.parametrization(net.A + dA, net.model.B + dB) - net.W
    quadratic = net.A.t() @ dA + dA.t() @ net.A + dA.t() @ dA
    assert torch.allclose(change, -quadratic + dB - dB.t(), atol=1e-12)
    assert not torch.allclose(change, quadratic + dB - dB.t(), atol=1e-4)
    bound = 2 * torch.linalg.matrix_norm(net.A, ord=2) * dA.norm() + dA.norm() ** 2 + 2 * dB.norm()
    assert torch.linalg.matrix_norm(change, ord=2) <= bound


def test_lemma_3_3_7_has_the_step_size() -> None:
    net = Dense()
    loss = (net.model(net.rows) - net.y).square().sum() / 2
    (gradient,) = torch.autograd.grad(loss, net.model.U)
    before, eta = net.model.U.detach().clone(), 0.01
    with torch.no_grad():
        net.model.U -= eta * gradient
    moved = (net.model.U.detach() - before).norm()
    assert torch.isclose(moved, eta * gradient.norm()) and not torch.isclose(moved, gradient.norm())


def test_flow_proof_exponent() -> None:
    # all that is known is sigma_min(Z) >= l0/2: a residual may decay exactly like exp(-(l0/2)^2 s)
    l0, s = 0.5, 10.0
    slowest = math.exp(-((l0 / 2) ** 2) * s)
    assert slowest > math.exp(-l0 / 4 * s)  # printed bound, broken
    assert slowest <= math.exp(-(l0**2) / 4 * s)
    # (3.13): the gradient with respect to u is Z r, bounded by |U|, not by |u|
    net = Dense()
    with torch.no_grad():
        net.model.u *= 1e-6
    r = (net.model(net.rows) - net.y).detach()
    X_F, u, U = net.X.norm(), net.model.u.detach().norm(), torch.linalg.matrix_norm(net.model.U.detach(), ord=2)
    gradient = (net.Z @ r).norm()
    assert gradient > X_F * u * r.norm() / net.model.margin
    assert gradient <= X_F * U * r.norm() / net.model.margin


def test_3_17_is_short_of_a_factor_two() -> None:
    for A, U in ((0.0, 1.0), (1.0, 1.0), (2.0, 5.0)):
        u = X = r0 = 1.0
        l0 = (8 * X**2 * r0 * u * (1 + 6 * U**2 * A**2 + 4 * U**2)) ** (1 / 3)  # printed (3.17) with equality, m = 1
        moved = X**2 * r0 * (8 * u + 16 * (3 * A**2 + 2) * U**2 * u) / l0**2  # the proof of Proposition 6
        assert moved > l0 / 2 * 1.9  # needed: at most l0/2
        for bracket in (1 + (6 * A**2 + 4) * U**2, 1 + 4 * (A**2 + 1) * U**2):
            fixed = (16 * X**2 * r0 * u * bracket) ** (1 / 3)
            tight = 8 * X**2 * r0 * u * bracket / fixed**2
            assert tight <= fixed / 2 * (1 + 1e-12)


def test_3_18_can_never_hold() -> None:
    for seed in range(30):
        N = 1 + seed % 5
        X, _ = sphere(N, 4, seed)
        model = wp.MonotoneDEQ(4, 8, margin=0.2 + 0.05 * (seed % 10), generator=generator(seed), dtype=F64, max_steps=5000)
        with torch.no_grad():
            model.u.zero_()
            model.U *= 10.0 ** (seed % 4)
            l0 = torch.linalg.svdvals(model.equilibrium(X))[-1]
        U, X_F, m = torch.linalg.matrix_norm(model.U.detach(), ord=2), X.norm(), model.margin
        assert l0**2 <= X_F**2 * U**2 / (m**2 * N) * (1 + 1e-9)
        assert l0**2 < 20 * X_F**2 * U**2 / m**2  # the term l_U^2 of (3.18) alone, with its power of m, without any radius


def test_theorem_3_3_5_literal_counterexample_diverges() -> None:
    model, X, y, R = literal_counterexample()
    with torch.no_grad():
        Z = model.equilibrium(X)
        r0 = float((model(X) - y).norm())
    l0, X_F, m = float(torch.linalg.svdvals(Z)[-1]), float(X.norm()), model.margin
    U = float(torch.linalg.matrix_norm(model.U.detach(), ord=2)) + R["U"]
    A, u = R["A"], R["u"]
    terms = (2 * U * u * A / (m**2 * R["A"]), 2 * U * u / (m**2 * R["B"]), u / (m * R["U"]), U / (m * R["u"]))
    printed = u**2 + 4 * (U * u) ** 2 + 4 * (U * u * A) ** 2 + U**2
    assert l0**2 >= 8 * X_F * r0 * max(terms)  # (3.16)
    assert l0**3 >= 8 * X_F**2 * r0 * u * (1 + 6 * (U * A) ** 2 + 4 * U**2)  # (3.17)
    assert l0**2 >= 20 * X_F**2 * printed  # (3.18)
    step = min(4 / l0**2, 1 / (X_F**2 * printed), 1 / (2 * X_F * l0 * U * u * A), 1 / (6 * l0**2 * (u * A) ** 2))
    loss = (model(X) - y).square().sum() / 2
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= step * gradient
        after = (model(X) - y).square().sum() / 2
    assert after > 5 * loss  # the theorem promises a decrease
    C_p = X_F**2 * (u**2 / m**2 + 4 * U**2 * u**2 * (A**2 + 1) / m**4)
    assert l0**2 < 20 * C_p  # the corrected (3.18) refuses


def test_square_of_the_step_bound() -> None:
    eta, l0, C11, C12 = 0.3, 0.7, 2.0, 5.0
    square = (eta * C11 + eta**2 * l0**2 * C12) ** 2
    common = eta**2 * C11**2 + 2 * eta**3 * l0**2 * C11 * C12
    assert math.isclose(square, common + eta**4 * l0**4 * C12**2)
    assert not math.isclose(square, common + eta**4 * l0 * C12**2)  # Lemma 3.3.8 as printed


def test_proposition_5_divides_by_lambda_squared() -> None:
    l0, eta = 0.1, 1.0
    path = eta / (1 - math.sqrt(1 - eta * l0**2 / 4))  # eta sum_k (1 - eta l0^2/4)^(k/2)
    assert path > 8  # the printed chain drops l0^2
    assert path <= 8 / l0**2
