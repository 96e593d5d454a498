"""Inexact gradients are attached to the equilibrium whose residual is reported, not to where their steps lead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wellposed as wp

F64 = torch.float64


@pytest.mark.parametrize("gradient", [wp.JacobianFree(), wp.PhantomGradient(), wp.PhantomGradient(3, 1.0)], ids=repr)
@pytest.mark.parametrize("slope", [-3.0, -300.0])
def test_the_value_is_the_one_that_is_reported_on(gradient: Any, slope: float) -> None:
    """The map expands: every step from z* multiplies the residual."""

    def cell(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return slope * torch.sin(z) + x

    layer = wp.EquilibriumLayer(cell, wp.NewtonKrylov(), gradient, rtol=1e-6, on_failure="raise")
    x = torch.linspace(0.1, 1, 4, dtype=F64).unsqueeze(1).requires_grad_()
    z = layer(x)
    fz = cell(z, x)
    assert torch.equal(z, layer.last_solution.value) and z.requires_grad
    assert ((fz - z).norm(dim=1) <= 1e-6 * fz.norm(dim=1)).all()


def test_the_value_inside_torch_func_is_that_of_the_solve() -> None:
    x = torch.linspace(0.1, 1, 4, dtype=F64).unsqueeze(1)
    for gradient in (wp.JacobianFree(), wp.PhantomGradient()):
        layer = wp.EquilibriumLayer(lambda z, x: 0.5 * torch.sin(z) + x, wp.Picard(), gradient, rtol=1e-3)
        z = torch.func.vmap(layer)(x.unsqueeze(0))[0]
        g = 0.5 * torch.sin(z) + x - z
        assert (z - layer.solve(x).value).abs().max() <= 4 * torch.finfo(F64).eps and g.abs().max() > 1e-6
