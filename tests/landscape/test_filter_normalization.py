"""Filter normalization against its definition, filter by filter in float64 with NumPy [li2018, Section 4]."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed.landscape import filter_normalized, random_direction


def network(seed: int) -> nn.Module:
    g = torch.Generator().manual_seed(seed)
    kinds = (
        lambda: nn.Sequential(nn.Conv2d(2, 3, (3, 2)), nn.ReLU(), nn.Conv2d(3, 4, 1, bias=False), nn.GroupNorm(2, 4)),
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)),
        lambda: wp.GaussianDEQ(3, 6, generator=g),
        lambda: wp.nn.ResidualDEQ(1, 4, 3, groups=2, generator=g),
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.ConvTranspose2d(3, 2, 2)),
    )
    model = kinds[seed % len(kinds)]()
    dtype = (torch.float32, torch.float64)[seed % 2]
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g))
    return model.to(dtype)


def by_definition(theta: np.ndarray, d: np.ndarray) -> np.ndarray:
    """d_ij |theta_ij|/|d_ij| for the slices j along the first axis."""
    made = np.zeros_like(d)
    for j in range(len(d)):
        largest = np.abs(d[j]).max()
        if largest > 0:
            unit = d[j] / largest
            made[j] = unit / np.sqrt((unit**2).sum()) * np.sqrt((theta[j] ** 2).sum())
    return made


@pytest.mark.parametrize("cases", [range(20), pytest.param(range(200), marks=pytest.mark.slow)], ids=["few", "all"])
def test_against_the_definition(cases):
    for seed in cases:
        model = network(seed)
        vectors = seed % 3 == 0
        scale = 10.0 ** (seed % 7 - 3)
        direction = {
            name: scale * d for name, d in random_direction(model, generator=torch.Generator().manual_seed(seed)).items()
        }
        made = filter_normalized(model, direction, vectors=vectors)
        assert set(made) == {name for name, p in model.named_parameters() if p.requires_grad}
        for name, p in model.named_parameters():
            theta, d = p.detach().double().numpy(), direction[name].double().numpy()
            if p.dim() >= 2:
                expected = by_definition(theta, d)
            elif vectors:
                expected = by_definition(theta.reshape(1, -1), d.reshape(1, -1)).reshape(theta.shape)
            else:
                expected = np.zeros_like(theta)
            rounding = 16 * torch.finfo(p.dtype).eps * np.abs(expected)
            assert (np.abs(made[name].double().numpy() - expected) <= rounding).all(), (seed, name)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_sizes_whose_squares_leave_the_dtype(size):
    """In float32 the square of 1e-30 is 0 and that of 1e30 infinite; the direction has unit filters all the same."""
    model = nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    d = random_direction(model)
    expected = filter_normalized(model, d)["weight"]
    of_the_direction = filter_normalized(model, {"weight": size * d["weight"]})["weight"]
    torch.testing.assert_close(of_the_direction, expected, rtol=1e-5, atol=0)
    with torch.no_grad():
        model.weight.mul_(size)
    torch.testing.assert_close(filter_normalized(model, d)["weight"], size * expected, rtol=1e-5, atol=0)
