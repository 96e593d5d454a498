"""Explicit resolvents that follow masks by updates of rank one, against dense inverses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from exact_descent import problem
from proof_points import I64, at_start, flat, slopes_of
from wellposed.prove import _explicit, _shadow
from wellposed.prove._expansion import expansion
from wellposed.prove._explicit import Explicit
from wellposed.prove._network import read_network
from wellposed.prove._problem import Exact
from wellposed.prove._run import ProofRun

N, M = 3, 20


def resolvent(R: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve(torch.eye(M, dtype=I64) - D[:, None] * R, torch.diag(D))


def norms(R: torch.Tensor, D: torch.Tensor) -> dict[str, float]:
    """tau and |(I - D R)^-1| of these samples, from dense algebra."""
    one = torch.eye(M, dtype=I64)
    inverse = max(float(torch.linalg.matrix_norm(torch.linalg.inv(one - d[:, None] * R), 2)) for d in D)
    return {"tau": max(float(torch.linalg.matrix_norm(resolvent(R, d), 2)) for d in D), "inverse": inverse}


def errors_of(explicit: Explicit, R0: torch.Tensor, D: torch.Tensor) -> list[tuple[float, float]]:
    """|(I - D R0) X - D| of every sample, and the bound of it."""
    X = torch.from_numpy(explicit._X.astype(np.float64))
    residuals = [(torch.eye(M, dtype=I64) - d[:, None] * R0) @ x - torch.diag(d) for d, x in zip(D, X, strict=True)]
    return [(float(torch.linalg.matrix_norm(E, 2)), bound) for E, bound in zip(residuals, explicit._error, strict=True)]


def followed(seed: int, moves: int) -> tuple[Explicit, torch.Tensor, torch.Tensor, torch.Tensor, list[tuple[float, float]]]:
    """An object that followed random masks and a slowly moving R, and its residuals on the way."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randn(M, M, generator=g, dtype=I64) * 0.15
    D = (torch.rand(N, M, generator=g) > 0.5).double()
    R, explicit, seen = start.clone(), Explicit(), []
    for _ in range(moves):
        explicit.follow(Exact(R, torch.zeros_like(R)), D)
        seen += errors_of(explicit, torch.from_numpy(explicit._R), D)
        i, u = (int(torch.randint(k, (1,), generator=g)) for k in (N, M))
        D = D.clone()
        D[i, u] = 1 - D[i, u]
        R = R + 1e-4 * torch.randn(M, M, generator=g, dtype=I64) / M
    explicit.follow(Exact(R, torch.zeros_like(R)), D)
    return explicit, start, R, D, seen


def broken(seed: int, moves: int = 40) -> int:
    """How often a bound of the residual, or of the norm of sums, does not hold."""
    explicit, start, R, D, seen = followed(seed, moves)
    assert torch.equal(torch.from_numpy(explicit._R), start)  # so near that nothing was renewed
    wrong = sum(residual > bound for residual, bound in seen)
    g = torch.Generator().manual_seed(seed + 1)
    for _ in range(4):
        c = torch.randn(2, N, generator=g, dtype=I64)
        exact = torch.cat([sum(w * resolvent(R, d) for w, d in zip(row, D, strict=True)) for row in c], dim=1)
        found = explicit.norm_of_sums(c, change=0.0, **norms(R, D))
        true = float(torch.linalg.matrix_norm(exact, 2))
        assert found <= 1.05 * true
        wrong += found < true
    return wrong


@pytest.mark.parametrize("seed", range(3))
def test_masks_are_followed_by_updates_of_rank_one(seed: int) -> None:
    assert broken(seed) == 0


def test_a_skipped_update_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def skipped(self: Explicit, i: int, u: int) -> None:
        self._D[i, u] = 1 - self._D[i, u]

    monkeypatch.setattr(Explicit, "_update", skipped)
    with pytest.raises(AssertionError):
        assert broken(0) == 0


def test_errors_that_are_not_added_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Explicit._update

    def without(self: Explicit, i: int, u: int) -> None:
        before = self._error[i] * 0.3
        update(self, i, u)
        self._error[i] = before

    monkeypatch.setattr(Explicit, "_update", without)
    assert broken(0) > 0


