"""The tangent kernel of OptEq networks in closed form, against Jacobians by autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wellposed as wp
from equilibria import F64, normal
from wellposed.convex import L1, Decorrelation, GradientStep, SquaredL2


def from_terms(model, X, X2):
    left, right = model.tangent_features(X), model.tangent_features(X2)
    parts = {}
    for name, products in left.terms.items():
        parts[name] = 0
        for product in products:
            part = product.coefficient
            for a, b in product.factors:
                part = part * (left.features[a] @ right.features[b].t())
            parts[name] = parts[name] + part
    return parts


def by_autograd(model, X, X2):
    names, values = zip(*((name, p) for name, p in model.named_parameters() if p.requires_grad), strict=True)

    def jacobian(X):
        rows = [torch.autograd.grad(model(x[None])[0], values) for x in X]
        return [torch.stack([row[k].flatten() for row in rows]) for k in range(len(values))]

    return {name: a @ b.t() for name, a, b in zip(names, jacobian(X), jacobian(X2), strict=True)}


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    layers=st.integers(1, 4),
    alpha=st.sampled_from([0.2, 0.7, 1.0]),
    mu=st.sampled_from([1.0, 2.0]),
    scale=st.sampled_from([1.0, 4.0]),
    activation=st.sampled_from([wp.nn.ReLU(), wp.nn.Tanh()]),
    prior=st.sampled_from([None, L1(0.05), SquaredL2(0.2)]),
)
def test_closed_form_against_autograd(seed, layers, alpha, mu, scale, activation, prior):
    model = wp.DeepOptEq(
        3,
        (4, 6, 3, 5)[:layers],
        width=4,
        alpha=alpha,
        mu=mu,
        activation=activation,
        prior=prior,
        dtype=F64,
        generator=torch.Generator().manual_seed(seed),
        rtol=1e-14,
        max_steps=2000,
        on_failure="ignore",
    )
    for unit in model.parameters_by_unit():
        unit.W.data *= scale  # 4: the norm bound is active, and its derivative part of the kernel
        unit.b.data = normal(*unit.b.shape, seed=seed + 1)
    X, X2 = normal(3, 3, seed=seed + 2), normal(2, 3, seed=seed + 3)
    found, expected = from_terms(model, X, X2), by_autograd(model, X, X2)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9)


def test_the_library_function_takes_the_closed_road():
    model = wp.OptEq(3, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
    X = normal(5, 3)
    K = wp.tangent_kernel(model, X, by_parameter=True)
    expected = by_autograd(model, X, X)
    for name in expected:
        torch.testing.assert_close(K[name], expected[name], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(wp.tangent_kernel(model, X, method="closed"), sum(expected.values()), rtol=1e-9, atol=1e-9)


def test_frozen_parameters_have_no_part():
    model = wp.OptEq(3, 6, dtype=F64)
    model.W.requires_grad_(False)
    assert set(model.tangent_features(normal(2, 3)).terms) == {"U", "b", "w"}


def test_coupled_samples_have_no_kernel():
    model = wp.OptEq(3, 6, dtype=F64, prior=GradientStep(Decorrelation(0.1), 0.1))
    with pytest.raises(wp.InvalidArgument, match="depend on one another"):
        model.tangent_features(normal(2, 3))


def test_the_skip_connection_of_one_layer_cancels():
    one = wp.OptEq(3, 6, dtype=F64, rtol=1e-14, on_failure="ignore", generator=torch.Generator().manual_seed(0))
    other = wp.OptEq(3, 6, alpha=0.3, dtype=F64, rtol=1e-14, on_failure="ignore", max_steps=2000)
    other.load_state_dict(one.state_dict())
    X = normal(3, 3)
    a, b = from_terms(one, X, X), from_terms(other, X, X)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-9, atol=1e-10)
