"""Theorem 1 of [ling2022]: what it licenses is kept, and what it cannot prove it does not certify."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wellposed as wp
from theorem_problems import gaussian, generator, sphere, steps
from wellposed.certify import Certificate, Verdict, ling2022
from wellposed.errors import InvalidArgument, InvalidType

COUNT = 12


def largest_constant(cert: Certificate) -> float:
    """The largest constant of (9) that still holds, nearly: it licenses the largest step that the proof allows."""
    return max(4.1, 0.9 * 4 * cert.measured["lambda_0/(4 C), the printed (9)"])


def check_every_bound(seed: int, n: int, d: int, m: int, scale: float, constant: float, count: int) -> float | None:
    """None if not certified; else every licensed bound was checked at every step of a descent, and |r| fell to this part."""
    model, X, y = gaussian(n, d, m, seed, scale)
    cert = ling2022(model, X, y, constant=8.0 if constant == math.inf else constant)
    if constant == math.inf:
        cert = ling2022(model, X, y, constant=largest_constant(cert))
    if not cert.certified:
        assert cert.step_size is None and cert.rate is None and cert.radii is None
        return None
    assert cert.step_size is not None and cert.rate is not None and cert.radii is not None
    assert isinstance(cert.step_size, float) and 0 < cert.rate <= 1
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = None
    for k, r, Z in steps(model, X, y, cert.step_size, count):
        first = r.norm() if first is None else first
        assert r.norm() <= cert.rate**k * first * (1 + 1e-12)
        assert torch.linalg.svdvals(Z)[-1] ** 2 >= cert.measured["lambda_0"] / 2
        for name, parameter in model.named_parameters():
            assert (parameter.detach() - start[name]).norm() <= cert.radii[name] * (1 + 1e-9)
        assert torch.linalg.matrix_norm(model.W.detach(), ord=2) < 1
    assert first is not None
    return float(r.norm() / first)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 4),
    exponent=st.floats(3.0, 5.5),
    constant=st.sampled_from([4.5, 8.0, 1e4, math.inf]),
)
def test_certified_descent_keeps_every_bound(seed: int, n: int, exponent: float, constant: float) -> None:
    check_every_bound(seed, n, 6, 30, 10.0**exponent, constant, COUNT)


def test_enough_problems_are_certified() -> None:
    results = [check_every_bound(seed, 3, 6, 40, 3e4, 8.0, 3) for seed in range(30)]
    assert sum(result is not None for result in results) >= 25


@pytest.mark.slow
def test_hundreds_of_problems() -> None:
    constants = (8.0, 1e3, math.inf)
    results = [check_every_bound(s, 1 + s % 5, 6, 40, 10.0 ** (3 + s % 4), constants[s % 3], 10) for s in range(300)]
    assert sum(result is not None for result in results) >= 100


def test_long_run_with_a_large_step() -> None:
    # one sample, a wide network, the largest constant: here the residual really falls while the bounds are checked
    fallen = check_every_bound(6, 1, 6, 150, 2e3, math.inf, 120)
    assert fallen is not None and fallen < 0.5


def test_the_conditions_by_hand() -> None:
    model, X, y = gaussian(4, 8, 50, 0, 1e4)
    cert = ling2022(model, X, y)
    assert cert.certified and cert.radii is not None
    with torch.no_grad():
        Z, r = model.equilibrium(X), model(X) - y
    W, U, a = (
        torch.linalg.norm(p.detach(), ord=2).item() + cert.radii[name]
        for name, p in (("W", model.W), ("U", model.U), ("a", model.a))
    )
    cw, cu, ca = U * a / (1 - W) ** 2, a / (1 - W), U / (1 - W)
    XF, r0, lam = X.norm().item(), r.norm().item(), torch.linalg.eigvalsh(Z @ Z.t())[0].item()
    bounds = [
        4 * XF * r0 * max(cw / cert.radii["W"], cu / cert.radii["U"], ca / cert.radii["a"]),
        4 * (2 + math.sqrt(2)) / a * (cw**2 + cu**2) * XF**2 * r0,
        8 * (cw**2 + cu**2) * XF**2,
    ]
    values = [lam, lam**1.5, lam]
    for hypothesis, value, bound in zip(cert.hypotheses, values, bounds, strict=True):
        assert hypothesis.value == pytest.approx(value, rel=1e-6) and hypothesis.value <= value
        assert hypothesis.bound == pytest.approx(bound, rel=1e-6) and hypothesis.bound >= bound * (1 - 1e-12)
    C, E = (cw**2 + cu**2) * XF**2, (cw**2 + cu**2 + ca**2) * XF**2
    assert cert.step_size == pytest.approx(0.999 * min(2 / lam, 2 * C / E**2), rel=1e-6)
    assert isinstance(cert.step_size, float)
    assert cert.rate == pytest.approx(math.sqrt(1 - cert.step_size * lam / 2), abs=1e-12)


def test_least_radii_are_best() -> None:
    # no radii on a grid satisfy all conditions where the least radii do not
    for seed, scale in ((0, 300.0), (1, 1e3), (2, 3e3)):
        model, X, y = gaussian(3, 6, 30, seed, scale)
        if ling2022(model, X, y).certified:
            continue
        with torch.no_grad():
            Z, r0 = model.equilibrium(X), (model(X) - y).norm().item()
        W0, U0 = (torch.linalg.matrix_norm(p.detach(), ord=2).item() for p in (model.W, model.U))
        XF, lam = X.norm().item(), torch.linalg.eigvalsh(Z @ Z.t())[0].item()
        grid = [10.0**e for e in range(-8, 1)]
        for dw in (f * (1 - W0) for f in grid[:-1]):
            for du in (f * U0 for f in grid):
                for a in grid:
                    W, U = W0 + dw, U0 + du
                    cw, cu, ca = U * a / (1 - W) ** 2, a / (1 - W), U / (1 - W)
                    seven = lam >= 4 * XF * r0 * max(cw / dw, cu / du, ca / a)
                    assert not (seven and lam >= 8 * (cw**2 + cu**2) * XF**2)


@pytest.mark.parametrize("m", [50, 200])
def test_never_certified_under_the_papers_own_initialization(m: int) -> None:
    for seed in range(10):
        X, y = sphere(5, 10, seed, math.sqrt(10))
        model = wp.GaussianDEQ(10, m, weight_variance=0.01, generator=generator(seed), dtype=torch.float64)
        cert = ling2022(model, X, y)
        assert cert.verdict is Verdict.VIOLATED
        assert cert.hypotheses[2].holds is False  # (9), for every choice of radii
        assert "never hold" in cert.note
        assert cert.measured["|a|"] > cert.measured["|a| that (9) allows at most"]


def test_more_samples_than_units() -> None:
    model, X, y = gaussian(6, 3, 4, 0, 1e5)
    cert = ling2022(model, X, y)
    assert not cert.certified
    assert "lambda_min" in cert.note


def test_equal_samples_are_not_certified() -> None:
    model, X, y = gaussian(3, 6, 40, 0, 1e6)
    X = torch.cat([X, X[:1]])
    y = torch.cat([y, -y[:1]])  # no parameters fit these labels
    assert not ling2022(model, X, y).certified


def test_a_fitted_start_licenses_no_step() -> None:
    model, X, _ = gaussian(3, 6, 40, 0, 1e6)
    cert = ling2022(model, X, torch.zeros(3, dtype=torch.float64))
    assert cert.verdict is Verdict.UNDECIDED
    assert "no step" in cert.note


def test_not_well_posed() -> None:
    model, X, y = gaussian(3, 6, 40, 0, 1e4)
    with torch.no_grad():
        model.W *= 100
    cert = ling2022(model, X, y)
    assert cert.verdict is Verdict.UNDECIDED and "contraction" in cert.note


def test_frozen_parameters() -> None:
    model, X, y = gaussian(3, 6, 40, 0, 1e6)
    assert ling2022(model, X, y).certified
    model.a.requires_grad_(False)
    cert = ling2022(model, X, y)
    assert cert.verdict is Verdict.UNDECIDED and "U, W would be trained" in cert.note


def test_float32_is_judged_in_float64() -> None:
    model, X, y = gaussian(3, 6, 40, 0, 1e6)
    model, X, y = model.float(), X.float(), y.float()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert ling2022(model, X, y).certified
    assert all(torch.equal(p, before[name]) and p.dtype == torch.float32 for name, p in model.named_parameters())


def test_errors_say_what_to_do() -> None:
    model, X, y = gaussian(3, 6, 40, 0, 1.0)
    with pytest.raises(InvalidArgument, match="above 4"):
        ling2022(model, X, y, constant=4.0)
    with pytest.raises(InvalidType, match="GaussianDEQ; got SkipDEQ"):
        ling2022(wp.SkipDEQ(6, 10), X, y)
    with pytest.raises(InvalidArgument, match="shape"):
        ling2022(model, X, y[:-1])
