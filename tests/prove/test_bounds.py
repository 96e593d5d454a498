"""The bounds of a step and of the tail, against dense algebra."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wellposed as wp
from exact_descent import problem
from proof_points import I64, at_start, flat, slopes_of
from wellposed.prove._contraction import Contraction
from wellposed.prove._expansion import expansion
from wellposed.prove._gain import least_gain, nonnegative_norm
from wellposed.prove._problem import Exact
from wellposed.prove._slopes import ReLUSlopes, TanhSlopes
from wellposed.prove._smooth_tail import lipschitz
from wellposed.prove._switches import Centre, pairs_in, within_slopes
from wellposed.prove._tail import _Kernel

KINDS = [("relu", 2, 7, 3), ("tanh", 2, 4, 2), ("softplus", 2, 4, 2), ("skip", 2, 6, 3), ("implicit_only", 2, 7, 3)]


@pytest.mark.parametrize(("kind", "n", "m", "d"), KINDS)
@pytest.mark.parametrize("seed", [0, 2])
def test_the_expansion_bounds_the_hessian_and_L_the_jacobian(kind: str, n: int, m: int, d: int, seed: int) -> None:
    model, X, y = problem(n, m, d, seed, kind=kind, variance=0.02)
    found, point, jacobian, contraction = at_start(model, X, y)
    t, f = flat(kind, model, slopes_of(kind, model, point))
    H = sum(point.r[i] * torch.autograd.functional.hessian(lambda t, i=i: f(t, X[i], i), t) for i in range(n))
    true = float(torch.linalg.matrix_norm(H, 2))
    M = expansion(found, point, jacobian, contraction, jacobian.ball(0.0))
    assert true * (1 - 1e-9) <= M <= 30 * true
    J = torch.stack([torch.autograd.functional.jacobian(lambda t, i=i: f(t, X[i], i), t) for i in range(n)])
    values = torch.linalg.svdvals(J)
    assert float(values[0]) <= jacobian.L * (1 + 1e-10) and jacobian.L <= float(values[0]) * (1 + 1e-6)
    assert jacobian.least_eigenvalue() <= float(values[-1]) ** 2 * (1 + 1e-9)
    assert jacobian.least_eigenvalue() >= float(values[-1]) ** 2 * (1 - 1e-6)
    r = torch.stack([f(t, X[i], i) for i in range(n)]) - y
    assert torch.allclose(r, point.r, rtol=1e-10, atol=1e-12)


def test_the_expansion_is_sharp_without_recurrence_and_read_out() -> None:
    """W = 0, a = 0, one sample: |r Hess f| = |r| |xi|, so that half of M would be wrong."""
    model, X, y = problem(1, 5, 3, 1)
    with torch.no_grad():
        model.W.zero_()
        model.a.zero_()
    found, point, jacobian, contraction = at_start(model, X, y)
    M = expansion(found, point, jacobian, contraction, jacobian.ball(0.0))
    true = float(point.r.abs()[0]) * float(jacobian.gram[0, 0].sqrt())
    assert true * (1 - 1e-12) <= M <= true * (1 + 1e-8)


@pytest.mark.parametrize("kind", ["tanh", "softplus"])
def test_the_jacobian_of_a_smooth_network_is_lipschitz(kind: str) -> None:
    model, X, y = problem(2, 6, 3, 1, kind=kind, variance=0.02)
    found, point, jacobian, contraction = at_start(model, X, y)
    radius = 0.02
    ball = jacobian.ball(radius)
    Lambda = lipschitz(found, point, jacobian, contraction, ball)
    t, f = flat(kind, model, slopes_of(kind, model, point))

    def J(t: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.autograd.functional.jacobian(lambda t, i=i: f(t, X[i], i), t) for i in range(2)])

    g = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(6):
        a, b = (torch.randn(len(t), generator=g, dtype=I64) for _ in range(2))
        a, b = t + radius * a / a.norm(), t + radius * b / b.norm()
        change = float(torch.linalg.matrix_norm(J(a) - J(b), 2))
        ratios.append(change / float((a - b).norm()))
        assert float(torch.linalg.matrix_norm(J(a), 2)) <= ball.L
        assert float(torch.linalg.matrix_norm(J(a) - J(t), "fro")) <= ball.dJ
    assert max(ratios) <= Lambda


def few_switches(seed: int, kind: str) -> tuple[Any, ...] | None:
    """A point and a ball in which between 1 and 4 units may switch."""
    model, X, y = problem(2, 12, 4, seed, kind=kind)
    found, point, jacobian, contraction = at_start(model, X, y)
    for radius in torch.logspace(-5, -1, 60).tolist():
        ball = jacobian.ball(radius)
        if ball is not None and 1 <= pairs_in(found, point, ball).count <= 4:
            return model, X, found, point, jacobian, contraction, ball
    return None


def jacobian_with(model: Any, kind: str, X: torch.Tensor, D: torch.Tensor, D_c: Any, shift: Any, Z: Any = None) -> torch.Tensor:
    """Rows (z, c, k p (x) z, l q (x) x) at shifted parameters, for given slopes; Z from elsewhere if given."""
    R, U, w = model.recurrent().detach(), model.input_matrix().detach(), model.readout_weight().detach()
    k, ell, v = 1.0, 1.0, None
    if kind == "skip":
        k, ell = model.gamma / math.sqrt(model.width), 1 / math.sqrt(model.width)
        U, v = U * ell, model.v.detach() + shift[3]
    R, U, w = R + k * shift[0], U + ell * shift[1], w + shift[2]
    rows = []
    for i, x in enumerate(X):
        c = U @ x if D_c is None else torch.relu(U @ x)
        z = torch.zeros(len(w), dtype=I64)
        for _ in range(300):
            z = torch.relu(R @ z + c)
        if Z is not None:
            z, c = Z[i]
        p = torch.linalg.solve(torch.eye(len(w), dtype=I64) - D[i][:, None] * R.T, D[i] * w)
        q = p if v is None else D_c[i] * (p + v)
        parts = [z] + ([] if v is None else [c]) + [k * torch.outer(p, z).flatten(), ell * torch.outer(q, x).flatten()]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def broken_bounds(kind: str, seed: int) -> tuple[int, int]:
    """How often s, L, f or e0 are wrong over all masks of the pairs that may switch, and how many were tried."""
    found = few_switches(seed, kind)
    if found is None:
        return 0, 0
    model, X, prob, point, jacobian, contraction, ball = found
    pairs = pairs_in(prob, point, ball)
    bounds = _Kernel(prob, point, jacobian, Centre(prob, point, contraction, pairs)).bounds(ball)
    if isinstance(bounds, str):
        return 0, 0
    s, L, f, e0, shares = bounds
    g = torch.Generator().manual_seed(seed)

    def shifted() -> list[torch.Tensor]:
        shapes = [(12, 12), (12, 4), (12,), (12,)][: 4 if kind == "skip" else 3]
        d = [torch.randn(*shape, generator=g, dtype=I64) for shape in shapes]
        size = math.sqrt(sum(float(part.square().sum()) for part in d))
        return [part * (0.999 * ball.radius / size) for part in d]

    of_z, of_c = pairs.of_z.nonzero().tolist(), [] if pairs.of_c is None else pairs.of_c.nonzero().tolist()
    corners = list(itertools.product([0.0, 1.0], repeat=len(of_z) + len(of_c)))

    def slopes(corner: tuple[float, ...]) -> tuple[torch.Tensor, Any]:
        D, D_c = point.D.clone(), None if point.D_c is None else point.D_c.clone()
        for (i, u), value in zip(of_z, corner, strict=False):
            D[i, u] = value
        for (i, u), value in zip(of_c, corner[len(of_z) :], strict=True):
            D_c[i, u] = value
        return D, D_c

    broken = tried = 0
    for first, second in itertools.product(corners, corners):
        here, there = shifted(), shifted()
        D, D_c = slopes(first)
        J = jacobian_with(model, kind, X, D, D_c, here)
        m = 12
        Z = [(row[:m], row[m : 2 * m]) for row in J]
        S = jacobian_with(model, kind, X, *slopes(second), there, Z)  # a secant has the z of its start
        N, F = (S + J) / 2, (S - J) / 2
        values = torch.linalg.svdvals(N)
        tried += 1
        broken += bool(values[-1] < s) + bool(values[0] > L) + bool(torch.linalg.matrix_norm(F, 2) > f)
        broken += bool(torch.linalg.matrix_norm(S @ F.T, 2) > e0)
        for share, rest in shares:
            broken += bool(torch.linalg.eigvalsh(F @ F.T - share * N @ N.T)[-1] > rest)
    return broken, tried


@pytest.mark.parametrize("kind", ["relu", "skip"])
def test_all_masks_are_within_the_bounds(kind: str) -> None:
    results = [broken_bounds(kind, seed) for seed in range(6)]
    assert sum(broken for broken, _ in results) == 0
    assert sum(tried for _, tried in results) >= 16


def test_switches_that_are_ignored_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Kernel, "_switches", lambda self, phi, ball: (0.0, 0.0, 0.0, 0.0))
    assert sum(broken_bounds("relu", seed)[0] for seed in range(6)) > 0


@pytest.mark.parametrize("seed", range(3))
def test_other_units_do_not_switch_in_the_ball(seed: int) -> None:
    """Each unit is moved towards 0 as fast as the parameters allow, to the edge of the ball."""
    m = 60
    model, X, y = problem(2, m, 4, seed)
    found, point, jacobian, contraction = at_start(model, X, y)
    ball = jacobian.ball(0.02)
    assert ball is not None
    crude = pairs_in(found, point, ball)
    ball = within_slopes(found, point, contraction, ball, crude)
    wide = pairs_in(found, point, ball)
    pairs = Centre(found, point, contraction, wide).fewer(found, point, ball)
    assert pairs.count <= crude.count and not bool((pairs.of_z & ~wide.of_z).any())
    W, U = model.W.detach(), model.U.detach()
    one = torch.eye(m, dtype=I64)
    switched = 0
    for i, u in itertools.product(range(2), range(m)):
        if float(point.V[i, u].abs()) > 0.5:
            continue
        z, x = point.Z[i], X[i]
        for D in (point.D[i], torch.where(wide.of_z[i], 1.0, point.D[i]), torch.where(wide.of_z[i], 0.0, point.D[i])):
            row = torch.linalg.solve((one - W * D).T, one[u])  # dV_u = row . (dW z + dU x)
            size = float(row.norm() * torch.cat([z, x]).norm())
            scale = -float(point.V[i, u].sign()) * ball.radius / size
            W1, U1 = W + scale * torch.outer(row, z), U + scale * torch.outer(row, x)
            z1 = z
            for _ in range(60):
                z1 = torch.relu(W1 @ z1 + U1 @ x)
            V1 = W1 @ z1 + U1 @ x
            changed = (V1 > 0) != (point.V[i] > 0)
            switched += int(changed.sum())
            assert not bool((changed & ~pairs.of_z[i]).any())
    assert switched > 0 and (seed or pairs.count < crude.count)


@pytest.mark.parametrize("smooth", [False, True])
def test_tau_bounds_every_slope_below_the_given_ones(smooth: bool) -> None:
    g = torch.Generator().manual_seed(3)
    m, n = 12, 3
    R = torch.randn(m, m, generator=g, dtype=I64) * 0.25
    slopes = TanhSlopes() if smooth else ReLUSlopes()
    contraction = Contraction(slopes)
    contraction.update(Exact(R, torch.zeros_like(R)))
    V = torch.randn(n, m, generator=g, dtype=I64)
    one = torch.eye(m, dtype=I64)
    for error in [0.0, 0.01, 0.3]:  # the last is beyond every reference
        D = slopes.slope(V) if smooth else torch.where(V.abs() <= error, 1.0, slopes.slope(V))
        tau = contraction.tau_of_slopes(V, D, error if smooth else 0.0, 0.0)
        assert tau <= contraction.tau
        worst = 0.0
        for _ in range(40):
            for i in range(n):
                top = (D[i] + (error if smooth else 0.0)).clamp(max=1.0)
                E = top * torch.rand(m, generator=g, dtype=I64).round(decimals=0 if not smooth else 2)
                T = torch.linalg.solve(one - E[:, None] * R, torch.diag(E))
                worst = max(worst, float(torch.linalg.matrix_norm(T, 2)))
        assert worst <= tau
        V = V + 0.02


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_one_step_decreases_as_the_lemma_says(seed: int) -> None:
    """Random N, F: |r'| <= |r| - kappa |step| for r' = r - eta (N + F) (N - F)^T r."""
    g = torch.Generator().manual_seed(seed)
    n = 4
    N = torch.randn(n, 9, generator=g, dtype=I64)
    U, values, V = torch.linalg.svd(N, full_matrices=False)
    N = U @ torch.diag(values + 1.5) @ V
    F = torch.randn(n, 9, generator=g, dtype=I64) * 10.0 ** float(torch.rand(1, generator=g) * 3 - 4)
    values = torch.linalg.svdvals(N)
    f, e0 = (float(torch.linalg.matrix_norm(M, 2)) for M in (F, (N + F) @ F.T))
    share = float(torch.rand(1, generator=g))
    rest = float(torch.linalg.eigvalsh(F @ F.T - share * N @ N.T)[-1])
    eta = float(torch.rand(1, generator=g) * 1.8 + 0.1) / float(values[0]) ** 2
    kappa = least_gain(eta, float(values[-1]), float(values[0]), f, e0, share, rest)
    for _ in range(8):
        r = U @ torch.randn(n, generator=g, dtype=I64)
        step = eta * (N - F).T @ r
        after = r - (N + F) @ step
        if kappa > 0:
            assert float(after.norm()) <= float(r.norm()) - kappa * float(step.norm()) + 1e-12 * float(r.norm())


def test_the_gain_is_sharp_without_switches() -> None:
    """At t = 1 and f = 0 it is s sqrt(1 - eta s^2)."""
    s, L = 1.3, 4.0
    eta = 1 / L**2
    assert least_gain(eta, s, L, 0.0, 0.0) == pytest.approx(s * math.sqrt(1 - eta * s * s), rel=1e-3)
    assert least_gain(eta, s, L, 0.0, 0.0) <= s * math.sqrt(1 - eta * s * s)
    assert least_gain(1.0, 0.0, 1.0, 0.0, 0.0) == -math.inf


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_norm_of_a_nonnegative_matrix(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    A = torch.rand(5, 4, generator=g, dtype=I64) * (torch.rand(5, 4, generator=g) > 0.5)
    norm = float(torch.linalg.matrix_norm(A, 2))
    assert norm * (1 - 1e-14) <= nonnegative_norm(A) <= norm * 1.2 + 1e-2
    assert nonnegative_norm(torch.zeros(3, 3, dtype=I64)) == 0.0


def test_the_verdict_of_a_tail_is_about_the_ball(tmp_path: Any) -> None:
    model, X, y = problem(2, 16, 4, 1)
    proof = wp.prove(model, X, y, max_steps=200)
    assert proof.verdict is wp.Verdict.CERTIFIED
    tail = proof.tail
    assert proof.radius >= tail["residual"] / tail["kappa"]
    assert 0 < tail["s"] <= tail["L"] and proof.rate < 1
    assert proof.rate >= 1 - proof.step_size * tail["kappa"] * (tail["s"] + tail["f"])
