"""Norms of single samples: what is proved and carried along, against dense algebra and 60 digits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

import wellposed as wp
from exact_descent import problem
from proof_points import at_start, flat, slopes_of
from stored_proofs import Stored, proved
from wellposed.prove._expansion import around, expansion
from wellposed.prove._problem import Exact
from wellposed.prove._resolvent import Around, Resolvents, proved_norms
from wellposed.prove._smooth_tail import _ball, lipschitz
from wellposed.prove.verify_resolvent import Bend, Change

F64 = torch.float64
CASES = 220


def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Generator]:
    """R, slopes and curvatures of a few samples."""
    g = torch.Generator().manual_seed(seed)
    m, n = int(torch.randint(2, 20, (1,), generator=g)), int(torch.randint(1, 4, (1,), generator=g))
    size = 0.1 + 0.4 * float(torch.rand(1, generator=g))
    R = size * torch.randn(m, m, generator=g, dtype=F64) / math.sqrt(m)
    b = torch.randn(n, m, generator=g, dtype=F64) / math.sqrt(m)
    return R, torch.rand(n, m, generator=g, dtype=F64), b, g


def dense(R: torch.Tensor, D: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(n,) |K_i|, |D_i K_i|, |K_i^T diag(b_i) K_i| by singular values."""
    K = torch.linalg.inv(torch.eye(len(R), dtype=F64) - R * D.unsqueeze(1))
    C = K.mT @ (b.unsqueeze(2) * K)
    return tuple(torch.linalg.matrix_norm(A, 2) for A in (K, D.unsqueeze(2) * K, C))  # type: ignore[return-value]


def exceeded(bounds: tuple[Any, Any, Any], truth: tuple[torch.Tensor, ...], factor: float = 1.0) -> list[bool]:
    """Which of the bounds, times a factor, are violated by more than the rounding of the dense algebra."""
    return [bool((t > factor * bound * (1 + 1e-12)).any()) for bound, t in zip(bounds, truth, strict=True)]


@pytest.mark.parametrize("part", range(4))
def test_proved_norms_are_bounds_and_near(part: int) -> None:
    halved = [0, 0, 0]
    for seed in range(part, CASES, 4):
        R, D, b, _ = draw(seed)
        found, truth = proved_norms(R, D, b, b), dense(R, D, b)
        assert exceeded(found, truth) == [False] * 3, seed
        assert found[0] <= 1.1 * float(truth[0].max()) and found[1] <= 1.1 * float(truth[1].max())
        assert bool((found[2] <= 1.15 * truth[2] + 1e-3 * b.abs().max()).all())
        halved = [count + bad for count, bad in zip(halved, exceeded(found, truth, 0.5), strict=True)]
    assert min(halved) == len(range(part, CASES, 4))  # a mutation that halves one of them is caught every time


@pytest.mark.parametrize("seed", range(6))
def test_proved_norms_in_60_digits(seed: int) -> None:
    R, D, b, _ = draw(seed)
    R, D, b = R[:5, :5], D[:1, :5], b[:1, :5]
    K, tau, c = proved_norms(R, D, b, b)
    with mpmath.workdps(60):
        A, d, diagonal = (mpmath.matrix(value.tolist()) for value in (R, D, b))
        m = A.rows
        inverse = (mpmath.eye(m) - A * mpmath.diag(list(d))) ** -1
        values = [
            mpmath.eigsy(inverse.T * mpmath.diag(x) * inverse, eigvals_only=True)
            for x in ([1] * m, [v**2 for v in d], list(diagonal))
        ]
        most = [max(abs(v) for v in found) for found in values]
        assert mpmath.sqrt(most[0]) <= K <= 1.1 * mpmath.sqrt(most[0])
        assert mpmath.sqrt(most[1]) <= tau <= 1.1 * mpmath.sqrt(most[1])
        assert most[2] <= float(c[0]) <= 1.15 * most[2] + 1e-3 * float(b.abs().max())


