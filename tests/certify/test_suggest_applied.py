"""Every suggestion is followed on the caller's own model and data, certified anew, and checked in 60 digits."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mpmath import mp
from torch import Tensor

import wellposed as wp
from certificate_problems import FAMILIES, check_flow, problem
from exact_networks import DIGITS, point_of
from exact_theorems import check_descent_theorem, check_flow_theorem, check_plain_descent_theorem
from wellposed.certify import Certificate, radius, suggest
from wellposed.certify._gate import check_data
from wellposed.certify.measurement import Measurement, measure
from wellposed.certify.suggestions import Suggestion

READOUTS = {"gaussian": ("a",), "skip": ("u", "v"), "monotone": ("u",)}


@pytest.fixture(autouse=True)
def digits() -> Iterator[None]:
    with mp.workdps(DIGITS):
        yield


def drawn(seed: int) -> tuple[str, Any, Tensor, Tensor]:
    """Of any family; small labels, so that the read-out's size matters, or labels near the predictions; often in float32."""
    family, g = FAMILIES[seed % 4], torch.Generator().manual_seed(seed)
    n, d, m = (int(torch.randint(low, high, (), generator=g)) for low, high in ((2, 4), (4, 7), (8, 15)))
    model, X, y = problem(family, seed, n, d, m)
    X = X * 10.0 ** float(torch.empty(()).uniform_(-1, 1, generator=g))
    size = 10.0 ** -float(torch.empty(()).uniform_(0, 6, generator=g))
    if seed // 4 % 2:
        model, X = model.float(), X.float()
        model.layer.rtol = 1e-6
    if family == "implicit" or seed // 8 % 2:
        with torch.no_grad():
            return family, model, X, model(X).to(y.dtype) + size * y
    return family, model, X, size * y


def followed(family: str, model: Any, X: Tensor, suggestion: Suggestion, seed: int) -> tuple[Any, Tensor, dict[str, Any]]:
    """What its reader does, in the reader's own dtype: the model, the inputs and the options of `radius`."""
    kind, value, changed = suggestion.kind, suggestion.value, copy.deepcopy(model)
    if kind == "hidden_rate":
        return changed, X, {"hidden_rate": value}
    if kind == "descent":
        return changed, X, {"dynamics": "descent"}
    if kind == "width":
        own = {"gaussian": "weight_variance", "skip": "gamma", "monotone": "margin"}[family]
        options = {own: getattr(model, own), "generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
        return type(model)(model.in_features, int(value), **options), X.double(), {}  # it says float64
    with torch.no_grad():
        for name in READOUTS[family]:
            weight = getattr(changed, name)
            weight.copy_(weight * value if kind == "readout_scale" else weight / value)
    return changed, X * value if kind == "input_scale" else X, {}


def check_exactly(model: Any, X: Tensor, y: Tensor, cert: Certificate) -> None:
    at = measure(model, *check_data(model, X, y))
    assert isinstance(at, Measurement)
    point, sharpen = point_of(at.model, at.X, at.y), ("active", "kernel")
    if cert.dynamics == "flow":
        check_flow_theorem(point, at, cert, sharpen)
    else:
        check = check_descent_theorem if point.network.readout else check_plain_descent_theorem
        check(point, at, cert, sharpen)


def check(seed: int, seen: Counter[str]) -> None:
    family, model, X, y = drawn(seed)
    found = suggest(model, X, y, generator=torch.Generator().manual_seed(seed))
    seen["problems"] += 1
    for suggestion in found:
        seen[suggestion.kind] += 1
        assert f"{suggestion.value:.15g}" in suggestion.text or suggestion.kind in ("hidden_rate", "descent")
        changed, inputs, options = followed(family, model, X, suggestion, seed)
        cert = radius(changed, inputs, y, **options)
        assert cert.certified, f"seed {seed}: {suggestion} is not certified when it is followed"
        # the very network that was certified, not one nearby
        assert torch.equal(suggestion.X, inputs.double())
        for name, value in suggestion.model.state_dict().items():
            assert torch.equal(value, changed.state_dict()[name].double()), name
        if suggestion.kind == "input_scale":
            with torch.no_grad():  # a power of two: no digit of a prediction changes
                assert torch.allclose(changed(inputs), model(X), rtol=4 * model.layer.rtol, atol=1e-9 + model.layer.rtol)
        if changed.width <= 16:
            check_exactly(changed, inputs, y, cert)
        elif changed.width <= 200:
            check_flow(changed, inputs.double(), y.double(), cert, 5)


@pytest.mark.parametrize("seed", [*(pytest.param(seed, marks=pytest.mark.slow) for seed in (4, 5)), 6, 7])
def test_suggestions_hold_when_they_are_followed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["wellposed.certify.suggestions"], "_WIDEST", 200)  # wider ones take seconds each
    check(seed, Counter())


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2000, 2240, 24))
def test_hundreds_of_suggestions(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["wellposed.certify.suggestions"], "_WIDEST", 200)
    seen: Counter[str] = Counter()
    for seed in range(first, first + 24):
        check(seed, seen)
    assert seen["problems"] == 24 and seen.total() - 24 >= 40
    assert all(seen[kind] >= 2 for kind in ("hidden_rate", "descent", "readout_scale", "input_scale"))


def test_a_wider_network_holds_when_it_is_drawn() -> None:
    model, X, y = problem("monotone", 1, 2, 6, 40)
    X = 8 * X
    found = suggest(model, X, y, generator=torch.Generator().manual_seed(1))
    (width,) = (suggestion for suggestion in found if suggestion.kind == "width")
    assert width.value > 40 and f"Take width {width.value:.0f}" in width.text
    changed, inputs, _ = followed("monotone", model, X, width, 1)
    cert = radius(changed, inputs, y)
    assert cert.certified and cert == width.certificate
    assert check_flow(changed, inputs, y, cert, 10) < 1


def test_they_print_as_a_table() -> None:
    model, X, y = problem("gaussian", 1)
    found = suggest(model, X, y)
    lines = str(found).splitlines()
    assert lines[0].split()[:3] == ["change", "value", "dynamics"] and max(map(len, lines)) <= 120
    assert [line.split()[0] for line in lines[2:] if not line.startswith(" ")] == ["hidden_rate", "descent", "input_scale"]
    assert "exp(-" in lines[2] and len(lines) <= 12
    assert len(repr(found)) < 1000  # without the certificates
    none = wp.suggest(model, torch.zeros_like(X), y)
    assert none == [] and str(none).startswith("No change was found under which the radius certificate holds")
