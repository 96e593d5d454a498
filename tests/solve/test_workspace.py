"""Memory that is used again: never seen by the caller, never growing, never in the way."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import Tensor

import wellposed as wp
from conformance import SPLITTING, every_method, every_solver, short, solve
from problems import problem
from wellposed import _tree
from wellposed._tree import give_buffer, take_buffer
from wellposed.solve import AbstractMap, AbstractSolver, loop
from wellposed.solve import solver as solver_module

SHAPE = (31, 7)
SLOPES = {"contracting": 0.5, "cycling": -1.0, "diverging": -1.05}
every_slope = pytest.mark.parametrize("slope", SLOPES.values(), ids=SLOPES.keys())
some_solvers = pytest.mark.parametrize(
    "solver", [wp.Picard(), wp.Picard(0.99), wp.Anderson(memory=2), wp.Broyden(memory=2), wp.Auto()], ids=short
)


class Alive:
    """slope z + 1 on memory of numpy, whose life can be watched: how many values are alive at each evaluation."""

    def __init__(self, slope: float) -> None:
        self.slope, self.values, self.counts = slope, [], []

    def __call__(self, z: Tensor) -> Tensor:
        self.counts.append(sum(value() is not None for value in self.values))
        value = self.slope * z.detach().numpy() + 1
        self.values.append(weakref.ref(value))
        return torch.from_numpy(value)


class Writing(AbstractMap):
    """slope z + 1 into the buffers it is given; counts them."""

    writes_out = True

    def __init__(self, slope: float) -> None:
        self.slope, self.given = slope, 0

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        self.given += out is not None
        return torch.add(torch.ones_like(z), z, alpha=self.slope, out=out)

    def take(self, rows: Tensor) -> Writing:
        return self


@every_slope
@some_solvers
def test_memory_does_not_grow_with_the_number_of_steps(slope: float, solver: AbstractSolver) -> None:
    f = Alive(slope)
    wp.fixed_point(f, torch.zeros(SHAPE, dtype=torch.float64), solver, rtol=1e-13, max_steps=60, on_failure="ignore")
    assert max(f.counts) <= 8


@every_slope
@some_solvers
def test_few_buffers_are_taken(slope: float, solver: AbstractSolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the residual rises and falls, old points are written over before new memory is asked for."""
    taken: list[int] = []
    for module in (loop, solver_module):
        monkeypatch.setattr(module, "take_buffer", lambda like: taken.append(1) or take_buffer(like))
    f = Writing(slope)
    wp.fixed_point(f, torch.zeros(SHAPE, dtype=torch.float64), solver, rtol=1e-13, max_steps=60, on_failure="ignore")
    assert len(taken) <= 5
    if isinstance(solver, wp.Picard):
        assert f.given > 20


@every_solver
@pytest.mark.parametrize("max_steps", [1, 3, 400])
def test_an_answer_is_not_overwritten_by_the_next_solve(solver: AbstractSolver, max_steps: int) -> None:
    """Converged or not, of a cell or of a function: what was returned belongs to the caller."""
    p = problem("relu_random", batch=9)
    results = [solve(p, solver, dense=dense, max_steps=max_steps) for dense in (True, False, True)]
    copies = [(sol.value.clone(), sol.residual.clone()) for sol in results]
    for dense in (True, False):
        for steps in (1, 2, 3, 50):
            solve(p.take(torch.arange(8, -1, -1)), solver, dense=dense, max_steps=steps)
    for sol, (value, residual) in zip(results, copies, strict=True):
        assert torch.equal(sol.value, value) and torch.equal(sol.residual, residual)
    assert len({sol.value.data_ptr() for sol in results}) == 3


@pytest.mark.parametrize("solver", SPLITTING, ids=short)
def test_an_answer_of_a_splitting_method_is_not_overwritten(solver: AbstractSolver) -> None:
    p = problem("monotone")
    first = solve(p, solver, dense=True, max_steps=200)
    copy = first.value.clone()
    solve(p.take([3, 2, 1, 0]), solver, dense=True, max_steps=200)
    assert torch.equal(first.value, copy)


@every_method
def test_writing_to_an_answer_does_not_disturb_the_next_solve(solver: AbstractSolver) -> None:
    p = problem("relu_random")
    first = solve(p, solver, dense=True)
    reference = first.value.clone()
    first.value.fill_(torch.nan)
    assert torch.equal(solve(p, solver, dense=True).value, reference)


@every_method
def test_inference_mode_before_and_after(solver: AbstractSolver) -> None:
    """A buffer made in inference mode cannot be written to outside; the next solve of that shape once failed on it."""
    p = problem("relu_random")
    for dense in (True, False):
        reference = solve(p, solver, dense=dense)
        _tree._kept().clear()
        with torch.inference_mode():
            solve(p, solver, dense=dense)
        assert torch.equal(solve(p, solver, dense=dense).value, reference.value)


def test_a_solve_inside_a_solve() -> None:
    """The inner one has the same shapes and takes its own buffers."""
    p = problem("relu_random")

    def f(z: Tensor, c: Tensor) -> Tensor:
        inner = wp.fixed_point(lambda y, z: 0.3 * y + 0.7 * z, torch.zeros_like(z), wp.Picard(), args=(z,), rtol=1e-13)
        return p.f(inner.value, c)

    nested = wp.fixed_point(f, p.z0, wp.Picard(), args=p.args, rtol=1e-9, on_failure="raise")
    assert torch.allclose(nested.value, p.solution, rtol=1e-6, atol=1e-7)


def test_after_an_error_in_f() -> None:
    p = problem("relu_random")
    reference = solve(p, wp.Auto()).value
    calls = 0

    def f(z: Tensor, c: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ZeroDivisionError
        return p.f(z, c)

    with pytest.raises(ZeroDivisionError):
        wp.fixed_point(f, p.z0, wp.Auto(), args=p.args)
    assert torch.equal(solve(p, wp.Auto()).value, reference)


def test_threads_do_not_share() -> None:
    p = problem("relu_random")
    reference = solve(p, wp.Picard(), dense=True)
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(20):
            if not torch.equal(solve(p, wp.Picard(), dense=True).value, reference.value):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_only_a_few_buffers_of_one_size_are_kept() -> None:
    for size in (3, 5, 7):
        wp.fixed_point(lambda z: 0.5 * z + 1, torch.zeros(4, size), wp.Picard())
    kept = _tree._kept()
    assert len(kept) <= _tree.MOST_KEPT and len({buffer.shape for buffer in kept}) <= 1


def test_take_and_give() -> None:
    like = torch.zeros(3, 11)
    buffer = take_buffer(like)
    assert buffer.shape == like.shape and buffer.dtype == like.dtype
    give_buffer(buffer)
    assert take_buffer(like) is buffer
    assert take_buffer(like) is not buffer
    give_buffer(buffer)
    assert take_buffer(like.double()).dtype == torch.float64
