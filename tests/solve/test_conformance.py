"""Every solver x problem x dtype: right, honest, counted, and each sample by itself."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from torch import Tensor

import wellposed as wp
from conformance import (
    EVALUATING,
    SOLVERS,
    SPLITTING,
    CountingFunction,
    CountingMap,
    check_close,
    check_honest,
    check_right,
    every_dtype,
    every_method,
    every_solver,
    every_solver_and_dtype,
    must_converge,
    rtol_of,
    short,
    solve,
)
from problems import PROBLEMS, Problem, flat, leaves, problem, spread_with
from wellposed import Status
from wellposed.solve import AbstractSolver

EASY = ["scalar", "affine", "relu_by_hand", "relu_random", "tanh", "vector_state"]
DENSE = ["affine", "rotation", "relu_by_hand", "relu_random", "smoothing", "monotone", "nilpotent"]

every_problem = pytest.mark.parametrize("name", list(PROBLEMS))
every_dense = pytest.mark.parametrize("name", DENSE)
evaluating = pytest.mark.parametrize("solver", EVALUATING, ids=short)
splitting = pytest.mark.parametrize("solver", SPLITTING, ids=short)


# --- the answer, and the truth about it ------------------------------------------------------------------------------


@every_solver_and_dtype
@every_problem
def test_right_and_honest(solver: AbstractSolver, name: str, dtype: torch.dtype) -> None:
    p = problem(name, dtype)
    sol = solve(p, solver)
    check_honest(p, sol)
    check_right(p, sol)
    if must_converge(p, solver):
        assert sol.converged.all(), sol


@every_solver_and_dtype
@every_dense
def test_right_and_honest_on_the_map_of_a_cell(solver: AbstractSolver, name: str, dtype: torch.dtype) -> None:
    p = problem(name, dtype)
    sol = solve(p, solver, dense=True)
    check_honest(p, sol)
    check_right(p, sol)
    if must_converge(p, solver):
        assert sol.converged.all(), sol


@splitting
@pytest.mark.parametrize("name", ["affine", "rotation", "relu_by_hand", "relu_random", "smoothing", "monotone"])
@every_dtype
def test_splitting_is_right_and_honest(solver: AbstractSolver, name: str, dtype: torch.dtype) -> None:
    p = problem(name, dtype)
    sol = solve(p, solver, dense=True, max_steps=20000)
    check_honest(p, sol)
    check_right(p, sol)
    assert sol.converged.all(), sol


@every_method
@pytest.mark.parametrize("name", EASY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_low_precision_is_solved_in_float32(solver: AbstractSolver, name: str, dtype: torch.dtype) -> None:
    p = problem(name, dtype)
    sol = solve(p, solver)
    assert sol.value.dtype == torch.float32
    check_honest(p, sol)
    check_right(p, sol)
    assert sol.converged.all(), sol


@every_method
@pytest.mark.parametrize("name", ["tuple_state", "dict_state", "image_state", "vector_state"])
def test_structure_and_shapes_come_back(solver: AbstractSolver, name: str) -> None:
    p = problem(name)
    value = solve(p, solver).value
    assert type(value) is type(p.z0)
    assert [leaf.shape for leaf in leaves(value)] == [leaf.shape for leaf in leaves(p.z0)]
    if isinstance(value, dict):
        assert list(value) == list(p.z0) and list(value["fast"]) == list(p.z0["fast"])


@every_solver
@every_dtype
def test_absolute_tolerance(solver: AbstractSolver, dtype: torch.dtype) -> None:
    p = problem("affine", dtype)
    sol = solve(p, solver, rtol=0.0, atol=1e-3)
    assert sol.converged.all() and (sol.absolute_residual <= 1e-3).all()
    check_honest(p, sol, rtol=0.0, atol=1e-3)
    stricter = solve(p, solver, rtol=0.0, atol=1e-4)
    assert (stricter.num_steps >= sol.num_steps).all() and (stricter.num_steps > sol.num_steps).any()


@every_solver
def test_failed_samples_return_the_best_point_they_saw(solver: AbstractSolver) -> None:
    p = problem("affine")
    sol = solve(p, solver, rtol=1e-30, max_steps=12, record=True)
    assert (sol.status == Status.MAX_STEPS).all() and (sol.num_steps <= 12).all()
    check_honest(p, sol, rtol=1e-30)
    assert sol.history is not None
    # |f(z)| hardly changes here, so the least relative residual in the record is near the one of the returned value
    least = sol.history.nan_to_num(torch.inf).amin(dim=0)
    assert (sol.residual <= 1.5 * least).all()


# --- counting --------------------------------------------------------------------------------------------------------


@every_solver
@pytest.mark.parametrize("name", ["affine", "relu_random", "monotone", "expanding", "shift"])
def test_num_steps_counts_evaluations_and_products(solver: AbstractSolver, name: str) -> None:
    p = problem(name).take([1])
    f = CountingMap(p)
    sol = wp.fixed_point(f, p.z0, solver, rtol=rtol_of(p), max_steps=60, on_failure="ignore")
    assert f.counts.tolist() == sol.num_steps.tolist()
    assert int(sol.num_steps) <= 60


@evaluating
@pytest.mark.parametrize("name", ["spread", "staggered"])
def test_num_steps_counts_what_each_sample_of_a_batch_took_part_in(solver: AbstractSolver, name: str) -> None:
    p = problem(name, batch=4)  # so few that a finished sample is compacted away at once
    f = CountingMap(p)
    sol = wp.fixed_point(f, p.z0, solver, rtol=1e-7, max_steps=p.max_steps, on_failure="raise")
    assert f.counts.tolist() == sol.num_steps.tolist()
    assert len(set(sol.num_steps.tolist())) > 1


@evaluating
def test_num_steps_of_a_function(solver: AbstractSolver) -> None:
    p = problem("staggered", batch=4)
    f = CountingFunction(p)
    args = (torch.arange(4), *p.args)
    sol = wp.fixed_point(f, p.z0, solver, args=args, rtol=1e-7, max_steps=p.max_steps, on_failure="raise")
    assert f.evaluations() == sol.num_steps.tolist()


@every_solver
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 11])
def test_max_steps_is_never_exceeded(solver: AbstractSolver, budget: int) -> None:
    for name in ("monotone", "slow"):
        p = problem(name).take([2])
        f = CountingMap(p)
        sol = wp.fixed_point(f, p.z0, solver, rtol=1e-14, max_steps=budget, on_failure="ignore")
        assert (f.counts <= budget).all()
        assert (sol.num_steps == budget)[sol.status == Status.MAX_STEPS].all()


# --- a finished sample leaves ----------------------------------------------------------------------------------------


@every_solver
def test_a_finished_sample_is_not_evaluated_again(solver: AbstractSolver) -> None:
    p = problem("staggered", batch=12)
    f = CountingMap(p)
    sol = wp.fixed_point(f, p.z0, solver, rtol=1e-7, max_steps=p.max_steps, on_failure="raise")
    *calls, closing = f.calls  # the last evaluation confirms the answer of all
    last = {i: max(k for k, call in enumerate(calls) if i in call) for i in range(12)}
    easiest, hardest = int(sol.num_steps.argmin()), int(sol.num_steps.argmax())
    assert last[easiest] < last[hardest]
    assert len(calls[0]) == len(closing) == 12 and len(calls[-1]) < 12
    # what is left at the end is what took longest; the stages of Auto run one after another
    assert solver == wp.Auto() or all(sol.num_steps[i] >= sol.num_steps.double().quantile(0.5) for i in calls[-1])


@evaluating
@pytest.mark.parametrize("name", ["spread", "staggered"])
def test_in_a_large_batch_few_finished_samples_linger(solver: AbstractSolver, name: str) -> None:
    """A copy of the batch is made only when it pays, so some finished samples are evaluated on; never more than agreed."""
    p = problem(name, batch=160)
    f = CountingMap(p)
    sol = wp.fixed_point(f, p.z0, solver, rtol=1e-7, max_steps=p.max_steps, on_failure="raise")
    evaluated, needed = sum(map(len, f.calls)), int(sol.num_steps.sum())
    assert needed <= evaluated <= needed / (1 - solver.idle_part)


@every_solver
def test_f_sees_fewer_rows_when_data_come_by_args(solver: AbstractSolver) -> None:
    p = problem("staggered", batch=12)
    f = CountingFunction(p)
    wp.fixed_point(f, p.z0, solver, args=(torch.arange(12), *p.args), max_steps=p.max_steps, on_failure="raise")
    assert f.rows[0] == f.rows[-1] == 12 and f.rows[-2] < 12


@every_solver
def test_f_sees_fewer_rows_when_it_captures_shared_data_only(solver: AbstractSolver) -> None:
    p = problem("affine")
    rows: list[int] = []

    def f(z: Tensor) -> Tensor:
        rows.append(len(z))
        return p.f(z, p.args[0][:1])

    z_star = flat(p.solution)[:1]
    z0 = torch.cat([z_star + 10.0**-k for k in range(12)])
    sol = wp.fixed_point(f, z0, solver, rtol=1e-7, max_steps=400, on_failure="raise")
    assert (sol.value - z_star).norm(dim=1).max() <= p.conditioning * float(sol.absolute_residual.max()) + 1e-13
    assert rows[0] == rows[-1] == 12 and rows[-2] < 12


@every_solver
def test_captured_per_sample_data_still_give_right_answers(solver: AbstractSolver) -> None:
    p = problem("spread", batch=12)
    q, c = p.args
    rows: list[int] = []

    def f(z: Tensor) -> Tensor:
        rows.append(len(z))
        return p.f(z, q, c)

    sol = wp.fixed_point(f, p.z0, solver, rtol=1e-9, max_steps=p.max_steps, on_failure="raise")
    check_right(p, sol)
    check_honest(p, sol)
    # f is evaluated for whole batches only: two rows meet the data of twelve once, in the library's attempt
    assert sum(k != 12 for k in rows) <= 1


@every_solver
def test_captured_per_sample_data_that_broadcast(solver: AbstractSolver) -> None:
    """One row is left at some time, and one row of z fits data of any batch size: no wrong answer may come of it."""
    slopes = torch.tensor([0.1, 0.2, 0.95], dtype=torch.float64)
    sol = wp.fixed_point(lambda z: slopes * z + 1, torch.zeros(3, dtype=torch.float64), solver, rtol=1e-9, max_steps=2000)
    assert (sol.value - 1 / (1 - slopes)).abs().max() <= 1e-9 * 20 * 20


@every_solver
def test_arguments_whose_size_happens_to_be_the_batch(solver: AbstractSolver) -> None:
    """A shared (6, 6) matrix among args looks like per-sample data for 6 samples; the answer must be right all the same."""
    p = problem("spread", batch=6)
    W = 0.9 * torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    c = p.args[1] * torch.logspace(-8, 0, 6, dtype=torch.float64).unsqueeze(1)
    exact = torch.linalg.solve(torch.eye(6, dtype=torch.float64) - W, c.T).T
    start = exact + torch.logspace(-9, 0, 6, dtype=torch.float64).unsqueeze(1)
    sol = wp.fixed_point(lambda z, W, c: z @ W.T + c, start, solver, args=(W, c), rtol=1e-8, max_steps=2000)
    allowed = 10 * sol.absolute_residual + 1e-13
    assert ((sol.value - exact).norm(dim=1) <= allowed).all()


# --- neighbours ------------------------------------------------------------------------------------------------------


@every_solver
@pytest.mark.parametrize("name", ["spread", "relu_random", "expanding", "tanh"])
def test_a_sample_alone_and_in_a_batch(solver: AbstractSolver, name: str) -> None:
    p = problem(name, batch=7)
    together = solve(p, solver, rtol=1e-6, max_steps=500)
    for i in range(p.batch):
        alone = solve(p.take([i]), solver, rtol=1e-6, max_steps=500)
        check_close(alone, _row(together, i), p.take([i]))


@every_method
@pytest.mark.parametrize("name", ["spread", "relu_random"])
def test_order_of_the_batch(solver: AbstractSolver, name: str) -> None:
    p = problem(name, batch=20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    straight, mixed = solve(p, solver, rtol=1e-6), solve(p.take(order), solver, rtol=1e-6)
    for k, i in enumerate(order.tolist()):
        check_close(_row(mixed, k), _row(straight, i), p.take([i]))


@every_method
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3.0, -40.0])
def test_a_bad_sample_costs_the_others_nothing(solver: AbstractSolver, bad: float) -> None:
    q = torch.tensor([0.3, 0.85, 0.0, 0.7, 0.9, 0.5], dtype=torch.float64)
    good = spread_with(q, torch.float64)
    spoiled = torch.cat([q[:2], torch.tensor([bad], dtype=torch.float64), q[2:]])
    others = [0, 1, 3, 4, 5, 6]
    p = spread_with(spoiled, torch.float64)
    p = Problem(**{**vars(p), "args": (p.args[0], torch.cat([good.args[1][:2], p.args[1][:1], good.args[1][2:]]))})
    f = CountingMap(p)
    sol = wp.fixed_point(f, p.z0, solver, rtol=1e-7, max_steps=400, on_failure="ignore")
    reference = wp.fixed_point(CountingMap(good), good.z0, solver, rtol=1e-7, max_steps=400, on_failure="ignore")
    for k, i in enumerate(others):
        check_close(_row(sol, i), _row(reference, k), good.take([k]))
    if bad in (3.0, -40.0) and sol.converged[2]:  # it has a fixed point, and some solvers find it
        assert p.residual(sol.value)[0][2] <= 1e-7 * 10
    else:
        assert sol.status[2] in (Status.DIVERGED, Status.NOT_FINITE, Status.MAX_STEPS)
    if sol.status[2] in (Status.DIVERGED, Status.NOT_FINITE):
        assert f.counts[2] <= sol.num_steps[2]


@every_solver
def test_nan_that_comes_late_stops_one_sample_only(solver: AbstractSolver) -> None:
    p = problem("ambush", batch=5)
    sol = solve(p, solver)
    assert sol.status[1] == Status.NOT_FINITE
    assert sol.converged[[0, 2, 3, 4]].all()
    check_right(p, sol)
    assert flat(sol.value).isfinite().all() and sol.residual.isfinite().all()  # the best point before it, and its residual
    check_honest(p, sol)


def _row(sol: wp.Solution, i: int) -> wp.Solution:
    return wp.Solution(
        sol.value[i : i + 1],
        sol.residual[i : i + 1],
        sol.absolute_residual[i : i + 1],
        sol.num_steps[i : i + 1],
        sol.status[i : i + 1],
        sol.rate[i : i + 1],
    )


# --- the caller's objects --------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("name", ["scalar", "relu_random", "spread", "tuple_state", "dict_state", "image_state", "expanding"])
def test_the_callers_tensors_are_left_alone(solver: AbstractSolver, name: str) -> None:
    p = problem(name)
    before = [(leaf.clone(), leaf._version) for leaf in (*leaves(p.z0), *p.args)]
    sol = solve(p, solver)
    for leaf, (copy_, version) in zip((*leaves(p.z0), *p.args), before, strict=True):
        assert torch.equal(leaf, copy_) and leaf._version == version
    memory = {leaf.untyped_storage().data_ptr() for leaf in (*leaves(p.z0), *p.args)}
    assert not memory & {leaf.untyped_storage().data_ptr() for leaf in leaves(sol.value)}


@pytest.mark.parametrize("solver", SOLVERS + SPLITTING, ids=short)
def test_the_data_of_a_cell_are_left_alone(solver: AbstractSolver) -> None:
    p = problem("relu_random")
    f = p.dense_map()
    W, c = f.inputs()
    before = [t.clone() for t in (p.z0, W, c)]
    sol = wp.fixed_point(f, p.z0, solver, max_steps=2000)
    assert all(map(torch.equal, (p.z0, W, c), before))
    again = wp.fixed_point(f, p.z0, solver, max_steps=2000)  # nor is the first answer overwritten by the second solve
    assert torch.equal(sol.value, again.value) and sol.value.data_ptr() != again.value.data_ptr()


@every_solver
def test_the_start_may_be_the_answer(solver: AbstractSolver) -> None:
    """Converged at the first evaluation: the value is a copy of the start, not the start itself."""
    z0 = torch.full((3, 1), 5.0, dtype=torch.float64)
    sol = wp.fixed_point(lambda z: 0.8 * z + 1, z0, solver)
    assert sol.num_steps.tolist() == [2, 2, 2] and torch.equal(sol.value, z0)  # that one, and the confirmation
    sol.value.zero_()
    assert (z0 == 5.0).all()


@every_solver
def test_constant_f_is_not_aliased(solver: AbstractSolver) -> None:
    x = torch.arange(6.0, dtype=torch.float64).reshape(3, 2) + 1
    sol = wp.fixed_point(lambda z, x: x, torch.zeros_like(x), solver, args=(x,))
    assert sol.converged.all() and torch.allclose(sol.value, x, rtol=1e-5)
    sol.value.zero_()
    assert x[0, 0] == 1.0


@every_method
def test_no_graph_is_made(solver: AbstractSolver) -> None:
    p = problem("relu_random")
    z0, c = p.z0.clone().requires_grad_(), p.args[0].clone().requires_grad_()
    sol = wp.fixed_point(p.f, z0, solver, args=(c,), max_steps=400)
    assert not sol.value.requires_grad and not sol.residual.requires_grad
    assert z0.grad is None and c.grad is None


@every_method
def test_works_in_inference_mode_and_with_autocast(solver: AbstractSolver) -> None:
    p = problem("relu_random", torch.float32)
    plain = solve(p, solver)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = solve(p, solver)
    assert torch.equal(plain.value, cast.value)
    if not isinstance(solver, wp.NewtonKrylov):  # needs derivatives, which inference mode forbids
        with torch.inference_mode():
            assert torch.equal(plain.value, solve(p, solver).value)


# --- the solvers themselves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVERS + SPLITTING, ids=short)
def test_solvers_are_values(solver: AbstractSolver) -> None:
    same = pickle.loads(pickle.dumps(solver))
    assert same == solver == copy.deepcopy(solver) and hash(same) == hash(solver)
    assert {solver: 1}[same] == 1
    name = fields(solver)[0].name  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        setattr(solver, name, None)
    assert repr(solver).startswith(type(solver).__name__ + "(")
    assert eval(repr(solver), vars(wp)) == solver


@every_solver
def test_twice_the_same(solver: AbstractSolver) -> None:
    p = problem("spread", batch=9)
    state = torch.random.get_rng_state()
    first, second = solve(p, solver), solve(p, solver)
    assert torch.equal(first.value, second.value) and torch.equal(first.num_steps, second.num_steps)
    assert torch.equal(first.residual, second.residual)
    assert torch.equal(torch.random.get_rng_state(), state)


@every_solver
def test_a_solver_remembers_nothing(solver: AbstractSolver) -> None:
    p, other = problem("affine"), problem("tanh")
    first = solve(p, solver)
    solve(other, solver)
    assert torch.equal(solve(p, solver).value, first.value)
