"""The exact gradient: against gradcheck, dense linear algebra and unrolling, for every cell, solver and linear solver."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad, gradcheck, gradgradcheck

import wellposed as wp
from conformance import cross
from equilibria import CASES, F64, Case, dense_gradients, leaf, normal
from wellposed._tree import measure
from wellposed.solve import loop
from wellposed.solve.map import AbstractMap
from wellposed.solve.solution import SolveOptions
from wellposed.solve.solver import Tolerance

SOLVERS = [wp.Picard(), wp.Picard(0.6), wp.Anderson(), wp.Broyden(), wp.NewtonKrylov(), wp.Auto()]
SPLITTINGS = [wp.PeacemanRachford(), wp.DouglasRachford(), wp.ForwardBackward(0.5)]
LINEAR_SOLVERS = [
    None,
    wp.GMRES(),
    wp.GMRES(restart=2),
    wp.BiCGStab(),
    wp.Neumann(),
    wp.DenseSolve(),
    wp.Picard(0.7),
    wp.Anderson(),
    wp.Broyden(),
    wp.NewtonKrylov(),
    wp.Auto(),
]

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
every_linear_solver = pytest.mark.parametrize("linear_solver", LINEAR_SOLVERS, ids=repr)


def cases(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [CASES[name] for name in names], ids=names)


def gradients(case: Case, v: Tensor, **options: Any) -> tuple[Tensor | None, ...]:
    return grad(case.rows(**options), case.leaves, v, allow_unused=True)


def assert_same(ours: Any, theirs: Any, rtol: float = 1e-8) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


def cotangent(case: Case) -> Tensor:
    return normal(*case.rows().shape, seed=99)


# --- first derivatives --------------------------------------------------------------------------------


@every_case
def test_it_agrees_with_dense_linear_algebra(case):
    case = case()
    v = cotangent(case)
    assert_same(gradients(case, v), dense_gradients(case, v))


@every_case
def test_it_agrees_with_unrolling(case):
    case = case()
    v = cotangent(case)
    assert_same(gradients(case, v), gradients(case, v, gradient=wp.UnrolledGradient(150)))


@every_case
def test_gradcheck(case):
    """A product from both sides with finite differences: entry by entry it is compared with dense linear algebra above."""
    case = case()
    assert gradcheck(lambda *_: case.rows(), case.leaves, fast_mode=True)


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@cases("relu", "tanh, spectral", "function of leaves", "tuple", "convolution")
def test_every_solver_gives_the_same_gradient(case, solver):
    case = case()
    v = cotangent(case)
    assert_same(gradients(case, v, solver=solver), dense_gradients(case, v))


@pytest.mark.parametrize("solver", SPLITTINGS, ids=repr)
@cases("relu", "relu, no bias", "relu, spectral", "identity", "identity, spectral")
def test_every_splitting_gives_the_same_gradient(case, solver):
    case = case()
    v = cotangent(case)
    assert_same(gradients(case, v, solver=solver, max_steps=1000), dense_gradients(case, v))


@every_linear_solver
@cases("relu", "tanh", "identity, spectral", "function of leaves", "dict", "convolution")
def test_every_linear_solver_gives_the_same_gradient(case, linear_solver):
    case = case()
    v = cotangent(case)
    gradient = wp.ImplicitGradient(linear_solver)
    assert_same(gradients(case, v, gradient=gradient, max_steps=500), dense_gradients(case, v))


def test_the_tolerance_of_the_linear_solve_is_its_own():
    case = CASES["tanh"]()
    v = cotangent(case)
    exact = dense_gradients(case, v)
    loose = gradients(case, v, gradient=wp.ImplicitGradient(wp.Neumann(), rtol=1e-2))
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(loose, exact, strict=True))
    assert 1e-6 < error < 1e-1


def monotone(dense: bool) -> Case:
    """z = relu(W z + U x), W = 2 (A - A^T) + a diagonal < 1: no contraction, yet one equilibrium."""
    A = normal(6, 6, seed=5)
    W = 2.0 * (A - A.T) + torch.diag(torch.linspace(-1.0, 0.3, 6, dtype=F64))
    assert torch.linalg.matrix_norm(W, 2) > 5
    cell = wp.nn.DenseCell(3, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
    cell.W.data = W
    x = leaf(4, 3, seed=7)
    if dense:
        return Case(lambda: cell, x, (x, *cell.parameters()))
    return Case(lambda: lambda z, x: cell(z, x), x, (x, *cell.parameters()), options={"state_shape": (6,)})


@cross(
    "solver, linear_solver",
    [wp.Auto(), wp.NewtonKrylov(), wp.PeacemanRachford(0.3), wp.DouglasRachford(0.3), wp.ForwardBackward()],
    [None, wp.GMRES(), wp.BiCGStab(), wp.DenseSolve(), wp.Auto()],
)
def test_a_monotone_map_that_does_not_contract(solver, linear_solver):
    case = monotone(dense=True)
    v = cotangent(case)
    gradient = wp.ImplicitGradient(linear_solver, max_steps=200)
    ours = gradients(case, v, solver=solver, gradient=gradient, max_steps=20000)
    assert_same(ours, dense_gradients(case, v))


@pytest.mark.parametrize("solver", [wp.Auto(), wp.NewtonKrylov()], ids=repr)
def test_a_monotone_function_that_does_not_contract(solver):
    case = monotone(dense=False)
    v = cotangent(case)
    assert_same(gradients(case, v, solver=solver, max_steps=500), dense_gradients(case, v))


# --- the regression of the field: d/da of z = a z + 1 at a = 0.8 is 25 -----------------------------------

SCALAR_SOLVERS = [
    wp.Picard(),
    wp.Picard(0.3),
    wp.Anderson(),
    wp.Anderson(memory=1),
    wp.Anderson(memory=10, regularization=1e-3),
    wp.Anderson(damping=0.4),
    wp.Broyden(),
    wp.Broyden(memory=1),
    wp.NewtonKrylov(),
    wp.NewtonKrylov(forcing=0.5),
    wp.NewtonKrylov(linear_solver=wp.BiCGStab()),
    wp.Auto(),
    wp.Auto(plain=wp.Picard(0.5), accelerated=wp.Anderson(memory=2)),
]


def scalar_function(a: Tensor) -> Callable[..., Tensor]:
    return lambda z, x: a * z + x


class ScalarModule(nn.Module):
    def __init__(self, a: Tensor) -> None:
        super().__init__()
        self.a = a  # a Parameter registers itself

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.a * z + x


def scalar_dense(activation: Any, dtype: torch.dtype) -> tuple[wp.nn.DenseCell, Tensor]:
    cell = wp.nn.DenseCell(1, 1, activation, bias=False, dtype=dtype)
    cell.W.data.fill_(0.8)
    cell.U.data.fill_(1.0)
    return cell, cell.W


def derivative(cell: Any, a: Tensor, dtype: torch.dtype, **options: Any) -> float:
    x = torch.ones(1, 1, dtype=dtype)
    layer = wp.EquilibriumLayer(cell, **{"max_steps": 2000, "on_failure": "raise", **options})
    return float(grad(layer(x).sum(), a)[0])


@cross("solver, linear_solver", SCALAR_SOLVERS, LINEAR_SOLVERS)
def test_the_derivative_of_the_scalar_map_is_25(solver, linear_solver):
    a = torch.tensor(0.8, dtype=F64, requires_grad=True)
    gradient = wp.ImplicitGradient(linear_solver)
    value = derivative(scalar_function(a), a, F64, solver=solver, gradient=gradient)
    assert value == pytest.approx(25.0, rel=1e-9)


@cross(
    "solver, linear_solver",
    [*SCALAR_SOLVERS, *SPLITTINGS, wp.ForwardBackward()],
    [None, wp.GMRES(), wp.Neumann(), wp.DenseSolve(), wp.Anderson()],
)
def test_the_derivative_of_the_scalar_cell_is_25(solver, linear_solver):
    for activation in (wp.nn.ReLU(), wp.nn.Identity()):
        cell, a = scalar_dense(activation, F64)
        value = derivative(cell, a, F64, solver=solver, gradient=wp.ImplicitGradient(linear_solver))
        assert value == pytest.approx(25.0, rel=1e-9)


@every_linear_solver
def test_the_derivative_of_the_scalar_map_is_25_in_float32(linear_solver):
    for solver in SCALAR_SOLVERS:
        a = torch.tensor(0.8, requires_grad=True)
        gradient = wp.ImplicitGradient(linear_solver)
        value = derivative(scalar_function(a), a, torch.float32, solver=solver, gradient=gradient)
        assert value == pytest.approx(25.0, rel=1e-3)


@pytest.mark.parametrize("solver", SCALAR_SOLVERS, ids=repr)
def test_the_derivative_of_the_scalar_module_is_25(solver):
    a = nn.Parameter(torch.tensor(0.8, dtype=F64))
    assert derivative(ScalarModule(a), a, F64, solver=solver) == pytest.approx(25.0, rel=1e-9)


@pytest.mark.parametrize("copies", [1, 2, 7, 64])
def test_the_derivative_of_copies_is_25_for_each(copies):
    a = torch.full((copies,), 0.8, dtype=F64, requires_grad=True)
    layer = wp.EquilibriumLayer(lambda z, x: a * z + x, max_steps=2000)
    (g,) = grad(layer(torch.ones(1, copies, dtype=F64)).sum(), a)
    torch.testing.assert_close(g, torch.full_like(g, 25.0), rtol=1e-9, atol=0)


def test_the_derivative_does_not_hinge_on_the_start():
    a = torch.tensor(0.8, dtype=F64, requires_grad=True)
    layer = wp.EquilibriumLayer(scalar_function(a), max_steps=2000)
    for start in (5.0, -1e6, 1e-9):
        z = layer(torch.ones(1, 1, dtype=F64), torch.full((1, 1), start, dtype=F64))
        assert float(grad(z.sum(), a)[0]) == pytest.approx(25.0, rel=1e-9)


# --- higher derivatives -------------------------------------------------------------------------------


@cases("tanh", "tanh, spectral", "function of leaves", "function of a tensor with a graph", "function of nothing", "tuple")
def test_gradgradcheck(case):
    case = case()
    options = {"rtol": 1e-13}
    assert gradgradcheck(lambda *_: case.rows(**options).square(), case.leaves, atol=1e-4, fast_mode=True)


def second(case: Case, **options: Any) -> tuple[Tensor, ...]:
    """A product with the second derivative of a loss, over all leaves at once, so mixed ones too."""
    z = case.rows(**options)
    first = grad((z.square() * normal(*z.shape, seed=5)).sum(), case.leaves, create_graph=True)
    directions = [normal(*g.shape, seed=50 + i) for i, g in enumerate(first)]
    return grad(sum((g * d).sum() for g, d in zip(first, directions, strict=True)), case.leaves)


@every_case
def test_second_derivatives_agree_with_unrolling(case):
    case = case()
    assert_same(second(case), second(case, gradient=wp.UnrolledGradient(150)))


@every_linear_solver
@cases("tanh", "function of leaves")
def test_second_derivatives_with_every_linear_solver(case, linear_solver):
    case = case()
    ours = second(case, gradient=wp.ImplicitGradient(linear_solver), max_steps=500)
    assert_same(ours, second(case, gradient=wp.UnrolledGradient(150)))


@pytest.mark.parametrize("dense", [False, True])
def test_second_derivatives_of_a_monotone_map_that_does_not_contract(dense):
    """Unrolling diverges here: a product with the Hessian against a difference of first derivatives."""
    case = monotone(dense)
    options = {"max_steps": 500, "rtol": 1e-13}
    directions = [normal(*x.shape, seed=60 + i) for i, x in enumerate(case.leaves)]

    def first(step: float, **flags: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            for x, d in zip(case.leaves, directions, strict=True):
                x += step * d
        return grad(case.rows(**options).square().sum(), case.leaves, **flags)

    plus, minus = first(1e-5), first(-2e-5)
    g = first(1e-5, create_graph=True)
    ours = grad(sum((a * d).sum() for a, d in zip(g, directions, strict=True)), case.leaves)
    assert_same(ours, [(p - m) / 2e-5 for p, m in zip(plus, minus, strict=True)], rtol=1e-5)


@pytest.mark.parametrize("by", ["function", "module", "input", "dense"])
def test_three_derivatives_in_closed_form(by):
    """z = a z + 1, so z = 1/(1 - a), with derivatives k!/(1 - a)^(k + 1)."""
    a = torch.tensor(0.6, dtype=F64, requires_grad=True)
    options = {"max_steps": 2000, "on_failure": "raise"}
    one = torch.ones(1, 1, dtype=F64)
    if by == "function":
        z = wp.EquilibriumLayer(scalar_function(a), **options)(one)
    elif by == "module":
        z = wp.EquilibriumLayer(ScalarModule(a), **options)(one)
    elif by == "input":
        z = wp.EquilibriumLayer(lambda z, x: x * z + 1, **options)(a.reshape(1, 1))
    else:
        cell = wp.nn.DenseCell(1, 1, wp.nn.Identity(), bias=False, dtype=F64)
        parameters = {"cell.W": a.reshape(1, 1), "cell.U": one}
        z = torch.func.functional_call(wp.EquilibriumLayer(cell, **options), parameters, (one,))
    derivatives, value = [], z.sum()
    for _ in range(3):
        (value,) = grad(value, a, create_graph=True)
        derivatives.append(float(value.detach()))
    assert derivatives == pytest.approx([1 / 0.4**2, 2 / 0.4**3, 6 / 0.4**4], rel=1e-8)


def nonlinear_third(gradient: Any, dense: bool) -> Tensor:
    """A third derivative of a nonlinear problem, in all of W, x and a shared factor of both."""
    t = torch.tensor(0.3, dtype=F64, requires_grad=True)
    W, x = normal(3, 3, seed=0, scale=0.3) * torch.cos(t), normal(2, 3, seed=1) * torch.exp(t)
    if dense:
        cell = wp.nn.DenseCell(3, 3, wp.nn.Tanh(), bias=False, dtype=F64)
        parameters = {"cell.W": W, "cell.U": torch.eye(3, dtype=F64) + t}
        z = torch.func.functional_call(wp.EquilibriumLayer(cell, gradient=gradient), parameters, (x,))
    else:
        z = wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W.T + x + t * x.sum(1, keepdim=True)), gradient=gradient)(x)
    value = z.square().sum()
    for _ in range(3):
        (value,) = grad(value, t, create_graph=True)
    return value.detach()


@pytest.mark.parametrize("dense", [False, True])
def test_a_third_derivative_agrees_with_unrolling(dense):
    ours, theirs = nonlinear_third(None, dense), nonlinear_third(wp.UnrolledGradient(100), dense)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def hessian(loss: Callable[[Tensor, Any], Tensor], at: Tensor) -> None:
    ours = torch.autograd.functional.hessian(lambda t: loss(t, None), at)
    theirs = torch.autograd.functional.hessian(lambda t: loss(t, wp.UnrolledGradient(150)), at)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def equilibrium(cell: Callable[..., Tensor], x: Tensor, gradient: Any) -> Tensor:
    return wp.EquilibriumLayer(cell, gradient=gradient, on_failure="raise")(x).square().sum()


def test_hessian_in_a_captured_matrix():
    x = normal(3, 2, seed=1)
    hessian(lambda W, gradient: equilibrium(lambda z, x: torch.tanh(z @ W.T + x), x, gradient), normal(2, 2, scale=0.3))


def test_hessian_in_the_input():
    W = normal(2, 2, scale=0.3)
    hessian(lambda x, gradient: equilibrium(lambda z, x: torch.tanh(z @ W.T + x), x, gradient), normal(3, 2, seed=1))


def test_hessian_in_a_captured_input():
    W = normal(2, 2, scale=0.3)
    hessian(lambda x, gradient: equilibrium(lambda z, _: torch.tanh(z @ W.T + x), x, gradient), normal(3, 2, seed=1))


def test_hessian_when_input_and_captured_tensor_come_out_of_one_operation():
    def loss(theta: Tensor, gradient: Any) -> Tensor:
        x, w = theta.split([3, 3], dim=1)
        return equilibrium(lambda z, x: torch.tanh(z * w + x), x, gradient)

    hessian(loss, normal(1, 6, scale=0.4))


def test_hessian_when_a_captured_tensor_is_made_of_the_input():
    def loss(x: Tensor, gradient: Any) -> Tensor:
        h = torch.sin(x)
        return equilibrium(lambda z, y: torch.tanh(0.5 * z * y + h), x, gradient)

    hessian(loss, normal(2, 2, seed=1))


def test_hessian_when_captured_tensors_are_made_of_each_other():
    x = normal(2, 2, seed=1)

    def loss(V: Tensor, gradient: Any) -> Tensor:
        W = torch.tanh(V) / 2
        b = W.sum(0)
        return equilibrium(lambda z, x: torch.tanh(z @ W.T + b + x @ V), x, gradient)

    hessian(loss, normal(2, 2, scale=0.5))


def test_hessian_when_the_input_shares_weights_with_the_cell():
    x = normal(3, 2, seed=1)
    hessian(lambda W, g: equilibrium(lambda z, y: torch.tanh(z @ W.T + y), x @ W, g), normal(2, 2, scale=0.3))


def test_second_derivative_in_a_leaf_that_is_input_and_captured():
    x = leaf(2, 3, seed=1, scale=0.5)
    for create in (lambda h: lambda z, y: torch.tanh(0.5 * z * y + h), lambda h: lambda z, y: torch.tanh(z * x + h)):
        values = []
        for gradient in (None, wp.UnrolledGradient(150)):
            (first,) = grad(equilibrium(create(torch.sin(x)), x, gradient), x, create_graph=True)
            values.append(grad(first.square().sum(), x)[0])
        torch.testing.assert_close(*values, rtol=1e-8, atol=1e-8)


class Doubling(torch.autograd.Function):
    """2 W, in a form that no mode of torch can look into."""

    @staticmethod
    def forward(ctx: Any, W: Tensor) -> Tensor:
        return 2 * W

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> Tensor:
        return 2 * v


def test_second_derivative_through_a_custom_function_inside_the_cell():
    V, x = leaf(2, 2, scale=0.3), normal(3, 2, seed=1)
    values = []
    for gradient in (None, wp.UnrolledGradient(150)):
        W = torch.sin(V)
        loss = equilibrium(lambda z, x: torch.tanh(z @ Doubling.apply(W).T / 2 + x), x, gradient)  # noqa: B023
        (first,) = grad(loss, V, create_graph=True)
        values.append(grad(first.square().sum(), V)[0])
    torch.testing.assert_close(*values, rtol=1e-8, atol=1e-8)


def test_a_double_backward_trick_with_a_cotangent_that_requires_grad():
    """Forward mode by two reverse modes: v -> J^T v differentiated in v gives products with J."""
    case = CASES["function of leaves"]()
    x, W, _ = case.leaves
    z = case.rows()
    v = torch.zeros_like(z).requires_grad_()
    (vjp,) = grad(z, W, v, create_graph=True)
    t = normal(3, 3, seed=8)
    (jvp,) = grad(vjp, v, t)
    columns = [grad(z, W, unit.reshape(z.shape), retain_graph=True)[0] for unit in torch.eye(z.numel(), dtype=F64)]
    expected = torch.stack([(column * t).sum() for column in columns]).reshape(z.shape)
    torch.testing.assert_close(jvp, expected, rtol=1e-8, atol=1e-8)


# --- what it costs ----------------------------------------------------------------------------------


def saved_bytes(factor: float, cell: str, gradient: Any = None) -> tuple[int, int]:
    """Memory that a forward pass keeps for backward, and the steps it took."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    a = torch.full((16,), factor, dtype=F64, requires_grad=True)
    x = torch.ones(4, 16, dtype=F64)
    options = {"solver": wp.Picard(), "max_steps": 5000, "gradient": gradient, "on_failure": "ignore"}
    if cell == "dense":
        dense = wp.nn.DenseCell(16, 16, wp.nn.Identity(), dtype=F64)
        dense.W.data = factor * torch.eye(16, dtype=F64)
        layer = wp.EquilibriumLayer(dense, **options)
    else:
        layer = wp.EquilibriumLayer(lambda z, x: a * z + x, **options)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x).sum()
    return sum(sizes), int(layer.last_solution.num_steps.max())


