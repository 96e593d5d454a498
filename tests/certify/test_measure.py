"""Measurements: float64, one-sided, and true in spite of inexact equilibria."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wellposed as wp
from theorem_problems import generator, sphere
from wellposed.certify._gate import check_data
from wellposed.certify.measurement import Measurement, measure
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg import least_singular_value_lower, spectral_norm_upper
from wellposed.linalg.directed import least_singular_value_upper, spectral_norm_lower, vector_norm_lower

FAMILIES = {
    "gaussian": lambda g, dtype: wp.GaussianDEQ(4, 16, generator=g, dtype=dtype),
    "skip": lambda g, dtype: wp.SkipDEQ(4, 16, gamma=0.1, generator=g, dtype=dtype),
    "implicit": lambda g, dtype: wp.ImplicitOnlyDEQ(4, 16, gamma0=0.2, generator=g, dtype=dtype),
    "monotone": lambda g, dtype: wp.MonotoneDEQ(4, 16, margin=0.4, generator=g, dtype=dtype),
}


def exact_equilibrium(model: Any, X: torch.Tensor) -> torch.Tensor:
    """By the active set: (I - D R) z = D c, once the masks are known; in float64, to rounding."""
    with torch.no_grad():
        R, C, Z = model.recurrent(), model.injection(X), model.equilibrium(X)
        rows = []
        for z, c in zip(Z, C, strict=True):
            active = (R @ z + c) > 0
            S = active.nonzero().squeeze(1)
            x = torch.zeros_like(z)
            x[S] = torch.linalg.solve(torch.eye(len(S), dtype=R.dtype) - R[S][:, S], c[S])
            rows.append(x)
        return torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bounds_are_true(family: str, dtype: torch.dtype) -> None:
    for seed in range(5):
        model = FAMILIES[family](generator(seed), dtype)
        X, y = sphere(6, 4, seed)
        X, y = check_data(model, X.to(dtype), y)
        at = measure(model, X, y)
        assert isinstance(at, Measurement)
        assert at.Z.dtype == torch.float64 and model.readout_weight().dtype == dtype
        twin = model.double()
        Z = exact_equilibrium(twin, X)
        assert bool(((at.Z - Z).norm(dim=1) <= at.z_error).all())
        with torch.no_grad():
            r = twin.readout(Z, twin.injection(X)) - y
        assert (at.r - r).norm() <= at.r_error
        assert at.residual >= r.norm() * (1 - 1e-15) and at.residual <= r.norm() * (1 + 1e-9)
        s = torch.linalg.svdvals(Z)
        assert 0 <= s[-1] - at.Z_least <= 1e-9 * s[0]
        assert 0 <= at.Z_norm - s[0] <= 1e-9 * s[0]
        assert at.X_norm_F >= X.norm() and at.X_norm >= torch.linalg.matrix_norm(X, ord=2) * (1 - 1e-14)
        V = Z @ twin.recurrent().detach().t() + twin.injection(X).detach()
        assert (at.V - V).abs().max() <= at.v_error


def test_inexact_equilibria_are_paid_for() -> None:
    # a solver that hardly works: the bounds are wide, and still true
    model = wp.GaussianDEQ(4, 16, generator=generator(0), dtype=torch.float64)
    X, y = sphere(6, 4, 0)
    Z = exact_equilibrium(model, X)

    class Lazy(wp.Picard):
        pass

    model.layer.solver = Lazy(damping=0.02)
    at = measure(model, X, y)
    assert isinstance(at, Measurement)
    assert bool(((at.Z - Z).norm(dim=1) <= at.z_error).all())
    assert at.Z_least <= torch.linalg.svdvals(Z)[-1]


def test_large_inputs_do_not_spoil_the_error_of_a_monotone_network() -> None:
    model = wp.MonotoneDEQ(4, 16, margin=0.4, generator=generator(0), dtype=torch.float64)
    X, y = sphere(3, 4, 0)
    with torch.no_grad():
        model.U *= 1e6
    at = measure(model, X, y)
    assert isinstance(at, Measurement)
    assert at.z_error_F <= 1e-10 * float(at.Z.norm())


def test_more_samples_than_units_have_no_least_singular_value() -> None:
    model = wp.GaussianDEQ(4, 5, weight_variance=0.01, generator=generator(0), dtype=torch.float64)
    X, y = sphere(6, 4, 0)
    at = measure(model, X, y)
    assert isinstance(at, Measurement) and at.Z_least == 0.0


def test_reasons() -> None:
    X, y = sphere(3, 4, 0)
    model = wp.GaussianDEQ(4, 16, generator=generator(0), dtype=torch.float64)
    with torch.no_grad():
        model.W *= 10
    reason = measure(model, X, y)
    assert isinstance(reason, str) and "not below 1" in reason
    with torch.no_grad():
        model.a[0] = math.nan
    assert measure(model, X, y) == "A parameter has NaN or infinite entries."


@pytest.mark.parametrize(
    ("X", "y", "error", "match"),
    [
        (torch.ones(3, 5), torch.ones(3), InvalidArgument, r"shape \(n, 4\)"),
        (torch.ones(3, 4), torch.ones(3, 1), InvalidArgument, "one number per sample"),
        (torch.ones(0, 4), torch.ones(0), InvalidArgument, "no samples"),
        (torch.ones(3, 4), torch.tensor([1.0, math.nan, 1.0]), InvalidArgument, "y has NaN"),
        (torch.ones(3, 4).long(), torch.ones(3), InvalidType, "floating point"),
        ([[1.0] * 4], torch.ones(1), InvalidType, "got list and Tensor"),
        (
            torch.ones(3, 4).double(),
            torch.ones(3),
            InvalidType,
            r"float32 parameters and got X of torch.float64.*X.to\(torch.float32\)",
        ),
    ],
)
def test_bad_data(X: Any, y: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        check_data(wp.GaussianDEQ(4, 6), X, y)


def test_bad_model() -> None:
    with pytest.raises(InvalidType, match="got Linear"):
        check_data(torch.nn.Linear(4, 1), torch.ones(1, 4), torch.ones(1))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 6), m=st.integers(6, 20), exponent=st.integers(-20, 20))
def test_the_two_sides_enclose_the_norms(seed: int, n: int, m: int, exponent: int) -> None:
    M = torch.randn(n, m, generator=generator(seed), dtype=torch.float64) * 10.0**exponent
    s = torch.linalg.svdvals(M)
    assert spectral_norm_lower(M) <= s[0] <= spectral_norm_upper(M) * (1 + 1e-15)
    assert least_singular_value_lower(M) * (1 - 1e-15) <= s[-1] <= least_singular_value_upper(M)
    assert spectral_norm_lower(M) >= s[0] * (1 - 1e-9)
    assert least_singular_value_upper(M) <= s[-1] + 1e-9 * s[0]
    assert 0.999 * M.norm() < vector_norm_lower(M) <= M.norm()
