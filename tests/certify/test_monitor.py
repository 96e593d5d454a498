"""CertificateMonitor: the first proved step, one-sided bounds all along, and few decompositions."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from certificate_problems import problem, train
from wellposed.certify import CertificateMonitor, radius
from wellposed.certify.measurement import Measurement
from wellposed.certify.monitor import IncrementalMeasure
from wellposed.errors import InvalidArgument, InvalidType


@dataclass
class HandMade:
    """What a callback is told, without the rest of the training loop."""

    model: Any
    X: Tensor
    y: Tensor
    step: int
    point: Any = None
    time: float | None = None
    loss: float = 0.0
    status: str = ""
    events: list[tuple[str, Any]] = field(default_factory=list)

    def record(self, name: str, value: Any) -> None:
        self.events.append((name, value))


def step_size(model: Any, X: Tensor) -> float:
    return 1 / float(torch.linalg.eigvalsh(wp.kernel.tangent_kernel(model, X))[-1])


class Watch:
    """Copies of the model at every step, and what the certificate says there from scratch."""

    def __init__(self) -> None:
        self.models: list[Any] = []

    def on_step(self, state: Any) -> None:
        self.models.append(copy.deepcopy(state.model))


@pytest.mark.parametrize("family", ["gaussian", "skip"])
@pytest.mark.parametrize("sharpen", [(), ("active", "kernel")], ids=str)
def test_the_first_proved_step_against_brute_force(family: str, sharpen: tuple[str, ...]) -> None:
    model, X, y = problem(family, 1)
    monitor, watch = CertificateMonitor(every=3, sharpen=sharpen, stop=True), Watch()
    history = wp.descend(model, X, y, step_size=step_size(model, X), steps=150, callbacks=[watch, monitor])
    assert monitor.first is not None and monitor.certificate is not None and monitor.certificate.certified
    step, loss = monitor.first
    assert step % 3 == 0 and step == history.rows[-1]["step"] and loss == history.rows[-1]["loss"]
    # from scratch it is certified there, too; what the cheap bounds lose delays it by less than a factor of 2 in the loss
    assert radius(watch.models[step], X, y, sharpen=sharpen).certified
    first = step
    while first > 0 and radius(watch.models[first - 3], X, y, sharpen=sharpen).certified:
        first -= 3
    assert loss > 0.5 * history.rows[max(0, first - 3)]["loss"] or step - first <= 3


@pytest.mark.parametrize("family", ["gaussian", "skip", "monotone"])
def test_incremental_bounds_are_one_sided_and_rarely_decompose(family: str) -> None:
    model, X, y = problem(family, 2)
    incremental = IncrementalMeasure(model, X, y)
    evaluations = 0

    class Check:
        def on_step(self, state: Any) -> None:
            nonlocal evaluations
            at = incremental(state.model, state.point)
            assert isinstance(at, Measurement)
            evaluations += 1
            with torch.no_grad():
                Z, C = model.solve(X).value, model.injection(X)
                R = float(torch.linalg.matrix_norm(model.recurrent(), ord=2))
            F = torch.cat([Z, C], dim=1) if family == "skip" else Z
            s, z = torch.linalg.svdvals(F), torch.linalg.svdvals(Z)
            assert at.F_least <= s[-1] and at.F_norm >= s[0] and at.Z_norm >= z[0]
            assert at.contraction >= R and at.X_norm >= torch.linalg.matrix_norm(X, ord=2)
            assert at.F_least >= 0.9 * s[-1] - 1e-9 and at.F_norm <= 1.1 * s[0]
            if family != "skip":
                assert at.Z_least <= z[-1]

    wp.descend(model, X, y, step_size=step_size(model, X), steps=60, callbacks=[Check()])
    assert evaluations == 61 and incremental.decompositions < 25


def test_what_training_does_to_its_tensors_does_not_matter() -> None:
    # the reference is a copy: equilibria that are overwritten in place are seen as moved
    model, X, y = problem("gaussian", 3)
    incremental = IncrementalMeasure(model, X, y)
    at = model.linearise(X)
    incremental(model, at)
    with torch.no_grad():
        model.U *= 0.5
    moved = model.linearise(X)
    at.value.copy_(moved.value)
    at.adjoint.copy_(moved.adjoint)
    found = incremental(model, at)
    assert isinstance(found, Measurement)
    assert found.F_least <= torch.linalg.svdvals(moved.value)[-1]


def test_stale_equilibria_are_noticed() -> None:
    # those of other parameters: the error bound must cover the difference
    model, X, y = problem("gaussian", 4)
    old = model.linearise(X)
    with torch.no_grad():
        model.U *= 1.01
    found = IncrementalMeasure(model, X, y)(model, old)
    assert isinstance(found, Measurement)
    now = model.linearise(X)
    assert bool(((old.value - now.value).norm(dim=1) <= found.z_error).all())
    with torch.no_grad():
        assert found.residual >= (model(X) - y).norm()


def test_records() -> None:
    model, X, y = problem("gaussian", 5)
    monitor = CertificateMonitor(every=10)
    history = wp.descend(model, X, y, step_size=step_size(model, X), steps=30, callbacks=[monitor])
    assert [record["step"] for record in monitor.records] == [0, 10, 20, 30]
    assert [event.value for event in history.events["certificate"]] == monitor.records
    first, last = monitor.records[0], monitor.records[-1]
    assert first["measured_rate"] is None and set(first["distance"].values()) == {0.0}
    assert last["distance"] == pytest.approx(history.rows[-1]["distance"])
    assert last["measured_rate"] == pytest.approx((last["residual_norm"] / monitor.records[-2]["residual_norm"]) ** 0.1)
    Z = torch.linalg.svdvals(model.linearise(X).value)
    assert last["s_min"] <= Z[-1] and last["lambda_min"] == last["s_min"] ** 2 and last["feature_norm"] >= Z[0]
    assert last["contraction"] >= torch.linalg.matrix_norm(model.W.detach(), ord=2)
    assert {record["verdict"] for record in monitor.records} <= {"certified", "undecided"}


def test_flow() -> None:
    model, X, y = problem("gaussian", 6)
    train(model, X, y, 12)
    monitor = CertificateMonitor(every=1)
    history = wp.flow(model, X, y, t_end=12 * step_size(model, X), rtol=1e-4, callbacks=[monitor])
    assert len(monitor.records) == len(history.rows)
    assert monitor.first is not None
    proved = [record for record in monitor.records if record["verdict"] == "certified"]
    # measured against certified: the flow is never slower than what was proved at an earlier row
    for record, later in zip(proved, proved[1:], strict=False):
        assert later["measured_rate"] >= record["certified_rate"] * (1 - 1e-2)


def test_hand_made_states(caplog: pytest.LogCaptureFixture) -> None:
    model, X, y = problem("gaussian", 7)
    with torch.no_grad():
        near = model(X) + 1e-7 * y
    monitor = CertificateMonitor(every=5)
    state = HandMade(model, X, y, 0, loss=1.0)
    assert not monitor.on_step(state) and state.status == "not certified" and monitor.first is None
    assert monitor.on_step(HandMade(model, X, y, 3, loss=0.5)) is None and len(monitor.records) == 1
    assert monitor.on_step(HandMade(model, X, y, 7, loss=0.5)) is False and len(monitor.records) == 2
    # a new run, on other data: nothing of the old one is kept
    state = HandMade(model, X, near, 0, loss=1e-14)
    with caplog.at_level(logging.INFO):
        assert monitor.on_step(state) is False
    assert monitor.first == (0, 1e-14) and state.status == "certified" and len(monitor.records) == 1
    assert "proved from step 0" in caplog.text
    assert [name for name, _ in state.events] == ["certificate"]
    assert CertificateMonitor(every=1, stop=True).on_step(HandMade(model, X, near, 0, loss=1e-14)) is True


def test_descent_and_hidden_rates() -> None:
    model, X, y = problem("gaussian", 8)
    monitor = CertificateMonitor(every=1, dynamics="descent")
    monitor.on_step(HandMade(model, X, y, 0, loss=1.0))
    assert monitor.certificate is not None and monitor.certificate.certified and monitor.certificate.step_size
    slow = CertificateMonitor(every=1, hidden_rate="largest")
    slow.on_step(HandMade(model, X, y, 0, point=model.linearise(X), loss=1.0))
    assert slow.certificate is not None and slow.certificate.certified and slow.certificate.rates


def test_ill_posed_points_are_recorded() -> None:
    model, X, y = problem("gaussian", 9)
    with torch.no_grad():
        model.W *= 10
    monitor = CertificateMonitor(every=1)
    state = HandMade(model, X, y, 0, loss=1.0)
    assert monitor.on_step(state) is False
    assert monitor.records[0]["verdict"] == "undecided" and "s_min" not in monitor.records[0]
    assert monitor.certificate is not None and "contraction" in monitor.certificate.note


def test_wrong_arguments() -> None:
    with pytest.raises(InvalidArgument, match="every"):
        CertificateMonitor(every=0)
    with pytest.raises(InvalidArgument, match="dynamics"):
        CertificateMonitor(dynamics="adam")
    _, X, y = problem("gaussian", 0)
    with pytest.raises(InvalidType, match="got Linear"):
        CertificateMonitor(every=1).on_step(HandMade(torch.nn.Linear(6, 1), X, y, 0))


@pytest.mark.parametrize(
    "options",
    [{"hidden_rate": 7}, {"hidden_rate": 0}, {"hidden_rate": "larges"}, {"sharpen": ("activ",)}, {"sharpen": "active"}],
)
def test_options_are_checked_at_once(options: dict) -> None:
    with pytest.raises(wp.InvalidArgument, match="hidden_rate|sharpen"):
        wp.CertificateMonitor(**options)
