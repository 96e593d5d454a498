"""Descent with one step size, for the network whose read-out is fixed: every licensed bound, the secant, and the traps."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import wellposed as wp
from certificate_problems import Point, check_descent, clone, move, problem, train
from wellposed.certify import Certificate, Verdict, radius
from wellposed.certify._gate import check_data
from wellposed.certify._radius_search import PlainDescentResult, plain_descent
from wellposed.certify._sensitivity import sensitivity_of
from wellposed.certify.measurement import Measurement, measure
from wellposed.nn.sensitivity import JacobianBounds

F64 = torch.float64
SHARPENINGS: tuple[tuple[str, ...], ...] = ((), ("active",), ("kernel",), ("active", "kernel"))


def trained(seed: int, **sizes: int) -> tuple[Any, Tensor, Tensor, Certificate]:
    """An ImplicitOnlyDEQ, trained until descent is certified, or for a while; a copy of its own for each caller."""
    return copy.deepcopy(_trained(seed, **sizes))


@functools.cache
def _trained(seed: int, **sizes: int) -> tuple[Any, Tensor, Tensor, Certificate]:
    model, X, y = problem("implicit", seed, **sizes)
    for _ in range(15):
        cert = radius(model, X, y, dynamics="descent", sharpen=SHARPENINGS[seed % 4])
        if cert.certified:
            break
        train(model, X, y, 12)
    return model, X, y, cert


def gaussian(seed: int, n: int, m: int) -> tuple[Any, Tensor, Tensor]:
    """Half of the units are inactive, some of them near their kinks; labels as near as `size` asks."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 6, generator=g, dtype=F64)
    X = X / X.norm(dim=1, keepdim=True)
    model = wp.ImplicitOnlyDEQ(6, m, gamma0=0.3, generator=g, dtype=F64, rtol=1e-13, max_steps=2000, on_ill_posed="ignore")
    with torch.no_grad():
        return model, X, model(X) + 1e-4 * torch.randn(n, generator=g, dtype=F64)


# --- the dynamics ------------------------------------------------------------------------------------------------------------


def test_descent_keeps_every_bound() -> None:
    certified = 0
    for seed in (0, 1, 3, 4):
        model, X, y, cert = trained(seed)
        if cert.certified:
            certified += 1
            assert check_descent(model, X, y, cert, 30) > 0
            assert isinstance(cert.step_size, dict) and set(cert.step_size) == {"A"}
            K = Point(model, X, y).kernel({"A": 1.0})
            assert cert.step_size["A"] <= 1 / float(torch.linalg.eigvalsh(K)[-1])
    assert certified >= 3


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 4), m=st.integers(8, 40), factor=st.sampled_from([1.0, 0.1, 1e-2, 1e-4]))
def test_near_labels_are_certified_or_not_but_never_wrongly(seed: int, n: int, m: int, factor: float) -> None:
    model, X, y = gaussian(seed, n, m)
    with torch.no_grad():
        y = model(X) + factor * (y - model(X))
    cert = radius(model, X, y, dynamics="descent", sharpen=SHARPENINGS[seed % 4])
    if cert.certified:
        check_descent(model, X, y, cert, 25)


def test_smaller_steps_stay_within_the_radius() -> None:
    model, X, y, cert = trained(3)
    assert cert.certified and isinstance(cert.step_size, dict) and cert.radii is not None
    origin, point = clone(model), Point(model, X, y)
    for k in range(40):
        move(model, clone(model), point.gradients, -cert.step_size["A"] * (0.1 if k % 2 else 0.7))
        point = Point(model, X, y, point)
        assert float((model.A.detach() - origin["A"]).norm()) <= cert.radii["A"]


def test_descend_runs_with_the_licensed_step() -> None:
    model, X, y, cert = trained(4)
    assert cert.certified and cert.rate is not None
    history = wp.descend(model, X, y, step_size=cert.step_size, steps=30)
    norms = history.residual_norm
    bounds = norms[0] * cert.rate ** torch.arange(len(norms), dtype=F64)
    assert bool((norms <= bounds * (1 + 1e-9)).all()) and norms[-1] < 0.95 * norms[0]