def around_exactly(R: torch.Tensor, D: torch.Tensor, b: torch.Tensor, dR: float, dD: float, db: float) -> Around:
    norm = float(torch.linalg.matrix_norm(R, 2)) * (1 + 1e-12)
    return Around(Exact(R, torch.zeros_like(R)), D, b, norm, dR, 0.0, torch.full((len(D),), dD, dtype=F64), b - db, b + db)


def moved(R: torch.Tensor, D: torch.Tensor, b: torch.Tensor, at: Around, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    """On the edge of the ball; one draw in two moves a single unit."""
    step = torch.randn(R.shape, generator=g, dtype=F64)
    turn = torch.randn(D.shape, generator=g, dtype=F64)
    if int(torch.randint(2, (1,), generator=g)):
        turn = turn * torch.nn.functional.one_hot(turn.abs().argmax(dim=1), turn.shape[1])
    D = D + at.dD.unsqueeze(1) * turn / turn.norm(dim=1, keepdim=True)
    b = b + (at.high - b) * torch.randint(-1, 2, b.shape, generator=g)
    return R + at.dR * step / torch.linalg.matrix_norm(step, 2), D.clamp(0.0, 1.0), b


@pytest.mark.parametrize("part", range(4))
def test_carried_norms_hold_on_the_ball_of_points_that_follow(part: int) -> None:
    carried, halved = 0, [0, 0, 0]
    for seed in range(part, CASES, 4):
        R, D, b, g = draw(seed)
        known = Resolvents()
        drift = [0.02 * torch.randn(value.shape, generator=g, dtype=F64) / math.sqrt(len(R)) for value in (R, D, b)]
        for k in range(3):  # seen, proved for its ball or ahead of itself, carried
            R1, D1, b1 = (value + k * step for value, step in zip((R, D, b), drift, strict=True))
            at = around_exactly(R1, D1.clamp(0.0, 1.0), b1, 0.01, 0.01, 0.002)
            if k == 0:
                known.see(at)
                assert known.carried(at) is None
                continue
            if k == 1:
                known.renew(at, ball=seed % 8 < 4)
            norms = known.carried(at)
            if norms is None:
                continue
            carried += 1
            truth = dense(*moved(at.R.high, at.D, at.b, at, g))
            assert exceeded((norms.K, norms.tau, norms.c), truth) == [False] * 3, (seed, k)
            low = exceeded((norms.K, norms.tau, norms.c), truth, 0.5)
            halved = [count + bad for count, bad in zip(halved, low, strict=True)]
    assert carried > 1.7 * CASES / 4 and min(halved) > 0.9 * carried  # sharp enough that half of each would be wrong


def test_a_reference_that_is_too_far_is_not_used() -> None:
    R, D, b, _ = draw(3)
    known = Resolvents()
    known.renew(around_exactly(R, D, b, 0.0, 0.0, 0.0))
    assert known.carried(around_exactly(R, D, b, 0.0, 0.0, 0.0)) is not None
    assert known.carried(around_exactly(R, D, b, 2.0, 0.0, 0.0)) is None


def test_nothing_is_claimed_of_a_singular_resolvent() -> None:
    R, D = torch.eye(3, dtype=F64), torch.ones(1, 3, dtype=F64)
    known = Resolvents()
    known.renew(around_exactly(R, D, D, 0.0, 0.0, 0.0))
    assert known.fresh is None and known.carried(around_exactly(R, D, D, 0.0, 0.0, 0.0)) is None


@pytest.mark.parametrize("kind", ["tanh", "softplus"])
@pytest.mark.parametrize("seed", range(3))
def test_the_expansion_with_norms_of_samples_bounds_the_hessian(kind: str, seed: int) -> None:
    model, X, y = problem(2, 4, 2, seed, kind=kind, variance=0.02)
    found, point, jacobian, contraction = at_start(model, X, y)
    ball = jacobian.ball(0.0)
    known = contraction.resolvents
    known.renew(around(found, point, contraction, ball))
    norms = known.carried(around(found, point, contraction, ball))
    t, f = flat(kind, model, slopes_of(kind, model, point))
    H = sum(point.r[i] * torch.autograd.functional.hessian(lambda t, i=i: f(t, X[i], i), t) for i in range(2))
    true = float(torch.linalg.matrix_norm(H, 2))
    M = expansion(found, point, jacobian, contraction, ball, norms)
    assert true * (1 - 1e-9) <= M < expansion(found, point, jacobian, contraction, ball)


@pytest.mark.parametrize("kind", ["tanh", "softplus"])
def test_a_ball_with_norms_of_samples_contains_what_moves(kind: str) -> None:
    model, X, y = problem(2, 6, 3, 1, kind=kind, variance=0.02)
    found, point, jacobian, contraction = at_start(model, X, y)
    contraction.resolvents.renew(around(found, point, contraction, jacobian.ball(0.0)))
    radius = 0.02
    plain, ball = jacobian.ball(radius), _ball(found, point, jacobian, contraction, radius)
    assert bool((ball.dv < plain.dv).all() and (ball.dz < plain.dz).all() and (ball.dp < plain.dp).all())
    own = Resolvents()
    own.renew(around(found, point, contraction, ball), ball=True)
    t, f = flat(kind, model, slopes_of(kind, model, point))

    def J(t: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.autograd.functional.jacobian(lambda t, i=i: f(t, X[i], i), t) for i in range(2)])

    Lambda = lipschitz(found, point, jacobian, contraction, ball, own)
    assert Lambda < lipschitz(found, point, jacobian, contraction, plain)
    g = torch.Generator().manual_seed(0)
    for _ in range(6):
        a, b = (torch.randn(len(t), generator=g, dtype=F64) for _ in range(2))
        a, b = t + radius * a / a.norm(), t + radius * b / b.norm()
        assert float(torch.linalg.matrix_norm(J(a) - J(b), 2)) <= Lambda * float((a - b).norm())
        assert float(torch.linalg.matrix_norm(J(a) - J(t), "fro")) <= ball.dJ


