"""Plain and damped iteration: the steps and the rate are known on paper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import wellposed as wp
from conformance import CountingFunction, check_honest, check_right, solve
from problems import Problem, problem
from wellposed import Status
from wellposed.nn import DenseCell


@pytest.mark.parametrize("slope", [0.0, 0.3, -0.5, 0.9, 0.99])
@pytest.mark.parametrize("damping", [1.0, 0.5])
def test_steps_are_those_of_the_geometric_series(slope: float, damping: float) -> None:
    z0 = torch.zeros(1, 1, dtype=torch.float64)
    sol = wp.fixed_point(lambda z: slope * z + 1, z0, wp.Picard(damping), rtol=1e-8, max_steps=5000, on_failure="raise")
    # z_k = z* (1 - p^k), p = 1 - damping (1 - slope); f(z) - z = (1 - slope) (z* - z)
    p, z_star = 1 - damping * (1 - slope), 1 / (1 - slope)
    k = 0
    while (1 - slope) * z_star * abs(p) ** k > 1e-8 * abs(z_star * (1 - slope * p**k)):
        k += 1
    assert sol.num_steps.item() == k + 2  # at z_0, ..., z_k, and once more at z_k
    assert math.isclose(float(sol.value), z_star * (1 - p**k), rel_tol=1e-12)
    if k > 0:
        assert math.isclose(float(sol.rate), abs(p), rel_tol=1e-6, abs_tol=1e-12)


def test_iterates_are_those_of_the_formula() -> None:
    p = problem("tanh").take([0])
    f = CountingFunction(p)
    args = (torch.arange(1), *p.args)
    wp.fixed_point(f, p.z0, wp.Picard(0.3), args=args, max_steps=6, on_failure="ignore")
    z = p.z0
    for seen in f.visited[0][:-1]:  # the last evaluation confirms
        assert torch.allclose(seen, z[0], rtol=1e-14)
        z = 0.7 * z + 0.3 * p.image(z)


def test_damping_tames_negative_slopes() -> None:
    """-1.5 z + 1: plain iteration diverges; with damping 1/2 the factor is -0.25."""
    z0 = torch.zeros(2, 1, dtype=torch.float64)
    plain = wp.fixed_point(lambda z: -1.5 * z + 1, z0, wp.Picard(), on_failure="ignore")
    assert (plain.status == Status.DIVERGED).all()
    damped = wp.fixed_point(lambda z: -1.5 * z + 1, z0, wp.Picard(0.5), on_failure="raise")
    assert torch.allclose(damped.value, torch.full_like(z0, 0.4)) and torch.allclose(damped.rate, torch.tensor(0.25).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_spectral_radius_close_to_one(dtype: torch.dtype) -> None:
    p = problem("slow", dtype)
    sol = solve(p, wp.Picard(), rtol=1e-5, max_steps=20000)
    assert sol.converged.all() and (sol.num_steps > 500).all()
    check_honest(p, sol, rtol=1e-5)
    check_right(p, sol)
    short = solve(p, wp.Picard(), rtol=1e-5, max_steps=300)
    assert (short.status == Status.MAX_STEPS).all()
    check_honest(p, short, rtol=1e-5)


def test_nilpotent_ends_exactly() -> None:
    """W^8 = 0: f^8 is constant, so the ninth evaluation finds a fixed point, after residuals that grew a thousandfold."""
    p = problem("nilpotent")
    sol = solve(p, wp.Picard(), rtol=1e-15, record=True)
    assert sol.num_steps.tolist() == [10] * 4  # and the tenth confirms it
    assert sol.history is not None


def test_cycle_is_not_convergence() -> None:
    sol = wp.fixed_point(lambda z: 1 - z, torch.zeros(1, 2), wp.Picard(), on_failure="ignore")
    assert sol.status[0] == Status.MAX_STEPS and sol.num_steps.item() == 200
    assert wp.fixed_point(lambda z: 1 - z, torch.zeros(1, 2), wp.Picard(0.5)).num_steps.item() == 3


def test_buffers_of_a_cell_are_reused_without_a_trace() -> None:
    """The map of a cell writes into old iterates; the answer must be that of an iteration that never reuses memory."""
    cell = DenseCell(5, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    z0 = torch.randn(40, 30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def plain(z: Tensor, x: Tensor) -> Tensor:
        return cell(z, x)

    for max_steps in (*range(1, 9), 100):
        options = {"max_steps": max_steps, "on_failure": "ignore", "rtol": 1e-10}
        buffered = wp.fixed_point(cell.bind(x), z0, wp.Picard(), **options)  # type: ignore[arg-type]
        options["max_steps"] = max_steps + 1
        reference = wp.fixed_point(plain, z0, wp.Picard(), args=(x,), **options)  # type: ignore[arg-type]
        assert torch.equal(buffered.num_steps + 1, reference.num_steps)  # one more confirms a function
        assert torch.allclose(buffered.value, reference.value, rtol=0, atol=1e-13)
        assert torch.allclose(buffered.absolute_residual, reference.absolute_residual, rtol=1e-6, atol=1e-14)


def test_best_point_is_kept_while_buffers_are_reused() -> None:
    """Residuals that rise and fall: the best point must survive the reuse of old iterates as buffers."""
    W = torch.tensor([[0.0, 3.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    cell = DenseCell(3, 3, wp.nn.Identity(), bias=False, dtype=torch.float64)
    with torch.no_grad():
        cell.W.copy_(W)
        cell.U.copy_(torch.eye(3))
    x = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    p = Problem("rise", lambda z, x: z @ W.T + x, (x,), torch.zeros(3, 3, dtype=torch.float64), None, 3.0, math.inf)
    for max_steps in range(1, 5):
        sol = wp.fixed_point(cell.bind(x), p.z0, wp.Picard(), rtol=1e-12, max_steps=max_steps, on_failure="ignore")
        check_honest(p, sol, rtol=1e-12)
