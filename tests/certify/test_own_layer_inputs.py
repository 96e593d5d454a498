"""What is proved for "every input" names the inputs: a cell may read all but the values in the tensors of x."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp

CERTIFIED, VIOLATED, UNDECIDED = wp.Verdict.CERTIFIED, wp.Verdict.VIOLATED, wp.Verdict.UNDECIDED


class Pair(NamedTuple):
    h: Tensor
    scale: Any


def pooled(z: Tensor, x: Tensor) -> Tensor:
    """Tokens are added up: the more of them, the larger the slope."""
    return 0.1 * torch.sigmoid(x).sum(1) * torch.tanh(z)


@pytest.mark.parametrize(
    ("cell", "x", "other", "named"),
    [
        (pooled, torch.ones(1, 4, 3), torch.ones(1, 40, 3), "For every x of shape (batch, 4, 3) in float32"),
        (lambda z, x: 0.5 * (x.dtype == torch.float32) * z + 4 * (x.dtype != torch.float32) * torch.tanh(z),
         torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float64), "For every x of shape (batch, 3) in float32"),
        (lambda z, x: x["gain"] * torch.tanh(z) + 0 * x["h"], {"h": torch.ones(2, 3), "gain": 0.5},
         {"h": torch.ones(2, 3), "gain": 4.0}, "For every x of the form {'h': (batch, 3) in float32, 'gain': 0.5}"),
        (lambda z, x: (0.9 if len(x) == 1 else 4) * torch.tanh(z) + 0 * x[0], (torch.ones(2, 3),),
         (torch.ones(2, 3), torch.ones(2, 3)), "For every x of the form tuple((batch, 3) in float32)"),
        (lambda z, x: (0.9 if x.scale is None else 4) * torch.tanh(z) + 0 * x.h, Pair(torch.ones(2, 3), None),
         Pair(torch.ones(2, 3), "large"), "For every x of the form Pair((batch, 3) in float32, None)"),
        (lambda z, x: 0.9 * (4 if x["by"].on else 1) * torch.tanh(z) + 0 * x["h"],
         {"h": torch.ones(2, 3), "by": type("Switch", (), {"on": False})()},
         {"h": torch.ones(2, 3), "by": type("Switch", (), {"on": True})()},
         "For every x of the form {'h': (batch, 3) in float32, 'by': this Switch}"),
    ],
)  # fmt: skip
def test_a_license_names_what_was_followed(cell: Callable[..., Tensor], x: Any, other: Any, named: str) -> None:
    layer = wp.EquilibriumLayer(cell, state_shape=(3,), on_failure="ignore")
    everywhere = wp.certify(layer, x).others[0]
    assert everywhere.certified and everywhere.licenses[0].startswith(named + " there is exactly one equilibrium")
    assert wp.certify(layer, other).verdict is VIOLATED  # of which the license says nothing


def test_a_shape_that_was_guessed_is_named() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Parameter(torch.zeros(3))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.05 * x.shape[1] * torch.tanh(z) + 0 * x

    layer = wp.EquilibriumLayer(Wide(), on_failure="ignore")
    found = wp.certify(layer)
    assert found.certified and "every x of shape (batch, 3) in float32 there is" in found.licenses[0]
    assert wp.certify(layer, torch.zeros(1, 40)).verdict is VIOLATED


def test_states_are_named_where_x_does_not_fix_them() -> None:
    cell = lambda z, x: 0.5 * z + x[:, :1]  # noqa: E731
    (found,) = wp.certify(wp.EquilibriumLayer(cell, state_shape=(2,)), torch.ones(2, 5)).others
    assert "of shape (batch, 5) in float32 there is exactly one equilibrium (states of shape (batch, 2))." in found.licenses[0]

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = wp.EquilibriumLayer(lambda z, x: 0.5 * z + x["h"].double())

        def forward(self, x: Tensor) -> Tensor:
            return self.layer({"h": x, "one": x[0, 0]}, torch.zeros(len(x), 2, dtype=torch.float64))

    (found,) = wp.certify(Looked(), torch.ones(3, 2)).others
    form = "{'h': (batch, 2) in float32, 'one': () in float32} that enters the layer"
    assert found.licenses[0].startswith(f"For every x of the form {form} there is exactly one equilibrium (states of shape")
    assert "(batch, 2) in float64" in found.licenses[0]


def test_coupled_rows_have_a_number() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: 0.5 * z.mean(0) + x, coupled=True)
    (found,) = wp.certify(layer, torch.ones(4, 2)).others
    assert "every x of shape (4, 2) in float32 there is" in found.licenses[0] and "batches of 4" in found.licenses[0]


@pytest.mark.parametrize(
    "size",
    [
        lambda x: x.nonzero().shape[0],
        lambda x: x[x > 0].shape[0],
        lambda x: torch.masked_select(x, x > 0).shape[0],
        lambda x: x.unique().shape[0] - 1,
        lambda x: torch.repeat_interleave((x > 0).int().reshape(-1)).shape[0],
    ],
)
def test_a_size_that_comes_from_the_values_of_x_is_a_decision(size: Callable[[Tensor], int]) -> None:
    # without an input zeros are tried, for which it is 0
    layer = wp.EquilibriumLayer(lambda z, x: 4.0 * size(x) * torch.tanh(z) + 0 * x, on_failure="ignore")
    for found in (wp.certify(layer), wp.certify(layer, torch.zeros(1, 2)).others[0]):
        assert found.verdict is UNDECIDED and re.search("decisions by the values of x", found.note)


def test_a_mask_that_is_fixed_is_not_a_decision() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([True, False, True]))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.5 * torch.tanh(z) + z[:, self.mask].sum(1, keepdim=True) / 10 + x[:, self.mask].sum(1, keepdim=True)

    assert wp.certify(wp.EquilibriumLayer(Masked()), torch.ones(2, 3)).others[0].certified


def _in_half(z: Tensor, x: Tensor) -> Tensor:
    h = torch.zeros(z.shape, dtype=torch.float16)
    h[:, :] = z
    return 0.9 * h.to(z.dtype) + x


def _partly_in_bfloat16(z: Tensor, x: Tensor) -> Tensor:
    h = torch.zeros(z.shape, dtype=torch.bfloat16)
    h[:, 1:] = z[:, 1:]
    return 0.9 * h.to(z.dtype) + x


@pytest.mark.parametrize(
    "cell", [_in_half, _partly_in_bfloat16, lambda z, x: 0.9 * torch.zeros_like(z).half().copy_(z).to(z) + x]
)
def test_a_state_that_is_rounded_is_not_the_state(cell: Callable[[Tensor, Tensor], Tensor]) -> None:
    certificate = wp.certify(wp.EquilibriumLayer(cell, state_shape=(3,), on_failure="ignore"), torch.full((1, 3), 0.1))
    assert not certificate.certified and not any(other.certified for other in certificate.others)


def test_data_that_are_rounded_may_be_infinite() -> None:
    def cell(z: Tensor, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape, dtype=torch.float16)
        h[...] = x  # infinite at 1e5
        return 0.5 * z + h.to(z.dtype)

    assert (
        "at which the cell is finite"
        in wp.certify(wp.EquilibriumLayer(cell, state_shape=(3,)), torch.ones(1, 3)).others[0].licenses[0]
    )


@pytest.mark.parametrize(
    "cell",
    [
        lambda z, x: torch.tanh(z) * torch.linspace(x.amax(), x.amax(), 3) + x * 0,
        lambda z, x: torch.tanh(z) * torch.linspace(0.0, x.amax(), 3) + x * 0,
        lambda z, x: (3 * torch.tanh(z) if "-" in str(x) else 0.5 * z) + x,
        lambda z, x: (3 * torch.tanh(z) if "9" in repr(z) else 0.5 * z) + x,
        lambda z, x: (3 * torch.tanh(z) if "-" in f"{x.sum():.2f}" else 0.5 * z) + x,
    ],
)
def test_numbers_read_from_x_or_z_are_decisions(cell: Callable[[Tensor, Tensor], Tensor]) -> None:
    certificate = wp.certify(wp.EquilibriumLayer(cell, state_shape=(3,), on_failure="ignore"), torch.full((1, 3), 0.5))
    assert not certificate.others[0].certified


def test_a_split_at_places_in_a_tensor_is_a_decision() -> None:
    def cell(z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        parts = torch.tensor_split(z, x[1], dim=1)
        return torch.cat([0.5 * parts[0], 3 * torch.tanh(parts[1])], 1) + x[0]

    certificate = wp.certify(wp.EquilibriumLayer(cell, state_shape=(1,)), (torch.zeros(1, 1), torch.tensor([1])))
    assert not certificate.others[0].certified and "tensor_split" in certificate.others[0].note
