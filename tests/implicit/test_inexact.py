"""Inexact gradients against their own formulas, and unrolling, which must not pretend to be an equilibrium."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import wellposed as wp
from equilibria import CASES, F64, by_formula, dense_gradients, leaf, normal

NAMES = ["relu", "tanh", "tanh, spectral", "function of leaves", "tuple", "dict", "convolution"]
every_case = pytest.mark.parametrize("case", [CASES[name] for name in NAMES], ids=NAMES)


def assert_same(ours: Any, theirs: Any, rtol: float = 1e-8) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(("steps", "damping"), [(1, 1.0), (1, 0.3), (5, 0.5), (4, 1.0), (3, 0.9)])
@every_case
def test_the_phantom_gradient_is_its_sum(case, steps, damping):
    case = case()

    def pulled(transposed: Tensor, v: Tensor) -> Tensor:
        total, term = torch.zeros_like(v), v
        for _ in range(steps):
            total = total + damping * term
            term = (1 - damping) * term + damping * (transposed @ term)
        return total

    z = case.rows(gradient=wp.PhantomGradient(steps, damping))
    v = normal(*z.shape, seed=99)
    assert_same(grad(z, case.leaves, v), by_formula(case, v, pulled))
    torch.testing.assert_close(z, case.rows(), rtol=1e-9, atol=1e-9)


@every_case
def test_the_jacobian_free_gradient_has_no_jacobian(case):
    case = case()
    z = case.rows(gradient=wp.JacobianFree())
    v = normal(*z.shape, seed=99)
    ours = grad(z, case.leaves, v)
    assert_same(ours, by_formula(case, v, lambda transposed, v: v))
    assert_same(ours, grad(case.rows(gradient=wp.PhantomGradient(1, 1.0)), case.leaves, v))
    torch.testing.assert_close(z, case.rows(), rtol=1e-9, atol=1e-9)


def test_the_scalar_map_shows_how_inexact_they_are():
    """z = 0.8 z + 1 has derivative 25; without the Jacobian it is z = 5, and k plain steps give 5 (1 - 0.8^k)/0.2."""
    a = torch.tensor(0.8, dtype=F64, requires_grad=True)
    x = torch.ones(1, 1, dtype=F64)
    for gradient, expected in (
        (wp.JacobianFree(), 5.0),
        (wp.PhantomGradient(3, 1.0), 5 * (1 - 0.8**3) / 0.2),
        (wp.PhantomGradient(400, 0.5), 25.0),
        (wp.ImplicitGradient(), 25.0),
    ):
        z = wp.EquilibriumLayer(lambda z, x: a * z + x, gradient=gradient)(x)
        assert float(grad(z.sum(), a)[0]) == pytest.approx(expected, rel=1e-9)


def test_the_phantom_gradient_tends_to_the_exact_one():
    case = CASES["tanh"]()
    v = normal(*case.rows().shape, seed=99)
    exact = dense_gradients(case, v)
    errors = []
    for steps in (2, 8, 32, 128):
        ours = grad(case.rows(gradient=wp.PhantomGradient(steps)), case.leaves, v)
        errors.append(max(float((a - b).norm()) for a, b in zip(ours, exact, strict=True)))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-9 < errors[0]


@pytest.mark.parametrize("gradient", [wp.PhantomGradient(), wp.JacobianFree()], ids=repr)
@pytest.mark.parametrize("policy", ["warn", "raise"])
def test_a_failed_solve_is_reported_in_every_mode(gradient, policy):
    """z = exp(z) + 1 has no solution."""
    layer = wp.EquilibriumLayer(lambda z, x: torch.exp(z) + x, gradient=gradient, on_failure=policy)
    x = torch.ones(1, 1, dtype=F64, requires_grad=True)
    with pytest.warns(wp.errors.NotConvergedWarning) if policy == "warn" else pytest.raises(wp.NotConverged):
        layer(x)
    assert not layer.last_solution.converged.any()


def test_inexact_modes_report_no_linear_solve():
    case = CASES["tanh"]()
    for gradient in (wp.PhantomGradient(), wp.JacobianFree(), wp.UnrolledGradient(100)):
        layer = case.layer(gradient=gradient)
        layer(case.x).sum().backward()
        assert layer.last_adjoint is None and bool(layer.last_solution.converged.all())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: wp.PhantomGradient(0), "'steps' parameter of PhantomGradient"),
        (lambda: wp.PhantomGradient(2.5), "integer of at least 1"),
        (lambda: wp.PhantomGradient(5, 0.0), "'damping' parameter of PhantomGradient"),
        (lambda: wp.PhantomGradient(5, 1.5), "Got 1.5"),
        (lambda: wp.UnrolledGradient(0), "'steps' parameter of UnrolledGradient"),
        (lambda: wp.UnrolledGradient(3, 0), "'recorded' parameter of UnrolledGradient"),
        (lambda: wp.UnrolledGradient(3, 4), "at most steps=3. Got 4"),
        (lambda: wp.ImplicitGradient("gmres"), "solver such as GMRES"),
        (lambda: wp.ImplicitGradient(wp.GMRES), "linear_solver"),
    ],
)
def test_bad_options_are_explained(make, words):
    with pytest.raises(wp.WellposedError, match=words):
        make()


@pytest.mark.parametrize(
    "make", [lambda: wp.PhantomGradient(tau=0.5), lambda: wp.UnrolledGradient(depth=3), lambda: wp.ImplicitGradient(tol=1)]
)
def test_unknown_options_raise(make):
    with pytest.raises(TypeError, match="unexpected keyword"):
        make()


# --- unrolling --------------------------------------------------------------------------------------


def loop(W: Tensor, x: Tensor, z: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        z = torch.tanh(z @ W.T + x)
    return z


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_unrolling_is_the_loop(steps):
    W, x, z0 = leaf(3, 3, scale=0.5), leaf(2, 3, seed=1), leaf(2, 3, seed=2)
    gradient = wp.UnrolledGradient(steps)
    layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W.T + x), gradient=gradient, on_failure="ignore")
    z, expected = layer(x, z0), loop(W, x, z0, steps)
    torch.testing.assert_close(z, expected)
    assert_same(grad(z.square().sum(), (W, x, z0)), grad(expected.square().sum(), (W, x, z0)))


@pytest.mark.parametrize("recorded", [1, 3, 7])
def test_only_the_last_steps_may_be_recorded(recorded):
    W, x, z0 = leaf(3, 3, scale=0.5), leaf(2, 3, seed=1), leaf(2, 3, seed=2)
    gradient = wp.UnrolledGradient(7, recorded)
    layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W.T + x), gradient=gradient, on_failure="ignore")
    z, middle = layer(x, z0), loop(W, x, z0, 7 - recorded)
    expected = loop(W, x, middle if recorded == 7 else middle.detach(), recorded)
    torch.testing.assert_close(z, expected)
    ours, theirs = (grad(value.square().sum(), (W, x, z0), allow_unused=True) for value in (z, expected))
    assert (ours[2] is None) is (theirs[2] is None) is (recorded < 7)
    assert_same(ours[:2], theirs[:2])


@pytest.mark.parametrize("policy", ["warn", "raise", "ignore"])
def test_a_depth_too_small_is_no_success(policy):
    W, x = normal(3, 3, scale=0.5), normal(2, 3, seed=1)
    layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(z @ W.T + x), gradient=wp.UnrolledGradient(3), on_failure=policy)
    if policy == "warn":
        with pytest.warns(wp.errors.NotConvergedWarning, match="2 of 2 samples did not converge"):
            z = layer(x)
    elif policy == "raise":
        with pytest.raises(wp.NotConverged) as caught:
            layer(x)
        z = caught.value.solution.value
    else:
        z = layer(x)
    solution = layer.last_solution
    assert all(status is wp.Status.MAX_STEPS for status in solution.status)
    fz = torch.tanh(z @ W.T + x)
    torch.testing.assert_close(solution.residual, (fz - z).norm(dim=1) / fz.norm(dim=1))
    assert solution.num_steps.tolist() == [4, 4]  # three steps, and the evaluation that measures


def test_a_depth_that_suffices_is_a_success():
    case = CASES["tanh"]()
    layer = case.layer(gradient=wp.UnrolledGradient(100))
    layer(case.x)
    assert bool(layer.last_solution.converged.all())


@pytest.mark.parametrize(
    "gradient", [wp.PhantomGradient(3), wp.JacobianFree(), wp.UnrolledGradient(60), wp.UnrolledGradient(60, 2)], ids=repr
)
def test_inexact_modes_inside_transforms_agree_with_themselves_outside(gradient):
    case = CASES["tanh"]()
    layer = case.layer(gradient=gradient)
    x = case.x.detach()
    inside = torch.func.grad(lambda x: layer(x).square().sum())(x)
    (outside,) = grad(layer(case.x).square().sum(), case.x)
    torch.testing.assert_close(inside, outside, rtol=1e-9, atol=1e-9)
