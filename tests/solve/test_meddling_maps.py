"""Maps that change their argument behind torch's back, and random numbers that are not those of the map."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from conformance import every_method
from wellposed.solve import AbstractSolver

F64 = torch.float64


def through_data(z: Tensor) -> Tensor:
    z.data.mul_(0.5).add_(1.0)
    return z


def through_data_with_a_new_value(z: Tensor) -> Tensor:
    w = 0.5 * z + 1.0
    z.data.copy_(w)
    return w


def through_numpy(z: Tensor) -> Tensor:
    a = z.detach().numpy()
    a *= 0.5
    a += 1.0
    return z


@every_method
@pytest.mark.parametrize("f", [through_data, through_data_with_a_new_value, through_numpy])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_map_that_changes_its_argument_is_refused_and_the_start_stays(solver: AbstractSolver, f: Any, batch: int) -> None:
    start = torch.full((batch, 3), 7.0, dtype=F64)
    with pytest.raises(wp.InvalidArgument, match="f changed its argument in place"):
        wp.fixed_point(f, start, solver, on_failure="ignore")
    assert (start == 7.0).all()


# --- random numbers --------------------------------------------------------------------------------------------------


def test_numbers_that_another_thread_draws_are_not_those_of_f() -> None:
    """f waits in every evaluation until another thread has drawn."""
    asked, drawn, stop = threading.Event(), threading.Event(), threading.Event()

    def draw() -> None:
        while not stop.is_set():
            if asked.wait(0.05):
                asked.clear()
                torch.rand(1)
                drawn.set()

    def f(z: Tensor) -> Tensor:
        drawn.clear()
        asked.set()
        assert drawn.wait(10)
        return torch.cos(z)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for max_steps in (50, 200):
            sol = wp.fixed_point(f, torch.zeros(2, 2, dtype=F64), max_steps=max_steps, on_failure="ignore")
            assert sol.converged.all() and not sol.note and (sol.num_steps <= max_steps).all()
        layer = wp.EquilibriumLayer(lambda z, x: f(z) + x, gradient=wp.UnrolledGradient(60), rtol=1e-6)
        layer(torch.zeros(2, 2, dtype=F64))
        assert layer.last_solution.converged.all()
    finally:
        stop.set()
        thread.join()


def test_where_no_evaluation_is_left_the_doubt_is_stated() -> None:
    def f(z: Tensor) -> Tensor:
        torch.rand(())
        return torch.ones_like(z)

    for max_steps, note in ((1, "f may be random"), (2, "f may be random"), (3, "f is random"), (4, "f is random")):
        sol = wp.fixed_point(f, torch.ones(2, 2), max_steps=max_steps, on_failure="ignore")
        assert not sol.converged.any() and sol.note.startswith(note) and (sol.num_steps == min(max_steps, 3)).all()
