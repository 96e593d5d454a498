"""Descent against torch.optim.SGD, against its closed form, and against everything that can go wrong."""

from __future__ import annotations

import copy
import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import wellposed as wp
from wellposed.certify import Certificate, Hypothesis, Verdict
from wellposed.descent import Stop

FAMILIES = {
    "gaussian": lambda **options: wp.GaussianDEQ(5, 16, **options),
    "skip": lambda **options: wp.SkipDEQ(5, 16, **options),
    "implicit-only": lambda **options: wp.ImplicitOnlyDEQ(5, 16, gamma0=0.3, **options),
    "monotone": lambda **options: wp.MonotoneDEQ(5, 16, margin=0.5, **options),
}


def problem(family: str = "gaussian", *, seed: int = 0, n: int = 7, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 5, generator=generator, dtype=dtype)
    y = torch.randn(n, generator=generator, dtype=dtype)
    return FAMILIES[family](generator=generator, dtype=dtype, **options), X, y


def sgd(model: nn.Module, X: Tensor, y: Tensor, sizes: dict[str, float], steps: int) -> list[float]:
    """The losses of the loop that everybody writes, by autograd and from cold starts."""
    groups = [{"params": [parameter], "lr": sizes[name]} for name, parameter in model.named_parameters()]
    optimizer = torch.optim.SGD(groups)
    losses = []
    for step in range(steps + 1):
        optimizer.zero_grad()
        loss = ((model(X) - y) ** 2).sum() / 2
        losses.append(float(loss.detach()))
        if step < steps:
            loss.backward()
            optimizer.step()
    return losses


