"""The known defects of the field's libraries, one by one, and our own. None may come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from conformance import SOLVERS, check_honest, check_right, every_solver, every_solver_and_dtype, short, solve
from problems import problem, spread_with
from wellposed import InvalidArgument, Status
from wellposed.solve import AbstractSolver


def scalar_map(z: Tensor) -> Tensor:
    return 0.8 * z + 1


# --- failures reported as success ------------------------------------------------------------------------------------


@every_solver_and_dtype
def test_divergence_is_reported(solver: AbstractSolver, dtype: torch.dtype) -> None:
    """2 z + 1 runs away under plain iteration; whoever claims success must be at -1."""
    p = problem("expanding", dtype)
    sol = solve(p, solver)
    check_honest(p, sol)
    check_right(p, sol)
    if isinstance(solver, wp.Picard):
        assert (sol.status == Status.DIVERGED).all()
        assert torch.equal(sol.value, p.z0) and (sol.absolute_residual == 1).all()  # the best point is the start


@every_solver
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_are_reported_at_the_first_evaluation(solver: AbstractSolver, bad: float) -> None:
    z0 = torch.ones(2, 3)
    sol = wp.fixed_point(lambda z: z * bad, z0, solver, on_failure="ignore")
    assert (sol.status == Status.NOT_FINITE).all() and sol.num_steps.tolist() == [1, 1]
    assert torch.equal(sol.value, z0)
    assert not (sol.residual <= 1).any()


@every_solver
def test_nan_in_the_start_is_reported(solver: AbstractSolver) -> None:
    z0 = torch.tensor([[0.0], [torch.nan], [1.0]])
    sol = wp.fixed_point(scalar_map, z0, solver, on_failure="ignore")
    assert sol.status.tolist() == [Status.CONVERGED, Status.NOT_FINITE, Status.CONVERGED]
    assert sol.num_steps[1] == 2  # the first evaluation, and the last one, which is of the whole batch


@every_solver_and_dtype
def test_nan_that_comes_later_is_reported(solver: AbstractSolver, dtype: torch.dtype) -> None:
    p = problem("square_root", dtype)
    sol = solve(p, solver)
    assert not sol.converged.any()
    assert sol.value.isfinite().all() and sol.residual.isfinite().all()
    check_honest(p, sol)


@every_solver_and_dtype
def test_infinity_is_not_convergence(solver: AbstractSolver, dtype: torch.dtype) -> None:
    """|f(z) - z| = inf <= rtol |f(z)| = inf was once taken for convergence."""
    p = problem("overflow", dtype)
    sol = solve(p, solver)
    assert not sol.converged.any()
    assert sol.value.isfinite().all() and sol.residual.isfinite().all()


@every_solver_and_dtype
@pytest.mark.parametrize("step", [1.0, 0.1])
def test_a_map_without_a_fixed_point_never_converges(solver: AbstractSolver, dtype: torch.dtype, step: float) -> None:
    """Rounding errors of z + 0.1 look like curvature; extrapolation then jumps to 1e14, where 0.1 is small beside z."""
    z0 = torch.tensor([[0.0, 0.0], [0.1, -0.7]], dtype=dtype)
    sol = wp.fixed_point(lambda z: z + step, z0, solver, max_steps=80, on_failure="ignore")
    assert not sol.converged.any()


@every_solver_and_dtype
def test_a_bounded_residual_is_not_small_because_z_is_large(solver: AbstractSolver, dtype: torch.dtype) -> None:
    """|f(z) - z| <= 1 for f(z) = z + tanh(x - z): at z = 1e9 every relative tolerance is met, far from z* = x."""
    x = torch.tensor([[10.0], [3.0], [-20.0], [0.1], [100.0], [-7.0]], dtype=dtype)
    sol = wp.fixed_point(lambda z, x: z + torch.tanh(x - z), torch.zeros_like(x), solver, args=(x,), on_failure="ignore")
    assert torch.allclose(sol.value[sol.converged], x[sol.converged], rtol=1e-4)
    assert (sol.residual > 1e-6)[~sol.converged].all()  # and what is returned for the others does not look converged
    if isinstance(solver, wp.Picard):
        assert sol.converged.sum() >= 5


def test_growth_from_a_small_start_is_no_runaway() -> None:
    """A start beside an unstable fixed point: both |f(z)| and |f(z) - z| grow by orders before the real one is found."""
    z0 = torch.full((2, 3), 1e-6, dtype=torch.float64)
    sol = wp.fixed_point(lambda z: 100 * torch.tanh(3 * z), z0, wp.Picard(), on_failure="raise")
    assert torch.allclose(sol.value, torch.full_like(z0, 100.0)) and (sol.num_steps < 10).all()


def test_a_large_fixed_point_of_a_slow_contraction_is_no_runaway() -> None:
    """z* = 1e4 from 0 by steps of at most 1: |f(z)| grows ten thousandfold, and the residual falls."""
    sol = wp.fixed_point(lambda z: 0.9999 * z + 1, torch.zeros(1, 1).double(), wp.Anderson(), rtol=1e-9, on_failure="raise")
    assert abs(float(sol.value) - 1e4) < 1
    options: dict[str, Any] = {"rtol": 1e-2, "max_steps": 300, "on_failure": "raise"}
    loose = wp.fixed_point(lambda z: 0.99 * z + 1, torch.zeros(1, 1).double(), wp.Picard(), **options)
    assert 0.09 < float(loose.absolute_residual) <= 0.1  # the tolerance is met earlier; a tenth is what convinces


@pytest.mark.parametrize("solver", [wp.Auto(), wp.Anderson(), wp.NewtonKrylov()])
@pytest.mark.parametrize("f", [lambda z: z - torch.atan(z) - 2, lambda z: z - torch.exp(z) - 1])
def test_a_residual_that_falls_to_a_limit_is_no_equilibrium(f: Any, solver: AbstractSolver) -> None:
    """|f(z) - z| falls to 0.43 and to 1, and never lower, while |z| grows without end."""
    solution = wp.fixed_point(f, torch.ones(1, 1, dtype=torch.float64), solver, on_failure="ignore")
    assert not solution.converged.any()


# --- the norm is that of a sample ------------------------------------------------------------------------------------


@every_solver
def test_steps_do_not_depend_on_the_number_of_copies_in_a_vector(solver: AbstractSolver) -> None:
    steps = [
        wp.fixed_point(scalar_map, torch.zeros(1, copies, dtype=torch.float64), solver).num_steps.item()
        for copies in (1, 2, 10, 100, 1000)
    ]
    assert len(set(steps)) == 1


@every_solver
def test_steps_do_not_depend_on_the_number_of_copies_in_a_batch(solver: AbstractSolver) -> None:
    steps = [
        wp.fixed_point(scalar_map, torch.zeros(copies, 1, dtype=torch.float64), solver).num_steps for copies in (1, 2, 17, 200)
    ]
    assert all((s == steps[0][0]).all() for s in steps)


@every_solver
def test_the_rest_of_the_batch_changes_nothing(solver: AbstractSolver) -> None:
    """A hard or a large neighbour neither prolongs nor shortens the solve of an easy sample."""
    q = torch.tensor([0.5, 0.97], dtype=torch.float64)
    both = solve(spread_with(q, torch.float64), solver)
    alone = solve(spread_with(q, torch.float64).take([0]), solver)
    assert both.num_steps[0] == alone.num_steps[0]
    assert torch.allclose(both.value[0], alone.value[0], rtol=1e-13)

    def f(z: Tensor, c: Tensor) -> Tensor:
        return 0.5 * z + c

    c = torch.tensor([[1.0], [1e12]], dtype=torch.float64)
    both = wp.fixed_point(f, torch.zeros_like(c), solver, args=(c,))
    alone = wp.fixed_point(f, torch.zeros_like(c[:1]), solver, args=(c[:1],))
    assert both.num_steps[0] == alone.num_steps[0] and both.value[0] == alone.value[0]


# --- options ---------------------------------------------------------------------------------------------------------


def test_unknown_keyword_arguments_raise() -> None:
    z0 = torch.zeros(1, 1)
    with pytest.raises(TypeError, match="stop_mode"):
        wp.fixed_point(scalar_map, z0, stop_mode="rel")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="m"):
        wp.Anderson(m=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="ls"):
        wp.Broyden(ls=True)  # type: ignore[call-arg]


@every_solver_and_dtype
@pytest.mark.parametrize("max_steps", [1, 2])
@pytest.mark.parametrize("name", ["scalar", "relu_random", "monotone", "tuple_state"])
def test_one_or_two_steps_return_an_honest_residual(
    solver: AbstractSolver, dtype: torch.dtype, max_steps: int, name: str
) -> None:
    p = problem(name, dtype)
    sol = solve(p, solver, max_steps=max_steps)
    assert (sol.num_steps == max_steps).all() and (sol.status == Status.MAX_STEPS).all()
    check_honest(p, sol)
    start, _ = p.residual(p.z0)
    assert (sol.absolute_residual <= start * (1 + 1e-6)).all()
    if max_steps == 1:
        assert torch.allclose(sol.absolute_residual.double(), start, rtol=1e-6)


# --- low precision ---------------------------------------------------------------------------------------------------


@every_solver
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_low_precision_weights_that_refuse_float32(solver: AbstractSolver, dtype: torch.dtype) -> None:
    """A product with captured low-precision weights works in their precision only; the answer is then as good as that."""
    W = torch.tensor([[0.5, 0.25], [0.0, 0.25]], dtype=dtype)
    c = torch.tensor([[1.0, 2.0], [3.0, -4.0]], dtype=dtype)
    sol = wp.fixed_point(lambda z, c: z @ W.T + c, torch.zeros_like(c), solver, args=(c,), rtol=2e-2)
    assert sol.converged.all() and sol.value.dtype == torch.float32
    exact = torch.linalg.solve(torch.eye(2) - W.float(), c.float().T).T
    assert ((sol.value - exact).norm(dim=1) <= 5 * 2e-2 * exact.norm(dim=1)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_low_precision_inputs_meet_a_tolerance_they_could_not_resolve(dtype: torch.dtype) -> None:
    x = torch.linspace(0.1, 1, 5).unsqueeze(1).to(dtype)
    sol = wp.fixed_point(lambda z, x: torch.tanh(0.5 * z + x), torch.zeros_like(x), args=(x,), rtol=1e-6)
    assert sol.converged.all() and sol.value.dtype == sol.residual.dtype == torch.float32
    exact = wp.fixed_point(lambda z, x: torch.tanh(0.5 * z + x), torch.zeros(5, 1).double(), args=(x.double(),), rtol=1e-14)
    assert torch.allclose(sol.value.double(), exact.value, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_low_precision_structures(dtype: torch.dtype) -> None:
    p = problem("dict_state", dtype)
    sol = solve(p, wp.Auto())
    assert sol.value["fast"]["left"].dtype == torch.float32
    check_honest(p, sol)
    check_right(p, sol)


# --- sizes -----------------------------------------------------------------------------------------------------------


@every_solver
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e-25), (torch.float64, 1e-200)], ids=["float32", "float64"])
def test_tiny_values_do_not_converge_by_underflow(solver: AbstractSolver, dtype: torch.dtype, size: float) -> None:
    """The squares of these values are 0 in their dtype; the residual is not."""
    c = torch.tensor([[1.0, 2.0, 3.0]], dtype=dtype) * size
    sol = wp.fixed_point(lambda z, c: 0.5 * z + c, torch.zeros_like(c), solver, args=(c,), rtol=1e-5)
    assert sol.converged.all() and (sol.num_steps > 1).all()
    assert ((sol.value - 2 * c).abs() <= 2 * c * 1e-4).all()


@every_solver
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e25), (torch.float64, 1e200)], ids=["float32", "float64"])
def test_huge_values_do_not_converge_by_overflow(solver: AbstractSolver, dtype: torch.dtype, size: float) -> None:
    """The squares of these values are infinite in their dtype. Plain steps get there; nobody may claim it wrongly."""
    c = torch.tensor([[1.0, 2.0, 3.0]], dtype=dtype) * size
    sol = wp.fixed_point(lambda z, c: 0.5 * z + c, torch.zeros_like(c), solver, args=(c,), rtol=1e-5, on_failure="ignore")
    near = ((sol.value - 2 * c).abs() <= 2 * c * 1e-4).all(dim=1)
    assert torch.equal(sol.converged, near & sol.converged)
    assert sol.residual.isfinite().all()
    if isinstance(solver, wp.Picard):
        assert sol.converged.all()


@every_solver
def test_empty_batch(solver: AbstractSolver) -> None:
    def explode(z: Tensor) -> Tensor:
        raise AssertionError("f was called for nobody")

    sol = wp.fixed_point(explode, torch.zeros(0, 3), solver, on_failure="raise")
    assert sol.value.shape == (0, 3) and sol.converged.shape == sol.residual.shape == sol.num_steps.shape == (0,)
    assert sol.converged.all() and len(sol.status) == 0


def test_empty_batch_of_a_structure() -> None:
    state = (torch.zeros(0, 3), {"a": torch.zeros(0), "b": torch.zeros(0, 2, 2)})
    sol = wp.fixed_point(lambda z: z, state)
    assert sol.value[0].shape == (0, 3) and sol.value[1]["a"].shape == (0,) and sol.value[1]["b"].shape == (0, 2, 2)
    assert sol.error_bound(0.5).shape == (0,)


@every_solver
def test_no_features(solver: AbstractSolver) -> None:
    sol = wp.fixed_point(lambda z: z + 1, torch.zeros(3, 0), solver, on_failure="raise")
    assert sol.value.shape == (3, 0) and sol.converged.all() and sol.residual.tolist() == [0, 0, 0]


# --- particular maps -------------------------------------------------------------------------------------------------


@every_solver
def test_identity(solver: AbstractSolver) -> None:
    z0 = torch.tensor([[1.0, -2.0], [0.0, 0.0]])
    sol = wp.fixed_point(lambda z: z, z0, solver)
    assert sol.converged.all() and sol.num_steps.tolist() == [2, 2] and sol.residual.tolist() == [0, 0]
    assert torch.equal(sol.value, z0) and sol.value.data_ptr() != z0.data_ptr()


@every_solver
def test_zero_is_the_fixed_point(solver: AbstractSolver) -> None:
    """No relative residual is small near 0: with rtol alone it must be reached exactly or reported; atol is the remedy."""
    z0 = torch.tensor([[1.0, -3.0], [0.0, 0.0]], dtype=torch.float64)
    sol = wp.fixed_point(lambda z: 0.5 * z, z0, solver, max_steps=50, on_failure="ignore")
    assert sol.converged[1] and sol.num_steps[1] == 2 and sol.residual[1] == 0
    assert not sol.converged[0] or (sol.value[0] == 0).all()
    remedy = wp.fixed_point(lambda z: 0.5 * z, z0, solver, atol=1e-9, on_failure="raise")
    assert remedy.value.abs().max() <= 2e-9


@every_solver
def test_f_that_does_not_depend_on_z(solver: AbstractSolver) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    sol = wp.fixed_point(lambda z: x.clone(), torch.zeros_like(x), solver, rtol=1e-9)
    assert sol.converged.all() and torch.allclose(sol.value, x, rtol=1e-8)


@pytest.mark.parametrize("solver", SOLVERS, ids=short)
@pytest.mark.parametrize("state", ["tensor", "tuple"])
def test_f_that_changes_its_argument_is_refused(solver: AbstractSolver, state: str) -> None:
    if state == "tensor":
        with pytest.raises(InvalidArgument, match="f changed its argument in place"):
            wp.fixed_point(lambda z: z.mul_(0.5).add_(1), torch.ones(2, 3), solver)
    else:

        def f(z: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            z[1].mul_(0.5)
            return z[0] * 0.5 + 1, z[1].clone()

        with pytest.raises(InvalidArgument, match="f changed its argument in place"):
            wp.fixed_point(f, (torch.ones(2, 3), torch.ones(2, 2, 2)), solver)


def test_data_of_samples_handed_from_stage_to_stage_stay_with_them() -> None:
    """Rows were once permuted between the stages of Auto: each sample then met the data of another."""
    q = torch.tensor([0.95, 0.1, 2.0, 0.9, 0.0, 0.99, 3.0, 0.5], dtype=torch.float64)
    p = spread_with(q, torch.float64)
    for order in (list(range(8)), [5, 2, 7, 0, 3, 6, 1, 4]):
        part = p.take(order)
        sol = solve(part, wp.Auto())
        assert sol.converged.all()
        check_right(part, sol)


def test_a_line_search_of_everybody_proves_nothing_about_f() -> None:
    """When all samples search, `take` of all rows was once taken for a proof that f goes row by row."""
    x = torch.tensor([[2.0], [3.0], [-2.5], [0.1]], dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        return z - torch.atan(5 * (z - x))  # captures per-sample data; the first steps of Newton overshoot

    sol = wp.fixed_point(f, torch.zeros_like(x), wp.NewtonKrylov(), rtol=1e-10, on_failure="raise")
    assert torch.allclose(sol.value, x, rtol=1e-8)


def test_the_default_dtype_of_torch_does_not_matter() -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        sol = wp.fixed_point(lambda z: 0.5 * z + 1, torch.zeros(3, 1, dtype=torch.float32))
    finally:
        torch.set_default_dtype(before)
    assert sol.converged.all()
    assert sol.rate.dtype == torch.float32


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e20), (torch.float64, 1e160)], ids=["float32", "float64"])
@pytest.mark.parametrize("solver", [wp.Auto(), wp.Picard(), wp.Anderson()], ids=lambda solver: type(solver).__name__)
def test_norms_whose_squares_overflow(dtype: torch.dtype, size: float, solver: AbstractSolver) -> None:
    """|f| was infinite, so every residual was 0 of it: CONVERGED after two steps, 5 % off."""
    f = lambda z: 0.5 * (z - size) + size  # noqa: E731 (fixed point: size)
    for start in (0.0, 0.9 * size):
        solution = wp.fixed_point(f, torch.full((4, 3), start, dtype=dtype), solver, rtol=1e-5)
        assert solution.converged.all()
        assert float((solution.value / size - 1).abs().max()) <= 2e-5
        true = (f(solution.value) / size - solution.value / size).norm(dim=1) / (f(solution.value) / size).norm(dim=1)
        torch.testing.assert_close(solution.residual, true, rtol=1e-2, atol=10 * torch.finfo(dtype).eps)


def test_records_of_a_layer_share_no_memory_with_graphs() -> None:
    generator = torch.Generator().manual_seed(0)
    W = (0.3 * torch.randn(5, 5, dtype=torch.float64, generator=generator)).requires_grad_()
    x = torch.randn(4, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W) + x + 0.01 * z * z)
    (expected,) = torch.autograd.grad(layer(x).sum(), W)
    z = layer(x)
    layer.last_solution.value.clamp_(-0.1, 0.1)
    (ours,) = torch.autograd.grad(z.sum(), W)
    assert torch.equal(ours, expected)
    linear = wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W) + x)
    (slope,) = torch.autograd.grad(linear(x).sum(), x)
    kept = slope.clone()
    linear.last_adjoint.value.zero_()
    assert torch.equal(slope, kept)
