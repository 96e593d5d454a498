"""Rows that have no equilibrium: NaN in their values, and in every derivative that depends on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import wellposed as wp
from problems import gaussian

F64 = torch.float64
IMPLICIT = [
    wp.ImplicitGradient(),
    wp.ImplicitGradient(linear_solver=wp.GMRES()),
    wp.ImplicitGradient(linear_solver=wp.Picard()),
]
OTHERS = [
    wp.PhantomGradient(),
    wp.JacobianFree(),
    wp.UnrolledGradient(steps=1),
    wp.UnrolledGradient(steps=30),
    wp.ReversibleGradient(steps=30),
]


def made(gradient: Any, **options: Any) -> tuple[wp.EquilibriumLayer, Tensor, Tensor]:
    """A layer whose first row is a logarithm of -1, with finite slopes there; its weight and its input."""
    w = torch.tensor(1.0, dtype=F64, requires_grad=True)
    x = torch.tensor([[-1.0], [1.0]], dtype=F64, requires_grad=True)
    options = {"on_failure": "ignore", **options}
    return wp.EquilibriumLayer(lambda z, x: 0.3 * torch.log(w * z + x) + 0.1, gradient=gradient, **options), w, x


@pytest.mark.parametrize("gradient", IMPLICIT + OTHERS, ids=repr)
@pytest.mark.parametrize("batch", [1, 2])
def test_the_gradient_of_a_lost_row_is_nan(gradient: Any, batch: int) -> None:
    layer, w, x = made(gradient)
    for loss in (Tensor.square, torch.clone):  # the cotangents are NaN and 1
        z = layer(x[:batch])
        gx, gw = grad(loss(z).sum(), (x, w))
        assert z[0].isnan() and gx[0].isnan() and gw.isnan() and gx[1:].isfinite().all()
        if layer.last_adjoint is not None:
            assert layer.last_adjoint.status.tolist() == [wp.Status.NOT_FINITE, wp.Status.CONVERGED][:batch]


@pytest.mark.parametrize("gradient", [*IMPLICIT, wp.JacobianFree()], ids=repr)
def test_a_lost_row_that_the_loss_omits_has_the_gradient_0(gradient: Any) -> None:
    layer, w, x = made(gradient)
    z = layer(x)
    gx, gw = grad(z.nan_to_num().sum(), (x, w))
    assert gx[0] == 0 and gw.isfinite() and gw != 0 and gx[1].isfinite()
    assert layer.last_adjoint is None or layer.last_adjoint.converged.all()


def test_a_loss_that_is_nan_is_told_in_the_backward_pass() -> None:
    layer, _, x = made(wp.ImplicitGradient(), on_failure="warn")
    with pytest.warns(wp.errors.NotConvergedWarning):
        z = layer(x)
    with pytest.warns(wp.errors.AdjointNotConvergedWarning, match="NOT_FINITE"):
        z.sum().backward()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_lost_row_of_a_dense_cell(bad: float) -> None:
    cell = wp.nn.DenseCell(2, 3, wp.nn.Tanh(), dtype=F64, generator=torch.Generator().manual_seed(0))
    layer = wp.EquilibriumLayer(cell, on_failure="ignore")
    x = gaussian(3, 2, seed=0)
    x[0, 0], x[0, 1] = bad, -bad
    z = layer(x.requires_grad_())
    found = grad(z.sum(), (x, *cell.parameters()))
    assert found[0][0].isnan().all() and found[0][1:].isfinite().all()
    assert all(g.isnan().any() for g in found)
    assert layer.last_adjoint.status[0] is wp.Status.NOT_FINITE and layer.last_adjoint.converged[1:].all()


def test_a_lost_row_of_a_family() -> None:
    model = wp.GaussianDEQ(3, 8, generator=torch.Generator().manual_seed(0))
    model.layer.on_failure = "ignore"
    x = gaussian(2, 3, seed=0).to(next(model.parameters()).dtype)
    x[0, 0] = torch.nan
    y = model(x.requires_grad_())
    assert y[0].isnan().all()
    (g,) = grad(y[1].sum(), x, retain_graph=True)
    assert g[1].isfinite().all()
    (g,) = grad(y.sum(), x)
    assert g[0].isnan().all() and g[1].isfinite().all()


def test_second_derivatives_of_a_lost_row_are_nan() -> None:
    layer, _, x = made(wp.ImplicitGradient())
    z, v = layer(x), torch.ones(2, 1, dtype=F64, requires_grad=True)
    (g,) = grad(z, x, v, create_graph=True)
    for of in (x, v):
        (second,) = grad(g.sum(), of, retain_graph=True)
        assert second[0].isnan() and second[1].isfinite()
        (second,) = grad(g[1].sum(), of, retain_graph=True)
        assert second[1].isfinite()


def test_batched_cotangents_of_a_lost_row() -> None:
    layer, _, x = made(wp.ImplicitGradient())
    z = layer(x)
    v = torch.tensor([[[1.0], [1.0]], [[0.0], [1.0]]], dtype=F64)
    g = torch.func.vmap(lambda v: grad(z, x, v, retain_graph=True)[0])(v)
    assert g[0, 0].isnan() and g[1, 0] == 0 and g[:, 1].isfinite().all()
