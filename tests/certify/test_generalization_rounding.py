"""The generalization bound from the safe side, and where it refuses."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

import wellposed as wp
from wellposed.certify import generalization_bound
from wellposed.errors import InvalidArgument, InvalidType


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def network(seed: int = 0, **options: Any) -> Any:
    return wp.GaussianDEQ(4, 30, generator=generator(seed), dtype=torch.float64, rtol=1e-13, **options)


def exact(model: Any, X: Tensor, y: Tensor) -> tuple[Any, Any, Any]:
    """B, the complexity and the bound of the float64 kernel and predictions, to 60 digits; all eigenvalues are kept."""
    n = len(y)
    with mpmath.workdps(60):
        H = mpmath.matrix(wp.tangent_kernel(model, X).tolist())
        H = (H + H.T) / 2
        r = mpmath.matrix([mpmath.mpf(a) - mpmath.mpf(b) for a, b in zip(y.tolist(), model(X).tolist(), strict=True)])
        B = mpmath.sqrt((r.T * mpmath.lu_solve(H, r))[0])
        j = max(0, int(mpmath.ceil(4 * mpmath.log(B, 2))))
        complexity = mpmath.mpf(2) ** (mpmath.mpf(j) / 4) * mpmath.sqrt(mpmath.fsum(H[i, i] for i in range(n))) / n
        confidence = 3 * mpmath.sqrt(mpmath.log(2 * (j + 1) * (j + 2) / mpmath.mpf(0.05)) / (2 * n))
        return B, complexity, 2 * complexity + confidence


def test_no_term_is_below_the_exact_one() -> None:
    for seed in range(12):
        X, y, model = normal(8, 4, seed=100 + seed), normal(8, seed=200 + seed), network(seed)
        if seed % 2:
            X[1] = X[0] + 1e-3 * X[2]
        result = generalization_bound(model, X, y)
        assert result.rank == 8 and result.empirical == 0.0
        B, complexity, bound = exact(model, X, y)
        # rounding of H alpha, and what the least eigenvalue makes of it
        slack = 64 * 8 * torch.finfo(torch.float64).eps * float(torch.linalg.cond(wp.tangent_kernel(model, X)))
        for found, true in ((result.norm, B), (result.complexity, complexity), (result.bound, bound)):
            assert true <= mpmath.mpf(found) <= true * (1 + slack)


def test_the_grid_norm_is_never_below_the_norm() -> None:
    model = network()
    with torch.no_grad():
        model.a.zero_()
    X, y = normal(8, 4, seed=5), normal(8, seed=6)
    y = y / generalization_bound(model, X, y).norm * 4
    for k in range(-12, 13, 2):
        labels = y * (1 + k * 2.0**-52)
        assert mpmath.mpf(generalization_bound(model, X, labels).bound) >= exact(model, X, labels)[2]


def test_what_a_singular_kernel_misses_is_counted() -> None:
    # 4 samples twice, with labels that differ by 2e-3: half of that is missed
    X, y = normal(4, 4, seed=1).repeat(2, 1), normal(4, seed=2).repeat(2)
    y[4:] += 2e-3
    result = generalization_bound(network(), X, y)
    assert result.rank == 4 and 1e-3 <= result.empirical <= 1e-3 * (1 + 1e-9)


def test_a_network_without_equilibria_is_refused() -> None:
    model = network(on_ill_posed="ignore", on_failure="ignore")
    with torch.no_grad():
        model.W.mul_(20)
    with pytest.raises(InvalidArgument, match="of 8 equilibria did not converge, .* Make the network well-posed"):
        generalization_bound(model, normal(8, 4, seed=1), normal(8, seed=2))


@pytest.mark.parametrize("name", ["W", "U", "a"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_parameters_that_are_not_finite_are_refused(name: str, value: float) -> None:
    model = network(on_ill_posed="ignore", on_failure="ignore")
    with torch.no_grad():
        getattr(model, name).view(-1)[0] = value
    with pytest.raises(InvalidArgument, match="a parameter has NaN or infinite entries; look for"):
        generalization_bound(model, normal(8, 4, seed=1), normal(8, seed=2))


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e-100, 1e100, 1e200, 1e305])
@pytest.mark.parametrize("kind", [wp.GaussianDEQ, wp.SkipDEQ, wp.MonotoneDEQ])
def test_no_number_is_nan_at_any_scale(kind: Any, scale: float) -> None:
    X, y = normal(6, 4, seed=1), normal(6, seed=2)
    for name in ("labels", "inputs", "readout"):
        model = kind(4, 20, generator=generator(0), dtype=torch.float64, on_failure="ignore")
        with torch.no_grad():
            if name == "readout":
                (model.a if kind is wp.GaussianDEQ else model.u).mul_(scale)
        try:
            result = generalization_bound(model, X * scale if name == "inputs" else X, y * scale if name == "labels" else y)
        except InvalidArgument as error:  # noqa: PERF203
            assert "ange of float64" in str(error) or "beyond the grid" in str(error)
            continue
        numbers = (result.bound, result.norm, result.dominating, result.complexity, result.confidence, result.fit)
        assert not any(math.isnan(number) for number in numbers)
        assert result.bound >= result.confidence > 0
        for table in (result.eigenvalues, result.projections):
            assert not bool(torch.isnan(table).any())


def test_extreme_options() -> None:
    X, y = normal(6, 4, seed=1), normal(6, seed=2)
    assert generalization_bound(network(), X, y, lipschitz=1e308).vacuous
    assert generalization_bound(network(), X, y, delta=1e-320).bound > generalization_bound(network(), X, y, delta=0.1).bound
    for name in ("delta", "lipschitz", "loss_bound", "rtol"):
        with pytest.raises(InvalidType, match=f"{name} must be a number; got str 'a'"):
            generalization_bound(network(), X, y, **{name: "a"})  # type: ignore[arg-type]
