"""Complex states: forward and gradient against dense implicit differentiation in real coordinates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wellposed as wp
from conformance import every_method
from problems import gaussian


def complex_gaussian(*shape: int, seed: int) -> Tensor:
    return torch.complex(gaussian(*shape, seed=seed), gaussian(*shape, seed=seed + 100))


W, X = 0.25 * complex_gaussian(4, 4, seed=0), complex_gaussian(3, 4, seed=1)


def f(z: Tensor, x: Tensor, W: Tensor) -> Tensor:
    """Not holomorphic: it uses conj and abs."""
    return (z @ W + x.conj()) / (1 + z.abs()) + 0.1 * z.conj()


def plain(x: Tensor, W: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(400):
        z = f(z, x, W)
    return z


@every_method
def test_every_solver_finds_it(solver: wp.solve.AbstractSolver) -> None:
    solution = wp.fixed_point(f, torch.zeros_like(X), solver, args=(X, W), rtol=1e-11, max_steps=600, on_failure="raise")
    exact = plain(X, W)
    assert solution.value.dtype == torch.complex128 and solution.residual.dtype == torch.float64
    assert (solution.value - exact).abs().max() <= 1e-8 * exact.abs().max()
    fz = f(solution.value, X, W)
    measured = (fz - solution.value).abs().square().sum(1).sqrt()
    assert (solution.absolute_residual - measured).abs().max() <= 1e-14 * fz.norm()


def dense(v: Tensor) -> list[Tensor]:
    """Cotangents of x and W with the real Jacobian of every sample, formed entry by entry."""
    z = plain(X, W)
    x, V = X.clone().requires_grad_(), W.clone().requires_grad_()

    def real(i: int, r: Tensor) -> Tensor:
        return torch.view_as_real(f(torch.view_as_complex(r.reshape(1, 4, 2)), X[i : i + 1], W)).reshape(8)

    solutions = []
    for i in range(3):
        J = torch.autograd.functional.jacobian(lambda r, i=i: real(i, r), torch.view_as_real(z[i]).reshape(8))
        right = torch.view_as_real(v[i]).reshape(8)
        u = torch.linalg.solve((torch.eye(8, dtype=J.dtype) - J).T, right)
        solutions.append(torch.view_as_complex(u.reshape(4, 2)))
    return list(torch.autograd.grad(f(z, x, V), (x, V), torch.stack(solutions)))


def test_gradient_against_dense_implicit_differentiation() -> None:
    x, V, v = X.clone().requires_grad_(), W.clone().requires_grad_(), complex_gaussian(3, 4, seed=2)
    layer = wp.EquilibriumLayer(lambda z, x: f(z, x, V), rtol=1e-13, on_failure="raise", max_steps=600)
    z = layer(x)
    assert z.dtype == torch.complex128 and layer.last_solution.converged.all()
    for ours, exact in zip(torch.autograd.grad(z, (x, V), v), dense(v), strict=True):
        assert (ours - exact).norm() <= 1e-9 * exact.norm()


def test_second_derivatives_are_those_of_the_unrolled_map() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: f(z, x, W), rtol=1e-13, on_failure="raise", max_steps=600)
    results = []
    for run in (layer, lambda x: plain(x, W)):
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(run(x).abs().square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.abs().square().sum(), x)[0])
    ours, exact = results
    assert (ours - exact).norm() <= 1e-8 * exact.norm()


def test_a_module_in_complex64_and_a_structure() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 4, dtype=torch.complex64)
    layer = wp.EquilibriumLayer(lambda z, x: {"a": 0.3 * linear(z["b"]) + x, "b": 0.5 * z["a"]}, on_failure="raise")
    zeros = torch.zeros(3, 4, dtype=torch.complex64)
    z = layer(X.to(torch.complex64), {"a": zeros, "b": zeros})
    z["a"].abs().sum().backward()
    expected = 0.3 * linear(z["b"]) + X.to(torch.complex64)
    assert (z["a"] - expected).abs().max() <= 1e-5 * z["a"].abs().max()
    assert linear.weight.grad.is_complex() and linear.weight.grad.isfinite().all()


def test_rows_of_a_conjugate_view_and_an_empty_batch() -> None:
    solution = wp.fixed_point(lambda z, x: (0.5 * z + x).conj(), X.conj(), args=(X,), on_failure="raise")
    assert (solution.value - (0.5 * solution.value + X).conj()).abs().max() <= 1e-5
    assert wp.fixed_point(lambda z: 0.5 * z, X[:0]).value.shape == (0, 4)


@pytest.mark.parametrize(
    ("start", "change", "message"),
    [
        (X, torch.abs, "expected entries of torch.complex128, got torch.float64"),
        (X.real, lambda z: torch.complex(z, z), "expected entries of torch.float64, got torch.complex128"),
    ],
)
def test_a_function_that_changes_the_kind_of_numbers(start: Tensor, change: object, message: str) -> None:
    with pytest.raises(wp.InvalidArgument, match=message):
        wp.fixed_point(lambda z: change(0.5 * z), start)


def test_cells_of_the_library_are_real() -> None:
    with pytest.raises(wp.InvalidType, match="complex64"):
        wp.EquilibriumLayer(wp.nn.DenseCell(4, 4))(X.to(torch.complex64))