def test_step_size_certified_and_float32() -> None:
    model, X, y, cert = trained(4)
    assert cert.certified
    single = radius(model.float(), X.float(), y.float(), dynamics="descent")
    assert single.certified and isinstance(single.step_size, dict) and isinstance(cert.step_size, dict)
    assert single.step_size["A"] == pytest.approx(cert.step_size["A"], rel=1e-3)
    assert model.A.dtype == torch.float32


@pytest.mark.slow
def test_hundreds_of_descents() -> None:
    certified = 0
    for seed in range(100, 400):
        if seed % 2:
            model, X, y, cert = trained(seed, n=2 + seed % 3, m=20 + seed % 20)
        else:
            model, X, y = gaussian(seed, 1 + seed % 4, 16 + seed % 40)
            cert = radius(model, X, y, dynamics="descent", sharpen=SHARPENINGS[seed % 4])
            for _ in range(6):
                if cert.certified:
                    break
                train(model, X, y, 20)
                cert = radius(model, X, y, dynamics="descent", sharpen=SHARPENINGS[seed % 4])
        if cert.certified:
            certified += 1
            check_descent(model, X, y, cert, 60)
    assert certified >= 100


# --- the secant --------------------------------------------------------------------------------------------------------------


class At:
    """The network at some A: equilibria, pre-activations, and Jacobians for masks of one's choice, by dense algebra."""

    def __init__(self, model: Any, X: Tensor) -> None:
        with torch.no_grad():
            self.R, self.C, self.v = model.recurrent().clone(), model.injection(X), model.readout_weight()
            Z = torch.zeros_like(self.C)
            for _ in range(2000):
                Z, before = torch.relu(Z @ self.R.t() + self.C), Z
                if torch.equal(Z, before):
                    break
            self.Z, self.V, self.gamma = Z, Z @ self.R.t() + self.C, model.gamma

    def jacobian(self, masks: Tensor, Z: Tensor) -> Tensor:
        """(n, m m) rows gamma z p^T, by the index of A, for p = D (I - R^T D)^(-1) v."""
        rows = []
        for mask, z in zip(masks, Z, strict=True):
            D, eye = torch.diag(mask), torch.eye(len(mask), dtype=mask.dtype)
            p = D @ torch.linalg.solve(eye - self.R.t() @ D, self.v)
            rows.append(self.gamma * torch.outer(z, p).flatten())
        return torch.stack(rows)


