"""A linear solve that fails in backward: told by status and policy, never a silent zero, never silently cut short."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import wellposed as wp
from equilibria import F64, leaf, normal

LINEAR_SOLVERS = [
    None,
    wp.GMRES(),
    wp.BiCGStab(),
    wp.Neumann(),
    wp.DenseSolve(),
    wp.Picard(),
    wp.Anderson(),
    wp.Broyden(),
    wp.NewtonKrylov(),
]
every_linear_solver = pytest.mark.parametrize("linear_solver", LINEAR_SOLVERS, ids=repr)
every_cell = pytest.mark.parametrize("kind", ["function", "dense"])


def make(kind: str, dtype: torch.dtype = F64, **options: Any) -> tuple[wp.EquilibriumLayer, Tensor]:
    """z = tanh(W z + x), 3 units, and its W."""
    if kind == "dense":
        cell = wp.nn.DenseCell(3, 3, wp.nn.Tanh(), bias=False, dtype=dtype)
        cell.W.data = normal(3, 3, scale=0.3, dtype=dtype)
        cell.U.data = torch.eye(3, dtype=dtype)
        return wp.EquilibriumLayer(cell, **options), cell.W
    W = leaf(3, 3, scale=0.3, dtype=dtype)
    return wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W.T + x), **options), W


def scalar(kind: str, a: float, dtype: torch.dtype, **options: Any) -> wp.EquilibriumLayer:
    """z = a z + x."""
    if kind == "dense":
        cell = wp.nn.DenseCell(1, 1, wp.nn.Identity(), bias=False, dtype=dtype)
        cell.W.data.fill_(a)
        cell.U.data.fill_(1.0)
        return wp.EquilibriumLayer(cell, **options)
    return wp.EquilibriumLayer(lambda z, x: a * z + x, **options)


# --- cotangents that are not finite -------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@every_linear_solver
@every_cell
def test_a_cotangent_that_is_not_finite_gives_nan_and_is_told(kind, linear_solver, bad):
    layer, W = make(kind, gradient=wp.ImplicitGradient(linear_solver), on_failure="warn")
    x = leaf(3, 3, seed=1)
    v = normal(3, 3, seed=2)
    expected, _ = grad(layer(x), (x, W), v)
    v[1, 2] = bad
    z = layer(x)
    with pytest.warns(wp.errors.AdjointNotConvergedWarning, match=r"1 of 3 samples .* index 1, NOT_FINITE"):
        gx, gW = grad(z, (x, W), v)
    assert bool(gx[1].isnan().all()) and bool(gW.isnan().any())
    # its neighbours do not notice
    torch.testing.assert_close(gx[[0, 2]], expected[[0, 2]], rtol=1e-9, atol=1e-9)
    assert [s.name for s in layer.last_adjoint.status] == ["CONVERGED", "NOT_FINITE", "CONVERGED"]


@every_cell
def test_a_nan_in_the_loss_raises_if_so_asked(kind):
    layer, _ = make(kind, on_failure="raise")
    z = layer(leaf(2, 3, seed=1))
    with pytest.raises(wp.errors.AdjointNotConverged, match="backward of the equilibrium.*NOT_FINITE") as caught:
        (z * torch.tensor(float("nan"), dtype=F64)).sum().backward()
    assert caught.value.solution is layer.last_adjoint
    assert not layer.last_adjoint.converged.any()


@every_cell
def test_a_nan_is_not_hidden_by_ignoring_it(kind):
    layer, W = make(kind, on_failure="ignore")
    z = layer(leaf(2, 3, seed=1))
    (g,) = grad(z, W, torch.full_like(z, torch.nan))
    assert bool(g.isnan().any())
    assert all(status is wp.Status.NOT_FINITE for status in layer.last_adjoint.status)


# --- systems that cannot be solved --------------------------------------------------------------------


@every_linear_solver
@every_cell
def test_a_singular_system_is_told(kind, linear_solver):
    """z = z + x with x = 0 has every z for an equilibrium, and no derivative."""
    layer = scalar(kind, 1.0, F64, gradient=wp.ImplicitGradient(linear_solver), on_failure="warn")
    x = torch.zeros(2, 1, dtype=F64, requires_grad=True)
    z = layer(x)
    assert bool(layer.last_solution.converged.all())
    with pytest.warns(wp.errors.AdjointNotConvergedWarning, match="2 of 2 samples"):
        grad(z, x, torch.ones_like(z))
    assert not layer.last_adjoint.converged.any()
    assert bool((layer.last_adjoint.residual > 1e-3).all())


@every_cell
def test_a_singular_system_raises_if_so_asked(kind):
    layer = scalar(kind, 1.0, F64, on_failure="raise")
    z = layer(torch.zeros(2, 1, dtype=F64, requires_grad=True))
    with pytest.raises(wp.errors.AdjointNotConverged):
        z.sum().backward()


@every_cell
def test_neumann_steps_on_a_map_that_does_not_contract_are_told(kind):
    """Newton finds the equilibrium of z = -2 z + x; the series sum (-2)^k diverges, and must not be taken for 1/3."""
    layer = scalar(kind, -2.0, F64, solver=wp.NewtonKrylov(), gradient=wp.ImplicitGradient(wp.Neumann()))
    x = torch.ones(1, 1, dtype=F64, requires_grad=True)
    z = layer(x)
    assert float(z.detach()) == pytest.approx(1 / 3)
    with pytest.warns(wp.errors.AdjointNotConvergedWarning, match="DIVERGED"):
        z.sum().backward()
    exact = scalar(kind, -2.0, F64, solver=wp.NewtonKrylov())
    assert float(grad(exact(x).sum(), x)[0]) == pytest.approx(1 / 3)


@every_cell
@pytest.mark.parametrize("policy", ["warn", "raise", "ignore"])
def test_a_budget_too_small_is_told(kind, policy):
    gradient = wp.ImplicitGradient(wp.Neumann(), max_steps=3)
    layer = scalar(kind, 0.8, F64, gradient=gradient, on_failure=policy)
    x = torch.ones(1, 1, dtype=F64, requires_grad=True)
    z = layer(x)
    if policy == "warn":
        with pytest.warns(wp.errors.AdjointNotConvergedWarning, match=r"MAX_STEPS.*max_steps=3") as seen:
            z.sum().backward()
        assert len(seen) == 1
    elif policy == "raise":
        with pytest.raises(wp.errors.AdjointNotConverged, match="max_steps=3") as caught:
            z.sum().backward()
        assert caught.value.solution is layer.last_adjoint
        assert x.grad is None
    else:
        z.sum().backward()
    adjoint = layer.last_adjoint
    assert [s.name for s in adjoint.status] == ["MAX_STEPS"] and int(adjoint.num_steps) == 3
    u = float(adjoint.value)
    assert float(adjoint.residual) == pytest.approx(abs(1 - 0.2 * u)) and float(adjoint.residual) > 0.3


@every_cell
def test_an_adjoint_that_failed_can_be_repeated(kind):
    """After the error the same graph is still there, and the layer still works."""
    gradient = wp.ImplicitGradient(wp.Neumann(), max_steps=3)
    layer = scalar(kind, 0.8, F64, gradient=gradient, on_failure="raise")
    x = torch.ones(1, 1, dtype=F64, requires_grad=True)
    z = layer(x)
    for _ in range(2):
        with pytest.raises(wp.errors.AdjointNotConverged):
            z.sum().backward(retain_graph=True)
    layer.gradient = wp.ImplicitGradient()
    layer(x).sum().backward()
    assert float(x.grad) == pytest.approx(5.0)


@every_cell
def test_a_failure_in_a_second_derivative_is_told(kind):
    """The cotangent of u is NaN in the second pass only."""
    layer, W = make(kind, on_failure="raise")
    (first,) = grad(layer(leaf(2, 3, seed=1)).square().sum(), W, create_graph=True)
    with pytest.raises(wp.errors.AdjointNotConverged):
        grad(first, W, torch.full_like(first, torch.nan))


def test_the_message_tells_what_to_try():
    layer = scalar("function", 0.999, F64, gradient=wp.ImplicitGradient(wp.Neumann()), solver=wp.NewtonKrylov())
    x = torch.ones(1, 1, dtype=F64, requires_grad=True)
    z = layer(x)
    with pytest.warns(wp.errors.AdjointNotConvergedWarning, match="max_steps") as seen:
        z.sum().backward()
    text = str(seen[0].message)
    assert "backward of the equilibrium" in text and "index 0" in text and "residual" in text


# --- sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e-20, 1e20, 1e30, 3e38])
@every_linear_solver
@every_cell
def test_tiny_and_huge_cotangents_in_float32(kind, linear_solver, size):
    """z = -z/2 + x, so dz/dx = 2/3: neither the squares of norms nor the scale may overflow or vanish."""
    layer = scalar(kind, -0.5, torch.float32, gradient=wp.ImplicitGradient(linear_solver), on_failure="raise")
    x = torch.ones(1, 1, requires_grad=True)
    z = layer(x)
    v = torch.full_like(z, size)
    (g,) = grad(z, x, v)
    # the smallest are subnormal: they carry few digits of their own
    rel = 0.2 if size < 1e-40 else 1e-5
    assert float(g.double() / v.double()) == pytest.approx(2 / 3, rel=rel)


@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e160, 1e300])
@every_cell
def test_tiny_and_huge_cotangents_in_float64(kind, size):
    layer = scalar(kind, -0.5, F64, on_failure="raise")
    x = torch.ones(1, 1, dtype=F64, requires_grad=True)
    z = layer(x)
    (g,) = grad(z, x, torch.full_like(z, size))
    assert float(g) / size == pytest.approx(2 / 3, rel=1e-10)


@every_linear_solver
@every_cell
def test_samples_of_very_different_size_do_not_disturb_each_other(kind, linear_solver):
    layer, _ = make(kind, torch.float32, gradient=wp.ImplicitGradient(linear_solver), on_failure="raise")
    x = leaf(4, 3, seed=1, dtype=torch.float32)
    v = normal(4, 3, seed=2, dtype=torch.float32)
    sizes = torch.tensor([[1e-30], [1.0], [1e30], [0.0]])
    (expected,) = grad(layer(x), x, v)
    (g,) = grad(layer(x), x, v * sizes)
    torch.testing.assert_close(g[:3] / sizes[:3], expected[:3], rtol=1e-4, atol=1e-5)
    assert bool((g[3] == 0).all())


@every_linear_solver
@every_cell
def test_samples_with_a_zero_cotangent(kind, linear_solver):
    layer, W = make(kind, gradient=wp.ImplicitGradient(linear_solver), on_failure="raise")
    x = leaf(3, 3, seed=1)
    v = normal(3, 3, seed=2)
    v[1] = 0
    gx, gW = grad(layer(x), (x, W), v)
    assert bool(layer.last_adjoint.converged.all())
    assert bool((gx[1] == 0).all())
    kept = x.detach()[[0, 2]].requires_grad_()
    expected_x, expected_W = grad(layer(kept), (kept, W), v[[0, 2]])
    torch.testing.assert_close(gx[[0, 2]], expected_x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gW, expected_W, rtol=1e-9, atol=1e-9)


@every_cell
def test_a_zero_cotangent_for_all(kind):
    layer, W = make(kind, on_failure="raise")
    x = leaf(3, 3, seed=1)
    z = layer(x)
    gx, gW = grad(z, (x, W), torch.zeros_like(z))
    assert bool((gx == 0).all()) and bool((gW == 0).all())
    assert bool(layer.last_adjoint.converged.all())


@pytest.mark.parametrize("coupled", [False, True])
def test_a_dense_solve_of_coupled_rows_stays_within_max_steps(coupled: bool) -> None:
    W, x = leaf(3, 3, scale=0.3), normal(5, 3)
    for max_steps, expected in ((14, wp.Status.MAX_STEPS), (16, wp.Status.CONVERGED)):  # 15 features in the batch
        gradient = wp.ImplicitGradient(wp.DenseSolve(), rtol=1e-9, max_steps=max_steps)
        layer = wp.EquilibriumLayer(
            lambda z, x: torch.tanh(z @ W.T + x) + 0.3 * z.mean(dim=0), gradient=gradient, coupled=coupled, on_failure="ignore"
        )
        layer(x).sum().backward()
        assert layer.last_adjoint is not None and set(layer.last_adjoint.status) == {expected}
        assert int(layer.last_adjoint.num_steps.max()) <= max_steps


def test_a_dense_solve_without_a_bound_of_its_own_takes_all_its_columns() -> None:
    W, x = leaf(30, 30, scale=0.1), normal(2, 30)
    layer = wp.EquilibriumLayer(
        lambda z, x: torch.tanh(z @ W.T + x), gradient=wp.ImplicitGradient(wp.DenseSolve()), max_steps=25
    )
    layer(x).sum().backward()
    assert layer.last_adjoint is not None and layer.last_adjoint.num_steps.tolist() == [32, 32]  # one confirms


class Counted(torch.autograd.Function):
    """The identity, with a count of the products with its Jacobian."""

    products = 0

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, v: torch.Tensor) -> torch.Tensor:
        Counted.products += 1
        return v


@pytest.mark.parametrize("solver", [wp.GMRES(), wp.BiCGStab(), wp.Neumann(), wp.DenseSolve()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("max_steps", [2, 7, 40])
def test_every_product_of_a_linear_solver_is_counted(solver: Any, max_steps: int) -> None:
    W, x = leaf(5, 5, scale=0.2), normal(4, 5)
    gradient = wp.ImplicitGradient(solver, max_steps=max_steps)
    layer = wp.EquilibriumLayer(
        lambda z, x: torch.tanh(Counted.apply(z) @ W.T + x), gradient=gradient, on_failure="ignore", rtol=1e-9
    )
    z = layer(x)
    Counted.products = 0
    z.sum().backward()
    adjoint = layer.last_adjoint
    assert adjoint is not None
    assert Counted.products == int(adjoint.num_steps.max())
    assert int(adjoint.num_steps.max()) <= max_steps + (0 if adjoint.converged.all() else 2)
