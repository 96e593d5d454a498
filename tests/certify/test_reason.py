"""What an undecided certificate says: the failing condition is listed, and the advice can be followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from certificate_problems import FAMILIES, problem
from wellposed.certify import Verdict

F64 = torch.float64
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"hidden_rate": "largest"},
    {"dynamics": "descent"},
    {"dynamics": "descent", "hidden_rate": 0.5},
)


def many(n: int = 30, m: int = 12) -> tuple[Any, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(n, 10, generator=g, dtype=F64), torch.randn(n, generator=g, dtype=F64)
    return wp.GaussianDEQ(10, m, generator=g, dtype=F64), X, y


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_undecided_certificate_lists_what_is_missing(family: str, options: dict[str, Any]) -> None:
    model, X, y = problem(family, 0)
    for labels in (y + 1e3, y + 1e6, y + 1e9):
        cert = wp.certify(model, X, labels, theorem="radius", **options)
        if cert.certified:  # slow hidden parameters certify nearly everything with independent features
            assert family != "implicit"
            continue
        assert any(h.holds is not True for h in cert.hypotheses)
        assert all(h.holds is not False for h in cert.hypotheses), "nothing here is refuted"
        assert cert.verdict is Verdict.UNDECIDED


@pytest.mark.parametrize("dynamics", ["flow", "descent"])
def test_far_labels_of_a_fixed_readout_miss_the_radius(dynamics: str) -> None:
    model, X, y = problem("implicit", 0)
    cert = wp.certify(model, X, y + 100.0, theorem="radius", dynamics=dynamics)
    rank, *_, radius = cert.hypotheses
    assert rank.holds and radius.holds is None and radius.name.startswith("radius R >=")
    e, s = cert.measured["|r|"], rank.value
    assert s is not None and radius.bound is not None
    assert radius.bound == pytest.approx(e / s, rel=2e-3)  # |S - J| vanishes at the point itself, and steps are 1/1024
    assert "sigma_min(F)" not in cert.measured and "sigma_min" not in str(cert)


def test_a_readout_that_is_trained_shows_its_features() -> None:
    for family in ("gaussian", "skip"):
        assert wp.certify(*problem(family, 0), theorem="radius").measured["sigma_min(F)"] > 0


def test_layerwise_rates_are_offered_once() -> None:
    """Not to who has asked for them, nor where they cannot help."""
    model, X, y = problem("gaussian", 0)
    plain = wp.certify(model, X, 1e3 + y, theorem="radius")
    assert "hidden_rate='largest'" in plain.note
    asked = wp.certify(model, X, 1e15 + y, theorem="radius", hidden_rate="largest")
    assert not asked.certified and "train further" in asked.note and "hidden_rate" not in asked.note


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_more_samples_than_features(options: dict[str, Any]) -> None:
    cert = wp.certify(*many(), theorem="radius", **options)
    assert not cert.certified and "more samples (30) than features (12)" in cert.note
    assert "out of reach for the read-out alone" in cert.note
    assert "train further" not in cert.note and "hidden_rate" not in cert.note
    enough = wp.certify(*many(12, 30), theorem="radius", **options)
    assert "more samples" not in enough.note


def test_skip_networks_have_twice_as_many_features() -> None:
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(9, 20, generator=g, dtype=F64), torch.randn(9, generator=g, dtype=F64)
    assert "more samples" not in wp.certify(wp.SkipDEQ(20, 5, gamma=0.1, generator=g, dtype=F64), X, y, theorem="radius").note
    narrow = wp.SkipDEQ(20, 4, gamma=0.1, generator=g, dtype=F64)
    assert "more samples (9) than features (8)" in wp.certify(narrow, X, y, theorem="radius").note


@pytest.mark.parametrize("dynamics", ["flow", "descent"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_rows_and_zero_rows_are_named(family: str, dynamics: str) -> None:
    model, X, y = problem(family, 0)

    def note(X: Tensor, y: Tensor) -> str:
        cert = wp.certify(model, X, y, theorem="radius", dynamics=dynamics)
        assert not cert.certified
        return cert.note

    twice = torch.cat([X, X[1:2]])
    contradictory = note(twice, torch.cat([y, y[1:2] + 1]))
    assert contradictory.startswith("Rows 1 and 4 of X are equal and their labels differ") and "impossible" in contradictory
    assert note(twice, torch.cat([y, y[1:2]])).startswith("Rows 1 and 4 of X are equal, so the kernel is singular")
    zero = torch.cat([X, -0.0 * X[:1]])
    assert "its label 1 is out of reach" in note(zero, torch.cat([y, torch.ones(1, dtype=F64)]))
    assert "fitted already" in note(zero, torch.cat([y, torch.zeros(1, dtype=F64)]))
    assert float(model(zero)[-1].detach()) == 0.0
    signed = torch.cat([zero, 0.0 * X[:1]])  # 0.0 and -0.0 are equal
    assert note(signed, torch.arange(6, dtype=F64)).startswith("Rows 4 and 5 of X are equal and")


def test_contradictory_labels_of_opteq() -> None:
    g = torch.Generator().manual_seed(0)
    X = torch.randn(3, 4, generator=g, dtype=F64)
    model = wp.OptEq(4, 12, generator=g, dtype=F64)
    cert = wp.certify(model, torch.cat([X, X[:1]]), torch.arange(4, dtype=F64), theorem="radius")
    assert cert.note.startswith("Rows 0 and 3 of X are equal and their labels differ")


def test_certified_steps_promise_nothing_where_nothing_helps() -> None:
    model, X, y = problem("gaussian", 0)
    twice, labels = torch.cat([X, X[:1]]), torch.cat([y, y[:1] + 1])
    assert wp.suggest(model, twice, labels) == []
    with pytest.raises(wp.WellposedError, match="Rows 0 and 4 of X are equal.*if it finds any"):
        wp.descend(model, twice, labels, step_size="certified", steps=1)
