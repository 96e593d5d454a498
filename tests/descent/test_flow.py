"""Gradient flow against its closed form, against descent with small steps, and against its own identities."""

from __future__ import annotations

import copy
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.descent import Stop


def problem(*, n: int = 5, m: int = 12, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 4, generator=generator, dtype=dtype)
    y = torch.randn(n, generator=generator, dtype=dtype)
    return wp.GaussianDEQ(4, m, generator=generator, dtype=dtype), X, y


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


class Curve(nn.Module):
    """x -> w^2 x, of which the flow is known; NaN beyond `limit`."""

    def __init__(self, w: float = 1.0, limit: float = math.inf) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))
        self.limit, self.calls, self.interrupt_at = limit, 0, -1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.interrupt_at:
            raise KeyboardInterrupt
        return self.w**2 * x * (math.nan if float(self.w.detach()) > self.limit else 1.0)


ONE = torch.ones(1, dtype=torch.float64)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-6), (torch.float32, 2e-5)])
def test_frozen_features_have_a_closed_form(dtype: torch.dtype, tolerance: float) -> None:
    """With only the read-out trained r(t) = exp(-Z Z^T t) r(0), and |a'| = |Z^T r|."""
    model, X, y = problem(dtype=dtype)
    W = model.W.detach().clone()
    with torch.no_grad():
        Z, r = model.equilibrium(X).double(), (model(X) - y).double()
    G = Z @ Z.T
    scale = float(torch.linalg.matrix_norm(G, 2))
    times = [0.1 / scale, 1 / scale, 3 / scale, 10 / scale]
    history = wp.flow(model, X, y, times=times, rates={"W": 0, "U": 0.0}, rtol=1e-6)
    expected = torch.stack([torch.matrix_exp(-t * G) @ r for t in [0.0, *times]])
    torch.testing.assert_close(history.residual_norm, expected.norm(dim=1), rtol=tolerance, atol=0)
    assert history["time"].tolist() == [0.0, *times]
    assert torch.equal(W, model.W)
    with torch.no_grad():
        torch.testing.assert_close((model(X) - y).double(), expected[-1], rtol=0, atol=tolerance * float(r.norm()))

    # the length of the way, by a quadrature of its own
    fine = torch.linspace(0, times[-1], 2001, dtype=torch.float64)
    eigenvalues, V = torch.linalg.eigh(G)
    speed = (torch.exp(-fine[:, None] * eigenvalues) * (V.T @ r) @ V.T @ Z).norm(dim=1)
    assert float(history["path_length"]["a"][-1]) == pytest.approx(float(torch.trapezoid(speed, fine)), rel=1e-5)
    assert float(history["total_path_length"][-1]) == pytest.approx(float(history["path_length"]["a"][-1]), rel=1e-9)
    rate = -torch.log(expected[1:].norm(dim=1) / expected[:-1].norm(dim=1)) / history["time"].diff()
    torch.testing.assert_close(history.measured_rate(), rate, rtol=10 * tolerance, atol=0)


def test_descent_tends_to_the_flow_at_first_order() -> None:
    model, X, y = problem()
    t_end = 0.05
    exact = copy.deepcopy(model)
    with torch.no_grad():
        before = model.equilibrium(X) > 0
    wp.flow(exact, X, y, times=[t_end], rtol=1e-7, rates={"W": 0.1})
    with torch.no_grad():
        assert torch.equal(before, exact.equilibrium(X) > 0)  # no kink on the way, so the order can be seen
    errors = []
    for steps in (15, 30, 60):
        near = copy.deepcopy(model)
        eta = t_end / steps
        wp.descend(near, X, y, step_size={"W": 0.1 * eta, "U": eta, "a": eta}, steps=steps)
        errors.append(distance(near, exact))
    assert errors[0] < 1e-2
    for coarse, fine in zip(errors, errors[1:], strict=False):
        assert coarse / fine == pytest.approx(2.0, rel=0.1)


def test_a_scalar_flow() -> None:
    """w' = -2 w (w^2 - y): w^2 solves a logistic equation."""
    model, y = Curve(w=0.5), 2.0
    history = wp.flow(model, ONE, y * ONE, t_end=1.0, rtol=1e-10)
    t, u = history["time"], 0.25
    expected = u * y / (u + (y - u) * torch.exp(-4 * y * t))
    torch.testing.assert_close(history.residual_norm, y - expected, rtol=1e-6, atol=1e-8)
    assert len(history) == 51 and history.stop is Stop.STEPS
    assert float(model.w.detach()) ** 2 == pytest.approx(float(expected[-1]), rel=1e-8)


@pytest.mark.parametrize("method", ["dopri8", "bosh3"])
def test_methods_agree(method: str) -> None:
    model, twin = Curve(w=0.5), Curve(w=0.5)
    wp.flow(model, ONE, 2 * ONE, times=[0.3], rtol=1e-9)
    wp.flow(twin, ONE, 2 * ONE, times=[0.3], rtol=1e-9, method=method)
    assert distance(model, twin) < 1e-7


