"""Anderson acceleration: against a textbook version, on singular systems, and its safeguard."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import wellposed as wp
from conformance import CountingFunction, check_honest, check_right, solve
from problems import Problem, flat, problem


def textbook(f, z: Tensor, memory: int, damping: float, steps: int) -> list[Tensor]:
    """The iterates of one sample by dense least squares, type II, differences of the last `memory` steps."""
    points, zs, fs = [], [], []
    for _ in range(steps):
        points.append(z)
        zs.append(z)
        fs.append(f(z))
        g = fs[-1] - zs[-1]
        m = min(memory, len(zs) - 1)
        if m == 0:
            z = zs[-1] + g  # the first step of ours is plain, whatever the damping
            if damping < 1:
                z = zs[-1] + damping * g
            continue
        gs = [b - a for a, b in zip(zs, fs, strict=True)]
        dG = torch.stack([gs[-i] - gs[-i - 1] for i in range(1, m + 1)], dim=1)
        dF = torch.stack([fs[-i] - fs[-i - 1] for i in range(1, m + 1)], dim=1)
        gamma = torch.linalg.lstsq(dG, g.unsqueeze(1), driver="gelsd").solution.squeeze(1)
        z = fs[-1] - dF @ gamma - (1 - damping) * (g - dG @ gamma)
    return points


@pytest.mark.parametrize("memory", [1, 2, 4])
@pytest.mark.parametrize("damping", [1.0, 0.7])
@pytest.mark.parametrize("name", ["affine", "tanh"])
def test_iterates_are_those_of_the_textbook(name: str, memory: int, damping: float) -> None:
    p = problem(name).take([0])
    f = CountingFunction(p)
    solver = wp.Anderson(memory=memory, regularization=0.0, damping=damping)
    wp.fixed_point(f, p.z0, solver, args=(torch.arange(1), *p.args), rtol=1e-12, max_steps=9, on_failure="ignore")
    expected = textbook(lambda z: p.image(z.unsqueeze(0))[0], p.z0[0], memory, damping, 8)
    residuals = [float((p.image(z.unsqueeze(0))[0] - z).norm()) for z in expected]
    assert residuals == sorted(residuals, reverse=True), "the safeguard would act, and the comparison would not hold"
    for seen, z in zip(f.visited[0][:-1], expected, strict=True):  # the last evaluation confirms
        assert torch.allclose(seen, z, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["affine", "rotation", "spread"])
def test_affine_maps_end_after_as_many_steps_as_features(name: str) -> None:
    """With full memory it is GMRES in disguise [walker2011]: exact after n + 2 evaluations, and one confirms."""
    p = problem(name)
    features = flat(p.z0).shape[1]
    sol = solve(p, wp.Anderson(memory=features, regularization=0.0), rtol=1e-7)
    assert sol.converged.all() and (sol.num_steps <= features + 3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("regularization", [0.0, 1e-10, 1e-4])
@pytest.mark.parametrize("memory", [2, 5, 30])
def test_collinear_differences(dtype: torch.dtype, regularization: float, memory: int) -> None:
    """Copies of one scalar map: from the second difference on, the least-squares system is singular."""
    solver = wp.Anderson(memory=memory, regularization=regularization)
    z0 = torch.zeros(3, 4, dtype=dtype)
    sol = wp.fixed_point(lambda z: 0.9 * torch.sin(z) + 1, z0, solver, rtol=1e-5, on_failure="raise")
    low, high = 1.5, 2.0
    for _ in range(50):  # z - 0.9 sin z - 1 increases: bisection
        middle = (low + high) / 2
        low, high = (middle, high) if middle < 0.9 * math.sin(middle) + 1 else (low, middle)
    assert torch.allclose(sol.value, torch.full_like(z0, low), rtol=1e-4) and (sol.num_steps < 15).all()


def test_memory_larger_than_features_and_steps() -> None:
    sol = wp.fixed_point(lambda z: 0.5 * z + 1, torch.zeros(2, 1, dtype=torch.float64), wp.Anderson(memory=50))
    assert torch.allclose(sol.value, torch.tensor(2.0).double())


def test_repeated_points() -> None:
    """1 - z from 1/2: every difference is zero at the solution; from 0 they are all the same vector."""
    z0 = torch.tensor([[0.5, 0.5], [0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    sol = wp.fixed_point(lambda z: 1 - z, z0, wp.Anderson(), on_failure="raise")
    assert torch.allclose(sol.value, torch.full_like(z0, 0.5)) and sol.num_steps[0] == 2 and (sol.num_steps <= 5).all()


def test_piecewise_constant_f_has_differences_of_zero() -> None:
    sol = wp.fixed_point(lambda z: torch.floor(0.5 * z + 3), torch.zeros(2, 3), wp.Anderson(), on_failure="ignore")
    assert sol.value.isfinite().all()
    assert ((torch.floor(0.5 * sol.value + 3) - sol.value).norm(dim=1) <= 1e-6 * 10)[sol.converged].all()


def kinked(z: Tensor, c: Tensor) -> Tensor:
    """Steep on one side and flat on the other: secants through the kink mislead."""
    return torch.where(z > c, 0.98 * (z - c) + 0.3, -0.9 * (z - c) + 0.3)


@pytest.mark.parametrize("memory", [1, 3, 6])
def test_safeguard_goes_back_to_the_accepted_point(memory: int) -> None:
    """Reconstructs from outside which points were accepted: after a rejection comes the plain step from the last of them."""
    generator = torch.Generator().manual_seed(3)
    rejections = 0
    for _ in range(20):
        c = torch.randn(1, 5, generator=generator, dtype=torch.float64)
        p = Problem("kinked", kinked, (c,), torch.zeros(1, 5, dtype=torch.float64), None, 1.0, float("inf"))
        f = CountingFunction(p)
        solver = wp.Anderson(memory=memory)
        wp.fixed_point(f, p.z0, solver, args=(torch.arange(1), c), max_steps=25, rtol=1e-12, on_failure="ignore")
        points = f.visited[0]
        images = [kinked(z.unsqueeze(0), c)[0] for z in points]
        residuals = [float((b - a).norm()) for a, b in zip(points, images, strict=True)]
        accepted = 0
        for k in range(1, len(points)):
            plain = torch.equal(points[k], images[accepted])
            if residuals[k] <= residuals[accepted] or plain:
                accepted = k
            elif k + 1 < len(points):
                rejections += 1
                assert torch.equal(points[k + 1], images[accepted])
    assert rejections > 5


def test_never_returns_worse_than_the_best_point() -> None:
    c = torch.randn(16, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    p = Problem("kinked", kinked, (c,), torch.zeros(16, 5, dtype=torch.float64), None, 1.0, float("inf"), max_steps=30)
    solutions = [solve(p, wp.Anderson(), max_steps=k, rtol=1e-14) for k in range(1, 25)]
    residuals = torch.stack([sol.absolute_residual for sol in solutions])
    # more steps never return more residual, which is measured to the rounding of f
    assert (residuals[1:] <= residuals[:-1] + p.rounding(solutions[-1].value)).all()


def test_works_where_plain_iteration_does_not() -> None:
    p = problem("expanding")
    sol = solve(p, wp.Anderson())
    assert sol.converged.all() and (sol.num_steps <= 4).all()


def test_float32_with_large_states() -> None:
    p = problem("smoothing", torch.float32)
    sol = solve(p, wp.Anderson())
    check_honest(p, sol)
    check_right(p, sol)
    assert sol.converged.all() and (sol.num_steps < 60).all()


def test_regularization_is_relative() -> None:
    """Scaling f and z by 1e6 changes nothing but the scale."""
    p = problem("relu_random")
    f, (c,) = p.f, p.args
    solver = wp.Anderson(regularization=1e-3)
    small = wp.fixed_point(f, p.z0, solver, args=(c,), rtol=1e-8)
    scale = 2.0**20
    large = wp.fixed_point(f, p.z0 * scale, solver, args=(c * scale,), rtol=1e-8)
    assert torch.equal(large.num_steps, small.num_steps)
    assert torch.allclose(large.value / scale, small.value, rtol=1e-9)


def test_an_extrapolation_out_of_the_domain_costs_an_evaluation_and_not_the_sample():
    # z = log(z) + 2: candidates fall below 0 from this start, plain steps never do
    start = torch.tensor([[0.3], [3.0]], dtype=torch.float64)
    seen = []

    def f(z):
        seen.append(z.shape[0])
        return torch.log(z) + 2

    solution = wp.fixed_point(f, start, solver=wp.Anderson(), rtol=1e-12)
    assert solution.converged.all()
    torch.testing.assert_close(solution.value, torch.log(solution.value) + 2, rtol=1e-11, atol=0)
    assert int(solution.num_steps.sum()) <= sum(seen)
    assert int(solution.num_steps.max()) <= 100


def test_memory_that_is_not_filled_yet_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not set to 0 either, which would take as long as several steps."""
    p = problem("slow")
    expected = solve(p, wp.Anderson(memory=4))

    def poisoned(self: Tensor, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)

    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    for solver in (wp.Anderson(memory=4), wp.Auto(accelerated=wp.Anderson(memory=4))):
        found = solve(p, solver)
        assert found.converged.all() and found.value.isfinite().all()
        if isinstance(solver, wp.Anderson):
            assert torch.equal(found.value, expected.value)
