"""Layers about which less is proved than their tapes say, and those that a solver cannot differentiate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.certify.local_certificate import LocalCertificate

CERTIFIED, UNDECIDED = wp.Verdict.CERTIFIED, wp.Verdict.UNDECIDED
DOUBLE = torch.float64


def local(layer: nn.Module, x: Tensor) -> LocalCertificate:
    found = wp.certify(layer, x)
    assert isinstance(found, LocalCertificate)
    return found


def test_rows_that_depend_on_each_other_are_found_also_where_they_are_equal() -> None:
    def cell(z: Tensor, x: Tensor) -> Tensor:
        mean = z.mean(0, keepdim=True)
        return 0.5 * mean + (z - mean) + x  # with z, z +- t is an equilibrium too

    x = torch.full((2, 1), 0.2, dtype=DOUBLE)
    found = local(wp.EquilibriumLayer(cell), x)
    assert found.verdicts == (UNDECIDED, UNDECIDED) and "depend on each other" in found.note
    assert local(wp.EquilibriumLayer(cell), x[:1]).certified  # alone it is 0.5 z + x


def test_a_cell_without_a_second_derivative_is_certified() -> None:
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0, dtype=DOUBLE)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.3 * self.inner(z + x)

    layer = wp.EquilibriumLayer(Attention()).eval()
    assert all(verdict is CERTIFIED for verdict in local(layer, torch.randn(2, 3, 4, dtype=DOUBLE)).verdicts)


def test_neither_does_a_hard_sigmoid_raise() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: z * nn.functional.hardsigmoid(3 * z) + x, state_shape=(2,))
    assert wp.certify(layer).verdict in (UNDECIDED, wp.Verdict.VIOLATED)