def secant(a: At, b: At) -> Tensor:
    """S with f(b) - f(a) = S (A_b - A_a): the slopes of relu between the two pre-activations as masks."""
    moved = b.V - a.V
    steady = moved.abs() <= 1e-14
    slopes = torch.where(steady, (a.V > 0).double(), (b.Z - a.Z) / torch.where(steady, 1.0, moved)).clamp(0, 1)
    return b.jacobian(slopes, a.Z)


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    init=st.sampled_from(["gaussian", "half_normal"]),
    ratio=st.sampled_from([1e-4, 1e-2, 0.1, 0.3]),
    sharpen=st.sampled_from(SHARPENINGS),
)
def test_the_secant_is_exact_and_within_the_bounds(seed: int, init: str, ratio: float, sharpen: tuple[str, ...]) -> None:
    """At random pairs of points of the ball: kinks are crossed on the way, and at ties any slope may be taken."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(3, 5, generator=g, dtype=F64)
    model = wp.ImplicitOnlyDEQ(5, 14, gamma0=0.3, init=init, generator=g, dtype=F64, on_ill_posed="ignore", rtol=1e-13)
    with torch.no_grad():
        if seed % 3 == 0:  # a unit that sits at its kink, exactly
            model.W[:, 0] = 0.0
            model.A[:, 0] = 0.0
        y = model(X) + 1e-3
        at = measure(model, *check_data(model, X, y))
        assert isinstance(at, Measurement)
        R = ratio * float(torch.linalg.matrix_norm(model.A, ord=2))
        sensitivity = sensitivity_of(at, sharpen)
        sensitivity.prepare(R)
        bounds, beginning = sensitivity.jacobian(R, 1.0), model.A.clone()
        if bounds is None:
            return
        at_zero = sensitivity.jacobian(0.0, 1.0)
        assert at_zero is not None and at_zero.least >= bounds.least and at_zero.largest <= bounds.largest
        step = sensitivity.residual / bounds.largest  # what the variation covers
        for _ in range(4):
            first, second = (torch.randn(beginning.shape, generator=g, dtype=F64) for _ in range(2))
            start = beginning + 0.9 * R * first / first.norm() * float(torch.rand(1, generator=g))
            end = start + min(step, 0.1 * R) * second / second.norm()
            model.A.copy_(start)
            a = At(model, X)
            model.A.copy_(end)
            b = At(model, X)
            S = secant(a, b)
            torch.testing.assert_close(S @ (end - start).flatten(), (b.Z - a.Z) @ a.v, rtol=1e-7, atol=1e-12)
            ties = a.V.abs() <= 1e-14
            masks = torch.where(ties, torch.rand(a.V.shape, generator=g, dtype=F64), (a.V > 0).double())
            J = a.jacobian(masks, a.Z)
            values = torch.linalg.svdvals(J)
            assert bounds.least <= float(values[-1]) * (1 + 1e-9) + 1e-12
            assert float(values[0]) <= bounds.largest * (1 + 1e-9)
            assert float(torch.linalg.matrix_norm(S - J, ord=2)) <= bounds.variation * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("crossing", [True, False])
@pytest.mark.parametrize("sharpen", SHARPENINGS, ids=str)
def test_the_variation_is_nearly_attained(crossing: bool, sharpen: tuple[str, ...]) -> None:
    """By a step off a kink, where the Jacobian jumps, and by a step along the adjoint, where it does not: no smaller bound."""
    g = torch.Generator().manual_seed(7)
    X = torch.randn(1, 5, generator=g, dtype=F64)
    model = wp.ImplicitOnlyDEQ(5, 10, gamma0=0.05, init="half_normal", generator=g, dtype=F64, rtol=1e-13)
    with torch.no_grad():
        model.W.mul_(torch.sign(X @ model.W))  # every unit of phi is active
        if crossing:
            model.W[:, 0] = 0.0
            model.A[:, 0] = 0.0  # but this one is at its kink, exactly
        y = model(X) + 1e-3
        at = measure(model, *check_data(model, X, y))
        assert isinstance(at, Measurement)
        sensitivity = sensitivity_of(at, sharpen)
        R, a = 0.05, At(model, X)
        sensitivity.prepare(R)
        bounds = sensitivity.jacobian(R, 1.0)
        assert bounds is not None
        step = sensitivity.residual / bounds.largest
        assert step < R
        J = a.jacobian((a.V > 0).double(), a.Z)
        unit = torch.zeros(10, dtype=F64)
        if crossing:
            unit[0] = 1.0
            direction = torch.outer(a.Z[0] / a.Z[0].norm(), unit)  # raises gamma A[:, 0] . z
        else:
            unit[1] = 1.0
            p = J[0].reshape(10, 10).t() @ a.Z[0]
            direction = torch.outer(unit, p / p.norm())  # dR^T p is along one unit, and as long as it can be
        model.A.add_(step * direction)
        found = float((secant(a, At(model, X)) - J).norm())
    assert 0.8 * bounds.variation <= found <= bounds.variation


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 5),
    share=st.sampled_from([1.0, 0.5, 0.1]),
    apart=st.just(0.0) | st.floats(1e-9, 0.6),
)
def test_one_step_of_theorem_3(seed: int, n: int, share: float, apart: float) -> None:
    """|(I - eta S J^T) r| against both rates and the bound per length, on matrices from nowhere."""
    g = torch.Generator().manual_seed(seed)
    J, N, r = (torch.randn(n, size, generator=g, dtype=F64) for size in (7, 7, 1))
    values = torch.linalg.svdvals(J)
    s, L = float(values[-1]), float(values[0])
    d = apart * (1 - share / 2) * s
    S = J + N * (d / float(torch.linalg.matrix_norm(N, ord=2)))
    result = PlainDescentResult(1.0, JacobianBounds(s, L, d), share)
    eta = share / L**2
    after, length = float((r - eta * S @ (J.t() @ r)).norm()), eta * float((J.t() @ r).norm())
    size = float(r.norm())
    assert after <= result.rate * size * (1 + 1e-12)
    assert after <= size - length * ((1 - share / 2) * s - d) + 1e-12 * size
    assert result.rate <= 1 and (apart == 0.0 or d > 0)


def test_the_radius_is_the_least_that_holds() -> None:
    model, X, y, cert = trained(3)
    at = measure(model, *check_data(model, X, y))
    assert isinstance(at, Measurement)
    sensitivity = sensitivity_of(at)
    result = plain_descent(sensitivity)
    assert result is not None

    def needed(R: float) -> float:
        bounds = sensitivity.jacobian(R, result.share)
        assert bounds is not None
        return sensitivity.residual / ((1 - result.share / 2) * bounds.least - bounds.variation)

    assert needed(result.radius) <= result.radius
    assert needed(0.98 * result.radius) > 0.98 * result.radius


# --- traps -------------------------------------------------------------------------------------------------------------------


def refuse(model: Any, X: Tensor, y: Tensor) -> Certificate:
    for sharpen in SHARPENINGS:
        cert = radius(model, X, y, dynamics="descent", sharpen=sharpen)
        assert cert.verdict is Verdict.UNDECIDED and cert.note
        assert cert.step_size is cert.rate is cert.radii is None and cert.licenses == ()
    return cert


def test_labels_that_no_parameter_reaches() -> None:
    """With a read-out that is nowhere negative predictions are not either, however near a negative label is."""
    for seed, size in ((0, 1.0), (1, 1e-3), (2, 1e-9)):
        model, X, y = gaussian(seed, 2, 20)
        with torch.no_grad():
            model.b.abs_()
        refuse(model, size * X, torch.full_like(y, -size * 1e-3))


def test_a_unit_at_its_kink_costs() -> None:
    """A tie makes the Jacobian jump by a part of the read-out: with half of the units tied nothing is left."""
    model, X, y, cert = trained(4)
    assert cert.certified
    with torch.no_grad():
        model.W[:, ::2] = 0.0
        model.A[:, ::2] = 0.0  # half of the units are tied at 0
        y = model(X) + 1e-6
    tied = refuse(model, X, y)
    assert "kinks" in tied.note


def test_inputs_without_features() -> None:
    model, X, y = gaussian(0, 2, 20)
    assert "Row 0 of X is zero" in refuse(model, torch.zeros_like(X), torch.full_like(y, 0.5)).note


def test_far_labels_and_a_missing_contraction() -> None:
    model, X, y, cert = trained(4)
    assert cert.certified
    assert "too large" in refuse(model, X, y + 100.0).note and "hidden_rate" not in refuse(model, X, y + 100.0).note
    with torch.no_grad():
        model.A *= 1.001 / float(torch.linalg.matrix_norm(model.recurrent(), ord=2))
    assert "contraction" in refuse(model, X, y).note


def test_other_networks_know_nothing_of_this_theorem() -> None:
    for family in ("gaussian", "skip", "monotone"):
        at = measure(*(lambda model, X, y: (model, *check_data(model, X, y)))(*problem(family, 0)))
        assert isinstance(at, Measurement)
        assert sensitivity_of(at).jacobian(1e-3, 1.0) is None


def test_auto_and_suggest_offer_it() -> None:
    model, X, y, _ = trained(4)
    every = wp.certify(model, X, y)
    assert any(other.dynamics == "descent" and other.certified for other in (every, *every.others))
    offers = [offer for offer in wp.suggest(model, X, y) if offer.kind == "descent"]
    assert len(offers) == 1 and offers[0].certificate.certified and "read-out" not in offers[0].text


def test_the_flow_is_what_small_steps_tend_to() -> None:
    """Where descent is certified so is the flow: it asks for less."""
    for seed in (0, 3, 4):
        model, X, y, cert = trained(seed)
        if cert.certified and cert.radii is not None:
            flow = radius(model, X, y, sharpen=SHARPENINGS[seed % 4])
            assert flow.certified and flow.radii is not None and flow.radii["A"] <= cert.radii["A"] * (1 + 1e-9)
            assert math.isfinite(cert.radii["A"])
