"""Smooth activations in splittings: the prox against roots of its equation in 40 digits, and equilibria against Newton's."""

from __future__ import annotations

import mpmath
import pytest
import torch
from mpmath import mp

import wellposed as wp
from wellposed.nn import AbstractActivation, Sigmoid, Softplus, Tanh

smooth = pytest.mark.parametrize("s", [Softplus(), Sigmoid(), Tanh()], ids=repr)
few_or_all = pytest.mark.parametrize("cases", [range(12), pytest.param(range(400), marks=pytest.mark.slow)], ids=["few", "all"])
#: v and step sizes at which w - s(w) cancels and is magnified, and the root may be missed by a bracket
LARGE = [(20.995510773171148, 910.3568164462414), (33.0, 500.0), (700.0, 1000.0), (12.0, 1e5)]
VALUES = {
    Softplus(): lambda w: mpmath.log1p(mpmath.exp(w)) if w < 0 else w + mpmath.log1p(mpmath.exp(-w)),
    Sigmoid(): lambda w: 1 / (1 + mpmath.exp(-w)),
    Tanh(): mpmath.tanh,
}


def root(s: AbstractActivation, v: float, a: float):
    """The w with (1 - a) s(w) + a w = v, by bisection: the left side increases with slope at least min(a, 1)."""
    value, v, a = VALUES[s], mp.mpf(v), mp.mpf(a)
    radius = abs((1 - a) * (value(v) - v)) / min(a, 1) + 1
    low, high = v - radius, v + radius
    for _ in range(180):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - a) * value(middle) + a * middle < v else (low, middle)
    return low


@smooth
@few_or_all
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_prox_is_the_root_of_its_equation(s, cases, dtype):
    """v from -700 to 700 and step sizes from 1e-3 to 1e3, log-uniform; step sizes as numbers and one per sample."""
    eps = torch.finfo(dtype).eps
    g = torch.Generator().manual_seed(0)
    u = torch.rand(len(cases), 3, generator=g, dtype=torch.float64)
    v = torch.where(u[:, 0] < 0.5, -1.0, 1.0) * 10 ** (5 * u[:, 1] - 2.155)
    v = torch.cat([v, torch.tensor(LARGE)[:, 0]]).to(dtype)
    a = torch.cat([10 ** (6 * u[:, 2] - 3), torch.tensor(LARGE)[:, 1]]).to(dtype)
    together = s.prox(v.unsqueeze(1), a.unsqueeze(1)).squeeze(1)
    with mp.workdps(40):
        for i in range(len(v)):
            alone = s.prox(v[i : i + 1], float(a[i]))
            w = root(s, float(v[i]), float(a[i]))
            exact = VALUES[s](w)
            # w is known to rounding of what it is computed from, divided by the least slope min(a, 1); s moves by s' dw
            gap = abs(w - exact) if isinstance(s, Softplus) else abs(w) + exact
            terms = abs(w) + float(a[i]) * gap + abs(float(v[i]))
            dw = 8 * eps * (1 + terms / min(float(a[i]), 1.0))
            near = [VALUES[s](w + t) for t in (-dw, dw)]
            allowed = max(abs(y - exact) for y in near) + 8 * eps * abs(exact) + torch.finfo(dtype).smallest_normal
            for ours in (together[i], alone[0]):
                assert abs(mp.mpf(float(ours)) - exact) <= allowed, (float(v[i]), float(a[i]))


@smooth
@pytest.mark.parametrize("cases", [range(1), pytest.param(range(70), marks=pytest.mark.slow)], ids=["few", "all"])
def test_splittings_find_the_equilibrium_of_newtons_method(s, cases):
    """Three activations, 70 monotone cells each, with weights, margins and step sizes at random."""
    for seed in cases:
        g = torch.Generator().manual_seed(seed)
        u = torch.rand(3, generator=g, dtype=torch.float64)
        margin, a = float(10 ** (-u[0])), float(10 ** (2 * u[1] - 1))
        cell = wp.nn.DenseCell(3, 8, s, weight=wp.nn.Monotone(margin), dtype=torch.float64, generator=g)
        with torch.no_grad():
            for p in cell.parameters():
                p.mul_(0.5 + 2 * float(u[2]))
        x = torch.randn(4, 3, generator=g, dtype=torch.float64)
        m, L = cell.bind(x).monotonicity()
        with torch.no_grad():
            newton = wp.EquilibriumLayer(cell, wp.NewtonKrylov(), on_failure="raise")(x)
        for solver in (wp.PeacemanRachford(a), wp.DouglasRachford(a), wp.ForwardBackward(wp.TunedStep())):
            with torch.no_grad():
                z = wp.EquilibriumLayer(cell, solver, on_failure="raise", max_steps=20_000)(x)
            # residuals are at most 1e-12 |z|, errors at most (1 + |W|)/m times that
            assert float((z - newton).norm()) <= 2 * (2 + L) / m * 1e-12 * float(newton.norm()), (seed, solver)
