"""Measurements and certificates of any scale against 60 digits: every bound from its side, every licensed step taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("mpmath")

from mpmath import mp

import wellposed as wp
from certificate_problems import problem
from exact_networks import (
    DIGITS,
    Array,
    ExactNetwork,
    ExactPoint,
    exact,
    largest_singular_value,
    least_root,
    least_singular_value,
    norm,
)
from wellposed.certify._gate import check_data
from wellposed.certify.measurement import Measurement, measure

FAMILIES = ("gaussian", "skip", "monotone", "implicit")
#: Powers of ten of inputs and labels.
EXPONENTS = (-300, -230, -160, -153, -120, -78, -30, 0, 30, 78, 120, 153, 160, 230, 300)
READOUT = {"gaussian": ("a",), "skip": ("u", "v"), "monotone": ("u",), "implicit": ()}


def scaled_problem(family: str, exponent: int, seed: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Certifiable for even seeds (read-out 0, labels small), as drawn for odd ones."""
    model, X, y = problem(family, seed, n=2, d=3, m=6)
    with torch.no_grad():
        if family == "implicit":
            y = model(X) + (1e-6 if seed % 2 == 0 else 0.1) * (y - model(X))
        elif seed % 2 == 0:
            for name in READOUT[family]:
                getattr(model, name).zero_()
            y = 1e-6 * y
    return model, X * 10.0**exponent, y * 10.0**exponent


def check_case(family: str, exponent: int, seed: int) -> dict[str, int]:
    """Everything that is said about one problem; how many certificates were checked."""
    model, X, y = scaled_problem(family, exponent, seed)
    with mp.workdps(DIGITS):
        there = ExactPoint(ExactNetwork(model), exact(X), exact(y))
        at = measure(model, *check_data(model, X, y))
        if isinstance(at, str):
            return {"not measured": 1}
        check_measurement(at, there)
        count = {"measured": 1}
        flow = wp.certify(model, X, y, theorem="radius", hidden_rate="largest")
        if flow.certified:
            count["flow"] = 1
            assert flow.rate is not None and flow.rates is not None and flow.radii is not None
            least = least_root(there.kernel(dict(flow.rates))) ** 2
            assert 0 < mp.mpf(flow.rate) <= least
            # the path is at least as long as the way to zero residual with the largest slope
            assert max(flow.radii.values()) * mp.sqrt(least) >= norm(there.r) * (1 - mp.mpf(10) ** -9)
        for theorem in ("radius", {"gaussian": "ling2022", "monotone": "nguyen2022"}.get(family, "")):
            if not theorem:
                continue
            descent = (
                wp.certify(model, X, y, theorem=theorem, dynamics="descent") if theorem != "ling2022" else ling(model, X, y)
            )
            if descent.certified:
                count[f"descent by {theorem}"] = 1
                check_descent(there, exact(y), descent)
    return count


def ling(model: Any, X: torch.Tensor, y: torch.Tensor) -> wp.Certificate:
    return wp.certify(model, X, y, theorem="ling2022")


def check_measurement(at: Measurement, there: ExactPoint) -> None:
    """Bounds of norms, singular values, the residual and the errors, in the unit of the measurement."""
    unit = mp.mpf(2) ** at.unit.exponent
    for matrix, least, most in ((there.Z, at.Z_least, at.Z_norm), (there.features, at.F_least, at.F_norm)):
        assert mp.mpf(least) * unit <= least_singular_value(matrix)
        assert largest_singular_value(matrix) <= mp.mpf(most) * unit
    assert largest_singular_value(there.X) <= mp.mpf(at.X_norm) * unit and norm(there.X) <= mp.mpf(at.X_norm_F) * unit
    assert largest_singular_value(there.R) <= mp.mpf(at.contraction)
    assert norm(there.r) <= mp.mpf(at.residual) * unit
    assert norm(exact(at.r) * unit - there.r) <= mp.mpf(at.r_error) * unit
    for z, found, error in zip(there.Z, at.Z, at.z_error, strict=True):
        assert norm(exact(found) * unit - z) <= mp.mpf(float(error)) * unit


def check_descent(there: ExactPoint, label: Array, certificate: wp.Certificate, steps: int = 3) -> None:
    """Steps as licensed: the residual falls at least at the rate, and no parameter leaves its radius."""
    step, rate, radii = certificate.step_size, certificate.rate, certificate.radii
    assert step is not None and rate is not None and radii is not None and 0 <= rate < 1
    start, first = there.network.parameters, norm(there.r)
    for k in range(1, steps + 1):
        eta = {name: mp.mpf(step[name] if isinstance(step, Mapping) else step) for name in start}
        moved = there.network.moved({name: -eta[name] * gradient for name, gradient in there.gradients().items()})
        there = ExactPoint(moved, there.X, label, there.masks)
        assert norm(there.r) <= mp.mpf(rate) ** k * first
        for name, parameter in moved.parameters.items():
            assert norm(parameter - start[name]) <= mp.mpf(radii[name])


@pytest.mark.parametrize(
    ("family", "exponent"), [("gaussian", -160), ("gaussian", 150), ("skip", -120), ("monotone", 78), ("implicit", -78)]
)
def test_a_few_scales_in_60_digits(family: str, exponent: int) -> None:
    assert check_case(family, exponent, 0)["measured"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_scales_in_60_digits(family: str, exponent: int) -> None:
    total: dict[str, int] = {}
    for seed in range(6):
        for name, number in check_case(family, exponent, seed).items():
            total[name] = total.get(name, 0) + number
    assert total["measured"] == 6
    if abs(exponent) <= 120:
        assert total["flow"] >= 1 and total["descent by radius"] >= 1