def test_kinks_are_crossed() -> None:
    """Masks flip on the way: the energy identity d loss/dt = -sum rate |grad|^2 still holds, and descent comes near."""
    model, X, y = problem(n=6, m=10, seed=3)
    near = copy.deepcopy(model)
    with torch.no_grad():
        before = model.equilibrium(X) > 0
    times = torch.linspace(0, 0.2, 31, dtype=torch.float64)
    history = wp.flow(model, X, y, times=times, rtol=1e-4, rates={"W": 0.3, "U": 0.3})
    with torch.no_grad():
        assert not torch.equal(before, model.equilibrium(X) > 0)
    decay = sum(history.speeds[name] * grad**2 for name, grad in history["gradient_norm"].items())
    lost = torch.trapezoid(decay, history["time"])
    assert float(history.loss[0] - history.loss[-1]) == pytest.approx(float(lost), rel=5e-3)
    assert (history.loss.diff() < 0).all()
    eta = 0.2 / 200
    wp.descend(near, X, y, step_size={"W": 0.3 * eta, "U": 0.3 * eta, "a": eta}, steps=200)
    assert distance(near, model) < 2e-3


def test_a_rate_is_a_change_of_time() -> None:
    model, X, y = problem()
    twin = copy.deepcopy(model)
    one = wp.flow(model, X, y, times=[0.02], rtol=1e-8, rates=2.0)
    two = wp.flow(twin, X, y, times=[0.02, 0.04], rtol=1e-8)
    assert distance(model, twin) < 1e-7
    assert float(one["total_path_length"][-1]) == pytest.approx(float(two["total_path_length"][-1]), rel=1e-6)


def test_warm_starts_between_stages() -> None:
    model, X, y = problem()
    cold = wp.descend(copy.deepcopy(model), X, y, step_size=1e-3, steps=0)["equilibrium_steps"]
    history = wp.flow(model, X, y, times=[0.001], rtol=1e-4)
    stages = 6 * history["integrator_steps"][-1] + 4  # of dopri5, and the first step, and the row itself
    assert float(history["equilibrium_steps"][-1]) < 0.8 * float(stages * cold)


def test_callbacks_and_stops() -> None:
    class Clock:
        def __init__(self) -> None:
            self.times: list[float | None] = []

        def on_step(self, state: wp.descent.State) -> bool:
            self.times.append(state.time)
            state.record("w", float(state.model.w.detach()))
            assert state.loss == pytest.approx(float(((state.model(ONE) - 2 * ONE) ** 2).sum().detach()) / 2, rel=1e-12)
            return state.time is not None and state.time >= 0.25

    model, clock = Curve(0.5), Clock()
    history = wp.flow(model, ONE, 2 * ONE, times=[0.1, 0.2, 0.3, 0.4], callbacks=[clock])
    assert clock.times == [0.0, 0.1, 0.2, 0.3] == history["time"].tolist()
    assert history.stop is Stop.CALLBACK
    assert [event.time for event in history.events["w"]] == clock.times
    assert history.events["w"][-1].value == float(model.w.detach())
    assert history["step"].tolist() == [0, 1, 2, 3] and (history["integrator_steps"].diff() > 0).all()

    history = wp.flow(Curve(0.5), ONE, 2 * ONE, t_end=5.0, stop_loss=1e-3)
    assert history.stop is Stop.LOSS and float(history.loss[-2]) > 1e-3 >= float(history.loss[-1])


def test_a_loss_that_is_not_finite_goes_back() -> None:
    model = Curve(0.5, limit=1.2)
    with pytest.warns(wp.errors.DivergedWarning, match="NaN or infinite after time"):
        history = wp.flow(model, ONE, 4 * ONE, times=[0.05, 0.1, 0.15, 0.2, 0.3])
    assert history.stop is Stop.NOT_FINITE and 1 < len(history) < 6
    assert (float(model.w.detach()) ** 2 - 4) ** 2 / 2 == pytest.approx(float(history.loss[-1]))
    with pytest.raises(wp.InvalidArgument, match="loss at the start"):
        wp.flow(Curve(2.0, limit=1.0), ONE, ONE, t_end=1.0)


def test_interruption_keeps_the_last_row() -> None:
    model = Curve(0.5)
    model.interrupt_at = 40
    history = wp.flow(model, ONE, 4 * ONE, times=[0.1, 0.2, 0.3, 0.4, 5.0])
    assert history.stop is Stop.INTERRUPTED and 1 < len(history) < 6
    assert (float(model.w.detach()) ** 2 - 4) ** 2 / 2 == pytest.approx(float(history.loss[-1]))


