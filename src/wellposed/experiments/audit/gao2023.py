"""[gao2023], only the implicit layer is trained: what is printed, and what the numbers say."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.certify import generalization_bound
from wellposed.experiments.audit._finding import Evidence, Paper, gap
from wellposed.experiments.audit._problems import F64, eye, generator, norm2, sphere
from wellposed.kernel import tangent_kernel
from wellposed.nn import ImplicitOnlyDEQ

__all__ = ["PAPER", "network"]

PAPER = Paper("gao2023")


def network(
    m: int = 60, init: str = "gaussian", gamma0: float = 0.3, *, n: int = 3, seed: int = 0
) -> tuple[ImplicitOnlyDEQ, Tensor, Tensor]:
    """An ImplicitOnlyDEQ and data on the unit sphere."""
    X, y = sphere(n, 5, 0)
    return ImplicitOnlyDEQ(5, m, gamma0=gamma0, init=init, generator=generator(seed), dtype=F64), X, y


@PAPER.finding(
    "Lemma 3.2, second part",
    "dJ^T = gamma D U^(-1) (dA) D U^(-1) B",
    "typo",
    corrected="dA kron I_n; only while no mask changes",
)
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


@PAPER.finding(
    "(13)-(15)",
    "H(t) - H(0) = O(1/sqrt m), by sigma'' = 0",
    "gap: masks do change",
    corrected="no rigorous constant",
)
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


@PAPER.finding(
    "Gaussian A(0), gamma_0 in (0, 1)",
    "‖A(0)‖ <= sqrt(m) without loss of generality",
    "wrong: 2 sqrt(m)",
    corrected="gamma_0 < 1/2, and < 1/3 to leave room for training",
)
def check_gaussian_norm_is_two_root_m(e: Evidence) -> None:
    A = torch.randn(400, 400, generator=generator(0), dtype=F64)
    norm = norm2(A) / 20
    e.printed("|A(0)|/sqrt(m), m = 400", norm, ">", 1.9)
    e.printed("contraction factor at gamma_0 = 0.9", 0.9 * norm, ">", 1)
    e.corrected("|A(0)|/sqrt(m)", norm, "<", 2.1)
    e.corrected("gamma_0 (|A| + sqrt m)/sqrt m at gamma_0 = 1/3, up to the edge", (1 / 3) * (norm + 1), "<", 1.05)


@PAPER.finding(
    "half-normal A(0), Section 5.1",
    "contraction, Z(0) = Phi (I - gamma A)^(-1)",
    "unsat: ‖A(0)‖ = m sqrt(2/pi), and for m > pi/(2 gamma_0^2) there is no equilibrium",
    corrected="entries divided by sqrt(m)",
)
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


@PAPER.finding(
    "repair of it by gamma = gamma_0/‖A‖",
    "(ours, rejected)",
    "lambda_min(H(0)) decays like 1/m",
    corrected="scale the entries instead",
)
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


@PAPER.finding(
    "(25)",
    "n x n >= nm x nm",
    "typo",
    corrected="all units active: H(0) >= gamma^2/(1 + gamma‖A‖)^4 Phi Phi^T",
)
def check_25_lower_bound(e: Evidence) -> None:
    model, X, _ = network(80, "half_normal")
    H = tangent_kernel(model, X)
    with torch.no_grad():
        Phi = model.injection(X)
    lower = model.gamma**2 / (1 + model.gamma * norm2(model.A)) ** 4 * Phi @ Phi.t()
    n, m = Phi.shape
    e.printed("rows on the right of (25), and on the left", len(torch.kron(eye(m), Phi @ Phi.t())), "!=", len(H))
    e.corrected("least eigenvalue of the difference", torch.linalg.eigvalsh(H - lower)[0], ">=", -1e-12)


def _machine(model: ImplicitOnlyDEQ, X: Tensor, y: Tensor, *, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f_0(at), the change that the kernel machine makes there, and y - u_0."""
    H = tangent_kernel(model, X)
    with torch.no_grad():
        r, f0 = y - model(X), model(at)
        return f0, tangent_kernel(model, at, X) @ torch.linalg.solve(H, r), r


@PAPER.finding(
    "Lemma 4.2",
    "f_inf in F_B",
    "typo",
    corrected="f_inf - f_0 in F_B",
)
def check_lemma_4_2_the_offset_is_not_in_the_ball(e: Evidence) -> None:
    model, X, y = network()
    x0 = sphere(1, 5, 77)[0]
    f0, change, r = _machine(model, X, y, at=x0)
    # with y = u0 the ball is {0}: f_inf = f_0 is not in it, f_inf - f_0 is
    with torch.no_grad():
        fitted = model(X)
    _, nothing, _ = _machine(model, X, fitted, at=x0)
    e.printed("|f_0(x)| where the ball is {0}", f0.abs(), ">", 1e-3)
    e.corrected("|f_inf - f_0| there", nothing.abs(), "<", 1e-9)
    B = math.sqrt(float(r @ torch.linalg.solve(tangent_kernel(model, X), r)))
    e.corrected("|f_inf - f_0|, and B sqrt(k(x, x))", change.abs(), "<=", B * math.sqrt(float(tangent_kernel(model, x0))))


@PAPER.finding(
    "Theorem A.3",
    "(B/n) tr K",
    "typo",
    corrected="(B/n) sqrt(tr K)",
)
def check_theorem_a_3_needs_the_square_root(e: Evidence) -> None:
    model, X, _ = network(n=12)
    K = tangent_kernel(model, X)
    K = K / (4 * K.trace())  # any kernel may be scaled
    signs = torch.randint(0, 2, (2000, 12), generator=generator(1)).double() * 2 - 1
    complexity = float(((signs @ K) * signs).sum(1).sqrt().mean()) / 12  # of the unit ball
    e.printed("complexity in 2000 draws, and tr K/n", complexity, ">", float(K.trace()) / 12)
    e.corrected("complexity, and sqrt(tr K)/n", complexity, "<=", math.sqrt(float(K.trace())) / 12)


@PAPER.finding(
    "Theorem 4.1",
    "roots lost",
    "recovered",
    corrected="sqrt((y - u0)^T H0^(-1) (y - u0)/n) + sqrt(log(1/delta)/n)",
)
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


@PAPER.finding(
    "its spectral form",
    "lambda_i^(-2); sum of lambda_i = ‖H‖_F",
    "wrong",
    corrected="lambda_i^(-1) under the root; the sum is the trace",
)
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


@PAPER.finding(
    "Lemma 4.3",
    "O(...) exp(-lambda_0 t)",
    "wrong time factor",
    corrected="(2/lambda_0) sup‖H - H0‖ r0 exp(-lambda_0 t/2)",
)
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


@PAPER.finding(
    "proof of Theorem 3.1",
    "gamma_0 = gamma/M; >= -lambda_0‖u - y‖^2",
    "typo",
    corrected="gamma_0 = gamma M; <=",
)
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
