"""Well-posedness: what is certified has one equilibrium, found by the solver named; counter-examples are not certified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wellposed as wp
from theorem_problems import generator, sphere
from wellposed.certify import Verdict, contraction, monotone, perron_frobenius
from wellposed.certify.well_posedness import radius_bounds
from wellposed.errors import InvalidType

THEOREMS = (contraction, monotone, perron_frobenius)


def with_matrix(W: torch.Tensor) -> Any:
    model = wp.GaussianDEQ(3, len(W), on_ill_posed="ignore", generator=generator(0), dtype=torch.float64)
    with torch.no_grad():
        model.W.copy_(W)
    return model


def draw(kind: str, m: int, scale: float, seed: int) -> torch.Tensor:
    g = generator(seed)
    W = torch.randn(m, m, generator=g, dtype=torch.float64) * scale
    return {
        "dense": W / m**0.5,
        "positive": W.abs() / m,
        "nilpotent": torch.triu(W, 1),
        "shifted": -3 * torch.eye(m, dtype=W.dtype) + W / m**0.5,
        "permuted": torch.triu(W, 1)[torch.randperm(m, generator=g)] * 0.3,
    }[kind]


@settings(deadline=None, max_examples=25)
@given(
    kind=st.sampled_from(["dense", "positive", "nilpotent", "shifted", "permuted"]),
    m=st.integers(1, 6),
    scale=st.floats(0.05, 3.0),
    seed=st.integers(0, 10_000),
)
def test_certified_networks_have_one_equilibrium(kind: str, m: int, scale: float, seed: int) -> None:
    W = draw(kind, m, scale, seed)
    model = with_matrix(W)
    certificates = {theorem.__name__: theorem(model) for theorem in THEOREMS}
    certified = {name: certificate.certified for name, certificate in certificates.items()}
    # by dense algebra, and never against it
    assert certified["contraction"] == (torch.linalg.matrix_norm(W, ord=2).item() < 1 - 1e-9)
    least = torch.linalg.eigvalsh(torch.eye(m, dtype=W.dtype) - (W + W.t()) / 2)[0].item()
    assert certified["monotone"] == (least > 1e-9)
    radius = torch.linalg.eigvals(W.abs()).abs().max().item()
    if certified["perron_frobenius"]:
        assert radius < 1 + 1e-6
    elif certificates["perron_frobenius"].verdict is Verdict.VIOLATED:
        assert radius > 1 - 1e-6
    if certified["contraction"]:
        assert certified["monotone"]  # contraction implies monotone, with margin >= 1 - |W|
        assert certificates["monotone"].measured["margin"] >= 1 - certificates["contraction"].measured["|R|, upper"] - 1e-12
    margin, factor = certificates["monotone"].measured["margin"], certificates["perron_frobenius"].measured["rho(|R|), upper"]
    if margin < 0.3 and factor > 0.8:
        return  # not certified, or too slow to solve here
    X, _ = sphere(3, 3, seed)
    C = model.injection(X).detach()
    solver: Any = wp.PeacemanRachford(step_size=0.5) if margin >= 0.3 else wp.Picard()
    ends = []
    for start in (0.0, 10.0):
        model.layer.solver, model.layer.max_steps = solver, 2000
        ends.append(model.solve(X, torch.full((3, m), start, dtype=torch.float64)).value)
    assert torch.relu(ends[0] @ W.t() + C).sub(ends[0]).norm() <= 1e-8 * (1 + ends[0].norm())
    for end in ends[1:]:
        assert (end - ends[0]).norm() <= 1e-7 * (1 + ends[0].norm())


@settings(deadline=None, max_examples=40)
@given(m=st.integers(1, 10), scale=st.floats(0.1, 2.0), seed=st.integers(0, 10_000))
def test_picard_contracts_in_the_weighted_maximum_norm(m: int, scale: float, seed: int) -> None:
    W = draw("permuted", m, scale, seed)
    certificate = perron_frobenius(with_matrix(W))
    if not certificate.certified:
        return
    q = certificate.measured["rho(|R|), upper"]
    z = torch.randn(m, generator=generator(seed), dtype=torch.float64)
    c = torch.randn(m, generator=generator(seed + 1), dtype=torch.float64)
    path = [z]
    for _ in range(200):
        path.append(torch.relu(W @ path[-1] + c))
    # linear convergence at rate q, up to a constant: the gaps beat any slower rate in the end
    gaps = torch.stack([(b - a).norm() for a, b in zip(path, path[1:], strict=False)])
    assert gaps[-1] <= 1e-12 * (1 + path[-1].norm()) or (gaps[-1] / gaps[100]) ** 0.01 <= q + 0.02


@settings(deadline=None, max_examples=60)
@given(m=st.integers(1, 15), scale=st.floats(1e-3, 1e3), density=st.floats(0.05, 1.0), seed=st.integers(0, 10_000))
def test_collatz_wielandt_encloses_the_spectral_radius(m: int, scale: float, density: float, seed: int) -> None:
    g = generator(seed)
    M = torch.rand(m, m, generator=g, dtype=torch.float64) * (torch.rand(m, m, generator=g) < density) * scale
    lower, upper = radius_bounds(M)
    # nearly defective eigenvalues are computed to a root of the rounding only
    radius = torch.linalg.eigvals(M).abs().max().item()
    slack = 1e-5 * scale * m
    assert lower <= radius + slack and radius <= upper + slack
    if density == 1.0:
        assert upper - lower <= 1e-4 * upper


def test_exact_radius_of_a_known_matrix() -> None:
    M = torch.tensor([[0.0, 4.0], [0.09, 0.0]], dtype=torch.float64)  # rho = sqrt(0.36) = 0.6, norm 4
    lower, upper = radius_bounds(M)
    assert upper >= 0.6 and upper == pytest.approx(0.6, rel=1e-4) and lower <= 0.6
    assert perron_frobenius(with_matrix(M)).certified
    assert contraction(with_matrix(M)).verdict is Verdict.VIOLATED


def test_nilpotent_matrices() -> None:
    # spectral radius 0 and any norm: [nguyen2022, (2.6)] takes the one for the other
    W = torch.triu(torch.full((6, 6), 5.0, dtype=torch.float64), 1)
    model = with_matrix(W)
    assert contraction(model).verdict is Verdict.VIOLATED
    assert monotone(model).verdict is Verdict.VIOLATED
    certificate = perron_frobenius(model)
    assert certificate.certified and "Picard()" in certificate.licenses[0]


def test_a_map_without_equilibrium_is_never_certified() -> None:
    # z = relu(2 z + 1) has none
    model = with_matrix(torch.full((1, 1), 2.0, dtype=torch.float64))
    assert all(theorem(model).verdict is Verdict.VIOLATED for theorem in THEOREMS)


def test_the_boundary_is_not_certified() -> None:
    model = with_matrix(torch.eye(3, dtype=torch.float64))  # z = relu(z + c): none, or infinitely many
    for theorem in THEOREMS:
        certificate = theorem(model)
        assert not certificate.certified and certificate.licenses == ()


def test_monotone_network_names_splitting_and_not_picard() -> None:
    model = wp.MonotoneDEQ(3, 12, margin=0.2, generator=generator(0), dtype=torch.float64)
    with torch.no_grad():
        model.B *= 6
    certificate = monotone(model)
    assert certificate.certified and certificate.measured["margin"] >= 0.2 - 1e-9
    assert "Picard() is not licensed" in certificate.licenses[1]
    X, _ = sphere(2, 3, 0)
    model.layer.solver, model.layer.max_steps = wp.PeacemanRachford(step_size=0.05), 100_000
    reference = model.solve(X).value
    model.layer.solver = wp.ForwardBackward(step_size=0.9 * certificate.measured["forward-backward step below"])
    assert torch.allclose(model.solve(X).value, reference, atol=1e-8)
    with torch.no_grad():
        z = torch.zeros_like(reference)
        for _ in range(300):
            z = torch.relu(z @ model.recurrent().t() + model.injection(X))
    assert not torch.allclose(z, reference, atol=1.0)  # Picard diverges


@pytest.mark.parametrize("gamma", [0.1, 0.2, 1.5])
def test_scaled_recurrent_matrices(gamma: float) -> None:
    model = wp.SkipDEQ(3, 20, gamma=gamma, generator=generator(0), on_ill_posed="ignore")
    R = model.double().recurrent().detach()
    assert contraction(model).certified == (torch.linalg.matrix_norm(R, ord=2).item() < 1)


def test_errors_and_reasons() -> None:
    for theorem in THEOREMS:
        with pytest.raises(InvalidType, match="got Linear"):
            theorem(torch.nn.Linear(2, 2))
    model = with_matrix(torch.full((2, 2), float("nan"), dtype=torch.float64))
    assert all(theorem(model).verdict is Verdict.UNDECIDED for theorem in THEOREMS)
