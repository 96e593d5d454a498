"""What a certificate licenses, in words: the read-out alone or all parameters, how long until the residual halves."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from report_problems import certificate, parse_file, write_by_hand
from wellposed.certify import Certificate, Verdict
from wellposed.certify._certificate_table import NEGLIGIBLE
from wellposed_lab import report
from wellposed_lab.runs.records import halving, hidden_ratio, licence, moves, plain_flow


def made(rate: float | None, dynamics: str = "descent", *others: Certificate, **licensed: Any) -> Certificate:
    return Certificate("radius", Verdict.CERTIFIED, dynamics=dynamics, rate=rate, others=others, **licensed)


UNDECIDED_FLOW = Certificate("radius", Verdict.UNDECIDED, dynamics="flow")


def test_the_read_out_alone() -> None:
    slow = made(0.9999941715, "descent", UNDECIDED_FLOW, step_size={"W": 1e-12, "U": 1e-12, "a": 1e-2})
    assert licence(slow) == (
        "read-out only (hidden steps are 1e-10 times as large); |r| halves within 119,000 steps; plain gradient flow: UNDECIDED"
    )
    for ratio, words in ((NEGLIGIBLE * 0.99, "read-out only"), (NEGLIGIBLE, "all parameters, hidden steps 0.001 of")):
        assert moves(made(0.5, step_size={"W": ratio, "a": 1.0})).startswith(words)


def test_print_says_what_is_trained() -> None:
    slow = made(0.99, step_size={"W": 1e-12, "U": 1e-12, "a": 1e-2})
    assert f"\ntrained: {moves(slow)}\n" in str(slow) and "read-out only" in str(slow)
    assert "\ntrained: all parameters, hidden speeds 0.25" in str(made(2.0, "flow", rates={"W": 0.25, "a": 1.0}))
    assert "trained:" not in str(made(0.5, step_size=0.1)) + str(replace(slow, verdict=Verdict.UNDECIDED))


def test_all_parameters() -> None:
    assert moves(made(0.5, step_size=0.1)) == moves(made(0.5, step_size={"A": 0.1})) == "all parameters with equal steps"
    plain = made(2.0, "flow", rates={"W": 1.0, "a": 1.0})
    assert licence(plain) == f"plain gradient flow, |r| halves within time {math.log(2) / 2:.3g}"
    layers = made(2.0, "flow", UNDECIDED_FLOW, rates={"W": 0.25, "a": 1.0})
    assert licence(layers).startswith("all parameters, hidden speeds 0.25 of the read-out's; |r| halves within time")
    # a flow with slow hidden parameters is not the plain one
    assert plain_flow(layers) == "plain gradient flow: UNDECIDED" and plain_flow(plain) == "plain gradient flow: CERTIFIED"
    assert plain_flow(made(2.0, "flow", rates={"W": 0.25, "a": 1.0})) == "plain gradient flow: not tried"


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 0.51, 0.9, 0.99, 0.999, 0.99904, 0.9999941715, 1 - 2.0**-30])
def test_the_number_of_steps_is_a_bound_and_near(rate: float) -> None:
    found = re.fullmatch(r"\|r\| halves within ([\d,]+) steps?", halving(made(rate)))
    assert found
    steps = int(found[1].replace(",", ""))
    assert rate**steps <= 0.5
    assert steps == 1 or rate ** (steps * 0.98 - 1) >= 0.5


@pytest.mark.parametrize("rate", [None, 1.0, -0.5, math.nan, math.inf])
def test_values_that_are_not_rates(rate: float | None) -> None:
    undecided = Certificate("radius", Verdict.UNDECIDED, dynamics="descent", rate=rate)
    assert halving(undecided) == "no rate is proved"
    assert hidden_ratio(replace(undecided, step_size={"W": -1.0 if rate is None else rate, "a": math.nan})) == 1.0


def test_nothing_is_said_where_nothing_is_licensed() -> None:
    assert licence(UNDECIDED_FLOW) == "" and licence(Certificate("contraction", Verdict.CERTIFIED)) == ""


def test_the_page_of_a_run_says_so_at_a_glance(tmp_path: Path) -> None:
    step_size = {"W": 1e-12, "U": 1e-12, "a": 1e-2}
    slow = replace(certificate(0.9999941715), step_size=step_size, others=(UNDECIDED_FLOW,))
    page = parse_file(report.write(write_by_hand(tmp_path / "run", [2.0, 1.0], certificates={0: slow})))
    tile = next(element for element in page.find("dl") if element.attributes.get("class") == "glance").words()
    assert f"radius (descent), epoch 0; {licence(slow)}" in tile and "read-out only" in tile
    assert page.words().count("|r| halves within 119,000 steps") == 2  # and in the table of certificates
