"""Splitting methods: the factors that [nguyen2022] proves, and whom they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import wellposed as wp
from conformance import SPLITTING, check_honest, check_right, short, solve
from problems import Problem, gaussian, norm, problem
from wellposed import InvalidArgument, InvalidType, Status
from wellposed.nn import DenseCell, Identity, ReLU, Tanh
from wellposed.solve import AbstractSolver, AbstractSplitMap, Point, TunedStep
from wellposed.solve.tuned_step import minimal_residual

DOUBLE = torch.float64
every_splitting = pytest.mark.parametrize("solver", SPLITTING, ids=short)
reflecting = pytest.mark.parametrize("kind", [wp.PeacemanRachford, wp.DouglasRachford])


def constants(W: Tensor) -> tuple[float, float]:
    """m and L: the least eigenvalue of sym(I - W), and |I - W|."""
    F = torch.eye(W.shape[0], dtype=W.dtype) - W
    return float(torch.linalg.eigvalsh((F + F.T) / 2)[0]), norm(F)


def monotone(n: int, margin: float, skew: float, seed: int) -> Tensor:
    A, B = 0.3 * gaussian(n, n, seed=seed), skew * gaussian(n, n, seed=seed + 1)
    return (1 - margin) * torch.eye(n, dtype=DOUBLE) - A.T @ A + B - B.T


def cell_map(W: Tensor, c: Tensor, activation=None) -> AbstractSplitMap:
    n = W.shape[0]
    cell = DenseCell(n, n, activation or ReLU(), bias=False, dtype=W.dtype)
    with torch.no_grad():
        cell.W.copy_(W)
        cell.U.copy_(torch.eye(n))
        return cell.bind(c)


def equilibrium(W: Tensor, c: Tensor) -> Tensor:
    """To rounding, by another method."""
    exact = {"rtol": 1e-14, "atol": 1e-14, "max_steps": 500, "on_failure": "raise"}
    return wp.fixed_point(cell_map(W, c), c, wp.NewtonKrylov(), **exact).value  # type: ignore[arg-type]


def states(solver: AbstractSolver, f: AbstractSplitMap, z: Tensor, steps: int) -> list[tuple[Tensor, Tensor]]:
    """(z, u) of so many steps, without the loop: the method itself."""

    def at(z: Tensor, fz: Tensor) -> Point:
        g = fz - z
        return Point(z, fz, g, g.norm(dim=1), torch.zeros(len(z)).double(), torch.ones(len(z)), steps)

    point = at(z, f(z))
    state = solver.init(f, point)
    out = [(z, state.get("u", z))]
    for _ in range(steps):
        step = solver.step(state, f, point)
        point = at(step.z, step.fz)
        out.append((step.z, state.get("u", step.z)))
    return out


INSTANCES = [(margin, skew, seed) for margin in (0.1, 0.5, 0.9) for skew in (0.1, 1.0) for seed in (40, 50)]


@pytest.mark.parametrize(("margin", "skew", "seed"), INSTANCES)
@pytest.mark.parametrize("a", [0.1, 1.0, 10.0])
def test_factor_of_peaceman_rachford(margin: float, skew: float, seed: int, a: float) -> None:
    """u approaches its limit by sqrt(1 - 4am/(1 + aL)^2) or better in every single step."""
    W, c = monotone(8, margin, skew, seed), gaussian(3, 8, seed=seed + 2)
    m, L = constants(W)
    assert m >= margin - 1e-12
    run = [u for _, u in states(wp.PeacemanRachford(a), cell_map(W, c), torch.zeros_like(c), 30)]
    # u* = z* + a (W z* + c - z*): the point whose prox is z*
    z_star = wp.fixed_point(
        cell_map(W, c), c, wp.NewtonKrylov(), rtol=1e-14, atol=1e-14, max_steps=500, on_failure="raise"
    ).value
    u_star = z_star + a * (z_star @ W.T + c - z_star)
    factor = math.sqrt(1 - 4 * a * m / (1 + a * L) ** 2)
    errors = torch.stack([(u - u_star).norm(dim=1) for u in run])
    assert (errors[1:] <= factor * errors[:-1] + 1e-11).all()
    assert (errors[0] > 0.1).all()


@pytest.mark.parametrize(("margin", "skew", "seed"), INSTANCES)
@pytest.mark.parametrize("part", [0.3, 1.0, 1.9])
def test_factor_of_forward_backward(margin: float, skew: float, seed: int, part: float) -> None:
    """z approaches z* by sqrt(1 - 2am + a^2 L^2) or better in every step, for a inside (0, 2m/L^2)."""
    W, c = monotone(8, margin, skew, seed), gaussian(3, 8, seed=seed + 2)
    m, L = constants(W)
    a = part * m / L**2
    z_star = wp.fixed_point(
        cell_map(W, c), c, wp.NewtonKrylov(), rtol=1e-14, atol=1e-14, max_steps=500, on_failure="raise"
    ).value
    run = [z for z, _ in states(wp.ForwardBackward(a), cell_map(W, c), torch.zeros_like(c), 30)]
    errors = torch.stack([(z - z_star).norm(dim=1) for z in run])
    assert (errors[1:] <= math.sqrt(1 - 2 * a * m + a**2 * L**2) * errors[:-1] + 1e-11).all()
    assert (errors[0] > 0.1).all()


def test_step_range_of_forward_backward_is_open() -> None:
    """[[m, w], [-w, m]] with the identity: at a = 2m/L^2 the factor is exactly 1, and beyond it the run diverges."""
    m, w = 0.5, 2.0
    W = torch.eye(2, dtype=DOUBLE) - torch.tensor([[m, w], [-w, m]], dtype=DOUBLE)
    assert constants(W) == pytest.approx((m, math.hypot(m, w)))
    end = 2 * m / (m**2 + w**2)
    c = torch.tensor([[1.0, 2.0]], dtype=DOUBLE)
    status = [
        wp.fixed_point(
            cell_map(W, c, Identity()), 0 * c, wp.ForwardBackward(part * end), max_steps=3000, on_failure="ignore"
        ).status[0]
        for part in (0.9, 1.0, 1.1)
    ]
    assert status == [Status.CONVERGED, Status.MAX_STEPS, Status.DIVERGED]
    endpoint = wp.fixed_point(cell_map(W, c, Identity()), 0 * c, wp.ForwardBackward(end), max_steps=3000, on_failure="ignore")
    assert float(endpoint.rate) == pytest.approx(1.0, abs=1e-9)


def test_forward_backward_takes_its_step_from_rigorous_bounds() -> None:
    W, c = monotone(8, 0.5, 1.0, 40), gaussian(3, 8, seed=42)
    m, L = constants(W)
    f = cell_map(W, c)
    lower, upper = f.monotonicity()
    assert lower <= m and upper >= L and lower == pytest.approx(m, rel=1e-6) and upper == pytest.approx(L, rel=1e-2)
    own = wp.fixed_point(f, 0 * c, wp.ForwardBackward(), max_steps=5000, on_failure="raise")
    given = wp.fixed_point(f, 0 * c, wp.ForwardBackward(lower / upper**2), max_steps=5000)
    assert torch.equal(own.num_steps, given.num_steps) and torch.equal(own.value, given.value)
    # best factor sqrt(1 - m^2/L^2): so many steps suffice, and a multiple of it is not needed
    z_star = own.value.norm(dim=1).max()
    bound = math.log(1e-6 * 1e-2 / float(z_star)) / math.log(math.sqrt(1 - lower**2 / upper**2))
    assert (own.num_steps <= bound).all()


def test_forward_backward_without_margin_is_refused() -> None:
    W = torch.tensor([[1.5, 0.0], [0.0, 0.2]], dtype=DOUBLE)
    c = torch.ones(1, 2, dtype=DOUBLE)
    with pytest.raises(InvalidArgument, match=r"found no certified step size: sym\(I - W\) >= m holds only with m = -0\.5"):
        wp.fixed_point(cell_map(W, c), 0 * c, wp.ForwardBackward())
    wp.fixed_point(cell_map(W, c), 0 * c, wp.ForwardBackward(0.1), on_failure="ignore", max_steps=5)  # at one's own risk


@every_splitting
def test_plain_functions_are_refused(solver: AbstractSolver) -> None:
    name = type(solver).__name__
    pattern = rf"{name} needs a map with a resolvent and a prox.*Use Auto\(\), Anderson\(\) or NewtonKrylov\(\)"
    with pytest.raises(InvalidType, match=pattern):
        wp.fixed_point(lambda z: 0.5 * z + 1, torch.zeros(2, 1), solver)


@every_splitting
def test_solves_what_plain_iteration_cannot(solver: AbstractSolver) -> None:
    p = problem("monotone")
    assert not solve(p, wp.Picard(), dense=True).converged.any()
    sol = solve(p, solver, dense=True, max_steps=20000)
    assert sol.converged.all()
    check_right(p, sol)


@reflecting
@pytest.mark.parametrize("step_size", [0.05, 0.3, 1.0, 3.0, 30.0])
def test_every_step_size_converges_to_the_same_point(kind: type, step_size: float) -> None:
    p = problem("monotone")
    sol = solve(p, kind(step_size), dense=True, max_steps=20000)
    assert sol.converged.all()
    check_honest(p, sol)
    check_right(p, sol)


def test_douglas_rachford_needs_no_margin() -> None:
    """I - W skew: m = 0. Peaceman-Rachford turns in a circle, its average with the identity goes to the middle."""
    F = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=DOUBLE)
    W, c = torch.eye(2, dtype=DOUBLE) - F, torch.tensor([[1.0, 2.0]], dtype=DOUBLE)
    f = cell_map(W, c, Identity())
    circle = wp.fixed_point(f, 0 * c, wp.PeacemanRachford(), max_steps=1000, on_failure="ignore")
    assert circle.status[0] == Status.MAX_STEPS
    middle = wp.fixed_point(f, 0 * c, wp.DouglasRachford(), max_steps=1000, on_failure="raise")
    assert torch.allclose(middle.value, torch.linalg.solve(F, c.T).T, atol=1e-5)


@every_splitting
def test_smooth_activations_at_any_step_size(solver: AbstractSolver) -> None:
    p = problem("tanh")
    assert isinstance(p.activation, Tanh)
    sol = solve(p, solver, dense=True)
    assert sol.converged.all()
    check_right(p, sol)


@every_splitting
def test_finished_samples_leave_and_take_their_state_along(solver: AbstractSolver) -> None:
    """Samples of different sizes finish at different times; the state (u, W z + c) of the others must stay theirs."""
    W = monotone(6, 0.5, 0.5, 60)
    c = gaussian(9, 6, seed=62)
    f = cell_map(W, c)
    z_star = equilibrium(W, c)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(64))
    z0 = z_star + gaussian(9, 6, seed=63) * torch.logspace(-9, 2, 9, dtype=DOUBLE)[order].unsqueeze(1)
    sol = wp.fixed_point(f, z0, solver, rtol=1e-8, max_steps=20000, on_failure="raise")
    assert len(set(sol.num_steps.tolist())) > 3
    assert ((sol.value - z_star).norm(dim=1) <= 1e-5).all()
    for i in range(9):
        alone = wp.fixed_point(cell_map(W, c[i : i + 1]), z0[i : i + 1], solver, rtol=1e-8, max_steps=20000)
        assert alone.num_steps[0] == sol.num_steps[i]
        assert torch.allclose(alone.value[0], sol.value[i], rtol=0, atol=1e-12)


@every_splitting
def test_nan_in_one_sample(solver: AbstractSolver) -> None:
    p = problem("relu_random")
    c = p.args[0].clone()
    c[1, 3] = torch.nan
    spoiled = Problem(**{**vars(p), "args": (c,)})
    sol = solve(spoiled, solver, dense=True, max_steps=20000)
    good = solve(p, solver, dense=True, max_steps=20000)
    others = [0, 2, 3]
    assert sol.status[1] == Status.NOT_FINITE and sol.converged[others].all()
    assert torch.equal(sol.num_steps[others], good.num_steps[others])
    assert torch.allclose(sol.value[others], good.value[others], rtol=0, atol=1e-12)


GRID = [2.0 ** (k / 2) for k in range(-8, 4)]


@pytest.mark.parametrize("kind", [wp.ForwardBackward, wp.PeacemanRachford, wp.DouglasRachford])
@pytest.mark.parametrize(("margin", "skew"), [(0.9, 0.1), (0.5, 0.4), (0.1, 0.3)])
def test_the_tuned_step_is_nearly_the_best_of_a_grid(kind: type, margin: float, skew: float) -> None:
    """Never more than 20 % more steps than the best of a grid of fixed step sizes."""
    W, c = monotone(30, margin, skew, 70), gaussian(8, 30, seed=72)
    f = cell_map(W, c)

    def steps(step_size: object) -> float:
        sol = wp.fixed_point(f, 0 * c, kind(step_size), rtol=1e-6, max_steps=250, on_failure="ignore")  # type: ignore[arg-type]
        return float(sol.num_steps.max()) if sol.converged.all() else math.inf

    best = min(steps(a) for a in GRID)
    assert math.isfinite(best)
    assert steps(TunedStep()) <= math.ceil(1.2 * best)


@pytest.mark.parametrize("seed", range(6))
def test_tuned_forward_backward_never_diverges(seed: int) -> None:
    """Skew-dominated problems on which most fixed steps of a grid diverge: all samples arrive, and none is ever far away."""
    W, c = monotone(12, 0.3, 1.0, 80 + 3 * seed), gaussian(6, 12, seed=82 + 3 * seed)
    f = cell_map(W, c)
    assert wp.fixed_point(f, 0 * c, wp.ForwardBackward(0.5), max_steps=500, on_failure="ignore").status[0] != Status.CONVERGED
    sol = wp.fixed_point(f, 0 * c, wp.ForwardBackward(TunedStep()), rtol=1e-6, max_steps=5000, record=True)  # type: ignore[arg-type]
    assert sol.converged.all()
    assert float(sol.history.nan_to_num(nan=0.0).max()) < 100  # type: ignore[union-attr]
    assert torch.allclose(sol.value, equilibrium(W, c), atol=1e-3)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**16), margin=st.floats(0.05, 1.0), skew=st.floats(0.0, 2.0))
def test_the_measured_step_minimises_and_is_never_below_the_certified_one(seed: int, margin: float, skew: float) -> None:
    W, d = monotone(6, margin, skew, seed), gaussian(4, 6, seed=seed + 2)
    F = torch.eye(6, dtype=DOUBLE) - W
    m, L = constants(W)
    a, log_factor = minimal_residual(d, d @ F.T, 1.0, math.inf)
    assert (a >= m / L**2 * (1 - 1e-9)).all()

    def factor(a: Tensor) -> Tensor:
        return (d - a * (d @ F.T)).norm(dim=1, keepdim=True) / d.norm(dim=1, keepdim=True)

    for part in (0.9, 1.1):
        assert (factor(a) <= factor(part * a) + 1e-12).all()
    assert torch.allclose(log_factor.exp(), factor(a).clamp(min=1e-3**0.5), atol=1e-9)
    longer, log_longer = minimal_residual(d, d @ F.T, 1.9, math.inf)
    assert torch.allclose(longer, 1.9 * a) and (log_longer < 0).all()  # below 2 it contracts along d
    short, _ = minimal_residual(d, d @ F.T, 1.0, 1e-3 * torch.ones(4, 1, dtype=DOUBLE))
    assert (short <= 1e-3).all()


def test_a_reflection_is_tuned_once_per_version_and_not_by_its_samples() -> None:
    W, c = monotone(10, 0.2, 0.3, 90), gaussian(5, 10, seed=92)
    cell = DenseCell(10, 10, bias=False, dtype=DOUBLE)
    with torch.no_grad():
        cell.W.copy_(W)
        cell.U.copy_(torch.eye(10))
        solver = wp.PeacemanRachford(TunedStep())
        steps = {solver.init(cell.bind(x), Point(*(torch.zeros_like(x),) * 6, 1))["step_size"] for x in (c, 100 * c, c[:1])}
        assert len(steps) == 1
        cell.W.copy_(torch.eye(10) - 25 * (torch.eye(10) - W))  # F is 25 times as large
        (after,) = {solver.init(cell.bind(c), Point(*(torch.zeros_like(c),) * 6, 1))["step_size"]}
        assert after == pytest.approx(steps.pop() / 25, rel=1.0)


def test_the_free_residual_of_reflections_is_the_true_one() -> None:
    """Points on the way carry f without a product: it is f all the same."""
    W, c = monotone(8, 0.5, 0.5, 95), gaussian(3, 8, seed=97)
    f = cell_map(W, c)
    for kind in (wp.PeacemanRachford, wp.DouglasRachford):
        for a in (0.01, 1.0, 50.0):
            z = torch.zeros_like(c)
            g = f(z) - z
            point = Point(z, f(z), g, g.norm(dim=1), torch.zeros(3, dtype=DOUBLE), torch.ones(3), 100)
            solver = kind(a)
            state = solver.init(f, point)
            for _ in range(3):
                step = solver.step(state, f, point)
                assert torch.allclose(step.fz, f(step.z), rtol=0, atol=1e-12 / min(a, 1.0))
                assert not torch.equal(step.z, state["z"])


def test_certified_step_of_reflections() -> None:
    W, c = monotone(8, 0.5, 1.0, 40), gaussian(3, 8, seed=42)
    f = cell_map(W, c)
    _, L = f.monotonicity()
    own = wp.fixed_point(f, 0 * c, wp.PeacemanRachford(None), on_failure="raise", max_steps=2000)
    given_step = wp.fixed_point(f, 0 * c, wp.PeacemanRachford(1 / L), max_steps=2000)
    assert torch.equal(own.num_steps, given_step.num_steps)
    bad = torch.tensor([[1.5, 0.0], [0.0, 0.2]], dtype=DOUBLE)
    with pytest.raises(InvalidArgument, match="found no certified step size"):
        wp.fixed_point(cell_map(bad, c[:, :2]), 0 * c[:, :2], wp.PeacemanRachford(None))


@pytest.mark.parametrize("solver", [wp.ForwardBackward(0.3), wp.PeacemanRachford(0.5), wp.DouglasRachford(0.5)], ids=short)
def test_steps_that_nobody_looks_at_change_nothing(solver: AbstractSolver) -> None:
    """With `record` every step is measured; answers and counts are the same, and without it fewer are."""
    W, c = monotone(12, 0.5, 0.4, 90), gaussian(5, 12, seed=91)
    f = cell_map(W, c)
    watched = wp.fixed_point(f, 0 * c, solver, rtol=1e-8, max_steps=2000, record=True)
    free = wp.fixed_point(f, 0 * c, solver, rtol=1e-8, max_steps=2000)
    assert torch.equal(watched.num_steps, free.num_steps)
    torch.testing.assert_close(watched.value, free.value, rtol=0, atol=1e-12)
    state, skipped = solver.init(f, point := Point(0 * c, f(0 * c), f(0 * c), *_norms(c), 1000)), 3
    for _ in range(4):
        step = solver.step(state, f, point)
    again = solver.init(f, point)
    point.skip = skipped
    at_once = solver.step(again, f, point)
    assert at_once.evaluations == 1 + skipped and step.evaluations == 1
    if isinstance(solver, wp.ForwardBackward):
        return  # its steps begin at the point, which this loop does not move
    torch.testing.assert_close(at_once.z, step.z)
    torch.testing.assert_close(at_once.fz, step.fz)


def _norms(c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A residual, a target that is far, and no evaluations so far."""
    return (
        torch.ones(len(c), dtype=c.dtype),
        torch.full((len(c),), 1e-12, dtype=c.dtype),
        torch.zeros(len(c), dtype=torch.int64),
    )


