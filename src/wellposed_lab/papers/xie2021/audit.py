"""[xie2021], optimization induced equilibrium networks: the print, and the numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.convex import OptEq, objective
from wellposed.nn import Sigmoid
from wellposed_lab.papers.audit_problems import F64, commutation, eye, generator, norm2, vec
from wellposed_lab.papers.findings import Evidence, gap


def check_explicit_objective_has_the_transposed_inverse(e: Evidence) -> None:
    g = generator(0)
    W = torch.randn(3, 3, generator=g, dtype=F64)
    W = 0.9 * W / norm2(W)
    c = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
    z = torch.zeros(3, dtype=F64)
    for _ in range(2000):
        z = W.t() @ torch.relu(W @ z + c)
    inverse = torch.linalg.inv(W)

    def objective(w: Tensor, other: Tensor) -> Tensor:
        # w = W^(-T) z >= 0, where the conjugate is |w|^2/2; `other` is what c is paired with
        return w.square().sum(-1) / 2 - other @ c - (w @ W).square().sum(-1) / 2

    w = torch.relu(W @ z + c)
    points = (w + 0.3 * torch.randn(2000, 3, generator=g, dtype=F64)).clamp(min=0)
    # with "x > 0" the objective would be infinite at an equilibrium with an inactive unit
    e.printed("inactive units at the equilibrium, which sit at 0", int((w == 0).sum()), ">", 0)
    printed = objective(points, points @ W @ inverse.t())  # <c, W^(-1) z> with z = W^T w
    e.printed("best of 2000 points near by, printed", (printed - objective(w, w @ W @ inverse.t())).min(), "<", -1e-3)
    e.corrected("best of 2000 points near by, corrected", (objective(points, points) - objective(w, w)).min(), ">=", -1e-12)


def check_skip_needs_the_factor_alpha(e: Evidence) -> None:
    alpha, v = 0.3, 2.0
    z = torch.linspace(-3, 3, 600_001, dtype=F64)

    def envelope(x: Tensor, width: float) -> Tensor:
        """Moreau envelope of |x|."""
        return torch.where(x.abs() <= width, x.square() / (2 * width), x.abs() - width / 2)

    target = (1 - alpha) * v + alpha * (v - 1.0)  # (1 - a) z + a prox_phi(z) for phi = |.|
    scaled = z[(alpha * envelope(z, 1 - alpha) + (z - v).square() / 2).argmin()]
    printed = z[(envelope(z, 1 - alpha) + (z - v).square() / 2).argmin()]
    e.printed("distance from the skip form, of the prox of M", abs(float(printed) - target), ">", 0.1)
    e.corrected("distance, of the prox of a M", abs(float(scaled) - target), "<", 1e-4)


def check_lemma_6_needs_the_inverse(e: Evidence) -> None:
    # phi = 0, A = 1/2: f(z) = argmin u^2/2 - u A z, found on a grid; grad psi(y) = y
    grid = torch.linspace(-8, 8, 160_001, dtype=F64)

    def f(z: float) -> float:
        return float(grid[(grid.square() / 2 - grid * z / 2).argmin()])

    y = 3.0
    e.printed("|f(A y) - grad psi(y)|", abs(f(y / 2) - y), ">", 1.0)
    e.corrected("|f(A^(-1) y) - grad psi(y)|", abs(f(2 * y) - y), "<=", 1e-3)


def check_lemma_4_fails_for_singular_matrices(e: Evidence) -> None:
    g = generator(0)
    n = 4
    W = torch.randn(n, 2, generator=g, dtype=F64) @ torch.randn(2, n, generator=g, dtype=F64)  # rank 2
    A = torch.randn(n, n, generator=g, dtype=F64)
    B = torch.linalg.solve(A, W).t()  # the only solution at width max(n, n)
    e.printed("rank of the factor at width max(m, n), promised 4", torch.linalg.matrix_rank(B), "<", n)
    wide = torch.randn(n, 2 * n, generator=g, dtype=F64)
    null = torch.linalg.svd(wide).Vh[n:].t()
    B = (torch.linalg.pinv(wide) @ W + null @ torch.randn(n, n, generator=g, dtype=F64)).t()
    e.corrected("rank at width m + n", torch.linalg.matrix_rank(B), "==", n)
    e.corrected("distance of the product from W", gap(wide @ B.t(), W), "<=", 1e-9)


def check_lemma_2_with_w_1_zero_outputs_zero(e: Evidence) -> None:
    g = generator(0)
    m, d = 6, 3
    weights = [torch.zeros(m, m, dtype=F64)] + [torch.randn(m, m, generator=g, dtype=F64) for _ in range(2)]
    U, x = torch.randn(m, d, generator=g, dtype=F64), torch.randn(d, generator=g, dtype=F64)
    z = torch.randn(m, generator=g, dtype=F64)
    for index, W in enumerate(weights):
        z = W.t() @ torch.relu(W @ z + (U @ x if index == 0 else 0.0))
    e.printed("|z| after one sweep with W_1 = 0", z.norm(), "==", 0)
    # the corrected construction, three layers in blocks: W_1 = [I 0 0], W_2 = [A_2 I 0], W_3 = [0 A_3 I]
    A1, A2, A3 = (torch.randn(k, j, generator=g, dtype=F64).abs() for k, j in ((2, d), (2, 2), (2, 2)))
    x = x.abs()  # with signs the network to be copied may well output 0 too
    one, none = eye(2), torch.zeros(2, 2, dtype=F64)
    blocks = [torch.cat(row, dim=1) for row in ([one, none, none], [A2, one, none], [none, A3, one])]
    z = torch.randn(6, generator=g, dtype=F64)
    for _ in range(3):
        for index, W in enumerate(blocks):
            z = W.t() @ torch.relu(W @ z + (A1 @ x if index == 0 else 0.0))
    network = torch.relu(A3 @ torch.relu(A2 @ torch.relu(A1 @ x)))
    e.given("|output| of the network to be copied", network.norm(), ">", 0.01)
    e.corrected("distance of the corrected construction from it", gap(z[4:], network), "<=", 1e-9)


def check_appended_prox_is_a_new_block(e: Evidence) -> None:
    # phi = (z - 2)^2/2, R = z^2/2: prox_phi(v) = (v + 2)/2, prox_R(v) = v/2
    z = 0.0
    for _ in range(100):
        z = (z + 2) / 2 / 2
    grid = torch.linspace(-1, 3, 401, dtype=F64)
    minimiser = float(grid[((grid - 2).square() / 2 + grid.square() / 2).argmin()])
    e.printed("distance of the equilibrium from argmin phi + R", abs(z - minimiser), ">", 0.3)
    z1, z0 = torch.meshgrid(grid, grid, indexing="ij")
    joint = (z1 - 2).square() / 2 + z0.square() / 2 + (z1 - z0).square() / 2
    e.corrected("distance from that of the new block", abs(z - float(z0.flatten()[joint.argmin()])), "<", 0.01)


def check_inverse_regularizer_is_not_convex(e: Evidence) -> None:
    z = torch.tensor([-2.0, 0.0, 2.0], dtype=F64, requires_grad=True)
    R = 1 / (z.square() + 1)
    e.printed("R(0), and (R(2) + R(-2))/2, eps = 1", R[1].detach(), ">", (R[0] + R[2]).detach() / 2)
    (gradient,) = torch.autograd.grad(R.sum(), z)
    stated = -2 * z.detach() / (z.detach().square() + 1).square()
    e.corrected("distance of the gradient from autograd", gap(stated, gradient), "<=", 1e-12)


def unit(W: Tensor, U: Tensor, b: Tensor, *, Z: Tensor, X: Tensor, alpha: float) -> Tensor:
    """a W^T s(W Z + U X + b) + (1 - a) Z with samples in columns."""
    return alpha * W.t() @ torch.sigmoid(W @ Z + U @ X + b.unsqueeze(1)) + (1 - alpha) * Z


def check_lemma_11_lost_one_minus_beta(e: Evidence) -> None:
    g = generator(0)
    W, U, X, Z = (torch.randn(*s, generator=g, dtype=F64) for s in ((3, 2), (3, 2), (2, 4), (2, 4)))
    b = torch.zeros(3, dtype=F64, requires_grad=True)
    beta, S = 0.5, 0.9 * Z
    total = beta * S + (1 - beta) * unit(W, U, b, Z=Z, X=X, alpha=0.7)
    (whole,) = torch.autograd.grad(total.sum(), b)
    (inner,) = torch.autograd.grad(unit(W, U, b, Z=Z, X=X, alpha=0.7).sum(), b)
    e.printed("relative error without 1 - beta", gap(inner, whole), ">", 0.1)
    e.corrected("with 1 - beta", gap((1 - beta) * inner, whole), "<=", 1e-12)


def check_17_identities_have_other_sizes(e: Evidence) -> None:
    g = generator(0)
    rows, m, N, d, alpha = 3, 2, 4, 2, 0.7
    W, U, b, Z, X = (torch.randn(*s, generator=g, dtype=F64) for s in ((rows, m), (rows, d), (rows,), (m, N), (d, N)))
    G = torch.sigmoid(W @ Z + U @ X + b.unsqueeze(1))
    D = torch.diag(vec(G * (1 - G)))
    J = torch.autograd.functional.jacobian(lambda M: vec(unit(M, U, b, Z=Z, X=X, alpha=alpha)), W)  # (mN, rows, m)
    J_b = torch.autograd.functional.jacobian(lambda v: vec(unit(W, U, v, Z=Z, X=X, alpha=alpha)), b)
    assert isinstance(J, Tensor) and isinstance(J_b, Tensor)
    J = J.transpose(1, 2).reshape(m * N, rows * m)
    through = alpha * torch.kron(eye(N), W.t().contiguous()) @ D
    first = alpha * torch.kron(G.t().contiguous(), eye(m)) @ commutation(rows, m)
    corrected = first + through @ torch.kron(Z.t().contiguous(), eye(rows))
    e.printed("rows of Z^T kron I_m, and columns to its left", N * m, "!=", through.shape[1])
    e.printed("rows of 1_N, and columns to its left", N, "!=", through.shape[1])
    e.corrected("distance from autograd, W", gap(corrected, J), "<=", 1e-9)
    e.corrected("distance from autograd, b", gap(through @ torch.kron(torch.ones(N, 1, dtype=F64), eye(rows)), J_b), "<=", 1e-9)


def check_lemma_16_bias_gradients_can_vanish(e: Evidence) -> None:
    # more samples than biases: some residual is orthogonal to the whole Jacobian, yet the lemma has a positive lower bound
    g = generator(0)
    N, m = 30, 4
    model = OptEq(3, m, generator=g, dtype=F64, activation=Sigmoid())
    X = torch.randn(N, 3, generator=g, dtype=F64)
    J = torch.stack([torch.autograd.grad(o, model.b, retain_graph=True)[0] for o in model(X)])  # (N, m)
    r = torch.linalg.svd(J).U[:, -1]
    e.given("|r|", r.norm(), ">", 0.999)
    e.printed("|grad_b|/|J| for this residual", (J.t() @ r).norm() / norm2(J), "<", 1e-10)
    e.corrected("rank of the Jacobian, L n_l = 4, N = 30", torch.linalg.matrix_rank(J), "<=", m)


def check_theorem_5_cannot_hold_for_equal_inputs(e: Evidence) -> None:
    g = generator(0)
    X = torch.ones(2, 3, dtype=F64)
    y = torch.tensor([1.0, -1.0], dtype=F64)
    losses = []
    for _ in range(20):
        model = OptEq(3, 8, generator=g, dtype=F64)
        with torch.no_grad():
            losses.append(float((model(X) - y).square().sum() / 2))
    e.printed("least loss of 20 networks, equal inputs and labels +1, -1", min(losses), ">=", 1 - 1e-12)


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


def check_soft_threshold_is_a_prox(e: Evidence) -> None:
    grid, lam, worst = torch.linspace(-3, 3, 60_001, dtype=F64), 0.4, 0.0
    for v in (-2.0, -0.3, 0.1, 1.5):
        best = float(grid[(lam * grid.abs() + (grid - v).square() / 2).argmin()])
        worst = max(worst, abs(best - math.copysign(max(abs(v) - lam, 0.0), v)))
    e.corrected("largest distance of the minimiser on a grid", worst, "<=", 2e-4)
