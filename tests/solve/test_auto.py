"""The default solver: cheap where plain steps are cheap, and never lost where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import wellposed as wp
from conformance import CountingMap, check_honest, check_right, solve
from problems import Problem, gaussian, problem, rotations, spread_with, with_norm
from wellposed import Status


def relu_map(W: Tensor, batch: int, dtype: torch.dtype = torch.float32) -> tuple:
    n = W.shape[0]
    W, c = W.to(dtype), gaussian(batch, n, seed=30).to(dtype)
    return (lambda z, c: torch.relu(z @ W.T + c)), torch.zeros(batch, n, dtype=dtype), c


def smoothing(n: int, width: float) -> Tensor:
    k = torch.arange(n)
    kernel = torch.exp(-0.5 * (torch.minimum(k, n - k).double() / width) ** 2)
    return with_norm(kernel[(k[:, None] - k[None]) % n], 0.95)


@pytest.mark.parametrize("width", [1.0, 2.0, 5.0])
def test_goes_on_to_anderson_on_a_smoothing_map(width: float) -> None:
    f, z0, c = relu_map(smoothing(300, width), 12)
    auto = wp.fixed_point(f, z0, wp.Auto(), args=(c,), on_failure="raise")
    picard = wp.fixed_point(f, z0, wp.Picard(), args=(c,), max_steps=400, on_failure="raise")
    assert (auto.num_steps <= 45).all()
    assert (auto.num_steps < 0.5 * picard.num_steps).all()


@pytest.mark.parametrize(
    "W",
    [
        with_norm(gaussian(60, 60, seed=31), 0.3),
        0.4 * gaussian(200, 200, seed=32) / 200**0.5,
        0.3 * rotations(40, seed=33),
        torch.zeros(5, 5, dtype=torch.float64),
    ],
    ids=["norm 0.3", "Gaussian", "rotation", "zero"],
)
def test_stays_plain_on_a_fast_contraction(W: Tensor) -> None:
    f, z0, c = relu_map(W, 10)
    auto = wp.fixed_point(f, z0, wp.Auto(), args=(c,), on_failure="raise")
    picard = wp.fixed_point(f, z0, wp.Picard(), args=(c,), on_failure="raise")
    assert torch.equal(auto.num_steps, picard.num_steps) and torch.equal(auto.value, picard.value)


def test_stays_plain_where_acceleration_gains_nothing() -> None:
    """The spectrum of an orthogonal W fills a circle: with ReLU, 0.95 Q converges as fast plainly as in any other way."""
    Q = torch.linalg.qr(gaussian(300, 300, seed=34))[0]
    f, z0, c = relu_map(0.95 * Q, 10)
    auto = wp.fixed_point(f, z0, wp.Auto(), args=(c,), on_failure="raise")
    picard = wp.fixed_point(f, z0, wp.Picard(), args=(c,), on_failure="raise")
    assert (auto.num_steps <= 1.1 * picard.num_steps).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_rescues_what_plain_iteration_loses(dtype: torch.dtype) -> None:
    p = problem("expanding", dtype)
    sol = solve(p, wp.Auto())
    assert sol.converged.all() and (sol.num_steps <= 12).all()
    check_right(p, sol)


def test_ends_with_newton_where_anderson_is_slow() -> None:
    """Products with the Jacobian show that the last stage was reached."""
    n = 60
    Q = torch.linalg.qr(gaussian(n, n, seed=35))[0]
    W = Q @ torch.diag(torch.linspace(-0.999, 0.9999, n, dtype=torch.float64)) @ Q.T
    c = gaussian(2, n, seed=36)
    z_star = torch.linalg.solve(torch.eye(n, dtype=torch.float64) - W, c.T).T
    p = Problem("stiff", lambda z, c: z @ W.T + c, (c,), torch.zeros_like(c), z_star, 1.0, 1e4)
    products: list[int] = []

    class Watched(CountingMap):
        def jacobian(self, z: Tensor):  # noqa: ANN202
            products.append(len(z))
            return super().jacobian(z)

        def take(self, rows: Tensor) -> Watched:
            part = Watched(p)
            part._samples, part.counts, part.calls = self._samples[rows], self.counts, self.calls
            return part

    sol = wp.fixed_point(Watched(p), p.z0, wp.Auto(), rtol=1e-9, max_steps=1000, on_failure="raise")
    assert products
    check_right(p, sol)
    plain = wp.fixed_point(Watched(p), p.z0, wp.Picard(), rtol=1e-9, max_steps=1000, on_failure="ignore")
    assert not plain.converged.any()


def test_samples_handed_over_at_different_times_keep_their_data() -> None:
    """Fast, slow, rotating and diverging samples in one batch, in two orders; each must find its own equilibrium."""
    q = torch.tensor([0.2, 0.97, 3.0, 0.0, 0.9, -1.5, 0.99, 0.6, 0.95, 20.0], dtype=torch.float64)
    p = spread_with(q, torch.float64)
    for order in (torch.arange(10), torch.tensor([6, 0, 9, 3, 8, 1, 5, 2, 7, 4])):
        part = p.take(order)
        sol = solve(part, wp.Auto(), max_steps=400)
        assert sol.converged.all()
        check_right(part, sol)
        check_honest(part, sol)
        assert len(set(sol.num_steps.tolist())) > 4


def test_handing_over_with_captured_data() -> None:
    q = torch.tensor([0.2, 0.97, 3.0, 0.0, 0.9, -1.5, 0.99, 0.6], dtype=torch.float64)
    p = spread_with(q, torch.float64)
    sol = wp.fixed_point(lambda z: p.f(z, *p.args), p.z0, wp.Auto(), rtol=1e-9, max_steps=400, on_failure="raise")
    check_right(p, sol)


def test_every_sample_is_judged_by_itself() -> None:
    """A slow neighbour does not draw a fast sample into acceleration, nor the other way round."""
    q = torch.tensor([0.3, 0.99], dtype=torch.float64)
    p = spread_with(q, torch.float64)
    both = solve(p, wp.Auto())
    assert [int(solve(p.take([i]), wp.Auto()).num_steps) for i in (0, 1)] == both.num_steps.tolist()
    assert both.num_steps[0] == solve(p, wp.Picard()).num_steps[0]


def test_budget_goes_through_all_stages() -> None:
    for max_steps in (1, 4, 5, 6, 7, 10, 25, 26, 40):
        p = problem("slow").take([0])
        f = CountingMap(p)
        sol = wp.fixed_point(f, p.z0, wp.Auto(), rtol=1e-15, max_steps=max_steps, on_failure="ignore")
        assert f.counts.tolist() == sol.num_steps.tolist()
        assert sol.converged.all() or (sol.num_steps == max_steps).all()
        check_honest(p, sol, rtol=1e-15)


def test_failure_in_the_last_stage_is_reported() -> None:
    sol = solve(problem("shift"), wp.Auto(), max_steps=150)
    assert (sol.status == Status.MAX_STEPS).all() and (sol.num_steps == 150).all()


def test_own_stages() -> None:
    p = problem("smoothing")
    custom = wp.Auto(plain=wp.Picard(0.9), accelerated=wp.Anderson(memory=2), newton=wp.NewtonKrylov(forcing=0.5))
    assert [type(stage).__name__ for stage, _ in custom.stages()] == ["Picard", "Anderson", "Picard", "NewtonKrylov"]
    assert custom.stages()[0][0] == wp.Picard(0.9)
    assert solve(p, custom).converged.all()


def test_has_no_steps_of_its_own() -> None:
    with pytest.raises(NotImplementedError, match="the loop runs its stages"):
        wp.Auto().init(None, None)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="the loop runs its stages"):
        wp.Auto().step(None, None, None)  # type: ignore[arg-type]


def test_a_sample_that_acceleration_cannot_solve_goes_back_to_plain_steps() -> None:
    """Cells with kinks and a norm: Anderson is stuck on some samples that plain iteration solves."""
    fewer = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        W = torch.randn(16, 16, generator=generator) / 4
        c = torch.randn(128, 8, generator=generator) @ (torch.randn(16, 8, generator=generator) / 3).T

        def f(z: torch.Tensor, c: torch.Tensor, W: torch.Tensor = W) -> torch.Tensor:
            return torch.nn.functional.layer_norm(torch.relu(z + 0.5 * torch.relu(z @ W.T + c)), (16,))

        failed = {}
        for solver in (wp.Auto(), wp.Anderson(), wp.Picard()):
            sol = wp.fixed_point(f, torch.zeros(128, 16), solver, args=(c,), rtol=1e-5, max_steps=200, on_failure="ignore")
            failed[type(solver).__name__] = int((~sol.converged).sum())
        fewer.append(failed["Auto"] <= min(failed["Anderson"], failed["Picard"]))
    assert all(fewer)


def test_a_sample_switches_by_itself() -> None:
    """Which points are kept for the decision to accelerate does not depend on whether another sample is slow."""
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        W = torch.randn(5, 5, generator=generator, dtype=torch.float64) / 5**0.5
        x = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        q = 3 * torch.rand(2, 1, generator=generator, dtype=torch.float64)

        def f(z: Tensor, x: Tensor, q: Tensor, W: Tensor = W) -> Tensor:
            return torch.tanh(q * (z @ W.T) + x)

        options: dict[str, Any] = {"rtol": 1e-6, "on_failure": "ignore", "max_steps": (10, 200)[seed % 2]}
        pair = wp.fixed_point(f, torch.zeros(2, 5, dtype=torch.float64), args=(x, q), **options)
        for i in range(2):
            part = slice(i, i + 1)
            alone = wp.fixed_point(f, torch.zeros(1, 5, dtype=torch.float64), args=(x[part], q[part]), **options)
            assert alone.status[0] == pair.status[i] and alone.num_steps[0] == pair.num_steps[i]


@pytest.mark.parametrize("weight", [1.0, 1.5])
def test_along_a_directed_chain_plain_steps_continue_to_their_end(weight: float) -> None:
    """The residual does not fall before the last node is exact, and acceleration does not help."""
    nodes = 40
    A = torch.diag(torch.full((nodes - 1,), weight, dtype=torch.float64), -1)
    steps = []
    for solver in (wp.Auto(), wp.Picard()):
        layer = wp.EquilibriumLayer(lambda z, x: z @ A.T + x, solver, wp.ImplicitGradient(solver), on_failure="raise")
        x = gaussian(2, nodes, seed=0).requires_grad_()
        layer(x).square().sum().backward()
        steps.append((int(layer.last_solution.num_steps.max()), int(layer.last_adjoint.num_steps.max())))
    (auto, auto_back), (plain, plain_back) = steps
    assert auto <= plain + 5 and auto_back <= plain_back + 5


class SlowingConv(torch.nn.Module):
    """Two convolutions around a sum: residuals fall by 0.5 in the first steps, by 0.77 in the last."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        weights = 0.01 * torch.randn(2, channels, channels, 3, 3, generator=draws)
        self.first, self.second = (torch.nn.Parameter(weight) for weight in weights)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        inner = F.group_norm(F.relu(F.conv2d(z, self.first, padding=1)), 8)
        return F.group_norm(F.relu(z + F.group_norm(x + F.conv2d(inner, self.second, padding=1), 8)), 8)


