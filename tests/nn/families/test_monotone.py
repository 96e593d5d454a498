"""MonotoneDEQ: well-posed for all parameters, with the formulas of [nguyen2022] as corrected."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import wellposed as wp
from equilibria import F64, normal
from networks import inputs, kernels

SOLVERS = [
    wp.PeacemanRachford(),
    wp.PeacemanRachford(step_size=0.3),
    wp.DouglasRachford(),
    wp.ForwardBackward(),
    wp.NewtonKrylov(),
]


def make(d=3, m=9, *, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return wp.MonotoneDEQ(d, m, generator=generator, dtype=F64, **{"on_failure": "raise", "margin": 0.5, **options})


def recurrent(network):
    """W by the definition."""
    A, B = network.A.detach(), network.B.detach()
    return (1 - network.margin) * torch.eye(len(A), dtype=F64) - A.T @ A + B - B.T


def test_letters_and_shapes():
    network = make(3, 9)
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
    assert shapes == {"A": (9, 9), "B": (9, 9), "U": (9, 3), "u": (9,)}
    torch.testing.assert_close(network.recurrent(), recurrent(network))


def test_the_draw():
    d, m = 40, 300
    network = make(d, m)
    for sample, variance in ((network.A, 1 / (4 * m)), (network.B, 1 / (4 * m)), (network.U, 2 / d), (network.u, 1 / m)):
        sample, n = sample.detach(), sample.numel()
        assert abs(float(sample.mean())) <= 5 * math.sqrt(variance / n)
        assert abs(float(sample.var()) / variance - 1) <= 5 * math.sqrt(2 / n)


@settings(deadline=None, max_examples=25)
@given(m=st.integers(1, 8), seed=st.integers(0, 10**6), scale=st.floats(0.0, 30.0), margin=st.floats(0.05, 0.99))
def test_well_posed_for_every_parameter(m, seed, scale, margin):
    """One equilibrium, whatever A and B are: two far starts and two methods end at the same point."""
    network, X = make(3, m, seed=seed, margin=margin, max_steps=20000, solver=wp.NewtonKrylov()), inputs(3)
    with torch.no_grad():
        network.B.copy_(normal(m, m, seed=seed + 1, scale=scale / math.sqrt(m)))
        network.A.copy_(normal(m, m, seed=seed + 2, scale=math.sqrt(scale / m)))
    W = recurrent(network)
    F = torch.eye(m, dtype=F64) - W
    assert float(torch.linalg.eigvalsh((F + F.T) / 2)[0]) >= margin * (1 - 1e-9) - 1e-13 * float(F.abs().max())
    a, b = network.solve(X), network.solve(X, normal(3, m, seed=seed + 3).abs() * 10)
    assert bool(a.converged.all()) and bool(b.converged.all())
    size = max(1.0, float(a.value.abs().max())) * (1 + float(torch.linalg.matrix_norm(F, 2))) / margin
    torch.testing.assert_close(a.value, b.value, rtol=0, atol=1e-10 * size)
    pre = a.value @ W.T + X @ network.U.detach().T
    assert float((torch.relu(pre) - a.value).abs().max()) <= 1e-10 * size


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_every_solver_finds_the_same_equilibrium_and_gradient(solver):
    reference, network, X = make(), make(solver=solver, max_steps=20000), inputs()
    torch.testing.assert_close(network.equilibrium(X), reference.equilibrium(X), rtol=0, atol=1e-9)
    ours = torch.autograd.grad(network(X).sum(), list(network.parameters()))
    theirs = torch.autograd.grad(reference(X).sum(), list(reference.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


def test_plain_iteration_diverges_where_splitting_converges():
    network, X = make(max_steps=1000), inputs()
    with torch.no_grad():
        network.B.mul_(6)
    assert float(torch.linalg.matrix_norm(recurrent(network), 2)) > 2
    assert bool(network.solve(X).converged.all())
    plain = make(solver=wp.Picard(), on_failure="ignore")
    plain.load_state_dict(network.state_dict())
    assert [status.name for status in plain.solve(X).status].count("DIVERGED") >= 3


def test_gradients_are_the_corrected_ones():
    """A: -A (P R Z^T + Z R P^T), B: P R Z^T - Z R P^T, U: P R X^T, u: Z r; here with samples in rows."""
    network, X, r = make(), inputs(), normal(5, seed=3)
    at = network.linearise(X)
    closed, PRZ = network.gradients(X, at, r), at.adjoint.T @ torch.diag(r) @ at.value
    torch.testing.assert_close(closed["A"], -network.A.detach() @ (PRZ + PRZ.T))
    torch.testing.assert_close(closed["B"], PRZ - PRZ.T)
    torch.testing.assert_close(closed["U"], at.adjoint.T @ torch.diag(r) @ X)
    torch.testing.assert_close(closed["u"], at.value.T @ r)


def test_kernel_parts_are_those_of_the_docstring():
    network, X = make(), inputs()
    at, A = network.linearise(X), network.A.detach()
    Z, P = at.value, at.adjoint
    G, AP, AZ = Z @ Z.T, P @ A.T, Z @ A.T
    features = network.tangent_features(X)
    parts = kernels(features, features)
    K_A = (AP @ AP.T) * G + (AZ @ AZ.T) * (P @ P.T) + (AP @ AZ.T) * (Z @ P.T) + (AZ @ AP.T) * (P @ Z.T)
    torch.testing.assert_close(parts["A"], K_A)
    torch.testing.assert_close(parts["B"], 2 * ((P @ P.T) * G - (P @ Z.T) * (Z @ P.T)))
    torch.testing.assert_close(parts["U"], (P @ P.T) * (X @ X.T))
    torch.testing.assert_close(parts["u"], G)


@settings(deadline=None, max_examples=20)
@given(m=st.integers(1, 8), seed=st.integers(0, 10**6), margin=st.floats(0.1, 2.0))
@example(m=3, seed=5484, margin=1.0)
def test_bounds_of_equilibria_and_masked_adjoints(m, seed, margin):
    """|Z|_F <= |X|_F |U|/m (Lemma 3.3.3) and |p_i| <= |u|/m (Lemma 3.3.2, which needs the mask that p has)."""
    # an equilibrium that happens to be tiny is known to the rounding of the terms that cancel in it, not to its own
    network, X = make(3, m, seed=seed, margin=margin, max_steps=5000), inputs(4)
    network.layer.atol = 1e-12
    at = network.linearise(X)
    U = float(torch.linalg.matrix_norm(network.U.detach(), 2))
    assert float(at.value.norm()) <= float(X.norm()) * U / margin * (1 + 1e-9)
    assert float(at.adjoint.norm(dim=1).max()) <= float(network.u.detach().norm()) / margin * (1 + 1e-9)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, "0.1"])
def test_a_bad_margin(bad):
    with pytest.raises(wp.errors.InvalidArgument, match=r"'margin' parameter of Monotone must be a float in \(0, inf\)"):
        make(margin=bad)


def test_it_has_no_policy_to_choose():
    with pytest.raises(TypeError, match="on_ill_posed"):
        make(on_ill_posed="warn")
