"""What is said when samples fail, what is refused, and what a Solution tells."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from conformance import EVALUATING, every_solver, short, solve
from problems import problem
from wellposed import InvalidArgument, InvalidType, NotConverged, Status, WellposedError
from wellposed.errors import NotConvergedWarning
from wellposed.solve import AbstractSolver
from wellposed.status import StatusArray

ONE = torch.ones(2, 1, dtype=torch.float64)


def doubling(z: Tensor) -> Tensor:
    return 2 * z + 1


# --- on_failure ------------------------------------------------------------------------------------------------------


def test_ignore_says_nothing() -> None:
    sol = wp.fixed_point(doubling, ONE, wp.Picard(), on_failure="ignore")
    assert not sol.converged.any()


def test_warn_is_the_default_and_points_at_the_caller() -> None:
    with pytest.warns(NotConvergedWarning, match="2 of 2 samples") as caught:
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        sol = wp.fixed_point(doubling, ONE, wp.Picard())
    assert (sol.status == Status.DIVERGED).all()
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def test_a_warning_of_a_layer_points_at_its_caller_too() -> None:
    layers = [wp.EquilibriumLayer(lambda z, x: 2 * z + x, wp.Picard()) for _ in range(2)]
    with pytest.warns(NotConvergedWarning) as caught:
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        layers[0](ONE)
        layers[1].solve(ONE)
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line), (__file__, line + 1)]


def test_raise_carries_the_solution() -> None:
    with pytest.raises(NotConverged, match="2 of 2 samples") as caught:
        wp.fixed_point(doubling, ONE, wp.Picard(), on_failure="raise")
    sol = caught.value.solution
    assert isinstance(sol, wp.Solution) and (sol.status == Status.DIVERGED).all()
    assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, WellposedError)


@pytest.mark.parametrize("policy", ["raise", "warn", "ignore"])
def test_success_is_silent(policy: str) -> None:
    assert wp.fixed_point(lambda z: 0.5 * z + 1, ONE, wp.Picard(), on_failure=policy).converged.all()


def test_policy_is_checked_before_anything_runs() -> None:
    def explode(z: Tensor) -> Tensor:
        raise AssertionError("f was called")

    with pytest.raises(
        InvalidArgument, match=r"on_failure must be 'raise', 'warn' or 'ignore'; got 'rase'\. Did you mean 'raise'\?"
    ):
        wp.fixed_point(explode, ONE, on_failure="rase")
    with pytest.raises(InvalidArgument, match=r"got None\.$"):
        wp.fixed_point(explode, ONE, on_failure=None)  # type: ignore[arg-type]


# --- the sentence ----------------------------------------------------------------------------------------------------


def message(f: Any, z0: Tensor, solver: AbstractSolver | None = None, **options: Any) -> str:
    with pytest.raises(NotConverged) as caught:
        wp.fixed_point(f, z0, solver, on_failure="raise", **options)
    return str(caught.value)


def test_message_names_the_first_sample_its_residual_and_its_steps() -> None:
    slopes = torch.tensor([[0.5], [0.5], [0.99], [0.5], [0.999]], dtype=torch.float64)
    text = message(lambda z, q: q * z + 1, torch.zeros(5, 1, dtype=torch.float64), wp.Picard(), args=(slopes,), max_steps=50)
    assert "fixed_point: 2 of 5 samples did not converge (first: index 2, MAX_STEPS: max_steps was used up" in text
    # after 49 evaluations z = (1 - 0.99^48)/0.01, |f(z) - z| = 0.99^48, f(z) = (1 - 0.99^49)/0.01; the 50th confirms it
    assert f"residual {0.99**48 / ((1 - 0.99**49) / 0.01):.1e} > rtol=1e-06 after 50 steps (max_steps=50)" in text
    assert "measured factor of 0.99 per step" in text
    assert "(max_steps=50). The others: index 4. Its residual" in text
    assert "Raise max_steps, loosen rtol, or try NewtonKrylov()." in text
    slopes = torch.full((12, 1), 0.99, dtype=torch.float64)
    slopes[0] = 0.5
    text = message(lambda z, q: q * z + 1, torch.zeros(12, 1, dtype=torch.float64), wp.Picard(), args=(slopes,), max_steps=50)
    assert "11 of 12 samples did not converge (first: index 1" in text and "The others: index 2, 3, 4, 5, 6 and 5 more." in text


def test_message_of_divergence() -> None:
    text = message(doubling, ONE, wp.Picard())
    assert (
        "DIVERGED: the residual grew to more than 1e8 times its least value); its best point has residual" in text
        and "measured factor of 2 per step" in text
    )
    assert "may not contract, or may have no fixed point" in text
    assert "try Auto() or NewtonKrylov(), or constrain the cell, e.g. with Spectral(bound=0.95)" in text


def test_advice_is_not_the_solver_that_failed() -> None:
    options: dict[str, Any] = {"max_steps": 7, "rtol": 1e-12}
    assert "try Auto()" in message(
        problem("slow").f, problem("slow").z0, wp.NewtonKrylov(), args=problem("slow").args, **options
    )
    grows = message(lambda z: z * z + 1, ONE, wp.Anderson(), max_steps=20)
    assert "NewtonKrylov()" in grows and "Anderson()" not in grows


def test_message_of_nan() -> None:
    text = message(problem("square_root").f, problem("square_root").z0, wp.Picard())
    assert "NOT_FINITE" in text and "Check f and its input for NaN, overflow or division by zero" in text


def test_message_of_a_map_that_overflows_names_divergence() -> None:
    text = message(lambda z: torch.exp(z) + 1, torch.zeros_like(ONE), wp.Picard())
    assert "NOT_FINITE" in text and "If they are finite, the iteration diverges: constrain the cell" in text


@pytest.mark.parametrize("solver", [wp.Picard(), wp.Auto()])
def test_message_of_a_slow_mean_factor_leaves_a_standstill_open(solver: AbstractSolver) -> None:
    slope = 1 - 1e-6
    text = message(lambda z: slope * z + 1, ONE, wp.Picard(), max_steps=60)
    assert "measured factor of 0.999999 per step on average" in text
    assert "If the residual is the same after more steps, the map may have no fixed point" in text
    assert "may have no fixed point" in solver.advice(wp.Status.MAX_STEPS, 0.998)
    assert "may have no fixed point" not in solver.advice(wp.Status.MAX_STEPS, 0.9)


def test_message_of_a_tolerance_below_rounding() -> None:
    p = problem("rotation", torch.float32)
    text = message(p.f, p.z0, wp.Picard(), args=p.args, rtol=1e-12)
    assert "rtol=1e-12 is below what torch.float32 resolves: raise rtol or use float64" in text


def test_message_with_an_absolute_tolerance() -> None:
    assert "rtol=1e-06 and |f(z)-z| > atol=1e-03 after" in message(doubling, ONE, wp.Picard(), atol=1e-3)


def test_message_of_a_single_evaluation_measures_no_factor() -> None:
    text = message(lambda z: 0.5 * z + 1, ONE, wp.Picard(), max_steps=1)
    assert "after 1 step (max_steps=1)" in text and "measured factor" not in text


# --- arguments that cannot work --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "pattern"),
    [
        ({"f": 3}, InvalidType, r"^f must be callable; got int\.$"),
        ({"f": None}, InvalidType, r"got NoneType"),
        (
            {"solver": "anderson"},
            InvalidType,
            r"a solver such as Auto\(\).*got 'anderson'\. Choices are objects",
        ),
        ({"solver": wp.Anderson}, InvalidType, r"Choices are objects: give Anderson\(\), not its name or class"),
        ({"solver": wp.GMRES()}, InvalidType, r"got GMRES.*It solves linear systems: give NewtonKrylov\(GMRES"),
        ({"args": ONE}, InvalidType, r"args must be a tuple; got Tensor\. For one argument write args=\(x,\)"),
        ({"args": [ONE]}, InvalidType, r"args must be a tuple; got list"),
        ({"rtol": -1e-3}, InvalidArgument, r"rtol must be a finite float of at least 0; got -0\.001"),
        ({"rtol": float("inf")}, InvalidArgument, r"rtol must be .*got inf"),
        ({"rtol": float("nan")}, InvalidArgument, r"rtol must be .*got nan"),
        ({"rtol": "1e-6"}, InvalidArgument, r"rtol must be .*got '1e-6'"),
        ({"rtol": True}, InvalidArgument, r"rtol must be .*got True"),
        ({"atol": -1.0}, InvalidArgument, r"atol must be a finite float of at least 0; got -1\.0"),
        ({"atol": None}, InvalidArgument, r"atol must be .*got None"),
        ({"max_steps": 0}, InvalidArgument, r"max_steps must be an integer of at least 1; got 0"),
        ({"max_steps": 10.0}, InvalidArgument, r"max_steps must be .*got 10\.0"),
        ({"max_steps": True}, InvalidArgument, r"max_steps must be .*got True"),
        ({"coupled": "yes"}, InvalidArgument, r"coupled must be True or False; got 'yes'"),
        ({"max_steps": ONE}, InvalidArgument, r"got Tensor of shape \(\d+, \d+\)\.$"),
        ({"rtol": "x" * 500}, InvalidArgument, r"got 'x{115} \.\.\.\.$"),
        ({"z0": [1.0]}, InvalidType, r"z0 must be a tensor, or a tuple, list or dict of tensors; found a float"),
        (
            {"z0": torch.ones(2, 1, dtype=torch.int64)},
            InvalidType,
            r"z0 must be floating point, real or complex; got torch\.int64",
        ),
        ({"z0": torch.tensor(1.0)}, InvalidArgument, r"z0 must be batch first"),
        ({"z0": (ONE, torch.ones(3, 1).double())}, InvalidArgument, r"All tensors of z0 must share batch size"),
    ],
)
def test_arguments_are_refused(options: dict[str, Any], error: type[Exception], pattern: str) -> None:
    arguments: dict[str, Any] = {"f": lambda z: 0.5 * z + 1, "z0": ONE} | options
    with pytest.raises(error, match=pattern):
        wp.fixed_point(**arguments)


@pytest.mark.parametrize(
    ("f", "error", "pattern"),
    [
        (
            lambda z: z[:, :2],
            InvalidArgument,
            r"f must keep the structure.*: expected \(2, 3\), got \(2, 2\)\. If what f returns is right, give a start",
        ),
        (lambda z: z.mean(), InvalidArgument, r"expected \(2, 3\), got \(\)"),
        (lambda z: (z,), InvalidArgument, r"expected \(2, 3\), got tuple\(\(2, 3\)\)"),
        (lambda z: None, InvalidArgument, r"expected \(2, 3\), got NoneType"),
        (lambda z: z.numpy(), InvalidArgument, r"expected \(2, 3\), got ndarray"),
        (lambda z: z.double(), InvalidType, r"f must keep the dtype of the state: expected torch\.float32, got torch\.float64"),
        (lambda z: z.mul_(0.5), InvalidArgument, r"f changed its argument in place; it must return a new value"),
    ],
)
@pytest.mark.parametrize("solver", [wp.Picard(), wp.NewtonKrylov(), wp.Auto()], ids=short)
def test_functions_are_refused(f: Any, error: type[Exception], pattern: str, solver: AbstractSolver) -> None:
    with pytest.raises(error, match=pattern):
        wp.fixed_point(f, torch.ones(2, 3), solver)


def test_a_dict_in_another_order_is_refused_rather_than_mixed_up() -> None:
    state = {"a": torch.zeros(2, 1), "b": torch.zeros(2, 1)}
    with pytest.raises(InvalidArgument, match=r"expected \{'a': \(2, 1\), 'b': \(2, 1\)\}, got \{'b'"):
        wp.fixed_point(lambda z: {"b": z["b"], "a": z["a"]}, state)


@pytest.mark.parametrize("keyword", ["tol", "max_iter", "rtoll", "callback"])
def test_unknown_keywords_raise(keyword: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
        wp.fixed_point(doubling, ONE, wp.Picard(), **{keyword: 1})  # type: ignore[arg-type]


def test_options_after_the_third_argument_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        wp.fixed_point(doubling, ONE, wp.Picard(), ())  # type: ignore[misc]


def test_a_map_that_holds_its_data_takes_no_args() -> None:
    p = problem("relu_random")
    with pytest.raises(InvalidArgument, match=r"DenseMap holds what it needs, so args must be empty; got 1\."):
        wp.fixed_point(p.dense_map(), p.z0, args=p.args)


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: wp.Picard(damping=0.0), r"The 'damping' parameter of Picard must be a float in \(0, 1\]\. Got 0\.0 instead\."),
        (lambda: wp.Picard(damping=1.5), r"'damping' parameter of Picard .*Got 1\.5"),
        (lambda: wp.Picard(damping="1"), r"'damping' parameter of Picard .*Got '1'"),  # type: ignore[arg-type]
        (lambda: wp.Picard(damping=float("nan")), r"'damping' parameter of Picard .*Got nan"),
        (lambda: wp.Picard(damping=True), r"'damping' parameter of Picard .*Got True"),
        (
            lambda: wp.Anderson(memory=0),
            r"'memory' parameter of Anderson must be an integer of at least 1\. Got 0 instead\.",
        ),
        (lambda: wp.Anderson(memory=2.0), r"'memory' parameter of Anderson .*Got 2\.0"),  # type: ignore[arg-type]
        (lambda: wp.Anderson(memory=True), r"'memory' parameter of Anderson .*Got True"),
        (lambda: wp.Anderson(regularization=-1.0), r"'regularization' parameter of Anderson must be a float in \[0, inf\)"),
        (lambda: wp.Anderson(damping=0), r"'damping' parameter of Anderson must be a float in \(0, 1\]"),
        (lambda: wp.Broyden(memory=-1), r"'memory' parameter of Broyden .*Got -1"),
        (lambda: wp.NewtonKrylov(forcing=1.0), r"'forcing' parameter of NewtonKrylov must be a float in \(0, 1\)"),
        (lambda: wp.NewtonKrylov(forcing=0.0), r"'forcing' parameter of NewtonKrylov"),
        (lambda: wp.NewtonKrylov(linear_solver="gmres"), r"'linear_solver' of NewtonKrylov must be .*got 'gmres'"),  # type: ignore[arg-type]
        (lambda: wp.Auto(plain=wp.Anderson()), r"The 'plain' parameter of Auto must be a Picard; got Anderson"),  # type: ignore[arg-type]
        (lambda: wp.Auto(newton=None), r"The 'newton' parameter of Auto must be a NewtonKrylov; got None"),  # type: ignore[arg-type]
        (lambda: wp.ForwardBackward(step_size=0.0), r"'step_size' parameter of ForwardBackward must be a float in \(0, inf\)"),
        (lambda: wp.PeacemanRachford(step_size=-1.0), r"'step_size' parameter of PeacemanRachford .*Got -1\.0"),
        (lambda: wp.PeacemanRachford(step_size=float("inf")), r"'step_size' parameter of PeacemanRachford .*Got inf"),
        (lambda: wp.DouglasRachford(step_size=0), r"'step_size' parameter of DouglasRachford .*Got 0"),
    ],
)
def test_options_of_solvers_are_refused(make: Any, pattern: str) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match=pattern):
        make()


@pytest.mark.parametrize("kind", [wp.Picard, wp.Anderson, wp.Broyden, wp.NewtonKrylov, wp.Auto, wp.PeacemanRachford])
def test_unknown_options_of_solvers_raise(kind: type) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'tolerance'"):
        kind(tolerance=1e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, at its first jvp
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_transforms_are_refused_with_the_remedy(transform: str) -> None:
    def run(x: Tensor) -> Tensor:
        return wp.fixed_point(lambda z: 0.5 * z + x, torch.zeros_like(x)).value.sum()

    calls = {
        "vmap": lambda: torch.func.vmap(run)(torch.ones(3, 2, 1)),
        "grad": lambda: torch.func.grad(run)(torch.ones(2, 1)),
        "jvp": lambda: torch.func.jvp(run, (torch.ones(2, 1),), (torch.ones(2, 1),)),
    }
    with pytest.raises(WellposedError, match="fixed_point needs concrete values.*use EquilibriumLayer"):
        calls[transform]()


def test_what_f_raises_comes_through() -> None:
    def f(z: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        wp.fixed_point(f, ONE)


# --- what a Solution tells -------------------------------------------------------------------------------------------


@every_solver
@pytest.mark.parametrize("name", ["scalar", "affine", "relu_random", "spread"])
def test_error_bound_bounds_the_true_distance(solver: AbstractSolver, name: str) -> None:
    p = problem(name)
    for rtol in (1e-2, 1e-5):
        sol = solve(p, solver, rtol=rtol)
        assert (p.distance(sol.value) <= sol.error_bound(p.lipschitz) + p.conditioning * p.rounding(sol.value)).all()


def test_error_bound_is_sharp_for_a_scalar() -> None:
    sol = wp.fixed_point(
        lambda z: 0.8 * z + 1, torch.zeros(2, 1, dtype=torch.float64), wp.Picard(), max_steps=11, on_failure="ignore"
    )
    # after 10 evaluations, and one that confirms, z = 5 (1 - 0.8^9)
    assert torch.allclose(sol.error_bound(0.8), (5 - sol.value).squeeze(1), rtol=1e-12)
    assert torch.allclose(sol.error_bound(0.8), torch.full((2,), 5 * 0.8**9, dtype=torch.float64), rtol=1e-12)


def test_error_bound_per_sample() -> None:
    p = problem("spread")
    sol = solve(p, wp.Picard(), rtol=1e-3)
    factors = p.args[0] * (1 + 1e-12)
    assert torch.allclose(sol.error_bound(factors), sol.absolute_residual / (1 - factors))
    assert (p.distance(sol.value) <= sol.error_bound(factors) * (1 + 1e-9)).all()


@pytest.mark.parametrize("factor", [1.0, 1.5, -0.1, float("nan"), torch.tensor([0.5, 1.0])])
def test_error_bound_refuses_what_does_not_contract(factor: Any) -> None:
    sol = wp.fixed_point(lambda z: 0.5 * z + 1, ONE, wp.Picard())
    with pytest.raises(InvalidArgument, match=r"error_bound needs a contraction factor in \[0, 1\); got"):
        sol.error_bound(factor)


def test_history_is_none_unless_asked_for() -> None:
    assert wp.fixed_point(lambda z: 0.5 * z + 1, ONE).history is None


def test_history_of_picard_decreases_at_the_known_rate() -> None:
    slopes = torch.tensor([0.5, 0.9, 0.0], dtype=torch.float64)
    sol = wp.fixed_point(
        lambda z, q: q * z + 1, torch.zeros(3, dtype=torch.float64), wp.Picard(), args=(slopes,), rtol=1e-8, record=True
    )
    assert sol.history is not None and sol.history.shape == (int(sol.num_steps.max()), 3)
    for i, (q, steps) in enumerate(zip(slopes.tolist(), sol.num_steps.tolist(), strict=True)):
        column = sol.history[:, i]
        assert column[:steps].isfinite().all() and column[steps:].isnan().all()
        steps -= 1  # the last evaluation confirms
        assert column[steps - 1] == column[steps] == sol.residual[i] and (column[: steps - 1] > 1e-8).all()
        # at step k: z = (1 - q^(k-1))/(1 - q), so |f(z) - z| / |f(z)| = q^(k-1) (1 - q)/(1 - q^k)
        k = torch.arange(1, steps + 1, dtype=torch.float64)
        assert torch.allclose(column[:steps], q ** (k - 1) * (1 - q) / (1 - q**k), rtol=1e-6)
    assert torch.allclose(sol.rate[:2], slopes[:2], rtol=1e-6)


@every_solver
def test_history_holds_a_residual_where_it_was_measured(solver: AbstractSolver) -> None:
    p = problem("spread", batch=6)
    sol = solve(p, solver, rtol=1e-7, record=True)
    assert sol.history is not None and sol.history.shape == (int(sol.num_steps.max()), 6)
    for i, steps in enumerate(sol.num_steps.tolist()):
        column = sol.history[:, i]
        assert column[0].isfinite() and column[steps - 1] == sol.residual[i]
        assert column[steps:].isnan().all()
        if solver in EVALUATING and not isinstance(solver, wp.Broyden):
            assert column[:steps].isfinite().all()
        else:  # products with the Jacobian and tries of a line search are counted, and measure no residual
            assert column[:steps].isfinite().any()


def test_history_does_not_change_the_run() -> None:
    p = problem("smoothing")
    for solver in (wp.Auto(), wp.Broyden()):
        plain, recorded = solve(p, solver), solve(p, solver, record=True)
        assert torch.equal(plain.value, recorded.value) and torch.equal(plain.num_steps, recorded.num_steps)


def test_history_of_tiny_values_is_not_zero() -> None:
    z0 = torch.zeros(1, 3)
    sol = wp.fixed_point(lambda z: 0.5 * z + 1e-25, z0, wp.Picard(), record=True)
    assert sol.history is not None and (sol.history > 0).all() and sol.history[-1] == sol.residual


def test_rate_is_measured_over_all_stages_of_auto() -> None:
    p = problem("smoothing")
    sol = solve(p, wp.Auto())
    first = p.residual(p.z0)[0]
    expected = (sol.absolute_residual / first) ** (1 / (sol.num_steps - 2))  # not the first, nor the one that confirms
    # a residual near its rounding is known to few digits, of which the root leaves one part in num_steps - 2
    allowed = expected * p.rounding(sol.value) / sol.absolute_residual / (sol.num_steps - 2)
    assert ((sol.rate - expected).abs() <= allowed).all() and allowed.max() < 1e-5


def test_repr() -> None:
    slopes = torch.tensor([0.5, 2.0], dtype=torch.float64)
    sol = wp.fixed_point(
        lambda z, q: q * z + 1, torch.zeros(2, dtype=torch.float64), wp.Picard(), args=(slopes,), on_failure="ignore"
    )
    assert repr(sol) == "Solution(StatusArray(CONVERGED: 1, DIVERGED: 1), residual <= 1.0e+00, num_steps <= 30)"
    empty = wp.fixed_point(doubling, torch.zeros(0, 3))
    assert repr(empty) == "Solution(StatusArray(), residual <= none, num_steps <= 0)"


def test_solutions_compare_by_identity_and_cannot_be_changed() -> None:
    a, b = (wp.fixed_point(lambda z: 0.5 * z + 1, ONE) for _ in range(2))
    assert a == a and a != b and len({a, b}) == 2
    with pytest.raises(AttributeError):
        a.value = None  # type: ignore[misc]
    assert isinstance(a.status, StatusArray)


def test_solutions_and_errors_can_be_sent_elsewhere() -> None:
    sol = wp.fixed_point(doubling, ONE, wp.Picard(), on_failure="ignore")
    for other in (pickle.loads(pickle.dumps(sol)), copy.deepcopy(sol)):
        assert torch.equal(other.value, sol.value) and other.status.tolist() == sol.status.tolist()
    with pytest.raises(NotConverged) as caught:
        wp.fixed_point(doubling, ONE, wp.Picard(), on_failure="raise")
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value) and torch.equal(error.solution.value, sol.value)


def test_a_warning_can_be_silenced_by_class() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        wp.fixed_point(doubling, ONE, wp.Picard())


@pytest.mark.parametrize("solver", [wp.Auto(), wp.Anderson(), wp.Picard()], ids=repr)
def test_a_map_that_moves_by_a_constant_has_the_factor_one(solver: wp.solve.AbstractSolver) -> None:
    """In float32 z grows until z + x is z: a residual of 0 that is no equilibrium, and no factor."""
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.5
    with pytest.warns(wp.errors.NotConvergedWarning, match="may have no fixed point|may not contract"):
        solution = wp.fixed_point(lambda z, x: z + x, torch.zeros(3, 4), solver, args=(x,))
    assert not bool(solution.converged.any()) and bool((solution.rate > 0.9).all())


def test_few_steps_give_the_advice_to_take_more() -> None:
    with pytest.warns(wp.errors.NotConvergedWarning, match="Raise max_steps: so few steps"):
        wp.fixed_point(lambda z: 0.5 * torch.tanh(z) + 1, torch.zeros(2, 3), max_steps=1)


def test_a_class_is_not_a_cell() -> None:
    with pytest.raises(wp.errors.InvalidType, match=r"cell must be an object; got the class Linear. Give Linear\(\.\.\.\)"):
        wp.EquilibriumLayer(torch.nn.Linear)
