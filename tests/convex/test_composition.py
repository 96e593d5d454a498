"""The map of an OptEq network: values and derivatives against dense algebra and autograd."""

from __future__ import annotations

import pytest
import torch

import wellposed as wp
from equilibria import F64, normal
from wellposed.convex import L1, Box, Decorrelation, GradientStep, GroupL1, InverseNorm, SquaredL2

PRIORS = [
    None,
    L1(0.05),
    SquaredL2(0.2),
    GroupL1(0.1, 5),
    Box(-0.2, 0.5),
    GradientStep(InverseNorm(0.1, 1.0), 0.2),
    GradientStep(SquaredL2(0.5), 0.3),
    GradientStep(Decorrelation(0.01), 0.1),
]


def network(prior=None, **options):
    generator = torch.Generator().manual_seed(1)
    options = {"alpha": 0.7, "mu": 1.5, "activation": wp.nn.Tanh(), "dtype": F64, "generator": generator} | options
    model = wp.DeepOptEq(3, (4, 6), width=5, prior=prior, **options)
    for b in model.b:
        b.data = normal(*b.shape, seed=2)
    return model


X = normal(4, 3, seed=3)


def by_hand(model, z):
    """The definition, with matrices written out for one sample after the other."""
    rows = []
    for i in range(len(X)):
        v = z[i]
        for W, unit in zip(model.matrices(), model.parameters_by_unit(), strict=True):
            inner = model.activation(W @ v + unit.U @ X[i] + unit.b)
            v = model.alpha / model.mu * W.t() @ inner + (1 - model.alpha) * v
        rows.append(v)
    return torch.stack(rows)


@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_values(prior):
    model = network(prior)
    z = normal(4, 5, seed=4)
    expected = by_hand(model, z)
    if prior is not None:
        expected = model.prior(expected)
    f = model.bind(X)
    rows = z.reshape(1, -1) if model.couples_samples else z
    torch.testing.assert_close(f(rows).reshape(4, 5), expected.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(f.tracked(rows).reshape(4, 5), expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(model.layer.cell(rows, X).reshape(4, 5), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_jacobian_and_pullback(prior):
    model = network(prior)
    f = model.bind(X)
    z = normal(4, 5, seed=4, scale=0.5)
    rows = z.reshape(1, -1) if model.couples_samples else z
    expected = torch.stack(
        [
            torch.autograd.functional.jacobian(lambda v, i=i: f.take(torch.tensor([i])).tracked(v[None])[0], rows[i])
            for i in range(len(rows))
        ]
    )
    jacobian = f.jacobian(rows)
    torch.testing.assert_close(jacobian.dense(), expected, rtol=1e-10, atol=1e-12)
    u = normal(*rows.shape, seed=5)
    torch.testing.assert_close(jacobian.mv(u), torch.einsum("nij,nj->ni", expected, u), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(jacobian.rmv(u), torch.einsum("nij,ni->nj", expected, u), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(jacobian.value, f(rows), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(f.pullback(rows).product(u), jacobian.rmv(u))


@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_cotangents_against_autograd(prior):
    model = network(prior)
    f = model.bind(X)
    z = normal(4, 5, seed=4, scale=0.5)
    rows = z.reshape(1, -1) if model.couples_samples else z
    u = normal(*rows.shape, seed=5)
    inputs = f.inputs()
    assert len(inputs) == 4
    expected = torch.autograd.grad(f.tracked(rows), inputs, u)
    for found, right in zip(f.cotangents(u, rows, (True,) * 4), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-13)
    assert f.cotangents(u, rows, (False, True, False, False))[0] is None
    other = f.with_inputs(*(2 * tensor.detach() for tensor in inputs))
    assert torch.equal(other.inputs()[3], 2 * inputs[3])


def test_rows_can_be_taken():
    f = network().bind(X)
    z = normal(4, 5, seed=4)
    rows = torch.tensor([2, 0])
    torch.testing.assert_close(f.take(rows)(z[rows]), f(z)[rows])
