"""Cells that write into parts of tensors, or have tensors without entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.certify.local_certificate import LocalCertificate


class Written(nn.Module):
    """Writes into a part of a product of z."""

    def __init__(self, write: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.3, 0.4, -0.2], dtype=torch.float64))
        self.write = write

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        y = z * self.w
        self.write(y)
        return 0.3 * y + x


def _add(y: Tensor) -> None:
    y[:, 1:] += y[:, :1]


def _every_second(y: Tensor) -> None:
    y[:, ::2] = torch.tanh(y[:, 1:])


def _one(y: Tensor) -> None:
    y[:, 1] = y[:, 0].clone().sin()


def _none(y: Tensor) -> None:
    y[:, 3:] = y[:, :0]


@pytest.mark.parametrize("write", [_add, _every_second, _one, _none])
def test_parts_of_a_tensor_may_be_written(write: Callable[[Tensor], None]) -> None:
    layer, x = wp.EquilibriumLayer(Written(write), rtol=1e-14), torch.randn(2, 3, dtype=torch.float64)
    everywhere, found = wp.certify(layer), wp.certify(layer, x)
    assert isinstance(found, LocalCertificate) and found.certified and everywhere.certified
    z = layer(x)
    J = torch.func.jacrev(lambda v: layer.cell(v[None], x[:1])[0])(z[0]).detach()
    assert float(torch.linalg.matrix_norm(J, ord=2)) <= everywhere.hypotheses[0].value * (1 + 1e-12)
    assert float(found.gradient_error.max()) < 1e-10 and float(found.parameter_error.max()) < 1e-10


class Without(nn.Module):
    """Products and activations of tensors without entries."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bias = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(0))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.relu(z @ self.inner.t() + self.bias) @ self.inner + 0.5 * torch.tanh(z) + x


@pytest.mark.parametrize(
    "cell", [Without(), lambda z, x: torch.cat([torch.tanh(z[:, :0]), 0.5 * torch.tanh(z), z[:, 3:] ** 2], 1) + x]
)
def test_tensors_without_entries_contribute_nothing(cell: Any) -> None:
    layer = wp.EquilibriumLayer(cell)
    everywhere, found = wp.certify(layer), wp.certify(layer, torch.ones(2, 3))
    assert everywhere.hypotheses[0].value == pytest.approx(0.5)
    assert isinstance(found, LocalCertificate) and found.certified and bool((found.parameter_error < 1e-3).all())
