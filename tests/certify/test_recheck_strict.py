"""What a certificate from a file, or from a callable, may claim; and that our own are read back as they were."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import wellposed as wp
from wellposed.certify import Certificate, Hypothesis, Verdict
from wellposed.certify._recheck import as_recorded
from wellposed.errors import InvalidArgument

HOLDS = Hypothesis("s", "", 1.0, 0.0, ">", True)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    X = torch.randn(3, 3, generator=generator(1), dtype=torch.float64)
    return X, torch.randn(3, generator=generator(2), dtype=torch.float64)


@pytest.mark.parametrize("scale", [1e150, 1e110, 1e60, 1.0, 1e-70, 1e-120, 1e-150])
def test_own_certificates_are_read_as_they_were_at_any_scale(scale: float) -> None:
    X, y = problem()
    monotone = wp.MonotoneDEQ(3, 24, margin=1.0, generator=generator(0), dtype=torch.float64)
    gaussian = wp.GaussianDEQ(3, 24, weight_variance=0.001, generator=generator(0), dtype=torch.float64)
    with torch.no_grad():
        monotone.u.zero_()
        gaussian.a.zero_()
        gaussian.U.mul_(1e4)
    made = [wp.certify(monotone, X * scale, y * scale * 1e-6, theorem="nguyen2022", dynamics="flow")]
    made += [wp.certify(gaussian, X * scale, y * scale * 1e-3, theorem="ling2022")]
    made += [wp.certify(gaussian, X * scale, y * scale * 1e-3, theorem="radius", dynamics=d) for d in ("flow", "descent")]
    assert sum(certificate.certified for certificate in made) >= (4 if 1e-100 < scale < 1e100 else 1)
    for certificate in made:
        if certificate.certified:
            assert all(h.holds for h in certificate.hypotheses)
        back, said = as_recorded(json.loads(certificate.to_json()))
        assert said == [] and back.to_dict() == certificate.to_dict()


def certified(hypothesis: Hypothesis = HOLDS, theorem: str = "mine", **licensed: Any) -> dict[str, Any]:
    return Certificate(theorem, Verdict.CERTIFIED, (hypothesis,), **licensed).to_dict()


@pytest.mark.parametrize(
    ("value", "relation", "bound"),
    [
        (math.nextafter(1.0, 2.0), "<", 1.0),
        (1.0, "<", 1.0),
        (-1e-320, ">", 0.0),
        (0.0, ">", 0.0),
        (1.0 - 2.0**-53, ">", 1.0),
    ],
)
def test_a_strict_inequality_has_no_tolerance(value: float, relation: str, bound: float) -> None:
    read, said = as_recorded(certified(Hypothesis("h", "", value, bound, relation, True)))
    assert read.verdict is Verdict.UNDECIDED and "is false" in said[0]


@pytest.mark.parametrize("theorem", ["gao2022", "gao2023"])
def test_theorems_that_never_certify(theorem: str) -> None:
    read, said = as_recorded(certified(theorem=theorem, dynamics="flow", rate=1.0))
    assert read.verdict is Verdict.UNDECIDED and "certifies nothing" in said[0]


def test_descent_needs_a_step() -> None:
    read, said = as_recorded(certified(dynamics="descent", rate=0.5))
    assert read.verdict is Verdict.UNDECIDED and "no step size" in said[0]
    assert as_recorded(certified(dynamics="descent", rate=0.5, step_size=0.1))[1] == []


@pytest.mark.parametrize(
    ("name", "value"), [("rate", True), ("step_size", True), ("step_size", {"a": True}), ("radii", {"a": False})]
)
def test_a_truth_value_is_not_a_number(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"'{name}' is"):
        as_recorded(certified(dynamics="flow", rate=1.0) | {name: value})
    hypothesis = certified()["hypotheses"][0] | {"value": True}
    with pytest.raises(InvalidArgument, match="'hypotheses' is"):
        as_recorded(certified() | {"hypotheses": [hypothesis]})


def test_an_error_is_not_negative() -> None:
    read, said = as_recorded(certified(dynamics="flow", rate=1.0, errors={"|Z - Z*|_F": -1.0}))
    assert read.verdict is Verdict.UNDECIDED and "|Z - Z*|_F is negative" in said[0]


@pytest.mark.parametrize("verdict", [Verdict.UNDECIDED, Verdict.VIOLATED])
@pytest.mark.parametrize(
    "licensed",
    [{"step_size": 1e9}, {"rate": 0.1}, {"rates": {"a": 1.0}}, {"radii": {"a": 1.0}}, {"licenses": ("ends at zero loss",)}],
)
def test_only_what_is_certified_licenses(verdict: Verdict, licensed: dict[str, Any]) -> None:
    read, said = as_recorded(Certificate("radius", verdict, (), "descent", **licensed).to_dict())
    assert read.step_size is read.rate is read.rates is read.radii is None and read.licenses == ()
    assert read.verdict is Verdict.UNDECIDED and "licenses" in said[0]


@pytest.mark.parametrize(
    "certificate",
    [
        Certificate("mine", Verdict.CERTIFIED, (), "descent", rate=0.5, step_size=1.0),
        Certificate("mine", Verdict.CERTIFIED, (Hypothesis("x", "", 5.0, 1.0, "<", True),), "flow", rate=0.5),
        Certificate("mine", Verdict.CERTIFIED, (Hypothesis("x", "", math.nan, 1.0, "<", True),), "flow", rate=0.5),
        Certificate("mine", Verdict.CERTIFIED, (HOLDS,), "descent", rate=0.5),
        Certificate("mine", Verdict.UNDECIDED, (), "descent", rate=0.5),
    ],
)
def test_callables_are_held_to_the_same(certificate: Certificate) -> None:
    X, y = problem()

    def mine(model: Any, X: torch.Tensor, y: torch.Tensor) -> Certificate:
        return certificate

    with pytest.raises(InvalidArgument, match="theorem=mine returned a certificate that contradicts itself: "):
        wp.certify(wp.GaussianDEQ(3, 8, dtype=torch.float64), X, y, theorem=mine)
