"""SkipDEQ: its initialization, its letters, and the formulas of [gao2022] as corrected."""

from __future__ import annotations

import math

import pytest
import torch

import wellposed as wp
from equilibria import F64, normal
from networks import inputs, kernels


def make(d=3, m=9, **options):
    generator = torch.Generator().manual_seed(0)
    return wp.SkipDEQ(d, m, generator=generator, dtype=F64, **{"on_failure": "raise", **options})


def test_letters_and_shapes():
    shapes = {name: tuple(p.shape) for name, p in make(3, 9).named_parameters()}
    assert shapes == {"A": (9, 9), "W": (9, 3), "u": (9,), "v": (9,)}


def test_the_draw():
    network = make(50, 300)
    for sample in (network.A.detach(), network.W.detach()):
        n = sample.numel()
        assert abs(float(sample.mean())) <= 5 / math.sqrt(n)
        assert abs(float(sample.var()) - 1) <= 5 * math.sqrt(2 / n)
    for sample in (network.u.detach(), network.v.detach()):
        assert set(sample.tolist()) == {-1.0, 1.0}
        assert abs(float(sample.mean())) <= 5 / math.sqrt(300)
    assert not torch.equal(network.u, network.v)
    assert network.contraction_upper() == pytest.approx(2 * network.gamma, rel=0.1)  # |A| is about 2 sqrt(m)


def test_gradients_are_the_corrected_ones():
    """[gao2022, (10)-(13)], with the g = gamma/sqrt(m) that (10) lost: W gets E (p + v) x^T/sqrt(m)."""
    network, X, r = make(), inputs(), normal(5, seed=3)
    m, at = 9, network.linearise(X)
    closed = network.gradients(X, at, r)
    Phi, E = torch.relu(X @ network.W.T) / math.sqrt(m), (X @ network.W.T > 0).to(F64)
    g = network.gamma / math.sqrt(m)
    torch.testing.assert_close(closed["A"], g * at.adjoint.T @ torch.diag(r) @ at.value)
    torch.testing.assert_close(closed["W"], (E * (at.adjoint + network.v)).T @ torch.diag(r) @ X / math.sqrt(m))
    torch.testing.assert_close(closed["u"], at.value.T @ r)
    torch.testing.assert_close(closed["v"], Phi.T @ r)
    printed = at.adjoint.T @ torch.diag(r) @ at.value
    assert float((printed / closed["A"])[closed["A"] != 0].mean()) == pytest.approx(1 / g)  # off by sqrt(m)/gamma = 15


def test_the_kernel_is_that_of_the_docstring():
    network, X = make(), inputs()
    m, at = 9, network.linearise(X)
    Phi, E = torch.relu(X @ network.W.T) / math.sqrt(m), (X @ network.W.T > 0).to(F64)
    EPV, ZZ = E * (at.adjoint + network.v), at.value @ at.value.T
    expected = (network.gamma**2 / m * at.adjoint @ at.adjoint.T + 1) * ZZ + (EPV @ EPV.T / m) * (X @ X.T) + Phi @ Phi.T
    features = network.tangent_features(X)
    torch.testing.assert_close(sum(kernels(features, features).values()), expected.detach())


def test_the_skip_path_alone():
    """With u = 0 nothing of the equilibrium is read, and only v and W have gradients."""
    network, X = make(), inputs()
    network.u.data.zero_()
    torch.testing.assert_close(network(X), torch.relu(X @ network.W.T) / 3 @ network.v)
    network(X).sum().backward()
    assert not network.A.grad.any() and network.W.grad.any() and network.v.grad.any()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, "0.2"])
def test_a_bad_gamma(bad):
    with pytest.raises(wp.errors.InvalidArgument, match=r"'gamma' parameter of SkipDEQ must be a float in \(0, inf\)"):
        make(gamma=bad)


def test_gamma_of_one_half_is_the_edge():
    with pytest.raises(wp.errors.IllPosed, match="smaller gamma"):
        make(m=200, gamma=0.6)(inputs())
    make(m=200, gamma=0.4)(inputs())
