"""OptEq and DeepOptEq as networks: equilibria, gradients both ways, norms, borders."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wellposed as wp
from equilibria import F64, normal
from wellposed.convex import L1, Box, Decorrelation, GradientStep, GroupL1, InverseNorm, ProxStep, SquaredL2

OPTIONS = {
    "one layer": lambda **o: wp.OptEq(3, 5, **o),
    "one layer, skip, mu": lambda **o: wp.OptEq(3, 5, hidden_width=7, alpha=0.4, mu=2.0, **o),
    "deep": lambda **o: wp.DeepOptEq(3, (4, 6, 3), width=5, alpha=0.6, **o),
    "deep, alpha 1": lambda **o: wp.DeepOptEq(3, (4, 6), width=5, **o),
}
every_network = pytest.mark.parametrize("make", OPTIONS.values(), ids=OPTIONS.keys())


def build(make, seed=0, **options):
    model = make(**{"dtype": F64, "generator": torch.Generator().manual_seed(seed), "on_failure": "raise"} | options)
    for unit in model.parameters_by_unit():
        unit.b.data = normal(*unit.b.shape, seed=seed + 1)
    return model


X = normal(4, 3, seed=5)


@every_network
def test_shapes_and_equilibria(make):
    model = build(make)
    z = model.equilibrium(X)
    assert z.shape == (4, 5) and model(X).shape == (4,)
    f = model.bind(X)
    assert ((f(z.detach()) - z.detach()).norm(dim=1) <= 2e-12 * z.detach().norm(dim=1)).all()  # rtol is 1e-12 of a row
    assert model.solve(X).converged.all() and model.contraction_upper() < 1
    torch.testing.assert_close(model(X), z @ model.w)
    torch.testing.assert_close(model.equilibrium(X, normal(4, 5, seed=8)), z, rtol=1e-9, atol=1e-9)


@every_network
@pytest.mark.parametrize(
    ("activation", "scale"), [(wp.nn.Tanh(), 1.0), (wp.nn.Softplus(), 3.0)], ids=["inside the ball", "bound active"]
)
def test_gradcheck(make, activation, scale):
    model = build(make, activation=activation, rtol=1e-14)
    names = [name for name, _ in model.named_parameters()]
    for unit in model.parameters_by_unit():
        unit.W.data *= scale
    x = X[:2].clone().requires_grad_()
    values = [p.detach().clone().requires_grad_() for p in model.parameters()]

    def f(x, *values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(f, (x, *values), atol=1e-6, fast_mode=True)


@every_network
@pytest.mark.parametrize(
    ("activation", "prior"),
    [(wp.nn.ReLU(), None), (wp.nn.Tanh(), L1(0.02)), (wp.nn.ReLU(), GroupL1(0.05, 5)), (wp.nn.Tanh(), Box(-0.5, 2.0))],
    ids=repr,
)
def test_unrolled_and_implicit_agree_from_the_same_object(make, activation, prior):
    model = build(make, activation=activation, prior=prior, max_steps=2000)
    gradients = []
    for gradient in (wp.ImplicitGradient(), wp.UnrolledGradient(250)):
        model.gradient = gradient
        model.zero_grad()
        model(X).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_gradient_against_dense_algebra():
    """(I - J)^-T v by a matrix of the whole layer, for ReLU."""
    model = build(OPTIONS["deep"])
    z = model.solve(X).value
    v = normal(4, 5, seed=7)
    (found,) = torch.autograd.grad(model.equilibrium(X), model.W[1], v)
    total = torch.zeros_like(found)
    for i in range(4):
        x = X[i : i + 1]
        J = torch.autograd.functional.jacobian(lambda s, x=x: model.bind(x).tracked(s[None])[0], z[i])
        u = torch.linalg.solve(torch.eye(5, dtype=F64) - J.t(), v[i])
        (part,) = torch.autograd.grad(model.bind(x).tracked(z[i : i + 1]), model.W[1], u[None])
        total += part
    torch.testing.assert_close(found, total, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("prior", [GradientStep(Decorrelation(0.01), 0.1), GradientStep(InverseNorm(0.1), 0.1)], ids=repr)
def test_priors_by_gradient_steps(prior):
    model = build(OPTIONS["one layer"], prior=prior, max_steps=2000)
    z = model.equilibrium(X)
    assert z.shape == (4, 5)
    torch.testing.assert_close(model.prior(model.units(X)[0](z)), z, rtol=1e-10, atol=1e-11)
    assert model.contraction_upper() == math.inf  # nothing is proved for a regularizer that is not convex
    gradients = []
    for gradient in (wp.ImplicitGradient(), wp.UnrolledGradient(300)):
        model.gradient = gradient
        gradients.append(torch.autograd.grad(model(X).square().sum(), [model.W, model.w]))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


def test_a_coupled_prior_makes_one_equilibrium_of_the_batch():
    model = build(OPTIONS["one layer"], prior=GradientStep(Decorrelation(0.05), 0.2), max_steps=2000)
    assert model.couples_samples
    assert model.solve(X).status.shape == (1,)
    alone = torch.cat([model.equilibrium(x[None]) for x in X])
    assert float((alone - model.equilibrium(X)).detach().abs().max()) > 1e-4
    torch.testing.assert_close(
        model.equilibrium(X, model.equilibrium(X).detach()), model.equilibrium(X), rtol=1e-10, atol=1e-10
    )


@every_network
def test_samples_ignore_their_neighbours(make):
    model = build(make)
    torch.testing.assert_close(model(X)[2:3], model(X[2:3]), rtol=1e-10, atol=1e-11)


def test_the_skip_connection_of_one_layer_changes_nothing_at_the_equilibrium():
    one = build(OPTIONS["one layer"])
    other = wp.OptEq(3, 5, alpha=0.3, dtype=F64, max_steps=1000)
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other.equilibrium(X), one.equilibrium(X), rtol=1e-10, atol=1e-10)
    found = [torch.autograd.grad(model(X).sum(), model.W)[0] for model in (one, other)]
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scale=st.floats(1e-3, 1e3),
    bound=st.floats(0.1, 0.99),
    mu=st.floats(0.1, 10.0),
    alpha=st.floats(0.01, 1.0),
)
def test_the_contraction_is_proved_and_real(seed, scale, bound, mu, alpha):
    generator = torch.Generator().manual_seed(seed)
    model = wp.DeepOptEq(3, (4, 2), width=3, norm_bound=bound, mu=mu, alpha=alpha, dtype=F64, generator=generator)
    for W in model.W:
        W.data *= scale
    factor = model.contraction_upper()
    assert factor <= (alpha * bound**2 + 1 - alpha) ** 2 * (1 + 1e-9)
    f = model.bind(normal(1, 3, seed=seed).expand(50, 3))
    a, b = normal(50, 3, seed=seed + 1), normal(50, 3, seed=seed + 2)
    assert ((f(a) - f(b)).norm(dim=1) <= factor * (a - b).norm(dim=1) * (1 + 1e-12)).all()


def test_the_lipschitz_constant_of_the_activation_counts():
    """A sigmoid has slopes up to 1/4, so |W| may be twice as large."""
    model = wp.OptEq(3, 5, activation=wp.nn.Sigmoid(), dtype=F64)
    model.W.data *= 100
    assert model.norms_upper()[0] == pytest.approx(1.9, rel=1e-9)
    assert model.contraction_upper() == pytest.approx(0.95**2, rel=1e-9)


def test_at_norm_one_there_may_be_no_equilibrium():
    """z = relu(z + c) with c > 0 moves away forever: |W| <= 1 alone is not enough, and nobody pretends it is."""
    model = wp.OptEq(1, 2, norm_bound=1.0, dtype=F64, on_failure="ignore")
    model.W.data = torch.eye(2, dtype=F64)
    model.b.data.fill_(1.0)
    model.U.data.zero_()
    assert not model.solve(torch.zeros(1, 1, dtype=F64)).converged.any()
    assert model.contraction_upper() >= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    model = wp.DeepOptEq(3, (4, 5), dtype=dtype, alpha=0.8)
    x = X.to(dtype)
    y = model.equilibrium(x)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert all(p.grad.isfinite().all() for name, p in model.named_parameters() if name != "w")


def test_copies_and_state_dicts():
    model = build(OPTIONS["deep"])
    names = ["w", *(f"{letter}.{i}" for letter in "WUb" for i in range(3))]
    assert set(model.state_dict()) == set(names)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(X), model(X))
        other.W[0].data *= 0.5  # and the copy solves with its own parameters
        assert float((other(X) - model(X)).detach().abs().max()) > 1e-6
    one = wp.OptEq(3, 5, hidden_width=7)
    assert {name: tuple(p.shape) for name, p in one.named_parameters()} == {"W": (7, 5), "U": (7, 3), "b": (7,), "w": (5,)}


def test_priors_may_be_given_as_regularizers():
    assert wp.OptEq(3, 5, prior=L1(0.1)).prior == ProxStep(L1(0.1))
    sparse = build(OPTIONS["one layer"], prior=L1(0.5)).equilibrium(X)
    assert (sparse == 0).any()


def test_training_lowers_the_loss_both_ways():
    y = normal(4, seed=11)
    for gradient in (wp.ImplicitGradient(), wp.UnrolledGradient(20)):
        model = build(OPTIONS["deep"], gradient=gradient, on_failure="ignore")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = (model(X) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"alpha": 0.0}, wp.InvalidArgument, "'alpha' parameter of OptEq"),
        ({"alpha": 1.5}, wp.InvalidArgument, "'alpha' parameter of OptEq"),
        ({"mu": 0.0}, wp.InvalidArgument, "'mu' parameter of OptEq"),
        ({"norm_bound": 1.5}, wp.InvalidArgument, "'norm_bound' parameter of OptEq"),
        ({"hidden_width": 0}, wp.InvalidArgument, "hidden_width"),
        ({"activation": torch.relu}, wp.InvalidType, "'activation' parameter of OptEq"),
        ({"prior": "l1"}, wp.InvalidType, "'prior' parameter of OptEq"),
        ({"unknown": 1}, TypeError, "unknown"),
    ],
)
def test_bad_options_are_explained(options, error, match):
    with pytest.raises(error, match=match):
        wp.OptEq(3, 5, **options)


def test_bad_calls_are_explained():
    model = build(OPTIONS["one layer"])
    with pytest.raises(wp.InvalidArgument, match=r"OptEq expects X of shape \(n, 3\); got \(4, 2\)"):
        model(X[:, :2])
    with pytest.raises(wp.InvalidType, match="float64 parameters and got X of torch.float32"):
        model(X.float())
    with pytest.raises(wp.InvalidArgument, match=r"z0 must have the shape of the state, \(4, 5\)"):
        model.equilibrium(X, torch.zeros(4, 6, dtype=F64))
    with pytest.raises(wp.InvalidType, match="gradient must be a gradient mode"):
        model.gradient = "unrolled"
    with pytest.raises(wp.InvalidArgument, match="'widths' parameter of DeepOptEq"):
        wp.DeepOptEq(3, ())


def test_second_derivatives():
    model = build(OPTIONS["deep"], activation=wp.nn.Tanh(), rtol=1e-14, on_failure="ignore", prior=SquaredL2(0.1))
    names = [name for name, _ in model.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in model.parameters()]

    def f(x, *values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradgradcheck(f, (X[:1].clone().requires_grad_(), *values), atol=1e-5, fast_mode=True)


def test_gradients_of_every_sample_by_torch_func():
    model = build(OPTIONS["deep"])
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def f(parameters, x):
        return torch.func.functional_call(model, parameters, (x[None],))[0]

    rows = torch.func.vmap(torch.func.grad(f), (None, 0))(parameters, X)
    for i in range(4):
        alone = torch.autograd.grad(model(X[i : i + 1])[0], list(model.parameters()))
        for (name, _), expected in zip(model.named_parameters(), alone, strict=True):
            torch.testing.assert_close(rows[name][i], expected, rtol=1e-9, atol=1e-11)


def test_no_samples():
    model = build(OPTIONS["deep"])
    assert model(X[:0]).shape == (0,) and model.solve(X[:0]).converged.shape == (0,)
