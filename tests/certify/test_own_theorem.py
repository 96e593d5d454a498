"""A theorem of one's own: a callable for `certify` and for `CertificateMonitor`, and a sentence for every mistake in it."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from certificate_problems import problem
from wellposed.certify import Certificate, Hypothesis, Verdict
from wellposed.errors import InvalidArgument, InvalidType


def small_weights(model: Any, X: Tensor, y: Tensor, *, bound: float = 1.0) -> Certificate:
    """|all parameters| < bound."""
    size = float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm())
    hypothesis = Hypothesis.compare("small", "|theta| < bound", size, "<", bound)
    verdict = Verdict.CERTIFIED if hypothesis.holds else Verdict.VIOLATED
    return Certificate("small_weights", verdict, (hypothesis,), measured={"samples": float(len(X))})


class Stateful:
    """An object that is called; it counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: Any, X: Tensor, y: Tensor) -> Certificate:
        self.calls += 1
        return small_weights(model, X, y, bound=float("inf"))


def test_certify_calls_it_with_its_options() -> None:
    model, X, y = problem("gaussian", 0)
    assert wp.certify(model, X, y, theorem=small_weights).verdict is Verdict.VIOLATED
    found = wp.certify(model, X, y, theorem=small_weights, bound=1e3)
    assert found.certified and found == small_weights(model, X, y, bound=1e3)
    assert wp.certify(model, X, y, theorem=functools.partial(small_weights, bound=1e3)) == found
    counting = Stateful()
    assert wp.certify(model, X, y, theorem=counting).certified and counting.calls == 1


def test_any_module_may_be_its_subject() -> None:
    found = wp.certify(torch.nn.Linear(3, 1), torch.zeros(2, 3), torch.zeros(2), theorem=small_weights, bound=1e3)
    assert found.certified and found.measured["samples"] == 2


def test_the_monitor_evaluates_it_along_training() -> None:
    model, X, y = problem("gaussian", 1)
    counting = Stateful()
    monitor = wp.CertificateMonitor(every=5, theorem=counting)
    history = wp.descend(model, X, y, step_size=1e-3, steps=10, callbacks=[monitor])
    assert counting.calls == 3 and monitor.first == (0, history.rows[0]["loss"])
    assert [record["step"] for record in monitor.records] == [0, 5, 10]
    assert {record["verdict"] for record in monitor.records} == {"certified"} and "s_min" not in monitor.records[0]
    # it may stop the run, and it judges the present point
    start = float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm())
    stopped = wp.CertificateMonitor(every=1, theorem=functools.partial(small_weights, bound=2 * start), stop=True)
    assert len(wp.descend(model, X, y, step_size=1e-3, steps=10, callbacks=[stopped]).rows) == 1
    never = wp.CertificateMonitor(every=1, theorem=functools.partial(small_weights, bound=start / 2), stop=True)
    wp.descend(model, X, y, step_size=1e-3, steps=3, callbacks=[never])
    assert never.first is None and len(never.records) == 4


@pytest.mark.parametrize(
    ("theorem", "error", "says"),
    [
        (7, InvalidType, "a name or a callable .model, X, y. -> Certificate; got int 7"),
        (None, InvalidType, "got NoneType None"),
        (lambda model, X, y: True, InvalidType, "must return a wellposed.certify.Certificate; it returned bool"),
        (lambda model, X, y: Certificate("mine", "certified"), InvalidType, "a wellposed.Verdict; got verdict='certified'"),  # type: ignore[arg-type]
        (lambda model: None, InvalidArgument, r"is called as <lambda>\(model, X, y\), but it is <lambda>\(model\)"),
        (
            lambda model, X, y: Certificate("mine", Verdict.CERTIFIED, (Hypothesis("open", "", 1.0, 0.0, "<", None),)),
            InvalidArgument,
            "returned CERTIFIED although its hypothesis 'open' does not hold",
        ),
    ],
)
def test_mistakes_get_one_sentence(theorem: Any, error: type[Exception], says: str) -> None:
    model, X, y = problem("gaussian", 2)
    with pytest.raises(error, match=says):
        wp.certify(model, X, y, theorem=theorem)
    with pytest.raises(error, match=says):
        monitor = wp.CertificateMonitor(every=1, theorem=theorem)
        wp.descend(model, X, y, step_size=1e-3, steps=1, callbacks=[monitor])


def test_wrong_options() -> None:
    model, X, y = problem("gaussian", 3)
    with pytest.raises(InvalidArgument, match=r"is called as small_weights\(model, X, y, size=...\)"):
        wp.certify(model, X, y, theorem=small_weights, size=3.0)
    with pytest.raises(InvalidArgument, match="options of theorem='radius'; a callable takes none"):
        wp.CertificateMonitor(theorem=small_weights, dynamics="descent")
    with pytest.raises(InvalidArgument, match="'radius' or a callable .* got 'ling2022'"):
        wp.CertificateMonitor(theorem="ling2022")


def test_an_error_inside_it_is_its_own() -> None:
    def broken(model: Any, X: Tensor, y: Tensor) -> Certificate:
        raise TypeError("a mistake inside")

    model, X, y = problem("gaussian", 4)
    with pytest.raises(TypeError, match="a mistake inside"):
        wp.certify(model, X, y, theorem=broken)


def test_only_public_names_are_listed() -> None:
    assert sorted(dir(wp.certify)) == sorted(wp.certify.__all__)
    assert "theorem" in inspect.signature(wp.certify).parameters