def test_step_sizes_of_reflections_are_found_between_two_bounds() -> None:
    from wellposed.solve.tuned_step import _root

    assert _root({0.0: 2.0}) == 2.0 and _root({1.0: -2.0}) == -1.0  # all of one sign: as far as measured
    assert _root({0.0: 1.0, 2.0: -1.0}) == pytest.approx(1.0)
    assert _root({0.0: 1e-3, 1.0: -10.0}) == pytest.approx(0.1)  # never so near to an end that nothing is learned


@pytest.mark.parametrize("solver", [wp.PeacemanRachford(), wp.PeacemanRachford(TunedStep()), wp.DouglasRachford()], ids=repr)
@pytest.mark.parametrize("activation", [wp.nn.Sigmoid(), wp.nn.Softplus()], ids=repr)
def test_values_far_below_the_precision_of_their_pre_activations(solver, activation):
    """z = s(u) of 1e-11 or 1e-41 is known to all its digits where u and x are not: the residual of x is no guide there."""
    cell = wp.nn.DenseCell(
        1, 1, activation, weight=wp.nn.Monotone(0.3), generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    x = torch.tensor([[-2.0], [-4.0], [-6.0], [-8.0], [-12.0], [-30.0]], dtype=torch.float64)
    layer = wp.EquilibriumLayer(cell, solver, on_failure="raise")
    found = layer.solve(x)
    assert found.num_steps.tolist() == [int(layer.solve(row[None]).num_steps) for row in x]
    expected = wp.EquilibriumLayer(cell, wp.Picard(), on_failure="raise").solve(x)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-10, atol=0)
    assert int(found.num_steps.max()) <= 80


@pytest.mark.parametrize("solver", [wp.PeacemanRachford(TunedStep()), wp.DouglasRachford(TunedStep())], ids=repr)
def test_the_rounding_of_a_resolvent_is_no_end(solver):
    """In float32, with |I - W| of about 70, reflections alone stay at 1.4e-6; forward-backward steps come down to 1e-6."""
    cell = wp.nn.DenseCell(20, 100, weight=wp.nn.Monotone(0.1), generator=torch.Generator().manual_seed(0))
    for parameter in cell.parameters():
        parameter.data *= 3
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(9), requires_grad=True)
    layer = wp.EquilibriumLayer(cell, solver, wp.ImplicitGradient(solver), on_failure="raise", max_steps=2000)
    assert float(layer.solve(x).residual.max()) <= 1e-6
    layer(x).square().sum().backward()
    assert bool(layer.last_adjoint.converged.all())
