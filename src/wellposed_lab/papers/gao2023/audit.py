"""[gao2023], the network and its kernel: the print, and the numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.kernel import tangent_kernel
from wellposed.nn import ImplicitOnlyDEQ
from wellposed_lab.papers.audit_problems import F64, eye, generator, norm2, sphere
from wellposed_lab.papers.findings import Evidence, gap

__all__ = ["network"]


def network(
    m: int = 60, init: str = "gaussian", gamma0: float = 0.3, *, n: int = 3, seed: int = 0
) -> tuple[ImplicitOnlyDEQ, Tensor, Tensor]:
    """An ImplicitOnlyDEQ and data on the unit sphere."""
    X, y = sphere(n, 5, 0)
    return ImplicitOnlyDEQ(5, m, gamma0=gamma0, init=init, generator=generator(seed), dtype=F64), X, y


def check_lemma_3_2_derivative_of_j(e: Evidence) -> None:
    n, m, gamma = 2, 3, 0.1
    g = generator(0)
    A, dA = (torch.randn(m, m, generator=g, dtype=F64) for _ in range(2))
    b = torch.randn(m, 1, generator=g, dtype=F64)
    D = torch.diag((torch.rand(n * m, generator=g) < 0.6).to(F64))  # frozen masks
    B = torch.kron(b, eye(n))

    def U(M: Tensor) -> Tensor:
        return eye(n * m) - gamma * torch.kron(M, eye(n)) @ D

    def J_transposed(M: Tensor) -> Tensor:
        return D @ torch.linalg.solve(U(M), B)

    h = 1e-6
    difference = (J_transposed(A + h * dA) - J_transposed(A - h * dA)) / (2 * h)
    corrected = gamma * D @ torch.linalg.solve(U(A), torch.kron(dA, eye(n)) @ J_transposed(A))
    e.printed("columns of dA, and rows to its right", dA.shape[1], "!=", J_transposed(A).shape[0])
    e.corrected("relative distance from finite differences", gap(corrected, difference), "<=", 1e-7)


def check_drift_of_the_kernel_comes_with_changing_masks(e: Evidence) -> None:
    model, X, y = network(m=100, n=6)

    def masks() -> Tensor:
        with torch.no_grad():
            return model.equilibrium(X) > 0

    before, H0 = masks(), tangent_kernel(model, X)
    for _ in range(100):
        (gradient,) = torch.autograd.grad((model(X) - y).square().sum() / 2, model.A)
        with torch.no_grad():
            model.A.sub_(0.5 / float(torch.linalg.eigvalsh(H0)[-1]) * gradient)
    e.printed("masks that changed in 100 steps, of 600", int((masks() != before).sum()), ">", 0)
    e.printed("|H(t) - H(0)|/|H(0)|", gap(tangent_kernel(model, X), H0), ">", 1e-3)


def check_gaussian_norm_is_two_root_m(e: Evidence) -> None:
    A = torch.randn(400, 400, generator=generator(0), dtype=F64)
    norm = norm2(A) / 20
    e.printed("|A(0)|/sqrt(m), m = 400", norm, ">", 1.9)
    e.printed("contraction factor at gamma_0 = 0.9", 0.9 * norm, ">", 1)
    e.corrected("|A(0)|/sqrt(m)", norm, "<", 2.1)
    e.corrected("gamma_0 (|A| + sqrt m)/sqrt m at gamma_0 = 1/3, up to the edge", (1 / 3) * (norm + 1), "<", 1.05)


def check_half_normal_start_has_no_equilibrium(e: Evidence) -> None:
    m, gamma0 = 400, 0.1
    g = generator(0)
    A = torch.randn(m, m, generator=g, dtype=F64).abs()
    gamma = gamma0 / math.sqrt(m)
    phi = torch.relu(torch.randn(m, generator=g, dtype=F64))
    z = torch.zeros(m, dtype=F64)
    for _ in range(300):
        z = torch.relu(gamma * A.t() @ z + phi)
    formula = torch.linalg.solve(eye(m) - gamma * A.t(), phi)
    e.given("m, and pi/(2 gamma_0^2)", m, ">", math.pi / (2 * gamma0**2))
    e.printed("|z| after 300 steps", z.norm(), ">", 1e10)
    e.printed("negative entries of Phi (I - gamma A)^(-1)", int((formula < 0).sum()), ">", 0)
    e.corrected("relative distance of |A(0)| from m sqrt(2/pi)", abs(norm2(A) / (m * math.sqrt(2 / math.pi)) - 1), "<", 0.02)
    repaired, X, _ = network(400, "half_normal", gamma0)
    e.corrected("gamma |A(0)| with entries divided by sqrt(m)", norm2(repaired.recurrent()), "<", 1)


def check_repair_by_scaling_entries_and_not_by_the_norm(e: Evidence) -> None:
    def least(m: int, by_norm: bool) -> float:
        values = []
        for seed in range(4):
            model, X, _ = network(m, "half_normal", 0.3, seed=seed)
            if by_norm:  # gamma = gamma0/|A| for unscaled half-normal entries
                with torch.no_grad():
                    model.A.mul_(math.sqrt(m))
                model.gamma = 0.3 / norm2(model.A)
            values.append(float(torch.linalg.eigvalsh(tangent_kernel(model, X))[0]))
        return sum(values) / 4

    by_norm = math.log(least(400, True) / least(50, True)) / math.log(8)
    by_entries = math.log(least(400, False) / least(50, False)) / math.log(8)
    e.printed("slope of log lambda_min against log m, by the norm", by_norm, "<", -0.6)
    e.corrected("|slope|, entries scaled", abs(by_entries), "<", 0.35)
    model, X, _ = network(80, "half_normal")
    with torch.no_grad():
        Phi = model.injection(X)
        closed = torch.linalg.solve(eye(80) - model.gamma * model.A.t(), Phi.t()).t()
        e.corrected("distance from Phi (I - gamma A)^(-1)", gap(model.equilibrium(X), closed), "<=", 1e-8)


def check_25_lower_bound(e: Evidence) -> None:
    model, X, _ = network(80, "half_normal")
    H = tangent_kernel(model, X)
    with torch.no_grad():
        Phi = model.injection(X)
    lower = model.gamma**2 / (1 + model.gamma * norm2(model.A)) ** 4 * Phi @ Phi.t()
    n, m = Phi.shape
    e.printed("rows on the right of (25), and on the left", len(torch.kron(eye(m), Phi @ Phi.t())), "!=", len(H))
    e.corrected("least eigenvalue of the difference", torch.linalg.eigvalsh(H - lower)[0], ">=", -1e-12)


def check_implicit_only_kernel(e: Evidence) -> None:
    model, X, _ = network(20)
    J = torch.stack([torch.autograd.grad(o, model.A, retain_graph=True)[0].flatten() for o in model(X)])
    e.corrected("relative distance from autograd", gap(tangent_kernel(model, X), J @ J.t()), "<=", 1e-9)


def check_kernel_machine(e: Evidence) -> None:
    model, X, y = network(40)
    H = tangent_kernel(model, X)
    with torch.no_grad():
        u = u0 = model(X)
    values, vectors = torch.linalg.eigh(H)
    t, steps = 2.0 / float(values[-1]), 20_000
    for _ in range(steps):  # Euler for du/dt = -H (u - y)
        u = u - t / steps * H @ (u - y)
    closed = u0 + vectors @ ((1 - torch.exp(-values * t)) * (vectors.t() @ (y - u0)))
    e.corrected("relative distance from Euler in 20000 steps", gap(closed, u), "<=", 1e-4)
