"""A certificate from a file is compared with itself; those that theorems make agree with themselves."""

from __future__ import annotations

import functools
import json

import pytest

import wellposed as wp
from theorem_problems import gaussian, monotone
from wellposed.certify import Certificate, Hypothesis
from wellposed.certify._recorded import as_recorded, contradictions


@functools.cache
def certificates() -> list[Certificate]:
    found = []
    problems = [gaussian(4, 8, 60, seed, 50.0) for seed in range(2)] + [monotone(4, 6, 40, seed, 50.0) for seed in range(2)]
    for model, X, y in problems:
        found += [
            wp.certify(model, X, y, theorem=name) for name in ("auto", "radius", "contraction", "monotone", "perron_frobenius")
        ]
        found.append(wp.certify(model, X, y, theorem="radius", dynamics="descent"))
    return found


def test_certificates_of_the_theorems_agree_with_themselves() -> None:
    made = certificates()
    assert sum(one.certified for one in made) >= 8
    assert {one.dynamics for one in made if one.certified} == {"", "flow", "descent"}
    for one in made:
        back, said = as_recorded(json.loads(one.to_json()))
        assert said == [] and back.to_dict() == one.to_dict()


def test_the_rounding_of_a_side_is_not_a_contradiction() -> None:
    bound = 1.0 / 3
    for value, holds in ((bound * (1 - 2**-52), True), (bound * (1 - 1e-9), False)):
        certificate = Certificate("t", wp.Verdict.CERTIFIED, (Hypothesis("a", "b", value, bound, ">=", True),))
        assert (contradictions(certificate, wp.Verdict.CERTIFIED) == []) is holds


def test_a_contradiction_takes_everything_away() -> None:
    good = next(one for one in certificates() if one.dynamics == "descent" and one.certified)
    plain = good.to_dict() | {"rate": 1.5}
    bad, said = as_recorded(plain)
    assert bad.verdict is wp.Verdict.UNDECIDED and bad.rate is bad.step_size is bad.radii is None and bad.licenses == ()
    assert "1.5" in bad.note and "contradict" in bad.note
    assert len(said) == 1 and said[0].startswith("contradicts itself (radius: ")
    outer = Certificate("auto", wp.Verdict.UNDECIDED).to_dict() | {"others": [plain]}
    assert as_recorded(outer)[0].others[0].verdict is wp.Verdict.UNDECIDED


@pytest.mark.parametrize("size", [None, "nan", "inf", -1.0, 0])
def test_numbers_that_no_certificate_can_have_are_words(size: object) -> None:
    good = next(one for one in certificates() if one.dynamics == "descent" and one.certified).to_dict()
    for table in ({"W": size}, *(() if size is None else (size,))):
        for verdict in ("certified", "undecided"):
            plain = good | {"step_size": table, "verdict": verdict}
            if size is None:
                with pytest.raises(wp.InvalidArgument, match="'step_size' is of type dict"):
                    as_recorded(plain)
            else:
                assert as_recorded(plain)[0].verdict is wp.Verdict.UNDECIDED
        with pytest.raises(wp.InvalidArgument):
            Certificate.from_dict(good | {"step_size": table})


def test_words_that_look_like_numbers_stay_words() -> None:
    good = Certificate(
        "t", wp.Verdict.UNDECIDED, (Hypothesis("inf", "nan", float("inf"), 1.0, note="-inf"),), step_size=float("inf")
    )
    back = Certificate.from_dict(good.to_dict() | {"step_size": "inf"})
    assert back == good and str(back) == str(good)
