"""The radius certificates in 60 digits: bounds, theorems, balls and paths, from the same float64 data and without tolerance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from mpmath import mp
from torch import Tensor

from certificate_problems import FAMILIES, problem
from exact_networks import (
    DIGITS,
    ExactPoint,
    exact,
    largest_of_symmetric_part,
    largest_singular_value,
    least_root,
    least_singular_value,
    norm,
    number,
    point_of,
    row_norms,
)
from exact_theorems import check_descent_theorem, check_flow_theorem, check_plain_descent_theorem
from wellposed.certify import Certificate, radius
from wellposed.certify._gate import check_data
from wellposed.certify.measurement import Measurement, measure

SHARPENINGS: tuple[tuple[str, ...], ...] = ((), ("active",), ("kernel",), ("active", "kernel"))


@pytest.fixture(autouse=True)
def digits() -> Iterator[None]:
    with mp.workdps(DIGITS):
        yield


def drawn(seed: int) -> tuple[str, Any, Tensor, Tensor]:
    """A problem of any family and size; labels from far to within 1e-12 of the predictions, now and then in float32."""
    family = FAMILIES[seed % 4]
    g = torch.Generator().manual_seed(seed)
    n, d, m = (int(torch.randint(low, high, (), generator=g)) for low, high in ((2, 5), (4, 7), (8, 15)))
    model, X, y = problem(family, seed, n, d, m)
    X = X * 10.0 ** float(torch.empty(()).uniform_(-1, 1, generator=g))
    near = 10.0 ** -float(torch.randint(0, 13, (), generator=g))
    if int(torch.randint(0, 4, (), generator=g)) == 0:
        model, X = model.float(), X.float()
        model.layer.rtol = 1e-6
    with torch.no_grad():
        y = model(X).double() + near * y if near < 1 or family == "implicit" else y
    return family, model, X, y


def certificates(seed: int, family: str, model: Any, X: Tensor, y: Tensor) -> Iterator[tuple[Certificate, tuple[str, ...]]]:
    """Those that hold, with the sharpenings of the seed."""
    sharpen = SHARPENINGS[seed // 4 % 4]
    options: list[dict[str, Any]] = [{}, {"dynamics": "descent"}]
    if family != "implicit":
        options += [{"hidden_rate": "largest"}, {"hidden_rate": 1e-3}, {"dynamics": "descent", "hidden_rate": 1e-6}]
    for chosen in options:
        found = radius(model, X, y, sharpen=sharpen, **chosen)
        if found.certified:
            yield found, sharpen


def measured(model: Any, X: Tensor, y: Tensor) -> Measurement:
    at = measure(model, *check_data(model, X, y))
    assert isinstance(at, Measurement)
    return at


def check_measurement(point: ExactPoint, at: Measurement) -> Any:
    """Every bound on its side; returns the largest of their relative excesses over the exact numbers."""
    above = {
        "|R|": (at.contraction, largest_singular_value(point.R)),
        "|Z|": (at.Z_norm, largest_singular_value(point.Z)),
        "|F|": (at.F_norm, largest_singular_value(point.features)),
        "|X|": (at.X_norm, largest_singular_value(point.X)),
        "|X|_F": (at.X_norm_F, norm(point.X)),
        "|r|": (at.residual, norm(point.r)),
    }
    below = {
        "s(Z)": (at.Z_least, least_singular_value(point.Z)),
        "s(F)": (at.F_least, least_singular_value(point.features)),
    }
    for name, (bound, truth) in above.items():
        assert number(bound) >= truth, name
    for name, (bound, truth) in below.items():
        assert 0 <= number(bound) <= truth, name
    errors = row_norms(exact(at.Z) - point.Z)
    assert all(number(float(bound)) >= error for bound, error in zip(at.z_error, errors, strict=True))
    assert number(at.z_error_F) >= norm(errors)
    assert number(at.v_error) >= abs(exact(at.V) - point.V).max()
    assert number(at.r_error) >= norm(exact(at.r) - point.r)
    excess = [bound / truth - 1 for bound, truth in above.values() if truth] + [
        1 - bound / truth for bound, truth in below.values() if truth
    ]
    return max(excess)


def check_theorem(point: ExactPoint, at: Measurement, cert: Certificate, sharpen: tuple[str, ...]) -> Any:
    if cert.dynamics == "flow":
        return check_flow_theorem(point, at, cert, sharpen)
    check = check_descent_theorem if point.network.readout else check_plain_descent_theorem
    return check(point, at, cert, sharpen)


def check_path(point: ExactPoint, X: Tensor, y: Tensor, cert: Certificate, steps: int) -> None:
    """Exact descent with the licensed steps: the residuals, the radii and the well-posedness of every step."""
    start, e = point.network, norm(point.r)
    for k in range(1, steps + 1):
        by = {name: -number(cert.step_size[name]) * gradient for name, gradient in point.gradients().items()}
        point = ExactPoint(point.network.moved(by), exact(X), exact(y), point.masks)
        assert norm(point.r) <= number(cert.rate) ** k * e
        assert start.margin or largest_of_symmetric_part(point.R) < 1
        for name, value in point.network.parameters.items():
            assert norm(value - start.parameters[name]) <= number(cert.radii[name]), name


def check_ball(point: ExactPoint, X: Tensor, y: Tensor, cert: Certificate, seed: int) -> Any:
    """sqrt(lambda_min) of the exact kernel on the boundary of the ball is never below the claim; returns the least ratio.

    Directions: random, and the steepest for the least singular value of the features, in either sign.
    """
    network, s = point.network, number(cert.hypotheses[0].value)
    h = number(cert.rates[network.hidden[0]])
    R = number(cert.radii[(network.readout or network.hidden)[0]])
    g = np.random.default_rng(seed)
    left, _, right = np.linalg.svd(point.Z.astype(float), full_matrices=False)
    random = {name: g.standard_normal(value.shape) for name, value in network.parameters.items()}
    pushed = {
        name: np.outer(g.standard_normal(value.shape[0]), right[-1]) if value.shape == point.R.shape else np.zeros(value.shape)
        for name, value in network.parameters.items()
    }
    worst = least_root(point.kernel(dict(cert.rates))) / s
    for direction in (random, pushed, {name: -by for name, by in pushed.items()}):
        by = {name: np.vectorize(mp.mpf, otypes=[object])(value) for name, value in direction.items()}
        weights = {name: 1 if name in network.readout else 1 / h for name in by}
        length = mp.sqrt(mp.fsum(weights[name] * norm(value) ** 2 for name, value in by.items()))
        there = ExactPoint(network.moved({k: v * (R / length) for k, v in by.items()}), exact(X), exact(y), point.masks)
        found = least_root(there.kernel(dict(cert.rates)))
        assert found >= s
        worst = min(worst, found / s)
    return worst


def check(seed: int, seen: Counter[str], numbers: dict[str, float]) -> None:
    family, model, X, y = drawn(seed)
    at = measured(model, X, y)
    point = point_of(at.model, at.X, at.y)
    excess = float(check_measurement(point, at))
    numbers["bounds"] = max(numbers.get("bounds", 0.0), excess)
    seen["measured"] += 1
    for cert, sharpen in certificates(seed, family, model, X, y):
        ratio = float(check_theorem(point, at, cert, sharpen))
        assert ratio <= 1
        seen[f"{family} {cert.dynamics}"] += 1
        seen[f"{cert.dynamics} {' '.join(sharpen)}"] += 1
        if cert.dynamics == "descent":
            check_path(point, at.X, at.y, cert, 3)
        else:
            ratio = float(check_ball(point, at.X, at.y, cert, seed))
            numbers["ball"] = min(numbers.get("ball", float("inf")), ratio)


@pytest.mark.parametrize("seed", [1000, 1013, 1014, 1019])
def test_bounds_theorems_balls_and_paths(seed: int) -> None:
    seen: Counter[str] = Counter()
    check(seed, seen, {})
    assert seen["measured"] == 1 and sum(seen.values()) > 1


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1256, 32))
def test_hundreds_of_certificates(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 32):
        check(seed, seen, {})
    assert seen["measured"] == 32
    for dynamics in ("flow", "descent"):
        assert sum(seen[f"{family} {dynamics}"] for family in FAMILIES) >= 32
        assert all(seen[f"{dynamics} {' '.join(sharpen)}"] >= 4 for sharpen in SHARPENINGS)
