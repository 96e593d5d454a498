"""GaussianDEQ: its initialization, its letters, and the formulas of [ling2022] as corrected."""

from __future__ import annotations

import math

import pytest
import torch

import wellposed as wp
from equilibria import F64, normal
from networks import inputs, kernels

GENERATOR = torch.Generator


def make(d=3, m=9, **options):
    generator = GENERATOR().manual_seed(0)
    return wp.GaussianDEQ(d, m, generator=generator, dtype=F64, **{"on_failure": "raise", **options})


def has_variance(sample, variance):
    """Mean 0 and the variance, within five standard errors of a normal sample."""
    n = sample.numel()
    assert abs(float(sample.mean())) <= 5 * math.sqrt(variance / n)
    assert abs(float(sample.var()) / variance - 1) <= 5 * math.sqrt(2 / n)
    assert abs(float((sample / math.sqrt(variance)).pow(4).mean()) - 3) <= 5 * math.sqrt(96 / n)


def test_letters_and_shapes():
    network = make(3, 9)
    assert {name: tuple(p.shape) for name, p in network.named_parameters()} == {"W": (9, 9), "U": (9, 3), "a": (9,)}
    assert not list(network.buffers())


@pytest.mark.parametrize("weight_variance", [0.08, 0.02])
def test_the_draw(weight_variance):
    d, m = 40, 300
    network = make(d, m, weight_variance=weight_variance)
    has_variance(network.W.detach(), 2 * weight_variance / m)
    has_variance(network.U.detach(), 2 / d)
    has_variance(make(1, 20000 // 20, weight_variance=0.0).a.detach(), 1 / 1000)
    # |W| is near the spectral edge 2 sqrt(2 s), not below it with overwhelming probability
    assert network.contraction_upper() == pytest.approx(2 * math.sqrt(2 * weight_variance), rel=0.1)


def test_without_recurrence_it_is_one_hidden_layer():
    network, X = make(weight_variance=0.0), inputs()
    torch.testing.assert_close(network(X), torch.relu(X @ network.U.T) @ network.a)


def test_gradients_are_the_printed_ones():
    """[ling2022, Lemma 2] with R = (I kron a^T) J^(-1) D: W: sum r p z^T, U: sum r p x^T, a: sum r z."""
    network, X, r = make(), inputs(), normal(5, seed=3)
    at = network.linearise(X)
    closed = network.gradients(X, at, r)
    R = torch.diag(r)
    torch.testing.assert_close(closed["W"], at.adjoint.T @ R @ at.value)
    torch.testing.assert_close(closed["U"], at.adjoint.T @ R @ X)
    torch.testing.assert_close(closed["a"], at.value.T @ r)


def test_the_kernel_is_that_of_the_docstring():
    network, X = make(), inputs()
    at = network.linearise(X)
    features = network.tangent_features(X)
    G, PP = at.value @ at.value.T, at.adjoint @ at.adjoint.T
    torch.testing.assert_close(sum(kernels(features, features).values()), G + PP * (G + X @ X.T))


def test_positive_homogeneity():
    """relu(W z + U (t x)) has the equilibrium t z: predictions scale with the inputs."""
    network, X = make(), inputs()
    torch.testing.assert_close(network(7.0 * X), 7.0 * network(X))


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf, "0.1", None])
def test_a_bad_variance(bad):
    with pytest.raises(
        wp.errors.InvalidArgument, match=r"'weight_variance' parameter of GaussianDEQ must be a float in \[0, inf\)"
    ):
        make(weight_variance=bad)


def test_the_remedy_names_the_variance():
    network = make(m=200, weight_variance=0.5)
    with pytest.raises(wp.errors.IllPosed, match="weight_variance below 1/8"):
        network(inputs())


def test_an_unknown_option_is_named_with_the_nearest_known_one():
    with pytest.raises(wp.InvalidType, match="no option 'weight_varaince'. Did you mean 'weight_variance'"):
        wp.GaussianDEQ(3, 4, weight_varaince=0.1)


@pytest.mark.parametrize("activation", [wp.nn.Tanh(), wp.nn.Softplus(centred=True)], ids=repr)
def test_another_activation(activation):
    """Values by iteration, gradients by autograd through it; the theorems of the paper do not apply."""
    generator = torch.Generator().manual_seed(0)
    model = wp.GaussianDEQ(3, 8, activation=activation, generator=generator, dtype=torch.float64, rtol=1e-13)
    X = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    z = torch.zeros(5, 8, dtype=torch.float64)
    for _ in range(200):
        z = activation(z @ model.W.t() + X @ model.U.t())
    expected = z @ model.a
    torch.testing.assert_close(model(X), expected, rtol=1e-10, atol=1e-12)
    r = torch.linspace(-1, 1, 5, dtype=torch.float64)
    wanted = torch.autograd.grad(expected @ r, [model.W, model.U, model.a])
    found = model.gradients(X, model.linearise(X), r)
    for name, gradient in zip(("W", "U", "a"), wanted, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-10)
    assert model.theory.theorem == ""
