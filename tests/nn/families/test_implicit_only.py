"""ImplicitOnlyDEQ: its three initializations, the repaired half-normal one above all, and the formulas of [gao2023]."""

from __future__ import annotations

import math

import pytest
import torch

import wellposed as wp
from equilibria import F64, normal
from networks import inputs, kernels


def make(d=3, m=9, *, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return wp.ImplicitOnlyDEQ(d, m, generator=generator, dtype=F64, **{"on_failure": "raise", "gamma0": 0.3, **options})


def test_letters_and_shapes():
    network = make(3, 9)
    assert {name: tuple(p.shape) for name, p in network.named_parameters()} == {"A": (9, 9)}
    assert {name: tuple(b.shape) for name, b in network.named_buffers()} == {"W": (3, 9), "b": (9,)}
    assert network.gamma == pytest.approx(0.1)


def test_the_draw():
    d, m = 50, 300
    network = make(d, m)
    for sample in (network.A.detach(), network.W):
        assert abs(float(sample.mean())) <= 5 / math.sqrt(sample.numel())
        assert abs(float(sample.var()) - 1) <= 5 * math.sqrt(2 / sample.numel())
    assert set(network.b.tolist()) == {-1.0, 1.0} and abs(float(network.b.mean())) <= 5 / math.sqrt(m)
    assert network.contraction_upper() == pytest.approx(2 * 0.3, rel=0.1)

    half = make(d, m, init="half_normal").A.detach() * math.sqrt(m)
    assert bool((half >= 0).all())
    assert float(half.mean()) == pytest.approx(math.sqrt(2 / math.pi), abs=5 * math.sqrt((1 - 2 / math.pi) / half.numel()))
    assert float(half.square().mean()) == pytest.approx(1, abs=5 * math.sqrt(2 / half.numel()))

    A = make(d, m, init="diagonal").A.detach()
    assert torch.equal(A, torch.diag(A.diagonal()))
    assert abs(float(A.diagonal().var()) - 1) <= 5 * math.sqrt(2 / m)


@pytest.mark.parametrize("init", ["gaussian", "half_normal", "diagonal"])
def test_gradient_and_kernel_are_those_of_the_docstring(init):
    """dL/dA = (gamma/sqrt(m)) Z^T diag(r) P and H = (gamma^2/m) (P P^T) o (Z Z^T), p_i = D_i (I - gamma A D_i)^(-1) b."""
    network, X, r, m = make(init=init), inputs(), normal(5, seed=3), 9
    A = network.A.detach()
    at = network.linearise(X)
    Z, gamma = at.value, network.gamma
    P = torch.stack(
        [
            torch.diag(D) @ torch.linalg.solve(torch.eye(m, dtype=F64) - gamma * A @ torch.diag(D), network.b)
            for D in (Z > 0).to(F64)
        ]
    )
    torch.testing.assert_close(network.gradients(X, at, r)["A"], gamma / math.sqrt(m) * Z.T @ torch.diag(r) @ P)
    features = network.tangent_features(X)
    torch.testing.assert_close(kernels(features, features)["A"], gamma**2 / m * (P @ P.T) * (Z @ Z.T))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("m", [20, 150])
def test_half_normal_facts(m, seed):
    """Scaled by 1/sqrt(m): every unit is active, Z = Phi (I - gamma A)^(-1), and all p_i are one vector p."""
    network, X = make(m=m, seed=seed, init="half_normal", gamma0=0.5), inputs(8)
    A, gamma, identity = network.A.detach(), network.gamma, torch.eye(m, dtype=F64)
    Phi = torch.relu(X @ network.W)
    at = network.linearise(X)
    Z = at.value
    assert bool((Z > 0).all())  # D(0) = I
    torch.testing.assert_close(Z, torch.linalg.solve((identity - gamma * A).T, Phi.T).T, rtol=1e-10, atol=1e-12)
    p = torch.linalg.solve(identity - gamma * A, network.b)
    features = network.tangent_features(X)
    H = gamma**2 / m * p.square().sum() * Z @ Z.T
    torch.testing.assert_close(kernels(features, features)["A"], H, rtol=1e-9, atol=1e-12)
    # [gao2023, (25)] as it should read: H(0) >= gamma^2/(1 + gamma |A|)^4 (|b|^2/m) Phi Phi^T, and |b|^2 = m
    norm = float(torch.linalg.matrix_norm(A, 2))
    least = torch.linalg.eigvalsh(H - gamma**2 / (1 + gamma * norm) ** 4 * Phi @ Phi.T)[0]
    assert float(least) >= -1e-10 * float(H.abs().max())


def test_half_normal_norm_tends_to_its_limit():
    """gamma |A| -> gamma0 sqrt(2/pi), instead of growing like sqrt(m)."""
    factors = [make(m=m, init="half_normal", gamma0=0.5).contraction_upper() for m in (50, 200, 800)]
    limit = 0.5 * math.sqrt(2 / math.pi)
    errors = [abs(factor - limit) for factor in factors]
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.01 * limit


def test_the_unscaled_half_normal_of_the_paper_has_no_equilibrium():
    """gamma |A| = gamma0 sqrt(2m/pi) > 1 for m > pi/(2 gamma0^2) = 157: the iteration diverges, the formula turns negative."""
    m, X = 400, inputs(4)
    network = make(m=m, init="half_normal", gamma0=0.1, on_ill_posed="ignore", on_failure="ignore", solver=wp.Picard())
    assert bool(network.solve(X).converged.all())  # scaled it is fine
    network.A.data.mul_(math.sqrt(m))
    gamma_A = network.gamma * network.A.detach()
    assert float(torch.linalg.eigvals(gamma_A).abs().max()) > 1.5
    assert all(status is wp.Status.DIVERGED for status in network.solve(X).status)
    formula = torch.linalg.solve((torch.eye(m, dtype=F64) - gamma_A).T, torch.relu(X @ network.W).T).T
    assert bool((formula < 0).any(dim=1).all())
    network.on_ill_posed = "raise"
    with pytest.raises(wp.errors.IllPosed, match=r"at most 1\.[56]"):
        network(X)


def test_a_diagonal_start_sits_at_kinks():
    """Where phi is 0 so is the pre-activation: relu'(0) = 0 is a convention there, and one-sided slopes differ from it."""
    network, x = make(init="diagonal", gamma0=0.5, seed=1), inputs(1)
    phi = torch.relu(x @ network.W)[0]
    off, on = int((phi == 0).nonzero()[0]), int((phi > 0).nonzero()[0])
    assert float(network.least_preactivation(x)) == 0.0
    (gradient,) = torch.autograd.grad(network(x).sum(), network.A)
    assert float(gradient[on, off]) == 0.0
    values = []
    for h in (-1e-6, 0.0, 1e-6):
        network.A.data[on, off] = h
        values.append(float(network(x).detach()))
    assert values[0] == values[1] and abs(values[2] - values[1]) / 1e-6 > 0.01


def test_a_diagonal_start_is_solved_unit_by_unit():
    network, X = make(init="diagonal", gamma0=0.5), inputs()
    diagonal = network.gamma * network.A.detach().diagonal()
    torch.testing.assert_close(network.equilibrium(X).detach(), torch.relu(X @ network.W) / (1 - diagonal))


def test_gamma0_too_large_for_a_gaussian_matrix():
    with pytest.raises(
        wp.errors.InvalidArgument, match=r"gamma0 = 0.9 is too large .* width 100: gamma \|A\| = 1\.[78].*below 1/2"
    ):
        make(m=100, gamma0=0.9)
    network = make(m=100, gamma0=0.9, on_ill_posed="warn", on_failure="ignore")
    with pytest.warns(wp.errors.IllPosedWarning):
        network(inputs())
    make(m=100, gamma0=0.9, init="half_normal")(inputs())
    make(m=100, gamma0=0.9, init="diagonal")(inputs())


def test_at_the_edge_a_gaussian_matrix_is_drawn_again():
    """gamma0 = 1/2 is where |A| = 2 sqrt(m) lies; what is returned contracts."""
    for seed in range(10):
        assert make(m=40, gamma0=0.5, seed=seed).contraction_upper() < 1 + 1e-12
    redrawn = [
        seed
        for seed in range(10)
        if not torch.equal(
            make(m=40, gamma0=0.5, seed=seed).A.detach(),
            torch.randn(40, 40, generator=torch.Generator().manual_seed(seed), dtype=F64),
        )
    ]
    assert 0 < len(redrawn) < 10


def test_unknown_init():
    with pytest.raises(
        wp.errors.InvalidArgument, match="gaussian, half_normal, diagonal; got 'half-normal'. Did you mean 'half_normal'"
    ):
        make(init="half-normal")
    with pytest.raises(wp.errors.InvalidArgument, match="got 3"):
        make(init=3)


@pytest.mark.parametrize("bad", [0.0, -0.1, math.inf, "0.3"])
def test_a_bad_gamma0(bad):
    with pytest.raises(wp.errors.InvalidArgument, match="'gamma0' parameter of ImplicitOnlyDEQ"):
        make(gamma0=bad)
