"""The kernel of a diagonal start: against the finite network written out, of growing width."""

from __future__ import annotations

import math

import pytest
import torch

import wellposed as wp
from wellposed.errors import InvalidArgument
from wellposed.kernel import diagonal_limit

F64 = torch.float64


def finite(X: torch.Tensor, gamma0: float, m: int, generator: torch.Generator) -> torch.Tensor:
    """H = (gamma^2/m) (P P^T) o (Z Z^T) of [gao2023] with A = diag(a): every unit is a scalar equation of its own."""
    n, d = X.shape
    gamma = gamma0 / math.sqrt(m)
    a = torch.randn(m, generator=generator, dtype=F64)
    b = torch.randint(0, 2, (m,), generator=generator).to(F64) * 2 - 1
    phi = torch.relu(X @ torch.randn(d, m, generator=generator, dtype=F64))
    Z = phi / (1 - gamma * a)  # z = relu(gamma a z + phi) with |gamma a| < 1 and phi >= 0
    torch.testing.assert_close(Z, torch.relu(gamma * a * Z + phi), rtol=1e-12, atol=1e-12)
    P = (phi > 0) * b / (1 - gamma * a)
    return gamma**2 / m * (P @ P.T) * (Z @ Z.T)


def unit(n: int, d: int) -> torch.Tensor:
    X = torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=F64)
    return X / X.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_two_percent_at_width_forty_thousand(scale):
    X = scale * unit(5, 6)
    X[0] *= 2
    H = finite(X, 0.7, 40_000, torch.Generator().manual_seed(1))
    limit = diagonal_limit(X, 0.7)
    assert float((H - limit).norm() / limit.norm()) < 0.02


def test_unit_inputs_in_the_closed_form():
    X = unit(5, 6)
    rho = (X @ X.T).fill_diagonal_(1.0)
    Q = (torch.sqrt(1 - rho**2) + (math.pi - torch.arccos(rho)) * rho) / math.pi
    expected = 0.7**2 * Q / 2 * (math.pi - torch.arccos(rho)) / (2 * math.pi)
    torch.testing.assert_close(diagonal_limit(X, 0.7), expected, rtol=1e-13, atol=0.0)
    torch.testing.assert_close(diagonal_limit(X[:2], 0.7, X[2:]), expected[:2, 2:], rtol=1e-13, atol=0.0)


def test_the_package_s_own_network():
    X, m = unit(5, 6), 600
    generator = torch.Generator().manual_seed(3)
    models = [wp.ImplicitOnlyDEQ(6, m, gamma0=0.7, init="diagonal", generator=generator, dtype=F64) for _ in range(6)]
    mean = torch.stack([wp.kernel.tangent_kernel(model, X) for model in models]).mean(dim=0)
    limit = diagonal_limit(X, 0.7)
    assert float((mean - limit).norm() / limit.norm()) < 0.08


def test_slope_in_the_width():
    X = unit(5, 6)
    limit, generator = diagonal_limit(X, 0.5), torch.Generator().manual_seed(2)
    errors = {
        m: math.sqrt(sum(float((finite(X, 0.5, m, generator) - limit).norm()) ** 2 for _ in range(40)) / 40)
        for m in (250, 1000, 4000)
    }
    assert -0.65 < math.log(errors[4000] / errors[250]) / math.log(16) < -0.35


@pytest.mark.parametrize("gamma0", [0.0, -1.0, math.inf, math.nan, "1"])
def test_wrong_factor(gamma0):
    with pytest.raises(InvalidArgument, match="'gamma0' must be a finite number above 0"):
        diagonal_limit(unit(2, 2), gamma0)