def test_sums_hold_on_a_ball_and_after_a_move_of_R() -> None:
    """R moves by most of what is allowed before a renewal, in the worst of some directions."""
    explicit, _, R, D, _ = followed(5, 6)
    g, true = torch.Generator().manual_seed(9), []
    c = torch.randn(1, N, generator=g, dtype=I64)
    S = sum(w * resolvent(R, d) for w, d in zip(c[0], D, strict=True))
    u, _, v = torch.linalg.svd(S)
    step = 0.02 * torch.outer(u[:, 0], v[0])
    for sign in (-1, 1):
        moved = R + sign * step.T
        true.append(float(torch.linalg.matrix_norm(sum(w * resolvent(moved, d) for w, d in zip(c[0], D, strict=True)), 2)))
    bounds = {key: 1.05 * value for key, value in norms(R, D).items()}
    found = explicit.norm_of_sums(c, change=0.02, **bounds)
    assert max(true) <= found and explicit.norm_of_sums(c, change=0.0, **bounds) < found
    assert max(true) > float(torch.linalg.matrix_norm(S, 2))


def test_too_many_changes_and_a_large_move_renew() -> None:
    explicit, start, _, D, _ = followed(2, 3)
    moved = start + 0.02 * torch.eye(M, dtype=I64)
    explicit.follow(Exact(moved, torch.zeros_like(moved)), 1 - D)
    assert torch.equal(torch.from_numpy(explicit._R), moved)
    for residual, bound in errors_of(explicit, moved, 1 - D):
        assert residual <= bound <= 1e-4
    explicit.follow(Exact(moved, torch.zeros_like(moved)), D)  # about M/2 units at once
    for residual, bound in errors_of(explicit, moved, D):
        assert residual <= bound <= 1e-4


@pytest.mark.parametrize("seed", [0, 2])
def test_the_expansion_with_explicit_resolvents_bounds_the_hessian(seed: int) -> None:
    model, X, y = problem(4, 9, 3, seed, variance=0.02)
    found, point, jacobian, contraction = at_start(model, X, y)
    t, f = flat("relu", model, slopes_of("relu", model, point))
    H = sum(point.r[i] * torch.autograd.functional.hessian(lambda t, i=i: f(t, X[i], i), t) for i in range(4))
    true = float(torch.linalg.matrix_norm(H, 2))
    contraction.explicit.follow(point.at.R, point.D)
    ball = jacobian.ball(0.0)
    sharp = expansion(found, point, jacobian, contraction, ball, explicit=contraction.explicit)
    assert true * (1 - 1e-9) <= sharp < expansion(found, point, jacobian, contraction, ball)


def hessians(n: int, m: int, d: int, seed: int, steps: int) -> tuple[list[float], int]:
    """|sum r_i Hess f_i|/M of every step, and how many masks changed on the way."""
    model, X, y = problem(n, m, d, seed, variance=0.03)
    run = ProofRun(*read_network(model, X, y), "auto")
    ratios, changed, before = [], 0, run._now.point.D
    for k in range(steps):
        point = run._now.point
        run.advance(1000)
        if run.result is not None:
            break
        with torch.no_grad():
            for name, part in zip("WUa", "RUw", strict=True):
                getattr(model, name).copy_(point.at.parts()[part].high)
        t, f = flat("relu", model, slopes_of("relu", model, point))
        H = sum(point.r[i] * torch.autograd.functional.hessian(lambda t, f=f, i=i: f(t, X[i], i), t) for i in range(n))
        if k:  # the first step begins at the start itself, so that no error can grow in it
            ratios.append(float(torch.linalg.matrix_norm(H, 2)) / run._rows[k].expansion)
        changed, before = changed + int((point.D != before).sum()), point.D
    return ratios, changed


def test_the_expansion_of_every_step_bounds_the_hessian_across_kinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shadow, "_WORTH", 0.0)
    ratios, changed = hessians(2, 6, 3, 1, 10)
    assert len(ratios) >= 8 and changed > 0 and 0.2 < max(ratios) <= 1


@pytest.mark.slow
def test_the_expansion_of_many_steps_bounds_the_hessian_across_kinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shadow, "_WORTH", 0.0)
    found = [hessians(3, 12, 5, seed, 60) for seed in range(3, 12)]
    assert sum(len(ratios) for ratios, _ in found) > 100 and sum(changed for _, changed in found) > 10
    assert max(ratio for ratios, _ in found for ratio in ratios) <= 1


def test_a_large_network_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def used(self: Explicit, *args: Any) -> None:
        raise AssertionError("too large")

    monkeypatch.setattr(_explicit.Explicit, "follow", used)
    monkeypatch.setattr(_shadow, "MOST_NUMBERS", 2 * 16 * 16 - 1)
    run = ProofRun(*read_network(*problem(2, 16, 4, 1)), "auto")
    for _ in range(4):
        run.advance(1000)
    assert run.step == 4
