"""Broyden's method: against dense updates, its line search and its memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wellposed as wp
from conformance import CountingFunction, CountingMap, check_honest, check_right, solve
from problems import flat, problem
from wellposed import Status


def textbook(f, z: Tensor, steps: int) -> list[Tensor]:
    """The iterates of one sample with a dense inverse Jacobian of g = f - z, updated by Sherman-Morrison; full steps."""
    H = -torch.eye(len(z), dtype=z.dtype)
    points, g = [z], f(z) - z
    for _ in range(steps - 1):
        s = -H @ g
        z = z + s
        y = f(z) - z - g
        g = g + y
        H = H + torch.outer(s - H @ y, s @ H) / (s @ H @ y)
        points.append(z)
    return points


@pytest.mark.parametrize("name", ["affine", "tanh", "relu_random"])
def test_iterates_are_those_of_the_textbook(name: str) -> None:
    p = problem(name).take([0])
    f = CountingFunction(p)
    wp.fixed_point(f, p.z0, wp.Broyden(), args=(torch.arange(1), *p.args), rtol=1e-13, max_steps=11, on_failure="ignore")
    expected = textbook(lambda z: p.image(z.unsqueeze(0))[0], p.z0[0], 10)
    assert len(f.visited[0]) == 11  # no line search: every full step was taken, and one evaluation confirms
    for seen, z in zip(f.visited[0][:-1], expected, strict=True):
        assert torch.allclose(seen, z, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["affine", "tuple_state"])
def test_affine_maps_end_after_twice_as_many_steps_as_features(name: str) -> None:
    """A theorem of Gay (1979): at most 2n steps on an affine map, as long as every full step is taken."""
    p = problem(name)
    sol = solve(p, wp.Broyden(memory=40), rtol=1e-7)
    assert sol.converged.all() and (sol.num_steps <= 2 * flat(p.z0).shape[1] + 1).all()


@pytest.mark.parametrize("memory", [1, 2, 5])
def test_full_memory_starts_again(memory: int) -> None:
    p = problem("relu_random")
    sol = solve(p, wp.Broyden(memory=memory))
    check_honest(p, sol)
    check_right(p, sol)
    assert sol.converged.all() and (sol.num_steps > 2 * memory).all()


def test_line_search_is_each_samples_own() -> None:
    """f - z = -z^3 is flat at 0 and steep far away: the far sample must halve its steps, the near one need not."""
    z0 = torch.tensor([[0.5], [3.0], [0.1]], dtype=torch.float64)
    p = problem("scalar", batch=3)
    f = CountingMap(type(p)(**{**vars(p), "f": lambda z: z - z**3, "z0": z0}))
    sol = wp.fixed_point(f, z0, wp.Broyden(), atol=1e-4, rtol=0.0, max_steps=100)
    assert sol.converged.all()
    first_search = f.calls[2]  # the first step is one evaluation for all, then only those that still search
    assert first_search == [1]
    assert f.counts.tolist() == sol.num_steps.tolist()


def test_line_search_recovers_from_nan() -> None:
    """A full step from z = 4 leads to 0.6, where f is NaN; half of it leads to 2.3, and from there it converges."""

    def f(z: Tensor) -> Tensor:
        return torch.where(z < 1, torch.nan, 0.3 * (z - 2) + 2 - (z - 2).clamp_min(0))

    z0 = torch.tensor([[4.0]], dtype=torch.float64)
    plain = wp.fixed_point(f, z0, wp.Picard(), on_failure="ignore")
    assert plain.status[0] == Status.NOT_FINITE
    sol = wp.fixed_point(f, z0, wp.Broyden(), rtol=1e-9, on_failure="raise")
    assert abs(float(sol.value) - 2) < 1e-8


def test_a_pair_that_is_rounding_error_is_left_out() -> None:
    """On z + c the change of f - z is rounding error; a model built on it sent the next point to 1e14."""
    for dtype in (torch.float32, torch.float64):
        z0 = torch.full((2, 3), 0.3, dtype=dtype)
        largest = 0.0

        def f(z: Tensor) -> Tensor:
            nonlocal largest
            largest = max(largest, float(z.abs().max()))
            return z + 0.1

        wp.fixed_point(f, z0, wp.Broyden(), max_steps=50, on_failure="ignore")
        assert largest < 10


def test_finds_what_plain_iteration_runs_from() -> None:
    p = problem("expanding")
    sol = solve(p, wp.Broyden())
    assert sol.converged.all() and (sol.num_steps == 4).all()
