"""Proofs against exact descent in 60 digits: every promise, step by step, across kinks."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from mpmath import mp

import wellposed as wp
from exact_descent import ExactDescent, problem
from exact_networks import norm
from wellposed.prove import _shadow
from wellposed.prove._problem import Exact


class Watch:
    """Takes every step in 60 digits too, and counts where the claimed distance is exceeded."""

    def __init__(self, model: Any, X: Any, y: Any, number: Any = mp.mpf) -> None:
        self.args, self.number, self.exact, self.violations, self.worst = (model, X, y), number, None, 0, 0.0
        self.last = 0

    def on_step(self, state: Any) -> None:
        proof = state.proof()
        if self.exact is None:
            self.exact = ExactDescent(*self.args, proof.step_size, self.number)
        while self.last < state.step:
            self.exact.step()
            self.last += 1
        distance = self.exact.distance(proof._at)
        self.violations += bool(distance > proof.delta)
        if proof.delta:
            self.worst = max(self.worst, float(distance / proof.delta))


def promises_kept(proof: wp.Proof, exact: ExactDescent, steps: int) -> int:
    """How often the tail's promises are broken in further exact steps."""
    broken = 0
    bound, start = mp.mpf(proof.tail["residual"]), dict(exact.theta)
    for _ in range(steps):
        broken += bool(norm(exact.r) > bound)
        broken += bool(exact.distance_to(start) > proof.radius)
        exact.step()
        bound *= mp.mpf(proof.rate)
    return broken


CASES = [("relu", 2, 16, 4, 1), ("relu", 3, 12, 5, 3), ("tanh", 2, 5, 3, 0), ("softplus", 2, 5, 3, 0), ("skip", 2, 10, 3, 1)]
MORE = [("relu", 3, 14, 5, seed) for seed in range(4, 16)] + [
    (kind, n, m, d, seed)
    for seed in range(1, 5)
    for kind, n, m, d in [("tanh", 3, 10, 4), ("softplus", 3, 10, 4), ("skip", 3, 16, 5), ("implicit_only", 2, 24, 4)]
]


def replay(kind: str, n: int, m: int, d: int, seed: int, steps: int) -> wp.Proof:
    model, X, y = problem(n, m, d, seed, kind=kind)
    watch = Watch(model, X, y)
    try:
        proof = wp.prove(model, X, y, max_steps=150, callbacks=[watch])
    except wp.InvalidArgument as error:  # omega of a network so small may be above 1
        pytest.skip(str(error))
    assert watch.violations == 0
    if proof.verdict is wp.Verdict.CERTIFIED:
        assert watch.last == proof.num_steps
        assert promises_kept(proof, watch.exact, steps) == 0
    return proof


@pytest.mark.parametrize(("kind", "n", "m", "d", "seed"), CASES)
def test_exact_descent_is_where_the_proof_says(kind: str, n: int, m: int, d: int, seed: int) -> None:
    proof = replay(kind, n, m, d, seed, steps=12)
    assert proof.num_steps > 3


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n", "m", "d", "seed"), MORE)
def test_exact_descent_is_where_the_proof_says_for_long(kind: str, n: int, m: int, d: int, seed: int) -> None:
    replay(kind, n, m, d, seed, steps=120)


def test_rational_descent_is_where_the_proof_says() -> None:
    """Without any rounding: the digits of the fractions grow tenfold with every step, so there are few."""
    model, X, y = problem(2, 3, 2, 1, variance=0.02)
    watch = Watch(model, X, y, Fraction)
    proof = wp.prove(model, X, y, max_steps=2, callbacks=[watch])
    assert proof.num_steps == 2 and watch.violations == 0


def violations_of_a_run() -> int:
    model, X, y = problem(2, 12, 4, 5)
    watch = Watch(model, X, y)
    wp.prove(model, X, y, max_steps=25, callbacks=[watch])
    return watch.violations


def test_without_a_mutation_there_is_no_violation() -> None:
    assert violations_of_a_run() == 0


def test_a_dropped_low_part_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    minus = Exact.minus

    def without_low(self: Exact, step: Any, step_low: Any) -> tuple[Exact, float]:
        found, rounding = minus(self, step, step_low)
        return Exact(found.high, found.low * 0), rounding

    monkeypatch.setattr(Exact, "minus", without_low)
    assert violations_of_a_run() > 0


def test_errors_that_are_taken_as_zero_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    advanced = _shadow._advanced
    monkeypatch.setattr(_shadow, "_advanced", lambda *args: (advanced(*args)[0], 0.0))
    assert violations_of_a_run() > 0


def test_a_tail_that_promises_too_much_is_caught() -> None:
    """Half the radius, and two thirds of the time to a given loss."""
    model, X, y = problem(3, 12, 5, 3)
    watch = Watch(model, X, y)
    proof = wp.prove(model, X, y, max_steps=150, callbacks=[watch])
    assert proof.verdict is wp.Verdict.CERTIFIED and proof.radius is not None and proof.rate is not None
    start = dict(watch.exact.theta)
    for changed in (proof, replace(proof, radius=proof.radius / 2), replace(proof, rate=proof.rate**1.5)):
        watch.exact.theta = dict(start)
        watch.exact.evaluate()
        assert (promises_kept(changed, watch.exact, 8) > 0) == (changed is not proof)
