"""The generalization bound: its terms by hand, its inequality by experiment."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import wellposed as wp
from theorem_problems import generator, sphere
from wellposed.certify import generalization_bound
from wellposed.errors import InvalidArgument, InvalidType


def network(seed: int = 0, m: int = 60) -> Any:
    return wp.GaussianDEQ(6, m, weight_variance=0.05, generator=generator(seed), dtype=torch.float64)


def test_terms_by_hand() -> None:
    model = network()
    X, y = sphere(9, 6, 1)
    result = generalization_bound(model, X, y, delta=0.1, lipschitz=2.0, loss_bound=3.0)
    H = wp.tangent_kernel(model, X)
    with torch.no_grad():
        r = y - model(X)
    B = math.sqrt(float(r @ torch.linalg.solve(H, r)))
    assert result.norm == pytest.approx(B, rel=1e-9)
    assert result.dominating == pytest.approx(math.sqrt(B**2 / 9) * math.sqrt(float(H.diagonal().max())), rel=1e-9)
    j = next(j for j in range(1000) if 2 ** (j / 4) >= B)
    assert result.complexity == pytest.approx(2 ** (j / 4) * math.sqrt(float(H.trace())) / 9)
    assert result.confidence == pytest.approx(9 * math.sqrt(math.log(2 * (j + 1) * (j + 2) / 0.1) / 18))
    assert result.bound == pytest.approx(4 * result.complexity + result.confidence)
    assert result.empirical == 0.0 and result.rank == 9
    # the sharper trace never exceeds the term of the theorem, up to the grid
    assert result.complexity <= result.dominating * 2**0.25 * (1 + 1e-9) or B < 1


def test_decomposition() -> None:
    model = network()
    X, y = sphere(9, 6, 1)
    result = generalization_bound(model, X, y)
    assert result.contributions.sum() == pytest.approx(result.norm**2)
    assert result.eigenvalues.sum() == pytest.approx(float(wp.tangent_kernel(model, X).trace()))  # the trace, not |H|_F
    assert bool((result.eigenvalues[:-1] >= result.eigenvalues[1:]).all())
    with torch.no_grad():
        assert result.projections.norm() == pytest.approx((y - model(X)).norm().item())
    assert torch.allclose(result.contributions, result.projections.square() / result.eigenvalues)


def test_pseudo_inverse_guard() -> None:
    model = network()
    X, y = sphere(5, 6, 1)
    doubled, labels = torch.cat([X, X]), torch.cat([y, -y])  # no function fits both
    result = generalization_bound(model, doubled, labels)
    assert result.rank == 5 and math.isfinite(result.norm)
    assert result.empirical == pytest.approx(1.0)  # it predicts the mean, 0, and misses by 1 everywhere
    assert result.vacuous
    agreeing = generalization_bound(model, doubled, torch.cat([y, y]))
    assert agreeing.rank == 5 and agreeing.empirical < 1e-9


def test_limit_of_the_diagonal_initialization() -> None:
    X, y = sphere(5, 6, 1)
    wide = wp.ImplicitOnlyDEQ(6, 900, gamma0=0.3, init="diagonal", generator=generator(0), dtype=torch.float64)
    result = generalization_bound(wide, X, y)
    assert result.limit is not None and result.limit.kernel == "limit"
    H = wp.kernel.diagonal_limit(X, 0.3)
    assert result.limit.norm == pytest.approx(math.sqrt(float(y @ torch.linalg.solve(H, y))), rel=1e-9)
    assert torch.allclose(result.eigenvalues, result.limit.eigenvalues, rtol=0.4)
    assert generalization_bound(network(), X, y).limit is None


def test_the_bound_is_kept_and_can_be_worth_something() -> None:
    model = network(m=40)
    with torch.no_grad():
        model.a.zero_()
    target = torch.randn(6, generator=generator(3), dtype=torch.float64) * 0.05
    X_new, _ = sphere(3000, 6, 99)
    failures, worth = 0, 0
    for seed in range(3):
        X, _ = sphere(600, 6, 1000 + seed)
        # labels from the model's own span are easy: B stays small as n grows
        with torch.no_grad():
            y, y_new = torch.relu(X @ target), torch.relu(X_new @ target)
        result = generalization_bound(model, X, y, rtol=1e-6)
        with torch.no_grad():
            H = wp.tangent_kernel(model, X)
            alpha = torch.linalg.lstsq(H, y - model(X), rcond=1e-6, driver="gelsd").solution
            prediction = model(X_new) + wp.tangent_kernel(model, X_new, X) @ alpha
        risk = float((prediction - y_new).abs().clamp(max=1.0).mean())
        failures += risk > result.bound
        worth += not result.vacuous
    assert failures == 0
    assert worth == 3


def test_rademacher_complexity_by_sampling() -> None:
    # sup over the ball of (1/n) sum s_i f(x_i) is (B/n) sqrt(s^T K s): its mean is at most (B/n) sqrt(trace K)
    X, _ = sphere(12, 6, 0)
    K = wp.tangent_kernel(network(), X)
    signs = torch.randint(0, 2, (4000, 12), generator=generator(1)).double() * 2 - 1
    mean = float(((signs @ K) * signs).sum(1).sqrt().mean()) / 12
    assert 0.8 * math.sqrt(float(K.trace())) / 12 < mean <= math.sqrt(float(K.trace())) / 12


def test_printing() -> None:
    X, y = sphere(14, 6, 1)
    text = str(generalization_bound(network(), X, y))
    assert "vacuous" in text.splitlines()[0] and "share of B^2" in text and "  ..." in text
    result = generalization_bound(network(), X, y)
    assert "below the trivial" in str(dataclasses.replace(result, vacuous=False))


def test_errors_say_what_to_do() -> None:
    X, y = sphere(3, 6, 1)
    for name, value in (("delta", 0.0), ("delta", 1.0), ("lipschitz", -1.0), ("loss_bound", 0.0), ("rtol", 1.0)):
        with pytest.raises(InvalidArgument, match=name):
            generalization_bound(network(), X, y, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="got Linear"):
        generalization_bound(torch.nn.Linear(6, 1), X, y)


def test_the_term_called_largest_is_the_largest() -> None:
    model = network()
    X, y = sphere(9, 6, 1)
    with torch.no_grad():
        fitted = model(X) + 1e-13 * y
    for labels in (y, 100 * y, fitted):
        result = generalization_bound(model, X, labels)
        assert sum(result.terms.values()) == pytest.approx(result.bound, rel=1e-12)
        assert result.terms[result.largest_term] == max(result.terms.values())
        text = str(result)
        assert f"largest term: {result.largest_term} {max(result.terms.values()):.4g}" in text
        assert "dominating" not in text


def test_a_model_that_fits_the_labels_is_told_from_one_that_was_drawn() -> None:
    model = network(m=40)
    X, _ = sphere(600, 6, 1)
    with torch.no_grad():
        u0 = model(X)
    fresh = generalization_bound(model, X, -u0, rtol=1e-6)
    assert fresh.fit == pytest.approx(2.0, rel=1e-12) and not fresh.trained
    assert "holds for a model drawn without using (X, y)" in str(fresh)
    trained = generalization_bound(model, X, u0 * (1 + 1e-6), rtol=1e-6)
    assert trained.bound < trained.loss_bound  # what the formula says, which is void here
    assert trained.trained and trained.vacuous
    assert "does not apply" in str(trained) and "not valid after training on these labels" in str(trained)


@pytest.mark.parametrize("exponent", [-900, -510, 510, 900])
def test_inputs_and_labels_of_any_size(exponent: int) -> None:
    model = network()
    X, y = sphere(9, 6, 1)
    here, there = generalization_bound(model, X, y), generalization_bound(model, X * 2.0**exponent, y * 2.0**exponent)
    assert there.norm == pytest.approx(here.norm, rel=1e-9)  # B does not change, all else does
    assert there.complexity == pytest.approx(here.complexity * 2.0**exponent, rel=1e-9)
    with pytest.raises(InvalidArgument, match="range of float64"):
        generalization_bound(model, X * 1e-200, y)