@pytest.mark.parametrize("cell", ["dense", "function"])
def test_memory_does_not_depend_on_the_number_of_steps(cell):
    (few_bytes, few), (some_bytes, some), (many_bytes, many) = (saved_bytes(q, cell) for q in (0.1, 0.76, 0.977))
    assert few < 20 and 80 < some < 200 and many > 900
    assert 0 < few_bytes == some_bytes == many_bytes
    ten, thirty = (saved_bytes(0.1, cell, wp.UnrolledGradient(k))[0] for k in (10, 30))
    assert thirty > 2 * ten  # the measure does see what unrolling keeps


def test_a_first_derivative_evaluates_the_cell_a_fixed_number_of_times():
    calls = itertools.count()
    W = leaf(3, 3, scale=0.3)

    def cell(z: Tensor, x: Tensor) -> Tensor:
        next(calls)
        return torch.tanh(z @ W.T + x)

    z = wp.EquilibriumLayer(cell)(normal(2, 3, seed=1))
    before = next(calls)
    z.sum().backward()
    assert next(calls) - before - 1 <= 4  # the recording, and one for each time that samples leave; products are free


class Skew(nn.Module):
    """tanh(scale W z + b) with a scale and b for each sample: at 1 monotone, and plain steps diverge; at 0.2 a contraction."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        skew = normal(width, width, seed=51) / width**0.5
        self.W = nn.Parameter(-0.2 * torch.eye(width, dtype=skew.dtype) + 0.9 * (skew - skew.T))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x[:, :1] * (z @ self.W.T) + 0.05 * x[:, 1:])


def test_adjoint_takes_no_plain_steps_where_those_of_the_solve_led_away() -> None:
    """Krylov steps begin at once, for those samples alone: the others are solved as without them."""
    cell = Skew()
    scale = torch.tensor([[1.0], [0.2], [1.0], [0.2], [1.0]], dtype=torch.float64)
    x, v = torch.cat((scale, normal(5, 24, seed=52)), dim=1), normal(5, 24, seed=53)

    def adjoint(rows: slice, gradient: wp.ImplicitGradient) -> tuple[list[int], Tensor]:
        layer = wp.EquilibriumLayer(cell, gradient=gradient, state_shape=(24,), rtol=1e-9, on_failure="raise")
        cell.zero_grad()
        (layer(x[rows]) * v[rows]).sum().backward()
        assert layer.last_adjoint is not None and cell.W.grad is not None
        return layer.last_adjoint.num_steps.tolist(), cell.W.grad.clone()

    auto, W_grad = adjoint(slice(None), wp.ImplicitGradient())
    krylov, expected = adjoint(slice(None), wp.ImplicitGradient(wp.NewtonKrylov()))
    assert all(auto[i] - krylov[i] <= 2 for i in (0, 2, 4)), (auto, krylov)  # one plain step, and one that confirms
    alone = [adjoint(slice(i, i + 1), wp.ImplicitGradient())[0][0] for i in range(5)]
    assert all(abs(auto[i] - alone[i]) <= (2 if i in (1, 3) else 1) for i in range(5)), (auto, alone)
    torch.testing.assert_close(W_grad, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("n", [30, 60])
def test_adjoint_of_a_chain_keeps_to_plain_steps_though_those_of_the_solve_led_away(n: int) -> None:
    """Far from its equilibrium the first unit expands; at it J is nilpotent, and restarted GMRES stagnates."""

    def cell(z: Tensor, x: Tensor) -> Tensor:
        e = z[:, :1] - 1
        return torch.cat((1 - 2.5 * e.sign() * (e.abs() - 1).relu(), z[:, :-1]), dim=1) + x

    x, v = torch.zeros(2, n, dtype=F64, requires_grad=True), normal(2, n, seed=0)
    z0 = torch.zeros(2, n, dtype=F64)
    z0[:, 0] = 4.0
    layer = wp.EquilibriumLayer(cell, on_failure="raise", max_steps=200)
    layer(x, z0).backward(v)
    expected = v.flip(1).cumsum(1).flip(1)  # (I - J)^-T v
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_adjoint_is_first_measured_where_the_factors_of_the_solve_predict_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two measurements, after about as many products as a loop that measures at each needs."""
    W = 0.5 * torch.linalg.qr(normal(16, 16, seed=61))[0]
    x, v = normal(8, 16, seed=62).requires_grad_(), normal(8, 16, seed=63)
    layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W.T + x), state_shape=(16,), rtol=1e-4, on_failure="raise")
    z = layer(x)
    measured = []
    monkeypatch.setattr(loop, "measure", lambda g, fz: measured.append(len(g)) or measure(g, fz))
    (z * v).sum().backward()
    assert 1 <= len(measured) <= 2, measured
    slopes = 1 - z.detach() ** 2
    u, needed = v, torch.zeros(8, dtype=torch.int64)
    while (open_ := ((slopes * u) @ W + v - u).norm(dim=1) > 1e-4 * u.norm(dim=1)).any():
        u, needed = (slopes * u) @ W + v, needed + open_
    assert layer.last_adjoint is not None
    extra = layer.last_adjoint.num_steps - needed
    assert ((extra >= 1) & (extra <= 8)).all(), (
        layer.last_adjoint.num_steps,
        needed,
    )  # cheap steps are measured at every fifth