def test_where_residuals_slow_down_acceleration_begins_at_once() -> None:
    x = torch.randn(2, 32, 16, 16, generator=torch.Generator().manual_seed(1))
    steps = []
    for solver in (wp.Auto(), wp.Anderson(), wp.Picard()):
        layer = wp.EquilibriumLayer(SlowingConv(), solver, rtol=1e-4, on_failure="raise")
        layer(x)
        steps.append(float(layer.last_solution.num_steps.double().mean()))
    auto, accelerated, plain = steps
    assert plain >= accelerated + 6 and auto <= accelerated + 1


class Smoothing(torch.nn.Module):
    """tanh of an average over neighbours: residuals fall fast in the first steps, and ever more slowly."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        distance = torch.arange(width).minimum(width - torch.arange(width)).float()
        kernel = torch.exp(-((distance / 12) ** 2) / 2)
        W = torch.stack([kernel.roll(shift) for shift in range(width)]) / kernel.sum()
        self.W = torch.nn.Parameter(0.97 * W)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.W + x)


def test_where_steps_cost_little_the_last_factor_counts_too() -> None:
    """The mean factor of the first five steps promises an end that does not come."""
    x = 0.5 * torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    steps = []
    for solver in (wp.Auto(), wp.Anderson(), wp.Picard()):
        layer = wp.EquilibriumLayer(Smoothing(), solver, rtol=1e-4, on_failure="raise")
        layer(x)
        steps.append(float(layer.last_solution.num_steps.double().mean()))
    auto, accelerated, plain = steps
    assert plain >= 2 * accelerated and auto <= 1.3 * accelerated, steps


def monotone_layers(batch: int = 6, n: int = 40) -> tuple[Tensor, Any]:
    """Inputs, and a layer by solver of the backward pass, of a map with one equilibrium that plain steps leave."""
    skew = gaussian(n, n, seed=1) / n**0.5
    W = -0.2 * torch.eye(n, dtype=torch.float64) + 0.9 * (skew - skew.T)
    x = 3 * gaussian(batch, n, seed=2) * torch.linspace(0.1, 1.0, batch, dtype=torch.float64).unsqueeze(1)

    def layer(solver: wp.solve.AbstractSolver | None) -> wp.EquilibriumLayer:
        cell = lambda z, x: torch.tanh(z @ W.T + x)  # noqa: E731
        return wp.EquilibriumLayer(cell, gradient=wp.ImplicitGradient(solver), rtol=1e-8, max_steps=300, on_failure="raise")

    return x, layer


def test_an_affine_map_that_expands_goes_to_krylov_steps_at_once() -> None:
    """The adjoint: six products beyond those of Newton-Krylov find out that plain steps do not contract, and none is wasted."""
    x, layer = monotone_layers()
    steps, gradients = {}, {}
    for solver in (None, wp.NewtonKrylov(), wp.Anderson()):
        leaf, net = x.clone().requires_grad_(), layer(solver)
        gradients[solver] = torch.autograd.grad(net(leaf).square().sum(), leaf)[0]
        steps[solver] = int(net.last_adjoint.num_steps.max())
    assert steps[None] <= steps[wp.NewtonKrylov()] + 6 and steps[None] < steps[wp.Anderson()], steps
    torch.testing.assert_close(gradients[None], gradients[wp.NewtonKrylov()], rtol=1e-6, atol=1e-8)


def test_the_adjoint_of_a_sample_does_not_depend_on_neighbours_that_expand() -> None:
    x, layer = monotone_layers()
    x[0] *= 20  # tanh is flat there: this sample contracts
    whole, net = x.clone().requires_grad_(), layer(None)
    together = torch.autograd.grad(net(whole).square().sum(), whole)[0]
    counts = net.last_adjoint.num_steps
    assert len(counts.unique()) > 1
    for i in (0, 3):
        alone, single = x[i : i + 1].clone().requires_grad_(), layer(None)
        torch.testing.assert_close(
            torch.autograd.grad(single(alone).square().sum(), alone)[0][0], together[i], rtol=1e-6, atol=1e-9
        )
        assert abs(int(single.last_adjoint.num_steps) - int(counts[i])) <= 1
