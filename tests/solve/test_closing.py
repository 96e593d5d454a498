"""No answer is called converged unless the whole batch, evaluated at that answer, confirms it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import wellposed as wp
from conformance import every_method
from problems import gaussian
from wellposed.solve import AbstractMap, AbstractSolver, Picard, Point, Step

F64 = torch.float64
KINDS = ("chain", "graph", "mean", "causal", "norm", "attention")
every_kind = pytest.mark.parametrize("kind", KINDS)


def coupled(kind: str, seed: int, batch: int = 7, features: int = 3) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
    """f and x: a contraction whose rows depend on each other, in a random way."""
    x = gaussian(batch, features, seed=seed)
    g = torch.Generator().manual_seed(seed)
    W = gaussian(features, features, seed=seed + 1)
    W = W / torch.linalg.matrix_norm(W, 2)
    strength = 0.3 + 0.6 * float(torch.rand((), generator=g))
    if kind == "chain":
        A = torch.diag(torch.ones(batch - 1, dtype=F64), -1)
        x = x * (torch.rand(batch, 1, generator=g, dtype=F64) < 0.4)
        x[0] = 1.0
        return lambda z, x: strength * (A @ z) + x, x
    if kind == "graph":
        A = (torch.rand(batch, batch, generator=g) < 0.4).to(F64)
        A = A / A.sum(dim=1, keepdim=True).clamp_min(1)
        return lambda z, x: torch.tanh(strength * (A @ z @ W) / torch.linalg.matrix_norm(A, 2).clamp_min(1) + x), x
    if kind == "mean":
        a, b = 0.5 * strength, strength
        return lambda z, x: torch.tanh(a * z - b * 0.5 * z.mean(dim=0) + x), x
    if kind == "causal":
        A = torch.tril(torch.rand(batch, batch, generator=g, dtype=F64), -1)
        A = A / A.sum(dim=1, keepdim=True).clamp_min(1)
        return lambda z, x: strength * (A @ z @ W) / torch.linalg.matrix_norm(A, 2).clamp_min(1) + x, x
    if kind == "norm":
        return lambda z, x: 0.3 * torch.tanh(z / (1 + z.square().mean())) + x, x
    scale = 0.2 * strength
    return lambda z, x: scale * torch.softmax(z @ z.T / 4, dim=1) @ torch.tanh(z @ W) + x, x


def residual(f: Any, z: Tensor, x: Tensor) -> float:
    fz = f(z, x)
    return float((fz - z).norm() / fz.norm())


def quiet(f: Any, x: Tensor, solver: AbstractSolver, **options: Any) -> wp.Solution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", wp.errors.CoupledRowsWarning)
        return wp.fixed_point(f, torch.zeros_like(x), solver, args=(x,), **{"on_failure": "ignore"} | options)


# --- rows that depend on each other ----------------------------------------------------------------------------------


@every_method
def test_a_chain_is_not_done_before_its_last_row(solver: AbstractSolver) -> None:
    """All rows but the first stand still at the first step, with residual 0."""
    A = torch.diag(torch.ones(49), -1)
    x = torch.zeros(50, 4)
    x[0] = 1
    with pytest.warns(wp.errors.CoupledRowsWarning, match="Rows of the batch depend on each other.*coupled=True"):
        sol = wp.fixed_point(lambda z, x: 0.9 * (A @ z) + x, torch.zeros(50, 4), solver, args=(x,), on_failure="raise")
    assert sol.converged.all() and (sol.residual <= 1e-6).all()
    exact = 0.9 ** torch.arange(50.0).unsqueeze(1).expand(50, 4)
    assert (sol.value - exact).norm() <= 1e-6 * 50 * exact.norm()  # |(I - 0.9 A)^-1| <= 10, and as much for f


@every_kind
@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 170), marks=pytest.mark.slow)], ids=["few", "many"])
def test_coupled_maps_are_never_falsely_converged(kind: str, seeds: range) -> None:
    """170 maps of every kind, a solver each in turn: 1,020 in all."""
    solvers = [wp.Auto(), wp.Picard(), wp.Anderson(), wp.Broyden(), wp.NewtonKrylov()]
    converged = 0
    for seed in seeds:
        f, x = coupled(kind, seed, batch=3 + seed % 6, features=1 + seed % 4)
        sol = quiet(f, x, solvers[seed % 5], rtol=1e-8)
        if sol.converged.any():
            fz = f(sol.value, x)
            row_wise = (fz - sol.value).norm(dim=1) <= 1e-8 * fz.norm(dim=1)
            assert row_wise[sol.converged].all() or residual(f, sol.value, x) <= 1e-8
            converged += int(sol.converged.all())
    assert converged >= 0.85 * len(seeds)  # the batch as one sample does converge, so nothing was gained by refusing


@every_kind
@every_method
def test_saying_so_gives_the_same_answer_without_a_warning(kind: str, solver: AbstractSolver) -> None:
    f, x = coupled(kind, seed=3)
    told = wp.fixed_point(f, torch.zeros_like(x), solver, args=(x,), rtol=1e-10, coupled=True, on_failure="raise")
    found = quiet(f, x, solver, rtol=1e-10)
    assert told.status.shape == (7,) and (told.residual == told.residual[0]).all() and told.residual[0] <= 1e-10
    assert found.converged.all() and (told.value - found.value).norm() <= 1e-8 * told.value.norm()


@every_kind
@pytest.mark.parametrize("linear_solver", [None, wp.GMRES(), wp.BiCGStab(), wp.Neumann()], ids=repr)
def test_gradients_of_coupled_maps_are_those_of_dense_implicit_differentiation(kind: str, linear_solver: Any) -> None:
    for seed in range(8):
        f, x = coupled(kind, seed, batch=5, features=2)
        x.requires_grad_()
        layer = wp.EquilibriumLayer(f, gradient=wp.ImplicitGradient(linear_solver), rtol=1e-11, on_failure="raise")
        v = gaussian(5, 2, seed=seed + 9)
        v[1 + seed % 3 :] = 0  # most samples have nothing to solve, if they were by themselves
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wp.errors.CoupledRowsWarning)
            z = layer(x)
            (g,) = torch.autograd.grad(z, x, v)
        J, Jx = (part.reshape(10, 10) for part in torch.autograd.functional.jacobian(f, (z.detach(), x.detach())))
        exact = Jx.T @ torch.linalg.solve((torch.eye(10, dtype=F64) - J).T, v.reshape(-1))
        assert (g.reshape(-1) - exact).norm() <= 1e-8 * exact.norm()
        assert layer.last_adjoint.converged.all() and layer.last_adjoint.status.shape == (5,)


def test_second_derivatives_of_a_coupled_layer() -> None:
    f, x = coupled("graph", seed=1, batch=4, features=2)
    layer = wp.EquilibriumLayer(f, coupled=True, rtol=1e-13, on_failure="raise")
    assert torch.autograd.gradcheck(layer, (x.requires_grad_(),))
    assert torch.autograd.gradgradcheck(layer, (x,))


def test_a_layer_warns_once_and_remembers_by_training_mode() -> None:
    class Cell(torch.nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.5 * torch.tanh(z - z.mean(dim=0) if self.training else z) + x

    layer, x = wp.EquilibriumLayer(Cell()), gaussian(6, 3, seed=1)
    with pytest.warns(wp.errors.CoupledRowsWarning) as caught:
        for _ in range(3):
            layer(x)
    assert len(caught) == 1
    layer.eval()
    layer(x)  # row-wise now, and no warning
    assert len(set(layer.last_solution.residual.tolist())) > 1


def test_ignoring_failures_is_silent_about_coupling_too() -> None:
    f, x = coupled("mean", seed=2)
    sol = wp.fixed_point(f, torch.zeros_like(x), args=(x,), on_failure="ignore")
    assert sol.converged.all() and sol.note.startswith("Rows of the batch depend on each other")


def test_a_function_that_counts_its_rows_is_not_called_coupled() -> None:
    """Row i knows its number: f of some rows is not some rows of f, and yet no row depends on another."""

    def f(z: Tensor) -> Tensor:
        slopes = torch.linspace(0.1, 0.95, len(z), dtype=F64).unsqueeze(1)
        return slopes * z + 1

    for solver in (wp.Auto(), wp.Picard(), wp.Anderson()):
        sol = wp.fixed_point(f, torch.zeros(12, 2, dtype=F64), solver, rtol=1e-9, max_steps=600, on_failure="raise")
        exact = 1 / (1 - torch.linspace(0.1, 0.95, 12, dtype=F64))
        assert ((sol.value[:, 0] - exact).abs() <= 1e-9 * 20 * exact).all() and not sol.note


# --- random maps -----------------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("batch", [1, 2, 9])
def test_a_random_map_never_converges(solver: AbstractSolver, batch: int) -> None:
    for seed in range(12):
        torch.manual_seed(seed)
        x = gaussian(batch, 4, seed=seed)
        sol = wp.fixed_point(
            lambda z, x: torch.nn.functional.dropout(0.5 * torch.tanh(z), 0.1) + x,
            torch.zeros_like(x),
            solver,
            args=(x,),
            rtol=1e-6,
            max_steps=60,
            on_failure="ignore",
        )
        assert not sol.converged.any() and sol.note.startswith("f is random")


def test_randomness_that_is_not_of_torch_is_found_by_its_values() -> None:
    generator = torch.Generator().manual_seed(0)

    def f(z: Tensor) -> Tensor:
        return 0.5 * z + 1 + 1e-3 * torch.randn(z.shape, generator=generator, dtype=F64)

    sol = wp.fixed_point(f, torch.zeros(40, 3, dtype=F64), wp.Picard(), rtol=5e-4, on_failure="ignore")
    assert not sol.converged.any() and sol.note.startswith("f is random")


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand()), lambda: random.gauss(0, 1)])
def test_noise_of_python_and_numpy_is_found_where_it_does_not_show(draw: Callable[[], float]) -> None:
    def f(z: Tensor, x: Tensor) -> Tensor:
        return 0.3 * z + x + (0.1 if draw() > 1e9 else 0.0)  # never, but f does not know

    x = torch.ones(2, 3, dtype=torch.float64)
    for given in (wp.Auto(), wp.Anderson()):
        sol = wp.fixed_point(f, torch.zeros_like(x), given, args=(x,), on_failure="ignore")
        assert not sol.converged.any() and sol.note.startswith("f is random")
    random.random(), np.random.rand()
    assert wp.fixed_point(lambda z, x: 0.3 * z + x, torch.zeros_like(x), args=(x,)).converged.all()


@pytest.mark.parametrize("grad", [True, False], ids=["with a graph", "without"])
@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())], ids=["random", "numpy"])
def test_a_layer_looks_for_draws_until_there_are_none(draw: Callable[[], float], grad: bool) -> None:
    noisy, x = True, torch.ones(2, 3, dtype=torch.float64)

    def cell(z: Tensor, x: Tensor) -> Tensor:
        return 0.3 * z + x + (0.1 if noisy and draw() > 1e9 else 0.0)  # never, but f does not know

    layer = wp.EquilibriumLayer(cell, on_failure="ignore")
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            layer(x.requires_grad_())
            assert not layer.last_solution.converged.any() and layer.last_solution.note.startswith("f is random")
        noisy = False
        for _ in range(2):
            layer(x)
            assert layer.last_solution.converged.all() and not layer.last_solution.note


def test_a_value_that_changes_is_found_though_no_generator_does() -> None:
    """f twice at one point gives it away."""
    noise, x = torch.zeros(()), torch.ones(2, 3)
    layer = wp.EquilibriumLayer(lambda z, x: 0.3 * z + x + noise.add_(1e-3), on_failure="ignore", rtol=0.1)
    noise_free = wp.EquilibriumLayer(lambda z, x: 0.3 * z + x, rtol=0.1)
    with torch.no_grad():
        for _ in range(2):
            layer(x)
            assert not layer.last_solution.converged.any() and layer.last_solution.note.startswith("f is random")
            assert noise_free(x).isfinite().all()


def test_the_message_of_a_random_map_says_so() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: torch.dropout(0.5 * z, 0.5, True) + x, on_failure="raise")
    with pytest.raises(
        wp.NotConverged, match="f is random: it draws random numbers.*dropout constant within a solve"
    ) as caught:
        layer(torch.ones(4, 3))
    assert "max_steps" not in str(caught.value)


@pytest.mark.parametrize("gradient", [wp.ImplicitGradient(), wp.UnrolledGradient(5)], ids=repr)
def test_rare_noise_is_random_too(gradient: Any) -> None:
    """Stochastic depth draws one number, and mostly does nothing; a layer that draws has no equation to solve."""

    def cell(z: Tensor, x: Tensor) -> Tensor:
        return (0.5 * torch.tanh(z) if torch.rand(()) > 0.02 else 0 * z) + x

    for seed in range(20):
        torch.manual_seed(seed)
        layer = wp.EquilibriumLayer(cell, gradient=gradient, on_failure="ignore", rtol=0.1)
        layer(gaussian(1, 4, seed=seed).requires_grad_())
        assert not layer.last_solution.converged.any() and layer.last_solution.note.startswith("f is random")


def test_a_mask_that_is_drawn_once_is_not_random() -> None:
    masks: list[Tensor] = []

    def f(z: Tensor) -> Tensor:
        if not masks:
            masks.append((torch.rand(z.shape) > 0.3).to(z.dtype))
        return 0.5 * masks[0] * z + 1

    assert wp.fixed_point(f, torch.zeros(3, 2), on_failure="raise").converged.all()


# --- solvers that report what is not so ------------------------------------------------------------------------------


class Liar(AbstractSolver):
    """Says that f(z) is z wherever it goes."""

    def init(self, f: AbstractMap, point: Point) -> None:
        return None

    def step(self, state: None, f: AbstractMap, point: Point) -> Step:
        return Step(point.fz, point.fz.clone())


class Boasting(Picard):
    """A subclass of a solver of the library is not one of the library."""

    def step(self, state: None, f: AbstractMap, point: Point) -> Step:
        return Step(point.fz, point.fz.clone())


class Forgetful(Liar):
    """Reports evaluations that it did not make, up to the end of the budget."""

    def step(self, state: None, f: AbstractMap, point: Point) -> Step:
        return Step(point.fz, point.fz.clone(), 1000)


@pytest.mark.parametrize("solver", [Liar(), Boasting(0.5), Forgetful()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_a_solver_that_reports_a_wrong_image_is_found(solver: AbstractSolver, batch: int, coupled: bool, dense: bool) -> None:
    cell = wp.nn.DenseCell(3, 4, wp.nn.Tanh(), generator=torch.Generator().manual_seed(0), dtype=F64)
    x = gaussian(batch, 3, seed=1)
    f: Any = cell.bind(x) if dense else lambda z: cell(z, x)
    sol = wp.fixed_point(f, torch.zeros(batch, 4, dtype=F64), solver, coupled=coupled, max_steps=6, on_failure="ignore")
    fz = cell(sol.value, x)
    true = (fz - sol.value).norm(dim=1) / fz.norm(dim=1)
    assert (true[sol.converged] <= 1e-6).all() and not sol.converged.all() and sol.note
    if not coupled:
        assert torch.allclose(sol.residual, true, rtol=1e-10)


def test_a_step_that_is_a_tensor_is_explained() -> None:
    class Bare(Liar):
        def step(self, state: None, f: AbstractMap, point: Point) -> Any:
            return point.fz

    with pytest.raises(wp.InvalidType, match=r"Bare\.step must return a Step\(z, fz\), .*; got Tensor"):
        wp.fixed_point(lambda z: 0.5 * z + 1, torch.zeros(2, 2), Bare())


class Echo(wp.linalg.AbstractLinearSolver):
    """Says that the right-hand side is the solution."""

    def __call__(self, matvec: Any, b: Tensor, x0: Any = None, **options: Any) -> Any:
        codes = torch.zeros(b.shape[0], dtype=torch.int64)
        zero = torch.zeros(b.shape[0], dtype=b.dtype)
        return wp.linalg.LinearSolution(b, zero, codes.clone(), wp.status.StatusArray(codes))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_linear_solver_that_is_wrong_is_found(batch: int) -> None:
    layer = wp.EquilibriumLayer(lambda z, x: 0.5 * z + x, gradient=wp.ImplicitGradient(Echo()), on_failure="ignore")
    x = gaussian(batch, 2, seed=1).requires_grad_()
    torch.autograd.grad(layer(x).sum(), x)
    assert not layer.last_adjoint.converged.any() and torch.allclose(layer.last_adjoint.residual, torch.tensor(0.5).double())
    assert not layer._record.coupled


# --- maps that are not what they seem --------------------------------------------------------------------------------


def test_a_window_of_coupling_does_not_confirm_what_was_found_in_it() -> None:
    """Row 0 converges while it depends on the others; then they leave, and it does not depend on them any more."""

    def f(z: Tensor) -> Tensor:
        near = (z[1:].mean() < 0.5).to(F64)
        first = 0.1 * z[:1] + 1 + near * 0.5
        return torch.cat([first, 0.95 * z[1:] + 0.05])

    for solver in (wp.Picard(), wp.Anderson(), wp.Auto()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wp.errors.CoupledRowsWarning)
            sol = wp.fixed_point(f, torch.zeros(20, 2, dtype=F64), solver, rtol=1e-8, max_steps=900, on_failure="ignore")
        fz = f(sol.value)
        r = (fz - sol.value).norm(dim=1) / fz.norm(dim=1)
        as_one = sol.note.startswith("Rows of the batch depend") and (fz - sol.value).norm() <= 1.01e-8 * fz.norm()
        assert ((r[sol.converged] <= 1.01e-8).all() or as_one) and sol.converged.any()


def test_a_map_that_takes_the_wrong_rows_is_found() -> None:
    class Wrong(AbstractMap):
        def __init__(self, slopes: Tensor) -> None:
            self.slopes = slopes

        def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
            return self.slopes * z + 1

        def take(self, rows: Tensor) -> Wrong:
            return Wrong(self.slopes[: len(rows)])

    f = Wrong(torch.linspace(0.1, 0.9, 6, dtype=F64).unsqueeze(1))
    for solver in (wp.Picard(), wp.Anderson(), wp.Broyden(), wp.NewtonKrylov(), wp.Auto()):
        sol = wp.fixed_point(f, torch.zeros(6, 3, dtype=F64), solver, max_steps=600, on_failure="raise")
        r = (f(sol.value) - sol.value).norm(dim=1) / f(sol.value).norm(dim=1)
        assert (r <= 1e-6).all()


@pytest.mark.parametrize(
    "linear_solver", [None, wp.Picard(), wp.Anderson(), wp.Broyden(), wp.NewtonKrylov(), wp.GMRES()], ids=repr
)
def test_a_shared_argument_of_the_size_of_the_batch_spoils_no_gradient(linear_solver: Any) -> None:
    """f of some rows agrees with the whole at z* = 0, and its Jacobian does not."""
    for seed in range(4):
        K = gaussian(4, 3, seed=seed)
        W = 0.25 * gaussian(3, 3, seed=seed + 50)

        def cell(z: Tensor, x: Any, W: Tensor = W) -> Tensor:
            x, K = x
            return torch.tanh(z @ W) * torch.softmax(K @ K.T, dim=1).sum() / 8 + x

        layer = wp.EquilibriumLayer(cell, gradient=wp.ImplicitGradient(linear_solver), state_shape=(3,), max_steps=500)
        x = torch.zeros(4, 3, dtype=F64, requires_grad=True)
        v = gaussian(4, 3, seed=seed + 9)
        v[1:] *= torch.tensor([[1e-9], [1e-3], [0.0]], dtype=F64)  # samples that finish at different times
        (g,) = torch.autograd.grad(layer((x, K)), x, v)
        J = W.T * float(torch.softmax(K @ K.T, dim=1).sum()) / 8
        exact = torch.linalg.solve(torch.eye(3, dtype=F64) - J, torch.eye(3, dtype=F64))
        assert (g - v @ exact).norm() <= 1e-9 * v.norm()


def test_weak_coupling_in_single_precision_is_not_confirmed() -> None:
    for batch in (2, 4, 8):
        ring = 2.5e-6 * torch.roll(torch.eye(batch), 1, dims=0)
        x = torch.ones(batch, 3)
        x[0] = 0.0
        f = lambda z, x, ring=ring: 0.9 * z * (x != 0) + ring @ z + x  # noqa: E731
        sol = quiet(f, x, wp.Picard(), max_steps=400)
        r = (f(sol.value, x) - sol.value).norm(dim=1) / f(sol.value, x).norm(dim=1)
        assert (r[sol.converged] <= 2e-6).all()


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_f_is_never_called_more_often_than_allowed() -> None:
    slopes = torch.tensor([[0.1], [0.5], [0.99], [0.5], [0.999], [0.0]], dtype=F64)
    for max_steps in (1, 2, 3, 10, 50):
        for solver in (wp.Auto(), wp.Picard(), wp.Anderson()):
            calls = []

            def f(z: Tensor, q: Tensor, calls: list[int] = calls) -> Tensor:
                calls.append(len(z))
                return q * z + 1

            z0 = torch.zeros(6, 1, dtype=F64)
            sol = wp.fixed_point(f, z0, solver, args=(slopes,), max_steps=max_steps, on_failure="ignore")
            assert int(sol.num_steps.max()) <= len(calls) <= max_steps


def test_a_cell_of_the_library_is_not_evaluated_again() -> None:
    cell = wp.nn.DenseCell(3, 4, dtype=F64)
    x = gaussian(5, 3, seed=1)
    own = wp.fixed_point(cell.bind(x), torch.zeros(5, 4, dtype=F64), wp.Picard())
    function = wp.fixed_point(lambda z, x: cell(z, x), torch.zeros(5, 4, dtype=F64), wp.Picard(), args=(x,))
    assert torch.equal(own.num_steps + 1, function.num_steps)


# --- warnings --------------------------------------------------------------------------------------------------------


def test_a_layer_warns_of_a_cause_once_and_counts() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: 2 * z + x, wp.Picard())
    with pytest.warns(wp.errors.NotConvergedWarning, match="failure_counts") as caught:
        for k in range(1, 21):
            layer(torch.full((2, 1), float(k)))
    assert len(caught) == 1 and layer.failure_counts == {"forward DIVERGED": 20}


def test_other_causes_are_warned_of_too() -> None:
    noise = {"on": False}

    def cell(z: Tensor, x: Tensor) -> Tensor:
        return 0.999 * z + x + (torch.rand(z.shape) if noise["on"] else 0.0)

    layer = wp.EquilibriumLayer(cell, wp.Picard(), max_steps=5)
    with pytest.warns(wp.errors.NotConvergedWarning) as caught:
        for on in (False, False, True, True):
            noise["on"] = on
            layer(torch.ones(2, 1))
    assert len(caught) == 2 and "f is random" in str(caught[1].message)
    assert layer.failure_counts == {"forward MAX_STEPS": 4, "forward f is random": 2}


def test_the_advice_for_auto_names_no_part_of_it() -> None:
    with pytest.raises(wp.NotConverged, match=r"Raise max_steps or loosen rtol\. If [^A-Z]*\.$"):
        wp.fixed_point(lambda z: 0.999 * z + 1, torch.zeros(1, 1, dtype=F64), max_steps=3, on_failure="raise")
