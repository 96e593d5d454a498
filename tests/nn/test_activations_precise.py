"""Smooth activations from -800 to 800 against 40 digits: derivatives, primitives and conjugates."""

from __future__ import annotations

import mpmath
import pytest
import torch
from mpmath import mp

from wellposed.nn import AbstractActivation, Sigmoid, Softplus, Tanh

SMOOTH = pytest.mark.parametrize("s", [Tanh(), Sigmoid(), Softplus()], ids=repr)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
SIZES = [0.0, 1e-12, 1e-3, 0.5, 0.7, 1.0, 2.0, 10.0, 19.999999, 20.0, 20.000001, 37.0, 88.0, 100.0, 340.0, 372.0, 700.0, 745.0]
POINTS = sorted({sign * v for sign in (1.0, -1.0) for v in (*SIZES, 800.0)})


def softplus(v):
    return mpmath.log1p(mpmath.exp(v))


def value(s: AbstractActivation, v):
    return {Tanh: mpmath.tanh, Sigmoid: lambda v: 1 / (1 + mpmath.exp(-v)), Softplus: softplus}[type(s)](v)


def derivative(s: AbstractActivation, v):
    if isinstance(s, Tanh):
        return mpmath.sech(v) ** 2
    sigmoid = 1 / (1 + mpmath.exp(-v))
    return sigmoid if isinstance(s, Softplus) else sigmoid / (1 + mpmath.exp(v))


def primitive(s: AbstractActivation, v):
    if isinstance(s, Tanh):
        return abs(v) + softplus(-2 * abs(v)) - mpmath.log(2)
    if isinstance(s, Sigmoid):
        return max(v, 0) + softplus(-abs(v)) - mpmath.log(2)
    lower = -mpmath.polylog(2, -mpmath.exp(-abs(v))) - mp.pi**2 / 12
    return lower if v <= 0 else v**2 / 2 - lower


def potential_at_zero(s: AbstractActivation):
    """p(s(0))."""
    if isinstance(s, Tanh):
        return mp.mpf(0)
    return -mpmath.log(2) - mp.mpf(1) / 8 if isinstance(s, Sigmoid) else mpmath.polylog(2, 0.5) - mp.pi**2 / 6


@SMOOTH
@DTYPES
def test_derivatives_keep_their_digits(s, dtype):
    """Relatively, down to the smallest normal number: a value that rounds to 1 has a derivative all the same."""
    info = torch.finfo(dtype)
    v = torch.tensor(POINTS, dtype=dtype)
    with mp.workdps(40):
        for x, ours in zip(v.tolist(), s.derivative(v).tolist(), strict=True):
            exact = derivative(s, mp.mpf(x))
            assert abs(ours - exact) <= 4 * info.eps * exact + info.smallest_normal, x


@SMOOTH
@DTYPES
def test_primitives(s, dtype):
    """Without a jump anywhere: PyTorch's softplus has one of 2e-9 at 20."""
    eps = torch.finfo(dtype).eps
    v = torch.tensor(POINTS, dtype=dtype)
    with mp.workdps(40):
        for x, ours in zip(v.tolist(), s.primitive(v).tolist(), strict=True):
            exact = primitive(s, mp.mpf(x))
            assert abs(ours - exact) <= 4 * eps * (1 + abs(exact)), x


@SMOOTH
@DTYPES
def test_conjugates(s, dtype):
    """At w = v - s(v), where p*(w) = S(v) - s(v)^2/2 + constant (Moreau)."""
    eps = torch.finfo(dtype).eps
    with mp.workdps(40):
        at_zero = value(s, mp.mpf(0))
        constant = -(at_zero**2) / 2 - potential_at_zero(s)
        for x in POINTS:
            exact_w = mp.mpf(x) - value(s, mp.mpf(x))
            w = torch.tensor(float(exact_w), dtype=dtype)
            if isinstance(s, Softplus) and not w < 0:
                continue  # v - softplus(v) < 0 has rounded to 0
            y = value(s, mp.mpf(x))
            exact = primitive(s, mp.mpf(x)) - y**2 / 2 + constant
            moved = abs(mp.mpf(float(w)) - exact_w) * y  # by the rounding of w
            assert abs(float(s.conjugate(w)) - exact) <= 4 * eps * (1 + abs(exact)) + 2 * abs(moved), x


def test_the_conjugate_of_softplus_keeps_its_digits():
    """p*(w) = Li_2(e^w), relatively, for w so small that 1 - e^w rounds to 1."""
    with mp.workdps(40):
        for w in (-1.0, -20.0, -40.0, -300.0, -700.0):
            exact = mpmath.polylog(2, mpmath.exp(w))
            ours = float(Softplus().conjugate(torch.tensor(w, dtype=torch.float64)))
            assert abs(ours - exact) <= 4 * 2.0**-52 * (1 + abs(w)) * exact
