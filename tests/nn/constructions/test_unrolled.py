"""unrolled: k explicit layers, their distance to the equilibrium, and what is proved of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import wellposed as wp
from equilibria import F64, normal
from networks import FAMILIES, dense_equilibrium, inputs, tensors_of
from wellposed.nn import unrolled

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


def dense_layer(activation=None, *, weight=None, scale=1.0, seed=0):
    cell = wp.nn.DenseCell(3, 6, activation, weight=weight, generator=torch.Generator().manual_seed(seed), dtype=F64)
    cell.W.data.mul_(scale)
    cell.b.data = normal(6, seed=5)
    return wp.EquilibriumLayer(cell, on_failure="raise")


@every_family
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_it_is_the_loop_written_out(family, steps):
    network, X = family(), inputs()
    explicit, tensors = unrolled(network, steps), tensors_of(network)
    a, W, C = explicit.step_size, family.recurrent(tensors), family.injection(tensors, X)
    z = torch.zeros_like(C)
    for _ in range(steps):
        z = torch.relu(z - a * (z - z @ W.T - C))  # forward-backward; for a = 1 plain iteration
    torch.testing.assert_close(explicit.equilibrium(X), z)
    torch.testing.assert_close(explicit(X), family.readout(tensors, z, X))
    start = normal(5, 7, seed=8)
    w = start
    for _ in range(steps):
        w = torch.relu(w - a * (w - w @ W.T - C))
    torch.testing.assert_close(explicit.equilibrium(X, start), w)


@settings(deadline=None, max_examples=30)
@given(
    family=st.sampled_from(list(FAMILIES.values())),
    d=st.integers(1, 4),
    m=st.integers(1, 10),
    steps=st.integers(1, 60),
    seed=st.integers(0, 10**6),
    started=st.booleans(),
)
def test_the_error_bound_holds(family, d, m, steps, seed, started):
    network, X = family.any_size(d, m, seed=seed), inputs(4, d, seed=seed + 1)
    explicit = unrolled(network, steps)
    z0 = normal(4, m, seed=seed + 2) if started else None
    z_star = dense_equilibrium(family, tensors_of(network), X)
    error = (explicit.equilibrium(X, z0).detach() - z_star).norm(dim=1)
    q = explicit.contraction_upper()
    first = unrolled(network, 1, step_size=explicit.step_size).equilibrium(X, z0).detach()
    bound = q**steps / (1 - q) * (first - (0 if z0 is None else z0)).norm(dim=1)
    assert q < 1
    torch.testing.assert_close(explicit.error_bound(X, z0), bound)
    assert bool((error <= bound * (1 + 1e-9) + 1e-12).all())


@every_family
def test_many_layers_have_the_values_and_gradients_of_the_equilibrium(family):
    network, X, r = family(seed=2), inputs(), normal(5, seed=3)
    explicit = unrolled(network, 4000 if family is FAMILIES["monotone"] else 400)
    parameters = list(network.parameters())
    assert list(explicit.parameters()) == parameters
    torch.testing.assert_close(explicit(X), network(X), rtol=0, atol=1e-9)
    ours, theirs = (torch.autograd.grad(f(X) @ r, parameters) for f in (explicit, network))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


def test_plain_iteration_of_a_monotone_network_diverges_and_the_certified_step_does_not():
    network, X = FAMILIES["monotone"](max_steps=5000), inputs()
    with torch.no_grad():
        network.B.mul_(6)
    z_star = network.solve(X).value
    plain, certified = unrolled(network, 300, step_size=1.0), unrolled(network, 300)
    with torch.no_grad():
        assert bool(((plain.equilibrium(X) - z_star).norm(dim=1) > z_star.norm(dim=1)).all())
        assert plain.contraction_upper() > 1 and bool(plain.error_bound(X).isinf().all())
        distance = (certified.equilibrium(X) - z_star).norm(dim=1)
        assert bool((distance <= certified.error_bound(X)).all()) and bool((distance < z_star.norm(dim=1)).all())


@settings(deadline=None, max_examples=25)
@given(m=st.integers(1, 10), seed=st.integers(0, 10**6), scale=st.floats(0.0, 10.0))
def test_the_certified_step_and_its_factor(m, seed, scale):
    """a = m/L^2 lies inside (0, 2m/L^2), and |W_a| <= sqrt(1 - m^2/L^2)."""
    network = FAMILIES["monotone"](3, m, seed=seed)
    with torch.no_grad():
        network.B.mul_(scale), network.A.mul_(math.sqrt(scale))
    F = torch.eye(m, dtype=F64) - FAMILIES["monotone"].recurrent(tensors_of(network))
    margin, L = float(torch.linalg.eigvalsh((F + F.T) / 2)[0]), float(torch.linalg.matrix_norm(F, 2))
    explicit = unrolled(network, 1)
    assert explicit.step_size == pytest.approx(margin / L**2, rel=1e-6)
    assert explicit.contraction_upper() <= math.sqrt(max(0.0, 1 - margin**2 / L**2)) + 1e-7 and explicit.contraction_upper() < 1


def test_layers_over_dense_cells():
    x = normal(4, 3, seed=7)
    for activation in wp.nn.activations.ACTIVATIONS:
        layer = dense_layer(activation, weight=wp.nn.Spectral(0.6))
        explicit = unrolled(layer, 80)
        assert explicit.step_size == 1.0
        torch.testing.assert_close(explicit(x), layer(x), rtol=0, atol=1e-9)
        parameters = list(layer.parameters())
        ours, theirs = (torch.autograd.grad(f(x).sin().sum(), parameters) for f in (explicit, layer))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


@pytest.mark.parametrize("activation", [wp.nn.ReLU(), wp.nn.LeakyReLU(0.2), wp.nn.SoftThreshold(0.1)], ids=repr)
def test_other_activations_with_a_smaller_step_keep_the_equilibrium(activation):
    layer, x = dense_layer(activation), normal(4, 3, seed=7)
    explicit = unrolled(layer, 300, step_size=0.5)
    torch.testing.assert_close(explicit(x), layer(x), rtol=0, atol=1e-9)
    (ours,), (theirs,) = (torch.autograd.grad(f(x).sin().sum(), layer.cell.W) for f in (explicit, layer))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)


def test_a_monotone_dense_cell_gets_a_certified_step():
    layer = dense_layer()
    V = normal(6, 6, scale=0.5)
    layer.cell.W.data = V - V.T  # skew: sym(I - W) = I
    assert float(torch.linalg.matrix_norm(layer.cell.W.detach(), 2)) > 1
    layer.solver, layer.max_steps, x = wp.PeacemanRachford(), 2000, normal(4, 3, seed=7)
    explicit = unrolled(layer, 3000)
    assert explicit.step_size < 1 and explicit.contraction_upper() < 1
    torch.testing.assert_close(explicit(x), layer(x), rtol=0, atol=1e-8)


def test_the_round_trip_of_both_constructions():
    """A perceptron, as an equilibrium, unrolled again: the perceptron."""
    mlp = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    cell, x = wp.nn.weight_tied(mlp), normal(6, 3, seed=7)
    explicit = unrolled(wp.EquilibriumLayer(cell, wp.Picard()), cell.depth, step_size=1.0)
    torch.testing.assert_close(cell.output(explicit(x)), mlp(x), rtol=1e-12, atol=1e-12)


@every_family
def test_gradcheck_and_transforms(family):
    """An explicit network decides nothing by values: every transform works, for the monotone one too."""
    if family is FAMILIES["diagonal"]:
        family = FAMILIES["half_normal"]  # a diagonal start has no derivative, see test_implicit_only.py
    network, X = family(2, 4, seed=3), inputs(2, 2).requires_grad_()
    explicit = unrolled(network, 5)
    names = [f"network.{name}" for name, _ in network.named_parameters()]

    def f(X, *values):
        return torch.func.functional_call(explicit, dict(zip(names, values, strict=True)), (X,))

    leaves = (X, *(parameter.detach().clone().requires_grad_() for parameter in network.parameters()))
    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)
    plain = torch.autograd.functional.jacobian(lambda X: explicit(X).sum(), X.detach())
    torch.testing.assert_close(torch.func.grad(lambda X: explicit(X).sum())(X.detach()), plain)
    per_sample = torch.func.vmap(torch.func.grad(lambda x: explicit(x.unsqueeze(0)).sum()))(X.detach())
    torch.testing.assert_close(per_sample, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_and_autocast(dtype):
    network, X = FAMILIES["monotone"](dtype=dtype), inputs().to(dtype)
    explicit = unrolled(network, 400)
    assert explicit(X).dtype == explicit.equilibrium(X).dtype == dtype
    tolerance = {torch.float32: 1e-3, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(explicit(X), network(X), rtol=tolerance, atol=tolerance)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = explicit(X)
    assert torch.equal(mixed, explicit(X))


def test_what_is_refused():
    network = FAMILIES["gaussian"]()
    with pytest.raises(
        wp.errors.InvalidArgument, match="'steps' parameter of unrolled must be an integer of at least 1. Got 0"
    ):
        unrolled(network, 0)
    with pytest.raises(wp.errors.InvalidArgument, match=r"'step_size' parameter of unrolled must be a float in \(0, inf\)"):
        unrolled(network, 3, step_size=0.0)
    with pytest.raises(wp.errors.InvalidType, match="expects a theory network such as GaussianDEQ.*got Linear"):
        unrolled(nn.Linear(3, 3), 3)
    with pytest.raises(wp.errors.InvalidType, match="an EquilibriumLayer over <function"):
        unrolled(wp.EquilibriumLayer(lambda z, x: torch.tanh(z + x)), 3)
    with pytest.raises(wp.errors.InvalidArgument, match="needs an activation whose proximal operator is a formula"):
        unrolled(dense_layer(wp.nn.Tanh()), 3, step_size=0.5)
    network.W.data.mul_(10)
    with pytest.raises(wp.errors.InvalidArgument, match="nothing proves that any step size converges.*step_size=1.0"):
        unrolled(network, 3)
    insisted = unrolled(network, 3, step_size=1.0)
    assert bool(insisted.error_bound(inputs()).isinf().all())
    with pytest.raises(wp.errors.InvalidArgument, match=r"GaussianDEQ expects X of shape \(n, 3\)"):
        insisted(normal(2, 4))
    with pytest.raises(wp.errors.InvalidArgument, match=r"z0 must have the shape of the state, \(5, 7\); got \(5, 6\)"):
        insisted.equilibrium(inputs(), normal(5, 6))
    with pytest.raises(wp.errors.InvalidArgument, match="DenseCell expects x of shape"):
        unrolled(dense_layer(), 3)(normal(2, 4))


def test_its_name_and_an_empty_batch():
    explicit = unrolled(FAMILIES["gaussian"](), 4)
    assert "steps=4, step_size=1" in repr(explicit)
    assert explicit(inputs()[:0]).shape == (0,)
