"""suggest: every suggestion is true, and nothing is invented."""

from __future__ import annotations

import copy

import pytest
import torch

import wellposed as wp
from certificate_problems import FAMILIES, check_descent, check_flow, problem
from wellposed.certify import radius, suggest
from wellposed.certify.suggestions import Suggestion


def again(suggestion: Suggestion, y: torch.Tensor) -> bool:
    """Whether the changed model is certified anew, from what the suggestion carries alone."""
    model, X, cert = suggestion.model, suggestion.X, suggestion.certificate
    if suggestion.kind == "descent":
        return radius(model, X, y, dynamics="descent", hidden_rate=suggestion.value * (1 - 1e-9)).certified
    if suggestion.kind == "hidden_rate":
        return radius(model, X, y, hidden_rate=suggestion.value).certified
    return radius(model, X, y).certified and cert.dynamics == "flow"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_suggestion_is_true(family: str) -> None:
    for seed in (0, 1):
        model, X, y = problem(family, seed)
        before, inputs = copy.deepcopy(model.state_dict()), X.clone()
        found = suggest(model, X, y, generator=torch.Generator().manual_seed(0))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert torch.equal(X, inputs)
        if family != "implicit":
            assert {"hidden_rate", "descent", "input_scale"} <= {suggestion.kind for suggestion in found}
        for suggestion in found:
            assert suggestion.certificate.certified and again(suggestion, y), suggestion
            assert suggestion.model is not model and suggestion.X.data_ptr() != 0
            assert str(suggestion) == suggestion.text and suggestion.value >= 0


@pytest.mark.parametrize("family", ["gaussian", "skip", "monotone"])
def test_input_scale_keeps_the_predictions(family: str) -> None:
    model, X, y = problem(family, 2)
    found = {suggestion.kind: suggestion for suggestion in suggest(model, X, y)}
    scaled = found["input_scale"]
    assert scaled.value > 1
    torch.testing.assert_close(scaled.X, X * scaled.value)
    with torch.no_grad():
        torch.testing.assert_close(scaled.model(scaled.X), model(X), rtol=1e-8, atol=1e-9)
    # what it licenses is kept
    assert check_flow(scaled.model, scaled.X, y, scaled.certificate, 10) < 1


def test_what_it_suggests_works() -> None:
    model, X, y = problem("gaussian", 3)
    found = {suggestion.kind: suggestion for suggestion in suggest(model, X, y)}
    check_descent(found["descent"].model, found["descent"].X, y, found["descent"].certificate, 20)
    check_flow(found["hidden_rate"].model, found["hidden_rate"].X, y, found["hidden_rate"].certificate, 10)
    h = found["hidden_rate"].value
    assert 0 < h < 1 and f"{h:.3g} times the speed" in found["hidden_rate"].text


def test_a_certified_problem_is_told_so() -> None:
    model, X, y = problem("gaussian", 4)
    with torch.no_grad():
        y = model(X) + 1e-6 * y
    found = suggest(model, X, y)
    assert found[0].kind == "hidden_rate" and found[0].value == 1.0 and "flow is certified" in found[0].text


@pytest.mark.parametrize("family", FAMILIES)
def test_hopeless_problems_have_no_suggestion(family: str) -> None:
    model, X, y = problem(family, 5)
    X[1] = X[0]  # with different labels: no change of scale or speed helps
    y[1] = y[0] + 1.0
    assert suggest(model, X, y) == []


def test_no_contraction_has_no_suggestion() -> None:
    model, X, y = problem("gaussian", 6)
    with torch.no_grad():
        model.W *= 10
    assert suggest(model, X, y) == []


def test_float32_models() -> None:
    model, X, y = problem("gaussian", 7)
    model, X, y = model.float(), X.float(), y.float()
    found = suggest(model, X, y)
    assert found and all(suggestion.certificate.certified for suggestion in found)
    assert next(model.parameters()).dtype == torch.float32 and isinstance(found[0].model, wp.GaussianDEQ)
