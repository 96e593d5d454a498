"""Derivatives inside torch.func: the recorded steps are as many as the slowest direction needs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wellposed as wp
from problems import gaussian

# torch itself calls torch.jit.script when forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
F64 = torch.float64


def slow_in(direction: Tensor, factor: float = 0.9) -> Tensor:
    """A matrix that shrinks one direction slowly, and annihilates all others."""
    v = direction / direction.norm()
    return factor * torch.outer(v, v)


def orthogonal_to(probe: Tensor, seed: int) -> Tensor:
    v = gaussian(1, probe.shape[0], seed=seed)[0]
    return v - (v @ probe) / (probe @ probe) * probe


PROBES = {
    "cosines": torch.cos(torch.arange(1, 9, dtype=F64) ** 2),
    "ones": torch.ones(8, dtype=F64),
    "first": torch.eye(8, dtype=F64)[0],
}


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("mode", ["jacrev", "jacfwd"])
def test_a_slow_direction_is_found_wherever_it_lies(name: str, mode: str) -> None:
    """A direction orthogonal to a fixed probe was once taken for fast: the Jacobian was off by 12."""
    W = slow_in(orthogonal_to(PROBES[name], 0))
    layer = wp.EquilibriumLayer(lambda z, x: z @ W.T + x, rtol=1e-10, max_steps=2000)
    J = getattr(torch.func, mode)(lambda x: layer(x))(gaussian(1, 8, seed=1)).reshape(8, 8)
    exact = torch.linalg.inv(torch.eye(8, dtype=F64) - W)
    assert (J - exact).abs().max() <= 1e-8 * exact.abs().max()
