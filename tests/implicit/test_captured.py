"""Second derivatives with respect to tensors with a graph that f captures: right, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from problems import gaussian

D = torch.float64


class Product(torch.autograd.Function):
    """z W^T, in a form that no mode of torch can look into."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, W: Tensor) -> Tensor:
        ctx.save_for_backward(z, W)
        return z @ W.T

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, Tensor]:
        z, W = ctx.saved_tensors
        return v @ W, v.T @ z


def unrolled(f: Any, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(60):
        z = f(z, x)
    return z


def second(z: Tensor, *inputs: Tensor) -> list[Tensor]:
    first = torch.autograd.grad((z**2).sum(), inputs, create_graph=True)
    return list(torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), inputs, retain_graph=True))


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-9 * b.norm()


def problem() -> tuple[Tensor, Tensor, Tensor]:
    W = (0.2 * gaussian(3, 3, seed=0)).requires_grad_()
    return W, 0.5 * W.tanh(), gaussian(4, 3, seed=1)


@pytest.mark.parametrize("direct", [0.0, 0.3])
def test_through_a_custom_function(direct: float) -> None:
    W, V, x = problem()

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(Product.apply(z, V) + direct * z @ V + x)

    apply = torch.autograd.Function.apply
    assert_close(second(wp.EquilibriumLayer(f)(x), V), second(unrolled(f, x), V))
    assert_close(second(wp.EquilibriumLayer(f)(x), V, W), second(unrolled(f, x), V, W))
    assert torch.autograd.Function.apply == apply


@pytest.mark.parametrize("how", ["captured by the inner cell", "the input of the inner layer"])
def test_through_a_layer_inside_the_cell(how: str) -> None:
    W, V, x = problem()
    if how == "captured by the inner cell":
        inner = lambda y, z: 0.4 * torch.sin(y) @ V + z  # noqa: E731
        outer = lambda solve: lambda z, x: torch.tanh(0.3 * solve(z) + x)  # noqa: E731
    else:
        inner = lambda y, v: 0.3 * torch.sin(y) @ v + 0.1 * v[0]  # noqa: E731
        outer = lambda solve: lambda z, x: torch.tanh(z @ solve(V) + x)  # noqa: E731
    ours = wp.EquilibriumLayer(outer(wp.EquilibriumLayer(inner)))(x)
    theirs = unrolled(outer(lambda z: unrolled(inner, z)), x)
    for p in (V, W):
        assert_close(second(ours, p), second(theirs, p))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_through_code_that_cannot_be_followed() -> None:
    W, V, x = problem()
    scripted = torch.jit.trace(lambda z, W: z @ W.T, (x, x[:3]))

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(scripted(z, V) + x)

    z = wp.EquilibriumLayer(f)(x)
    assert_close(list(torch.autograd.grad(z.sum(), V, retain_graph=True)), list(torch.autograd.grad(unrolled(f, x).sum(), V)))
    for inputs in ((V,), (W,), (V, W)):
        with pytest.raises(wp.WellposedError, match="Pass the tensor through x"):
            second(z, *inputs)