def test_errors_hand_over_the_history() -> None:
    model, X, y = problem()
    model.W.data.mul_(0.99 / float(torch.linalg.matrix_norm(model.W.detach(), 2)))
    with pytest.raises(wp.IllPosed, match=r"\(At time [\d.e-]+ of flow, or soon after\.\)") as caught:
        wp.flow(model, X, y + 20, times=[0.001 * k for k in range(1, 200)], rtol=1e-3, rates={"U": 0, "a": 0})
    history = caught.value.history  # type: ignore[attr-defined]
    assert history.stop is Stop.ERROR
    with torch.no_grad():
        assert float(((model(X) - y - 20) ** 2).sum() / 2) == pytest.approx(float(history.loss[-1]), rel=1e-9)


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ("underflow in dt 0.0", wp.WellposedError, "no step from time 0 is small enough for rtol=1e-04"),
        ("something else", AssertionError, "something else"),
    ],
)
def test_the_integrator_gives_up(monkeypatch: pytest.MonkeyPatch, said: str, error: type[Exception], message: str) -> None:
    def odeint(*given: Any, **options: Any) -> None:
        raise AssertionError(said)

    monkeypatch.setattr("torchdiffeq.odeint", odeint)
    model = Curve(0.5)
    with pytest.raises(error, match=message):
        wp.flow(model, ONE, 2 * ONE, t_end=1.0)
    assert float(model.w.detach()) == 0.5


def test_without_torchdiffeq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(wp.errors.MissingPackage, match=r"pip install 'wellposed\[flow\]'"):
        wp.flow(Curve(), ONE, ONE, t_end=1.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, wp.InvalidArgument, "positive finite t_end, or times; got t_end=None"),
        ({"t_end": -1.0}, wp.InvalidArgument, "got t_end=-1.0"),
        ({"times": []}, wp.InvalidArgument, "increasing, positive and finite"),
        ({"times": [0.2, 0.1]}, wp.InvalidArgument, "increasing"),
        ({"times": [-0.1, 0.1]}, wp.InvalidArgument, "increasing"),
        ({"times": [0.0]}, wp.InvalidArgument, "increasing"),
        ({"times": [0.0, 0.0, 0.1]}, wp.InvalidArgument, "increasing"),
        ({"times": [0.1, math.nan]}, wp.InvalidArgument, "increasing"),
        ({"times": [0.0, 0.1], "t_end": 0.3}, wp.InvalidArgument, "times end at 0.1, but t_end=0.3"),
        ({"times": [0.1, 2.0], "t_end": 1.0}, wp.InvalidArgument, "times end at 2, but t_end=1"),
        ({"t_end": 1.0, "rtol": 0.0}, wp.InvalidArgument, r"rtol of flow must be in \(0, 1\); got 0.0"),
        ({"t_end": 1.0, "atol": "1"}, wp.InvalidType, "atol of flow must be a number"),
        ({"t_end": 1.0, "method": "bosch3"}, wp.InvalidArgument, "Did you mean 'bosh3'"),
        ({"t_end": 1.0, "rates": {"v": 1.0}}, wp.InvalidArgument, "rates names 'v'"),
        ({"t_end": 1.0, "rates": 0.0}, wp.InvalidArgument, "nothing would move"),
        ({"t_end": 1.0, "rates": -1.0}, wp.InvalidArgument, "rates must be a finite number at least 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wp.flow(Curve(), ONE, ONE, **options)


def test_times_end_at_t_end() -> None:
    history = wp.flow(Curve(0.5), ONE, 2 * ONE, t_end=0.3, times=[0.0, 0.1, 0.3])
    assert history["time"].tolist() == [0.0, 0.1, 0.3]
    times = torch.tensor([0.1, 0.3])  # 0.3 of float32 is not that of Python
    assert wp.flow(Curve(0.5), ONE, 2 * ONE, t_end=0.3, times=times)["time"].tolist() == [0.0, *times.tolist()]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_data_that_are_not_usable_are_refused(bad: float) -> None:
    model, X, y = problem()
    twin = copy.deepcopy(model)
    for data, message in (
        ((X.index_fill(0, torch.tensor([1]), bad), y), "X has NaN or infinite entries"),
        ((X, y.index_fill(0, torch.tensor([1]), bad)), "y has NaN or infinite entries"),
        ((X[:0], y[:0]), "has no samples"),
    ):
        with pytest.raises(wp.InvalidArgument, match=message):
            wp.flow(model, *data, t_end=0.1)
    assert distance(model, twin) == 0.0


def test_the_default_tolerance_is_good_to_three_digits() -> None:
    """Across kinks, against a run of a hundredth of it."""
    model, X, y = problem(n=6, m=10, seed=3)
    twin = copy.deepcopy(model)
    rates = {"W": 0.3, "U": 0.3}
    one = wp.flow(model, X, y, times=[0.2], rates=rates)
    two = wp.flow(twin, X, y, times=[0.2], rates=rates, rtol=1e-6)
    assert float(one.loss[-1]) == pytest.approx(float(two.loss[-1]), rel=1e-3)
    assert one["integrator_steps"][-1] < two["integrator_steps"][-1]
