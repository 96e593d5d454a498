"""Inputs that are broadcast over the batch by mistake, and the same shapes meant as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp


class Cell(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.own, self.into = nn.Linear(16, 16, dtype=dtype), nn.Linear(8, 16, dtype=dtype)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.own(z) + self.into(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vector_in_the_place_of_a_batch_is_warned_of(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = wp.EquilibriumLayer(Cell(dtype), state_shape=(16,)), torch.randn(8, dtype=dtype)
    with pytest.warns(wp.errors.WellposedWarning, match=r"all 8 samples have the same equilibrium.*x.unsqueeze\(0\)"):
        z = layer(x)
    assert torch.allclose(z[:1], layer(x.unsqueeze(0)))


def test_a_state_shape_with_the_batch_is_warned_of() -> None:
    torch.manual_seed(0)
    layer = wp.EquilibriumLayer(Cell(), state_shape=(4, 16))
    with pytest.warns(wp.errors.WellposedWarning, match=r"state_shape=\(4, 16\) begins with the size of the batch"):
        layer(torch.randn(4, 8))


@pytest.mark.filterwarnings("error")
def test_the_same_shapes_on_purpose_are_not() -> None:
    torch.manual_seed(0)
    own = nn.Linear(4, 4)

    def numbers(z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * torch.tanh(own(z)) + x.unsqueeze(1)

    wp.EquilibriumLayer(numbers, state_shape=(4,))(torch.randn(4))
    wp.EquilibriumLayer(numbers, state_shape=(4,))(torch.full((4,), 0.3))  # equal inputs have equal equilibria
    wp.EquilibriumLayer(lambda z, x: 0.5 * z, state_shape=(4,))(torch.randn(4))  # 0 for every input
    chosen = wp.EquilibriumLayer(lambda z, x: 0.5 * z + x.unsqueeze(1).float(), state_shape=(2,))
    chosen(torch.tensor([True, False]), torch.zeros(2, 2))


class Two(nn.Module):
    def forward(self, z: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = z
        return 0.5 * torch.tanh(b) + x, 0.3 * a


@pytest.mark.parametrize("use", [lambda layer, x: layer(x), wp.export, wp.certify])
@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (Two(), r"If the state is several tensors, give their start: layer\(x, \(a, b\)\)"),
        (
            lambda z, x: {"a": 0.5 * torch.tanh(z["b"]) + x, "b": 0.3 * z["a"]},
            r"give their start: layer\(x, \(a, b\)\), or a dict",
        ),
        (nn.Linear(8, 8), r"A cell is a module or function of two arguments"),
        (lambda z, x: z[:, :3], r"expected \(4, 8\), got \(4, 3\)"),
    ],
)
def test_a_cell_that_does_not_fit_is_told_alike_everywhere(use: object, cell: object, message: str) -> None:
    with pytest.raises(wp.WellposedError, match=message):
        use(wp.EquilibriumLayer(cell), torch.randn(4, 8))  # type: ignore[operator,arg-type]
