"""attach_gradient: an equilibrium found elsewhere gets the derivatives of the implicit function theorem."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wellposed as wp
from problems import gaussian

W, X = 0.3 * gaussian(3, 3, seed=0), gaussian(4, 3, seed=1)


def f(z: Tensor, x: Tensor, W: Tensor) -> Tensor:
    return torch.tanh(z @ W + x)


def equilibrium() -> Tensor:
    z = torch.zeros_like(X)
    for _ in range(200):
        z = f(z, X, W)
    return z


def dense(v: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents of x and W by the dense Jacobian of every sample."""
    z = equilibrium()
    x, V = X.clone().requires_grad_(), W.clone().requires_grad_()
    fz = f(z, x, V)
    slopes = 1 - fz.detach() ** 2
    J = slopes.unsqueeze(2) * W.T  # df_i/dz_j = s_i W_ji
    u = torch.linalg.solve((torch.eye(3, dtype=J.dtype) - J).mT, v.unsqueeze(2)).squeeze(2)
    return torch.autograd.grad(fz, (x, V), u)


@pytest.mark.parametrize("captured", [False, True])
def test_against_dense_implicit_differentiation(captured: bool) -> None:
    x, V, v = X.clone().requires_grad_(), W.clone().requires_grad_(), gaussian(4, 3, seed=2)
    if captured:
        z = wp.attach_gradient(lambda z: f(z, x, V), equilibrium(), on_failure="raise")
    else:
        z = wp.attach_gradient(f, equilibrium(), (x, V), on_failure="raise")
    assert torch.equal(z.detach(), equilibrium())
    for ours, exact in zip(torch.autograd.grad(z, (x, V), v), dense(v), strict=True):
        assert (ours - exact).norm() <= 1e-10 * exact.norm()


def test_second_derivatives_and_the_root_of_a_function() -> None:
    a = torch.tensor([[2.0], [5.0]], dtype=torch.float64, requires_grad=True)
    z = wp.root(lambda z, a: z**2 - a, torch.ones_like(a), args=(a.detach(),), rtol=1e-14, atol=0.0).value
    attached = wp.attach_gradient(lambda z, a: z - (z**2 - a), z, (a,), on_failure="raise")
    (first,) = torch.autograd.grad(attached.sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), a)
    assert (first - 0.5 * a**-0.5).abs().max() <= 1e-12
    assert (second + 0.25 * a**-1.5).abs().max() <= 1e-12


def test_another_gradient_and_a_structure() -> None:
    x = X.clone().requires_grad_()
    z = wp.attach_gradient(lambda z, x: {"z": f(z["z"], x, W)}, {"z": equilibrium()}, (x,), gradient=wp.JacobianFree())
    (ours,) = torch.autograd.grad(z["z"].sum(), x)
    assert (ours - (1 - equilibrium() ** 2)).abs().max() <= 1e-12


def test_bfloat16_and_no_grad() -> None:
    x = X.bfloat16().requires_grad_()
    z = wp.attach_gradient(lambda z, x: 0.5 * z + x, 2 * x.detach(), (x,), rtol=0.02)
    z.sum().backward()
    assert z.dtype == torch.bfloat16 and (x.grad - 2).abs().max() <= 2 * 2**-8
    with torch.no_grad():
        assert not wp.attach_gradient(f, equilibrium(), (X, W)).requires_grad


def test_a_point_that_is_not_an_equilibrium_is_reported() -> None:
    with pytest.warns(
        wp.errors.NotConvergedWarning, match=r"attach_gradient: 4 of 4 samples .* is not an equilibrium of f"
    ) as caught:
        wp.attach_gradient(f, torch.ones_like(X), (X, W))
    message = str(caught[0].message)
    assert not any(word in message for word in ("max_steps", "MAX_STEPS", "1 step", "coupled=True")), "it takes neither"
    with pytest.raises(wp.NotConverged):
        wp.attach_gradient(f, torch.ones_like(X), (X, W), on_failure="raise")


def test_a_failed_linear_solve_obeys_the_policy() -> None:
    x = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    z = wp.attach_gradient(
        lambda z, x: z @ (0.9 * torch.eye(3).double() + W) + x, torch.zeros(1, 3).double(), (x,), max_steps=2
    )
    with pytest.warns(wp.errors.AdjointNotConvergedWarning):
        z.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient": wp.UnrolledGradient(3)}, "at an equilibrium, such as ImplicitGradient"),
        ({"gradient": "implicit"}, "got 'implicit'"),
        ({"args": X}, "args must be a tuple"),
        ({"on_failure": "shout"}, "'raise', 'warn' or 'ignore'"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(wp.WellposedError, match=message):
        wp.attach_gradient(f, equilibrium(), **arguments)
