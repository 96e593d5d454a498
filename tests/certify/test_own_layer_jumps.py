"""PyTorch's softplus jumps at its threshold: nothing is proved for every input there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wellposed as wp
from wellposed.certify import Verdict, _activations

DOUBLE = torch.float64


class Cell(nn.Module):
    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=DOUBLE)
        self.linear.weight.data = 0.5 * torch.eye(3, dtype=DOUBLE)
        self.softplus = nn.Softplus(threshold=threshold)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.softplus(self.linear(z)) + x


@pytest.mark.parametrize("threshold", [-2000.0, 0.0, 1.0, 20.0])
@pytest.mark.parametrize("theorem", ["auto", "contraction", "monotone", "perron_frobenius"])
def test_nothing_is_certified_for_every_input_where_softplus_jumps(threshold: float, theorem: str) -> None:
    found = wp.certify(wp.EquilibriumLayer(Cell(threshold)), theorem=theorem)
    for certificate in (found, *found.others):
        assert certificate.verdict is Verdict.UNDECIDED and not certificate.licenses
        assert not certificate.hypotheses[0].holds and "softplus of PyTorch jumps" in certificate.note


def test_the_jump_at_threshold_0_leaves_some_inputs_without_an_equilibrium() -> None:
    """The statement that must not be certified is false: 0.5 softplus(z) + x - z changes its sign only at the jump."""
    x = torch.tensor([-0.2], dtype=DOUBLE)
    z = torch.linspace(-4, 4, 100_001, dtype=DOUBLE)
    g = 0.5 * F.softplus(z, threshold=0.0) + x - z
    assert (g.abs() > 0.1).all() and g[0] > 0 > g[-1]


@pytest.mark.parametrize("threshold", [0.0, 1.0, 20.0])
def test_a_sample_is_certified_in_a_ball_away_from_the_jump(threshold: float) -> None:
    found = wp.certify(wp.EquilibriumLayer(Cell(threshold)), torch.full((1, 3), 8.0 if threshold < 20 else 0.0, dtype=DOUBLE))
    assert found.certified and "no other anywhere" not in found.licenses[0]


class Weighted(nn.Module):
    """Softplus makes a weight positive, and no state meets the jump."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.full((3,), -3.0, dtype=DOUBLE))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return -F.logsigmoid(-F.softplus(self.raw) * z) + F.softplus(x)


def test_a_softplus_of_weights_or_inputs_does_no_harm_and_logsigmoid_does_not_jump() -> None:
    assert wp.certify(wp.EquilibriumLayer(Weighted())).certified
    assert wp.certify(wp.EquilibriumLayer(Weighted()), torch.zeros(1, 3, dtype=DOUBLE)).radius.isinf().all()


@pytest.mark.parametrize("beta", [1.0, -1.0])
@pytest.mark.parametrize("threshold", [-3.0, 0.0, 2.0])
def test_slopes_and_values_of_softplus_are_bounded_at_the_jump_too(beta: float, threshold: float) -> None:
    mid = torch.linspace(-6, 6, 121, dtype=DOUBLE)
    function = _activations.softplus(beta, threshold)
    low, high = function.slopes(mid, torch.full_like(mid, 0.5))
    ends = mid.unsqueeze(1) + torch.linspace(-0.5, 0.5, 41, dtype=DOUBLE)
    quotients = F.softplus(ends, beta, threshold).diff(dim=1) / ends.diff(dim=1)
    assert (low.unsqueeze(1) <= quotients + 1e-9).all() and (quotients - 1e-9 <= high.unsqueeze(1)).all()
    for row in ends:
        least, largest = function.values_on(float(row[0]), float(row[-1]))
        values = F.softplus(row, beta, threshold)
        assert least <= values.min() + 1e-12 and values.max() - 1e-12 <= largest
