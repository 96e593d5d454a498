"""Checks behind the findings about [xie2021]: each fails if the printed form were right."""

from __future__ import annotations

from typing import Any

import torch

import wellposed as wp
from theorem_problems import commutation, generator, vec

F64 = torch.float64


def test_explicit_objective_has_the_transposed_inverse() -> None:
    g = generator(0)
    W = torch.randn(3, 3, generator=g, dtype=F64)
    W = 0.9 * W / torch.linalg.matrix_norm(W, ord=2)
    c = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
    z = torch.zeros(3, dtype=F64)
    for _ in range(2000):
        z = W.t() @ torch.relu(W @ z + c)
    inverse = torch.linalg.inv(W)

    def objective(w: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        # w = W^(-T) z >= 0, where the conjugate is |w|^2/2; `other` is what c is paired with
        return w.square().sum(-1) / 2 - other @ c - (w @ W).square().sum(-1) / 2

    w = torch.relu(W @ z + c)
    assert bool((w == 0).any())  # an inactive unit sits exactly at 0: with "x > 0" the objective would be infinite here
    points = (w + 0.3 * torch.randn(2000, 3, generator=g, dtype=F64)).clamp(min=0)
    assert bool((objective(points, points) >= objective(w, w) - 1e-12).all())
    printed = objective(points, points @ W @ inverse.t())  # <c, W^(-1) z> with z = W^T w
    assert bool((printed < objective(w, w @ W @ inverse.t()) - 1e-3).any())


def test_skip_needs_the_factor_alpha() -> None:
    alpha, v = 0.3, 2.0
    z = torch.linspace(-3, 3, 600_001, dtype=F64)

    def envelope(x: torch.Tensor, width: float) -> torch.Tensor:
        """Moreau envelope of |x|."""
        return torch.where(x.abs() <= width, x.square() / (2 * width), x.abs() - width / 2)

    target = (1 - alpha) * v + alpha * (v - 1.0)  # (1 - a) z + a prox_phi(z) for phi = |.|
    scaled = z[(alpha * envelope(z, 1 - alpha) + (z - v).square() / 2).argmin()]
    printed = z[(envelope(z, 1 - alpha) + (z - v).square() / 2).argmin()]
    assert abs(float(scaled) - target) < 1e-4
    assert abs(float(printed) - target) > 0.1


def test_lemma_6_needs_the_inverse() -> None:
    # phi = 0, A = 1/2: f(z) = argmin u^2/2 - u A z = z/2, grad psi(y) = y
    def f(z: float) -> float:
        return z / 2

    assert f(2 * 3.0) == 3.0  # f(A^(-1) y) = grad psi(y)
    assert f(3.0 / 2) != 3.0  # f(A y), as printed


def test_lemma_4_fails_for_singular_matrices() -> None:
    g = generator(0)
    n = 4
    W = torch.randn(n, 2, generator=g, dtype=F64) @ torch.randn(2, n, generator=g, dtype=F64)  # rank 2
    A = torch.randn(n, n, generator=g, dtype=F64)
    B = torch.linalg.solve(A, W).t()  # the only solution at width max(n, n)
    assert torch.linalg.matrix_rank(B) == 2  # the lemma promises rank n
    wide = torch.randn(n, 2 * n, generator=g, dtype=F64)
    null = torch.linalg.svd(wide).Vh[n:].t()
    B = (torch.linalg.pinv(wide) @ W + null @ torch.randn(n, n, generator=g, dtype=F64)).t()
    assert torch.linalg.matrix_rank(B) == n and torch.allclose(wide @ B.t(), W, atol=1e-10)


def test_lemma_2_with_w_1_zero_outputs_zero() -> None:
    g = generator(0)
    m, d = 6, 3
    weights = [torch.zeros(m, m, dtype=F64)] + [torch.randn(m, m, generator=g, dtype=F64) for _ in range(2)]
    U, x = torch.randn(m, d, generator=g, dtype=F64), torch.randn(d, generator=g, dtype=F64)
    z = torch.randn(m, generator=g, dtype=F64)
    for index, W in enumerate(weights):
        z = W.t() @ torch.relu(W @ z + (U @ x if index == 0 else 0.0))
    assert bool((z == 0).all())
    # the corrected construction, three layers in blocks: W_1 = [I 0 0], W_2 = [A_2 I 0], W_3 = [0 A_3 I]
    A1, A2, A3 = (torch.randn(k, j, generator=g, dtype=F64) for k, j in ((2, d), (2, 2), (2, 2)))
    one, none = torch.eye(2, dtype=F64), torch.zeros(2, 2, dtype=F64)
    blocks = [torch.cat(row, dim=1) for row in ([one, none, none], [A2, one, none], [none, A3, one])]
    z = torch.randn(6, generator=g, dtype=F64)
    for _ in range(3):
        for index, W in enumerate(blocks):
            z = W.t() @ torch.relu(W @ z + (A1 @ x if index == 0 else 0.0))
    network = torch.relu(A3 @ torch.relu(A2 @ torch.relu(A1 @ x)))
    assert torch.allclose(z[4:], network, atol=1e-10)


def test_appended_prox_is_a_new_block() -> None:
    # phi = (z - 2)^2/2, R = z^2/2: prox_phi(v) = (v + 2)/2, prox_R(v) = v/2
    z = 0.0
    for _ in range(100):
        z = (z + 2) / 2 / 2
    grid = torch.linspace(-1, 3, 401, dtype=F64)
    sum_minimiser = float(grid[((grid - 2).square() / 2 + grid.square() / 2).argmin()])
    assert abs(z - sum_minimiser) > 0.3  # not the minimiser of phi + R
    z1, z0 = torch.meshgrid(grid, grid, indexing="ij")
    joint = (z1 - 2).square() / 2 + z0.square() / 2 + (z1 - z0).square() / 2
    best = z0.flatten()[joint.argmin()]
    assert abs(z - float(best)) < 0.01  # of phi(z1) + R(z0) + |z1 - z0|^2/2


def test_inverse_regularizer_is_not_convex() -> None:
    def R(z: float) -> float:
        return 1 / (z**2 + 1)

    assert R((2.0 - 2.0) / 2) > (R(2.0) + R(-2.0)) / 2


def unit(W: torch.Tensor, U: torch.Tensor, b: torch.Tensor, Z: torch.Tensor, X: torch.Tensor, alpha: float) -> torch.Tensor:
    return alpha * W.t() @ torch.sigmoid(W @ Z + U @ X + b.unsqueeze(1)) + (1 - alpha) * Z


def test_lemma_11_lost_one_minus_beta() -> None:
    g = generator(0)
    W, U, X, Z = (torch.randn(*s, generator=g, dtype=F64) for s in ((3, 2), (3, 2), (2, 4), (2, 4)))
    b = torch.zeros(3, dtype=F64, requires_grad=True)
    beta, S = 0.5, 0.9 * Z
    total = beta * S + (1 - beta) * unit(W, U, b, Z, X, 0.7)
    (whole,) = torch.autograd.grad(total.sum(), b)
    (inner,) = torch.autograd.grad(unit(W, U, b, Z, X, 0.7).sum(), b)
    assert torch.allclose(whole, (1 - beta) * inner) and not torch.allclose(whole, inner)


def test_17_identities_have_other_sizes() -> None:
    g = generator(0)
    rows, m, N, d, alpha = 3, 2, 4, 2, 0.7
    W, U, b, Z, X = (torch.randn(*s, generator=g, dtype=F64) for s in ((rows, m), (rows, d), (rows,), (m, N), (d, N)))
    G = torch.sigmoid(W @ Z + U @ X + b.unsqueeze(1))
    D = torch.diag(vec(G * (1 - G)))

    def eye(k: int) -> torch.Tensor:
        return torch.eye(k, dtype=F64)

    J: Any = torch.autograd.functional.jacobian(lambda M: vec(unit(M, U, b, Z, X, alpha)), W)  # (mN, rows, m)
    J = J.transpose(1, 2).reshape(m * N, rows * m)
    through = alpha * torch.kron(eye(N), W.t().contiguous()) @ D
    corrected = alpha * torch.kron(G.t().contiguous(), eye(m)) @ commutation(rows, m) + through @ torch.kron(
        Z.t().contiguous(), eye(rows)
    )
    assert torch.allclose(J, corrected, atol=1e-10)
    assert through.shape[1] != torch.kron(Z.t().contiguous(), eye(m)).shape[0]  # I_m, as printed, does not fit
    J_b: Any = torch.autograd.functional.jacobian(lambda v: vec(unit(W, U, v, Z, X, alpha)), b)
    assert torch.allclose(J_b, through @ torch.kron(torch.ones(N, 1, dtype=F64), eye(rows)), atol=1e-10)
    assert through.shape[1] != N  # D 1_N, as printed, does not fit


def test_lemma_16_bias_gradients_can_vanish() -> None:
    # more samples than biases: some residual is orthogonal to the whole Jacobian, yet the lemma has a positive lower bound
    g = generator(0)
    N, m = 30, 4
    model = wp.OptEq(3, m, generator=g, dtype=F64, activation=wp.nn.Sigmoid())
    X = torch.randn(N, 3, generator=g, dtype=F64)
    outputs = model(X)
    J = torch.stack([torch.autograd.grad(o, model.b, retain_graph=True)[0] for o in outputs])  # (N, m)
    r = torch.linalg.svd(J).U[:, -1]
    assert r.norm() > 0.999 and (J.t() @ r).norm() < 1e-10 * torch.linalg.matrix_norm(J, ord=2)


def test_theorem_5_cannot_hold_for_equal_inputs() -> None:
    g = generator(0)
    X = torch.ones(2, 3, dtype=F64)
    y = torch.tensor([1.0, -1.0], dtype=F64)
    for _ in range(20):
        model = wp.OptEq(3, 8, generator=g, dtype=F64)
        assert (model(X) - y).square().sum() / 2 >= 1 - 1e-12
