"""What a certificate is: verdicts, margins, the table, and the way through JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.certify import Certificate, Hypothesis, Verdict
from wellposed.certify.certificate import finish
from wellposed.errors import InvalidArgument

NUMBERS = st.floats(allow_nan=False) | st.none()
TABLES = st.dictionaries(st.text(min_size=1, max_size=4), st.floats(allow_nan=False), max_size=3)
HYPOTHESES = st.builds(
    Hypothesis,
    st.text(max_size=8),
    st.text(max_size=8),
    NUMBERS,
    NUMBERS,
    st.sampled_from(["<", "<=", ">", ">="]),
    st.sampled_from([True, False, None]),
    st.sampled_from(["", "a note"]),
)
ANY = st.builds(
    Certificate,
    theorem=st.sampled_from(["radius", "ling2022"]),
    verdict=st.sampled_from([Verdict.VIOLATED, Verdict.UNDECIDED]),
    hypotheses=st.lists(HYPOTHESES, max_size=3).map(tuple),
    dynamics=st.sampled_from(["", "flow", "descent"]),
    step_size=st.none() | st.floats(1e-9, 1.0) | TABLES,
    rates=st.none() | TABLES,
    rate=NUMBERS,
    radii=st.none() | TABLES,
    licenses=st.lists(st.text(max_size=9), max_size=2).map(tuple),
    measured=TABLES,
    errors=TABLES,
    note=st.text(max_size=9),
)
FRACTIONS = st.floats(1e-300, 1.0, exclude_max=True)
LICENSED = st.builds(
    Certificate,
    theorem=st.just("radius"),
    verdict=st.just(Verdict.CERTIFIED),
    hypotheses=st.lists(HYPOTHESES, max_size=3).map(tuple),
    dynamics=st.sampled_from(["", "flow", "descent"]),
    step_size=st.none() | FRACTIONS | st.dictionaries(st.text(min_size=1, max_size=4), FRACTIONS, max_size=3),
    rate=st.none() | FRACTIONS,
    radii=st.none() | st.dictionaries(st.text(min_size=1, max_size=4), FRACTIONS, max_size=3),
    measured=TABLES,
)
CERTIFICATES = ANY | LICENSED


@settings(max_examples=40, deadline=None)
@given(CERTIFICATES, CERTIFICATES)
def test_json_round_trip(certificate: Certificate, other: Certificate) -> None:
    certificate = dataclasses.replace(certificate, others=(other,))
    assert Certificate.from_json(certificate.to_json()) == certificate
    assert str(certificate).startswith(certificate.theorem)


def test_a_foreign_dictionary_is_refused() -> None:
    plain = Certificate("radius", Verdict.UNDECIDED).to_dict()
    with pytest.raises(InvalidArgument, match=r"\['extra'\]"):
        Certificate.from_dict({**plain, "extra": 1})
    del plain["rate"]
    with pytest.raises(InvalidArgument, match=r"\['rate'\]"):
        Certificate.from_dict(plain)


@pytest.mark.parametrize(
    ("relation", "value", "bound", "holds", "margin"),
    [
        ("<", 1.0, 2.0, True, 1.0),
        ("<", 2.0, 2.0, False, 0.0),
        ("<=", 2.0, 2.0, True, 0.0),
        (">", 2.0, 2.0, False, 0.0),
        (">=", 2.0, 2.0, True, 0.0),
        (">=", 1.0, 2.0, False, -1.0),
    ],
)
def test_comparison(relation: str, value: float, bound: float, holds: bool, margin: float) -> None:
    hypothesis = Hypothesis.compare("name", "(1)", value, relation, bound)
    assert hypothesis.holds is holds
    assert hypothesis.margin == margin


def test_what_only_fails_to_prove_does_not_refute() -> None:
    assert Hypothesis.compare("name", "(1)", 1.0, ">=", 2.0, refutes=False).holds is None
    assert Hypothesis.compare("name", "(1)", math.nan, ">=", 2.0).holds is None
    assert Hypothesis("name", "(1)", None, 2.0).margin is None
    with pytest.raises(InvalidArgument, match="relation must be one of"):
        Hypothesis.compare("name", "(1)", 1.0, "==", 1.0)


def test_table() -> None:
    hypotheses = (
        Hypothesis.compare("the map contracts", "(7)", 0.5, "<", 1.0, note="good"),
        Hypothesis("unknown", "(8)", None, None),
    )
    certificate = Certificate(
        "radius",
        Verdict.CERTIFIED,
        hypotheses,
        "descent",
        step_size={"W": 0.25},
        rate=0.5,
        radii={"W": 2.0},
        licenses=("All is well.",),
        measured={"|W|": 0.5},
        errors={"Z": 1e-12},
        others=(Certificate("ling2022", Verdict.VIOLATED, dynamics="descent"),),
    )
    assert str(certificate).splitlines() == [
        "radius (descent): CERTIFIED",
        "===========================",
        "hypothesis         source  value      bound",
        "-----------------  ------  -----  --  -----  ---------",
        "the map contracts  (7)     0.5    <   1      holds  (good)",
        "unknown            (8)     ?      >=  ?      undecided",
        "- All is well.",
        "step size: W 0.25",
        "radii: W 2",
        "rate: 0.5",
        "measured: |W| 0.5",
        "errors considered: Z 1.0e-12",
        "also tried: ling2022 (descent): VIOLATED",
    ]
    assert certificate.certified


def test_the_rounding_of_0_is_printed_as_0() -> None:
    hypothesis = Hypothesis.compare("the margin", "m > 0", -1.784e-317, ">", 0.0, refutes=False)
    certificate = Certificate("monotone", Verdict.UNDECIDED, (hypothesis,), measured={"m": 8e-320, "n": 3e-308})
    for shown in (str(certificate), certificate.to_latex()):
        assert "e-317" not in shown and "10^{-317}" not in shown and "e-320" not in shown
    assert "measured: m 0, n 3e-308" in str(certificate)


def test_neither_a_certificate_nor_a_verdict_is_a_bare_yes() -> None:
    with pytest.raises(TypeError, match="not a bare yes or no"):
        bool(Certificate("radius", Verdict.UNDECIDED))
    with pytest.raises(TypeError, match="not a bare yes or no"):
        bool(Verdict.UNDECIDED)


def test_text_that_is_no_certificate_is_refused_with_a_sentence() -> None:
    with pytest.raises(InvalidArgument, match="not a certificate"):
        Certificate.from_json("nope")


@pytest.mark.parametrize(
    ("dynamics", "licensed"),
    [
        ("descent", {"step_size": math.nan, "rate": 0.5}),
        ("descent", {"step_size": math.inf, "rate": 0.5}),
        ("descent", {"step_size": {"W": 0.0}, "rate": 0.5}),
        ("descent", {"step_size": 1.0, "rate": 1.0}),
        ("descent", {"step_size": 1.0, "rate": math.nan}),
        ("descent", {"step_size": 1.0, "rate": -0.5}),
        ("flow", {"rate": 0.0}),
        ("flow", {"rate": math.inf}),
        ("flow", {"rate": 1.0, "rates": {"W": math.nan}}),
        ("flow", {"rate": 1.0, "radii": {"W": math.inf}}),
    ],
)
def test_nothing_is_certified_without_finite_positive_numbers(dynamics: str, licensed: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="cannot be CERTIFIED"):
        Certificate("radius", Verdict.CERTIFIED, (), dynamics, **licensed)
    refused = finish("radius", Verdict.CERTIFIED, (), dynamics, licenses=("all is well",), **licensed)
    assert refused.verdict is Verdict.UNDECIDED and "range of float64" in refused.note
    assert (refused.step_size, refused.rates, refused.rate, refused.radii, refused.licenses) == (None, None, None, None, ())
    Certificate("radius", Verdict.UNDECIDED, (), dynamics, **licensed)  # what is not certified may say anything
