"""Cells that pass through complex numbers: their bounds are about real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp


class Weighted(nn.Module):
    """tanh(z M) + x, with M made of a parameter."""

    def __init__(self, made: Any, weight: Tensor) -> None:
        super().__init__()
        self.made, self.weight = made, nn.Parameter(weight)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.made(self.weight)) + x


class Modulus(nn.Module):
    """|w z| - 1 + x with a complex w: at x = 0 there are two equilibria for |w| > 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2j))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return (self.weight * z).abs() - 1 + x


MADE = {
    "fft": lambda k: torch.fft.fft(k, dim=1).abs().T,
    "imaginary part": lambda k: torch.complex(torch.zeros_like(k), k).abs(),
    "real and imaginary": lambda k: torch.view_as_real(k * 1j).sum(dim=2),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("norm", [0.8, 1.4])
def test_a_weight_made_of_complex_numbers(name: str, norm: float) -> None:
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    weight = weight * norm / torch.linalg.matrix_norm(MADE[name](weight), 2)
    layer = wp.EquilibriumLayer(Weighted(MADE[name], weight), state_shape=(4,), on_failure="ignore")
    certified = wp.certify(layer).verdict is wp.Verdict.CERTIFIED
    assert certified == (norm < 1)


def test_complex_steps_of_the_state_are_not_decided() -> None:
    layer = wp.EquilibriumLayer(Modulus(), state_shape=(1,), on_failure="ignore")
    certificate = wp.certify(layer)
    assert certificate.verdict is not wp.Verdict.CERTIFIED and "proved of complex states" in str(certificate)


def test_a_complex_state_is_named() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: 0.3 * z + x)
    found = wp.certify(layer, torch.ones(2, 3, dtype=torch.complex64))
    assert "Nothing is proved of complex states" in found.note and "view_as" not in found.note
