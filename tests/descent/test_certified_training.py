"""What a certificate promises, against the run it licenses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wellposed as wp
from wellposed.certify import CertificateMonitor
from wellposed.descent import Stop


def problem(*, n: int = 8, m: int = 120, d: int = 30, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=generator, dtype=torch.float64)
    X *= d**0.5 / X.norm(dim=1, keepdim=True)
    y = torch.randn(n, generator=generator, dtype=torch.float64)
    return wp.GaussianDEQ(d, m, generator=generator, dtype=torch.float64), X, y


def test_certified_steps_keep_their_promise() -> None:
    model, X, y = problem()
    history = wp.descend(model, X, y, step_size="certified", steps=60)
    assert (history.residual_norm <= history.certified_residual() * (1 + 1e-12)).all()
    assert history.certificate is not None
    for name, radius in history.certificate["radii"].items():
        assert (history["distance"][name] <= radius).all()
    assert (history.measured_rate() <= history.certificate["rate"]).all()
    assert history.loss[-1] < history.loss[0]


def test_hopeless_problems_are_refused() -> None:
    model, X, y = problem(n=130, m=20)  # fewer units than samples: the features have no least singular value
    with pytest.raises(wp.WellposedError, match=r"No step size is certified for GaussianDEQ.*wp\.suggest"):
        wp.descend(model, X, y)


def test_descent_stops_when_the_monitor_has_a_proof() -> None:
    model, X, y = problem()
    with torch.no_grad():
        eta = 0.5 / float(torch.linalg.matrix_norm(model.equilibrium(X), 2)) ** 2
    monitor = CertificateMonitor(every=20, stop=True)
    history = wp.descend(model, X, y, step_size=eta, steps=5000, callbacks=[monitor], record_every=20)
    assert history.stop is Stop.CALLBACK and monitor.first is not None
    assert history["step"][-1] == monitor.first[0] > 0
    events = history.events["certificate"]
    assert [event.value["verdict"] for event in events[:-1]] == ["undecided"] * (len(events) - 1)
    assert events[-1].value["verdict"] == "certified"
    assert wp.certify(model, X, y, theorem="radius", dynamics="flow").certified  # from scratch, at the same point

    # from here on the flow must keep the bound
    rate = monitor.certificate.rate
    after = wp.flow(model, X, y, t_end=0.05 / rate, rtol=1e-5)
    assert (after.residual_norm <= after.certified_residual(rate) * (1 + 1e-6)).all()