@pytest.mark.parametrize("part", range(2))
def test_the_checker_bounds_the_same_norms_by_inverses(part: int) -> None:
    for seed in range(part, 60, 2):
        R, D, b, g = draw(seed)
        at = around_exactly(R, D, b, 0.01, 0.01, 0.002)
        n, m = D.shape
        change = Change(at.dR, at.dD.numpy(), (at.high - b).numpy() * (1 + 1e-12), np.zeros(n))
        bend = Bend(R.numpy(), b.numpy(), change, np.ones(n), np.full(n, np.inf))
        for i in range(n):
            bend.add(i, torch.linalg.inv(torch.eye(m, dtype=F64) - D[i].unsqueeze(1) * R).numpy() * D[i].numpy(), 1e-12)
        _, tau, c = dense(*moved(R, D, b, at, g))
        assert exceeded((bend.tau, torch.from_numpy(bend.c)), (tau, c)) == [False] * 2, seed
        assert all(exceeded((bend.tau, torch.from_numpy(bend.c)), (tau, c), 0.5)), seed


@pytest.mark.parametrize(("kind", "part"), [("tanh", 0.5), ("softplus", 0.25)])  # half is true of this softplus
def test_a_part_of_all_expansions_is_rejected(kind: str, part: float, tmp_path: Path) -> None:
    """A forger who makes every delta fit, and computes the checksums: only the norms themselves contradict."""
    stored = Stored(proved(kind).save(tmp_path / "genuine"))
    steps, eta = stored.document["steps"], stored.document["step_size"]
    assert stored.document["num_steps"] > 1
    steps["expansion"] = [None if M is None else float(f"{part * M:.5e}") for M in steps["expansion"]]
    for k, (M, error) in enumerate(zip(steps["expansion"], steps["error"], strict=True)):
        steps["delta"][k + 1] = ((1 + eta * (M or 0.0)) * steps["delta"][k] + error) * (1 + 1e-12)
    stored.document["delta"] = steps["delta"][-1]
    found = wp.verify(stored.write(tmp_path / "forged", sealed=True), steps=100, seed=0)
    assert [check.name for check in found.checks if not check.ok] == ["expansion"]