@pytest.mark.parametrize(("rate", "end"), [(0.1, 0.9), (0.9, 0.1)], ids=["slower than the solve", "faster than the solve"])
def test_adjoint_whose_factor_is_not_that_of_the_solve(rate: float, end: float) -> None:
    """Far from the equilibrium |f(z) - z| falls by another factor than at it: the prediction is wrong, the answer right."""

    def cell(z: Tensor, x: Tensor) -> Tensor:
        e = z - x
        return x + rate * e.sign() * (e.abs() - 1e-3).relu() + end * e.clamp(-1e-3, 1e-3)

    x, v = torch.rand(5, 7, dtype=F64, requires_grad=True), normal(5, 7, seed=64)
    layer = wp.EquilibriumLayer(cell, on_failure="raise", rtol=1e-5, max_steps=400)
    layer(x, 1e5 + torch.zeros(5, 7, dtype=F64)).backward(v)  # J = end, df/dx = 1 - end
    assert layer.last_adjoint is not None and layer.last_solution is not None
    needed = math.log(1e-5) / math.log(end)
    steps = layer.last_adjoint.num_steps
    assert (steps <= needed + 20).all() and bool(layer.last_adjoint.converged.all()), (steps, needed)
    torch.testing.assert_close(x.grad, v, rtol=0, atol=1e-5 / (1 - end) * 2 * float(v.norm(dim=1).max()))


