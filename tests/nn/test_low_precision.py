"""Iterates in bfloat16: residuals in float32, and every tolerance met or reported."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import wellposed as wp


class Cell(nn.Module):
    def __init__(self, *, low: bool) -> None:
        super().__init__()
        self.linear, self.low = nn.Linear(12, 12), low

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.low):
            return torch.tanh(self.linear(z) + x).float()


def cell(seed: int, *, low: bool) -> Cell:
    torch.manual_seed(seed)
    return Cell(low=low)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), exponent=st.integers(1, 6))
def test_statuses_follow_residuals_measured_in_float32(seed: int, exponent: int) -> None:
    f, rtol = cell(seed, low=True), 10.0**-exponent
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(seed))
    solution = wp.EquilibriumLayer(f, rtol=rtol, on_failure="ignore").solve(x)
    with torch.no_grad():
        fz = f(solution.value, x)
    measured = (fz - solution.value).norm(dim=1) / fz.norm(dim=1)
    assert solution.residual.dtype == solution.value.dtype == torch.float32
    assert (solution.residual - measured).abs().max() <= 16 * torch.finfo(torch.float32).eps
    assert (measured[solution.converged] <= rtol * (1 + 1e-4)).all()
    assert (measured[~solution.converged] > rtol * (1 - 1e-4)).all()


def test_a_tolerance_below_bfloat16_is_reported_and_finished_in_float32() -> None:
    low, full = cell(0, low=True), cell(0, low=False)
    x = torch.randn(32, 12, generator=torch.Generator().manual_seed(0))
    with pytest.warns(wp.errors.NotConvergedWarning, match="did not converge"):
        wp.EquilibriumLayer(low, rtol=1e-6)(x)
    start = wp.EquilibriumLayer(low, rtol=1e-2, on_failure="raise").solve(x).value
    layer = wp.EquilibriumLayer(full, on_failure="raise")
    fewer = layer.solve(x, start).num_steps.sum()
    exact = layer.solve(x)
    assert (layer(x, start) - exact.value).abs().max() <= 1e-5 and fewer < exact.num_steps.sum()
    layer(x, start).sum().backward()
    assert layer.last_adjoint.converged.all()


@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_lifts_low_precision_and_meets_its_tolerance(autocast: bool) -> None:
    f = cell(0, low=False)
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    expected = wp.EquilibriumLayer(f, on_failure="raise")(x)
    layer = wp.EquilibriumLayer(copy.deepcopy(f) if autocast else copy.deepcopy(f).bfloat16(), on_failure="raise")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        z = layer(x if autocast else x.bfloat16())
    assert layer.last_solution.residual.dtype == torch.float32 and (layer.last_solution.residual <= 1e-6).all()
    assert (z.float() - expected).abs().max() <= (1e-5 if autocast else 16 * 2**-8)