def loss_of(model: nn.Module, X: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(((model(X) - y) ** 2).sum() / 2)


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


class Seen:
    """A callback that keeps copies, and stops when told to."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at, self.parameters, self.states = stop_at, [], []

    def on_step(self, state: wp.descent.State) -> bool | None:
        self.parameters.append({name: parameter.detach().clone() for name, parameter in state.model.named_parameters()})
        self.states.append(state)
        return True if state.step == self.stop_at else None


class Line(nn.Module):
    """x -> w x, which diverges for steps beyond 2/|x|^2; `forward` may do something at a given call."""

    def __init__(self, w: float = 1.0, at_call: int = -1, raises: type[BaseException] = KeyboardInterrupt) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))
        self.at_call, self.raises, self.calls = at_call, raises, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at_call:
            raise self.raises("now")
        return self.w * x


MODULE = sys.modules["wellposed.descent._descend"]  # its name in the package is that of the function
ONES = torch.ones(4, dtype=torch.float64)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_agrees_with_sgd(family: str, dtype: torch.dtype, tolerance: float) -> None:
    model, X, y = problem(family, dtype=dtype)
    twin = copy.deepcopy(model)
    sizes = {name: 5e-3 / (i + 1) for i, (name, _) in enumerate(model.named_parameters())}
    history = wp.descend(model, X, y, step_size=sizes, steps=10)
    losses = torch.tensor(sgd(twin, X, y, sizes, 10), dtype=torch.float64)
    torch.testing.assert_close(history.loss, losses, rtol=tolerance, atol=tolerance)
    assert distance(model, twin) < tolerance
    assert history["step"].tolist() == list(range(11))
    assert history.stop is Stop.STEPS
    assert history.loss[-1] < 0.97 * history.loss[0]


@given(seed=st.integers(0, 10**6), size=st.floats(1e-4, 5e-3))
@settings(deadline=None, max_examples=6)
def test_agrees_with_sgd_wherever_it_starts(seed: int, size: float) -> None:
    model, X, y = problem(seed=seed)
    twin = copy.deepcopy(model)
    history = wp.descend(model, X, y, step_size=size, steps=5)
    sgd(twin, X, y, dict.fromkeys(("W", "U", "a"), size), 5)
    assert distance(model, twin) < 1e-9
    for name in ("W", "U", "a"):  # the way is at least the distance
        assert (history["path_length"][name] >= history["distance"][name] * (1 - 1e-12)).all()
    assert (history["total_path_length"] >= history.total("distance") * (1 - 1e-12)).all()


def test_other_modules_go_by_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    X, y = torch.randn(9, 3, generator=generator), torch.randn(9, 1, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), wp.EquilibriumLayer(wp.nn.DenseCell(8, 8)), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    history = wp.descend(model, X, y, step_size=0.01, steps=10)
    sgd(twin, X, y, {name: 0.01 for name, _ in model.named_parameters()}, 10)
    assert distance(model, twin) < 1e-6
    assert (history["equilibrium_steps"] > 1).all() and (history["adjoint_steps"] > 1).all()
    assert set(history["distance"]) == {name for name, _ in model.named_parameters()}


def test_a_chosen_gradient_mode_is_used() -> None:
    model, X, y = problem(gradient=wp.JacobianFree())
    twin = copy.deepcopy(model)
    wp.descend(model, X, y, step_size=1e-3, steps=5)
    sgd(twin, X, y, dict.fromkeys(("W", "U", "a"), 1e-3), 5)
    assert distance(model, twin) < 1e-9


def test_read_out_alone_is_linear() -> None:
    """With Z fixed, r_k = (I - eta Z Z^T)^k r_0 to the last digit."""
    model, X, y = problem()
    with torch.no_grad():
        Z, r = model.equilibrium(X), model(X) - y
    eta = 0.5 / float(torch.linalg.matrix_norm(Z, 2)) ** 2
    W, U = model.W.detach().clone(), model.U.detach().clone()
    history = wp.descend(model, X, y, step_size={"W": 0, "U": 0.0, "a": eta}, steps=30)
    assert torch.equal(W, model.W) and torch.equal(U, model.U)
    step = torch.eye(len(y), dtype=torch.float64) - eta * Z @ Z.T
    expected = torch.stack([torch.linalg.matrix_power(step, k) @ r for k in range(31)])
    torch.testing.assert_close(history.residual_norm, expected.norm(dim=1), rtol=1e-9, atol=0)
    rate = history.measured_rate()
    torch.testing.assert_close(rate, expected[1:].norm(dim=1) / expected[:-1].norm(dim=1), rtol=1e-9, atol=0)
    assert (history["distance"]["W"] == 0).all() and (history["gradient_norm"]["W"] > 0).all()
    assert (history["equilibrium_steps"][1:] == 1).all()  # nothing moved, and the start knows it


def test_frozen_parameters_have_no_part() -> None:
    model, X, y = problem()
    model.U.requires_grad_(False)
    history = wp.descend(model, X, y, step_size={"W": 1e-3, "a": 1e-3}, steps=3)
    assert set(history["distance"]) == {"W", "a"}
    with pytest.raises(wp.InvalidArgument, match=r"'U', which is held fixed"):
        wp.descend(model, X, y, step_size={"W": 1e-3, "U": 0.1, "a": 1e-3}, steps=3)


def test_rows_are_what_happened() -> None:
    """Columns against copies of the parameters and gradients by autograd."""
    model, X, y = problem()
    seen = Seen()
    history = wp.descend(model, X, y, step_size={"W": 1e-3, "U": 2e-3, "a": 3e-3}, steps=8, callbacks=[seen])
    path = dict.fromkeys(("W", "U", "a"), 0.0)
    total = 0.0
    for k, there in enumerate(seen.parameters):
        row = history.rows[k]
        for name, parameter in model.named_parameters():
            parameter.data.copy_(there[name])
        model.zero_grad()
        loss = ((model(X) - y) ** 2).sum() / 2
        loss.backward()
        assert row["loss"] == pytest.approx(float(loss.detach()), rel=1e-10)
        assert row["residual_norm"] == pytest.approx(math.sqrt(2 * float(loss.detach())), rel=1e-10)
        moved = []
        for name, parameter in model.named_parameters():
            assert row["gradient_norm"][name] == pytest.approx(float(parameter.grad.norm()), rel=1e-8)
            assert row["distance"][name] == pytest.approx(float((there[name] - seen.parameters[0][name]).norm()), rel=1e-12)
            moved.append(float((there[name] - seen.parameters[max(k - 1, 0)][name]).norm()))
            path[name] += moved[-1]
            assert row["path_length"][name] == pytest.approx(path[name], rel=1e-9, abs=1e-15)
        total += math.hypot(*moved)
        assert row["total_path_length"] == pytest.approx(total, rel=1e-9, abs=1e-15)
    assert (history["wall_time"].diff() > 0).all()


def test_callbacks_see_the_present_point() -> None:
    model, X, y = problem()
    checked = []

    class Check:
        def on_step(self, state: wp.descent.State) -> None:
            with torch.no_grad():
                torch.testing.assert_close(state.r, state.model(X) - y)
                torch.testing.assert_close(state.point.value, state.model.equilibrium(X))
            assert state.X is X and state.y is y and state.time is None
            assert state.loss == pytest.approx(float(state.r @ state.r) / 2)
            assert state.history.rows[-1]["step"] == state.step
            assert set(state.gradients) == {"W", "U", "a"}
            state.record("checked", {"twice": 2 * state.step})
            checked.append(state.step)

    history = wp.descend(model, X, y, step_size=1e-3, steps=4, callbacks=[Check()])
    assert checked == [0, 1, 2, 3, 4]
    assert [event.value["twice"] for event in history.events["checked"]] == [0, 2, 4, 6, 8]
    assert [event.step for event in history.events["checked"]] == checked


def test_stops_when_a_callback_says_so() -> None:
    model, X, y = problem()
    stopper, other = Seen(stop_at=3), Seen()
    history = wp.descend(model, X, y, step_size=1e-3, steps=100, callbacks=[stopper, other], record_every=10)
    assert history.stop is Stop.CALLBACK
    assert history["step"].tolist() == [0, 3]
    assert len(other.states) == 4  # the second callback saw the last point too
    assert loss_of(model, X, y) == pytest.approx(float(history.loss[-1]), rel=1e-9)


def test_stops_at_a_loss() -> None:
    model, X, y = problem()
    every = wp.descend(copy.deepcopy(model), X, y, step_size=3e-3, steps=20)
    goal = float(every.loss[17]) * (1 + 1e-9)
    history = wp.descend(model, X, y, step_size=3e-3, steps=20, stop_loss=goal)
    assert history.stop is Stop.LOSS and len(history) == 18
    assert loss_of(model, X, y) <= goal


def test_record_every() -> None:
    model, X, y = problem()
    twin = copy.deepcopy(model)
    every = wp.descend(model, X, y, step_size=1e-3, steps=7)
    some = wp.descend(twin, X, y, step_size=1e-3, steps=7, record_every=3)
    assert some["step"].tolist() == [0, 3, 6, 7]
    assert distance(model, twin) == 0.0
    torch.testing.assert_close(some.loss, every.loss[[0, 3, 6, 7]], rtol=0, atol=0)
    torch.testing.assert_close(some["path_length"]["W"], every["path_length"]["W"][[0, 3, 6, 7]], rtol=1e-14, atol=0)
    assert float(some["adjoint_steps"].sum()) == pytest.approx(float(every["adjoint_steps"].sum()))  # costs are summed up
    rate = every.measured_rate()
    assert float(some.measured_rate()[1]) == pytest.approx(float(rate[3:6].prod()) ** (1 / 3))


def test_no_steps_only_looks() -> None:
    model, X, y = problem()
    twin = copy.deepcopy(model)
    history = wp.descend(model, X, y, step_size=1.0, steps=0)
    assert len(history) == 1 and history.stop is Stop.STEPS
    assert distance(model, twin) == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_warm_starts_save_evaluations_and_change_nothing(family: str) -> None:
    model, X, y = problem(family)
    twin = copy.deepcopy(model)
    warm = wp.descend(model, X, y, step_size=1e-4, steps=10)
    cold = wp.descend(twin, X, y, step_size=1e-4, steps=10, warm_start=False)
    assert distance(model, twin) < 1e-10
    part = {
        column: float(warm[column][3:].mean() / cold[column][3:].mean()) for column in ("equilibrium_steps", "adjoint_steps")
    }
    assert part["adjoint_steps"] < 0.9
    assert part["equilibrium_steps"] < 0.9


@pytest.mark.parametrize("solver", [wp.PeacemanRachford(None), wp.DouglasRachford(None), wp.PeacemanRachford(10.0)])
@pytest.mark.parametrize("error", [0.0, 1e-12, 1e-9, 1e-4])
def test_a_splitting_method_stays_near_a_start_that_is_near(solver: Any, error: float) -> None:
    """Its own variable u must start as near to its limit as z does: otherwise the residual jumps, as if it diverged."""
    model, X, _ = problem("monotone", solver=solver, max_steps=3000, rtol=1e-13)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        exact = model.equilibrium(X)
        start = exact + error * torch.randn(exact.shape, generator=generator, dtype=exact.dtype)
        start[0] = 0.0  # one that knows nothing, among the others
        solution = model.solve(X, z0=start, record=True)
        alone = model.solve(X, record=True)
    assert solution.converged.all()
    torch.testing.assert_close(solution.value, exact, rtol=0, atol=1e-11)
    assert abs(int(solution.num_steps[0]) - int(alone.num_steps[0])) <= 2  # the last ones are decided by rounding
    if error == 0.0:
        assert (solution.num_steps[1:] == 1).all()
    else:
        assert (solution.num_steps[1:] < alone.num_steps[1:]).all()
    residuals = solution.history[1:].nan_to_num(0.0)
    assert (residuals.amax(dim=1) <= 20 * residuals[:, 0]).all()


def test_monotone_networks_train_without_a_warning() -> None:
    """Warnings are errors here; tiny steps make starts that are nearly exact."""
    model, X, y = problem("monotone")
    history = wp.descend(model, X, y, step_size=1e-9, steps=10)
    assert (history["equilibrium_steps"][3:] < 0.5 * history["equilibrium_steps"][0]).all()


class Broken(Line):
    """NaN beyond a limit."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (math.nan if abs(float(self.w.detach())) > 100 else 1.0)


def test_divergence_goes_back() -> None:
    model = Broken(w=1.0)  # w <- -3 w
    with pytest.warns(
        wp.errors.DivergedWarning, match="NaN or infinite at step 5, after .* at step 4, to .*smaller steps than 1.0"
    ):
        history = wp.descend(model, ONES, 0 * ONES, step_size=1.0, steps=100)
    assert history.stop is Stop.NOT_FINITE
    assert float(model.w.detach()) == 81.0
    assert history.loss.tolist() == [2 * 9.0**k for k in range(5)]


def test_an_exploding_loss_stops_and_goes_back() -> None:
    model = Line(w=1.0)
    with pytest.warns(wp.errors.DivergedWarning, match="exploded at step 13, after .* at step 12, to .*smaller steps than 1.0"):
        history = wp.descend(model, ONES, 0 * ONES, step_size=1.0, steps=100)
    assert history.stop is Stop.DIVERGED and "without bound" in history.stop.message
    assert float(model.w.detach()) == 3.0**12  # 9^12 < 1e12 < 9^13
    assert history.loss.tolist() == [2 * 9.0**k for k in range(13)]
    # measured by the targets as well: leaving a minimum that was met to 1e-30 is no explosion
    history = wp.descend(Line(w=1.0 + 1e-15), ONES, ONES, step_size=1.0, steps=30)
    assert history.stop is Stop.STEPS and history.loss[-1] > 1e12 * history.loss[0]


def test_an_exploding_network_stops() -> None:
    model, X, y = problem("monotone")
    with torch.no_grad():
        Z, r = model.equilibrium(X), model(X) - y
    name = next(name for name, parameter in model.named_parameters() if parameter.shape == (16,))
    eta = 100 / float(torch.linalg.matrix_norm(Z, 2)) ** 2
    with pytest.warns(wp.errors.DivergedWarning, match="exploded"):
        history = wp.descend(model, X, y, step_size={name: eta}, steps=20)
    assert history.stop is Stop.DIVERGED and len(history) < 6  # a factor of up to 99^2 a step
    assert history.loss[-1] <= 1e12 * float(max(r @ r, y @ y)) / 2
    assert loss_of(model, X, y) == pytest.approx(float(history.loss[-1]), rel=1e-9)


def test_a_step_that_is_not_finite_is_not_taken() -> None:
    class Steep(Line):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.sqrt(self.w - self.w.detach())  # infinite slope, finite value

    model = Steep(w=0.5)
    with pytest.warns(wp.errors.DivergedWarning, match="NaN or infinite at step 1"):
        history = wp.descend(model, ONES, 0 * ONES, step_size=0.1, steps=5)
    assert history.stop is Stop.NOT_FINITE and float(model.w.detach()) == 0.5


def test_a_bad_start_is_refused() -> None:
    with pytest.raises(wp.InvalidArgument, match="loss at the start is nan"):
        wp.descend(Line(w=math.nan), ONES, ONES, step_size=0.1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_data_that_are_not_finite_are_refused(family: str, bad: float) -> None:
    model, X, y = problem(family)
    twin = copy.deepcopy(model)
    X[2, 1], clean = bad, X.clone()
    with pytest.raises(wp.InvalidArgument, match="X has NaN or infinite entries"):
        wp.descend(model, X, y, step_size=1e-3)
    y[3] = bad
    with pytest.raises(wp.InvalidArgument, match="y has NaN or infinite entries"):
        wp.descend(model, clean, y, step_size=1e-3)
    assert distance(model, twin) == 0.0


class Spoil(Seen):
    """Makes the factor of one sample NaN after step 2."""

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.factor = factor

    def on_step(self, state: wp.descent.State) -> None:
        super().on_step(state)
        if state.step == 2:
            self.factor[4] = math.nan


def check_lost(model: nn.Module, X: Tensor, y: Tensor, spoil: Spoil) -> None:
    with pytest.warns(wp.errors.DivergedWarning, match="NaN or infinite at step 3, after .* at step 2"):
        history = wp.descend(model, X, y, step_size=1e-3, steps=6, callbacks=[spoil])
    assert history.stop is Stop.NOT_FINITE and len(history) == 3
    assert all(torch.equal(parameter, spoil.parameters[2][name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("family", ["gaussian", "monotone"])
def test_lost_equilibria_make_the_loss_nan(family: str) -> None:
    """They would enter with the z = 0 of their start, which is a finite loss."""
    model, X, y = problem(family, on_failure="ignore")
    injection, factor = model.injection, torch.ones(7, 1, dtype=torch.float64)
    model.injection = lambda X: factor * injection(X)
    check_lost(model, X, y, Spoil(factor))


def test_lost_equilibria_of_other_modules_make_the_loss_nan() -> None:
    class Features(nn.Module):
        def __init__(self, factor: Tensor) -> None:
            super().__init__()
            self.layer = wp.EquilibriumLayer(wp.nn.DenseCell(5, 16, dtype=torch.float64), on_failure="ignore")
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.factor * x).mean(dim=1)

    torch.manual_seed(0)
    factor = torch.ones(7, 1, dtype=torch.float64)
    check_lost(Features(factor), *problem()[1:], Spoil(factor))


def test_ill_posed_goes_back_and_hands_over_the_history() -> None:
    model, X, y = problem()
    with pytest.raises(wp.IllPosed, match=r"smaller step.*\(At step \d+ of descend\.\)$") as caught:
        wp.descend(model, X, y, step_size={"W": 0.05, "U": 0.0, "a": 0.0}, steps=200)
    history = caught.value.history  # type: ignore[attr-defined]
    assert f"(At step {len(history)} of descend.)" in str(caught.value)
    assert history.stop is Stop.ERROR and len(history) >= 1
    assert loss_of(model, X, y) == pytest.approx(float(history.loss[-1]), rel=1e-9)


def test_failed_equilibria_obey_the_policy_of_the_model() -> None:
    model, X, y = problem(max_steps=3, on_failure="raise")
    with pytest.raises(wp.NotConverged, match=r"max_steps=3.*\(At step 0 of descend\.\)"):
        wp.descend(model, X, y, step_size=1e-3, steps=2)
    model, X, y = problem(max_steps=3, on_failure="ignore")
    history = wp.descend(model, X, y, step_size=1e-3, steps=2)
    assert len(history) == 3
    model, X, y = problem(max_steps=3, on_failure="warn")
    with pytest.warns(wp.errors.NotConvergedWarning):
        wp.descend(model, X, y, step_size=1e-3, steps=2)


def test_interrupted_while_it_evaluates() -> None:
    model, twin = Line(at_call=6), Line()
    history = wp.descend(model, ONES, 0 * ONES, step_size=0.01, steps=100, record_every=50)
    assert history.stop is Stop.INTERRUPTED
    assert history["step"].tolist() == [0, 4]  # the fifth point was evaluated, the sixth not
    wp.descend(twin, ONES, 0 * ONES, step_size=0.01, steps=4)
    assert torch.equal(model.w, twin.w)


class InterruptUpdate(TorchFunctionMode):
    """Interrupts the in-place update of the k-th parameter that is updated."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.left = k

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.add_ and isinstance(args[0], nn.Parameter):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def test_interrupted_between_two_parameters() -> None:
    model, X, y = problem()
    twin = copy.deepcopy(model)
    with InterruptUpdate(3 * 4 + 2):  # W of the fifth update is done, U is not
        history = wp.descend(model, X, y, step_size=1e-3, steps=100)
    assert history.stop is Stop.INTERRUPTED and history["step"].tolist() == [0, 1, 2, 3, 4]
    wp.descend(twin, X, y, step_size=1e-3, steps=4)
    assert distance(model, twin) == 0.0


def certificate(verdict: Verdict, **options: Any) -> Certificate:
    hypothesis = Hypothesis.compare("2hE < s^2", "ours", 2.0, "<", 1.0)
    return Certificate("radius", verdict, (hypothesis,), dynamics="descent", **options)


def test_certified_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, X, y = problem()
    twin = copy.deepcopy(model)
    asked = {}

    def certify(*given: Any, **options: Any) -> Certificate:
        asked.update(options)
        return certificate(Verdict.CERTIFIED, step_size={"W": 1e-4, "U": 2e-4, "a": 1e-3}, rate=0.999)

    monkeypatch.setattr(MODULE, "certify", certify)
    history = wp.descend(model, X, y, steps=5)
    assert asked == {"theorem": "radius", "dynamics": "descent"}
    assert history.speeds == {"W": 1e-4, "U": 2e-4, "a": 1e-3}
    wp.descend(twin, X, y, step_size=history.speeds, steps=5)
    assert distance(model, twin) == 0.0
    expected = history.residual_norm[0] * 0.999 ** torch.arange(6, dtype=torch.float64)
    torch.testing.assert_close(history.certified_residual(), expected)
    assert wp.History.from_json(history.to_json()).certificate["rate"] == 0.999


def test_uncertified_steps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, X, y = problem()
    twin = copy.deepcopy(model)
    undecided = certificate(Verdict.UNDECIDED, note="the radii grow without end")
    monkeypatch.setattr(MODULE, "certify", lambda *given, **options: undecided)
    with pytest.raises(wp.WellposedError, match=r"UNDECIDED: the radii grow without end.*wp\.suggest"):
        wp.descend(model, X, y)
    assert distance(model, twin) == 0.0
    monkeypatch.setattr(MODULE, "certify", lambda *given, **options: certificate(Verdict.VIOLATED))
    with pytest.raises(wp.WellposedError, match=r"VIOLATED: 2hE < s\^2"):
        wp.descend(model, X, y, step_size="certified")
    with pytest.raises(wp.InvalidType, match="Line is not one. Give step_size a number"):
        wp.descend(Line(), ONES, ONES)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"step_size": {"W": 1.0, "U": 1.0, "A": 1.0}},
            wp.InvalidArgument,
            "names 'A', which is not a parameter of GaussianDEQ",
        ),
        ({"step_size": -1.0}, wp.InvalidArgument, "step_size must be a finite number at least 0; got -1.0"),
        ({"step_size": {"W": math.nan, "U": 1.0, "a": 1.0}}, wp.InvalidArgument, r"step_size\['W'\].*got nan"),
        ({"step_size": "certifed"}, wp.InvalidArgument, "Did you mean 'certified'"),
        ({"step_size": {}}, wp.InvalidArgument, r"step_size=\{\} holds every parameter fixed.*at least one of W, U, a"),
        ({"step_size": 0.0}, wp.InvalidArgument, "step_size=0.0 holds every parameter fixed"),
        ({"step_size": {"W": 0}}, wp.InvalidArgument, "nothing would move"),
        ({"step_size": [1.0]}, wp.InvalidType, "must be a number at least 0"),
        ({"steps": -1}, wp.InvalidArgument, "steps must be an integer at least 0; got -1"),
        ({"record_every": 0}, wp.InvalidArgument, "record_every"),
        ({"callbacks": [print]}, wp.InvalidType, r"on_step\(state\); got <built-in function print>"),
        ({"callbacks": [Seen]}, wp.InvalidType, "on_step"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model, X, y = problem()
    with pytest.raises(error, match=message):
        wp.descend(model, X, y, **({"step_size": 1e-3} | options))


def test_wrong_data() -> None:
    model, X, y = problem()
    with pytest.raises(wp.InvalidArgument, match=r"y must be like the predictions.*\(7,\).*got \(7, 1\)"):
        wp.descend(model, X, y.unsqueeze(1), step_size=1e-3)  # broadcasting would train on the wrong loss
    with pytest.raises(wp.InvalidArgument, match="It has 5 numbers for 7 predictions: give one target for each") as caught:
        wp.descend(model, X, y[:5], step_size=1e-3)
    assert "reshape" not in str(caught.value)
    for none in ((X[:0], y[:0]), (X, y[:0]), (X[:0], y)):
        with pytest.raises(wp.InvalidArgument, match="has no samples"):
            wp.descend(model, *none, step_size=1e-3)
    with pytest.raises(wp.InvalidArgument, match="float64.*got .*float32"):
        wp.descend(model, X, y.float(), step_size=1e-3)
    with pytest.raises(wp.InvalidType, match="y must be a tensor"):
        wp.descend(model, X, y.tolist(), step_size=1e-3)
    with pytest.raises(wp.InvalidType, match="torch.nn.Module"):
        wp.descend(lambda x: x, X, y, step_size=1e-3)
    with pytest.raises(wp.InvalidArgument, match="nothing to train"):
        wp.descend(model.requires_grad_(False), X, y, step_size=1e-3)


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, X, y = problem()

    class Status:
        def on_step(self, state: wp.descent.State) -> None:
            if state.step == 2:
                state.status = "certified!"  # stays until somebody changes it

    wp.descend(model, X, y, step_size=1e-3, steps=3, callbacks=[Status()], progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "descent" in shown.err
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    wp.descend(model, X, y, step_size=1e-3, steps=3, callbacks=[Status()], progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "descent 3/3: loss" in shown.err and "steps/s, equilibrium" in shown.err and "certified!" in shown.err


def test_a_parameter_that_is_not_named_is_held_fixed() -> None:
    torch.manual_seed(0)
    model = wp.GaussianDEQ(5, 12, dtype=torch.float64)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    X, y = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    wp.descend(model, X, y, step_size={"W": 1e-3, "a": 1e-3}, steps=3)
    after = dict(model.named_parameters())
    assert torch.equal(after["U"], before["U"])
    assert not torch.equal(after["W"], before["W"]) and not torch.equal(after["a"], before["a"])