def test_adjoint_of_rows_solved_as_one_sample_has_no_prediction() -> None:
    W = 0.1 * normal(6, 6, seed=65)
    x, v = normal(4, 6, seed=66).requires_grad_(), normal(4, 6, seed=67)
    z = wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W + z.mean(dim=0) * 0.2 + x), on_failure="raise", coupled=True)(
        x, torch.zeros(4, 6, dtype=F64)
    )
    (gradient,) = torch.autograd.grad(z, x, v)
    J = torch.func.jacrev(lambda z: torch.tanh(z @ W + z.mean(dim=0) * 0.2 + x.detach()))(z.detach()).reshape(24, 24)
    u = torch.linalg.solve((torch.eye(24, dtype=F64) - J).T, v.reshape(24)).reshape(4, 6)
    torch.testing.assert_close(gradient, (1 - z.detach() ** 2) * u, rtol=0, atol=1e-4 * float(u.abs().max()))


@dataclass(frozen=True)
class FrozenMap(AbstractMap):
    """tanh(x - 1.5 z), which cannot be written to."""

    x: Tensor

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.tanh(self.x - 1.5 * z)

    def take(self, rows: Tensor) -> FrozenMap:
        return FrozenMap(self.x[rows])

    def inputs(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def with_inputs(self, *inputs: Tensor) -> FrozenMap:
        return FrozenMap(*inputs)


def test_solving_writes_nothing_to_a_map_of_the_caller() -> None:
    f = FrozenMap(normal(3, 2, seed=1).requires_grad_())
    options = SolveOptions(wp.Auto(), Tolerance(1e-9, 0.0), 100, "raise", "test")
    with torch.no_grad():
        outcome = options.run(f, torch.zeros(3, 2, dtype=F64))
    z = wp.ImplicitGradient().attach(f, outcome, options)
    (found,) = grad(z.sum(), f.x)
    slope = 1 - z.detach() ** 2
    torch.testing.assert_close(found, slope / (1 + 1.5 * slope), rtol=0, atol=1e-7)


def test_an_answer_that_depends_on_nothing_has_no_gradient() -> None:
    """As in torch: a cell that detaches what it is given is not silently a constant with a gradient of None."""
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    layer = wp.EquilibriumLayer(lambda z, x: 0.5 * z.detach() + x.detach(), rtol=1e-5)
    z = layer(x)
    assert not z.requires_grad
    assert torch.allclose(z, 2 * x.detach(), atol=1e-4)
    with pytest.raises(RuntimeError, match="does not require grad"):
        z.sum().backward()
