"""norm_is_below: True is a proof, and False is rare."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wellposed.linalg import spectral_norm_upper
from wellposed.linalg.verified_cholesky import norm_is_below, norm_upper_by_test


def random_matrix(seed: int, m: int, k: int, rank: int | None = None) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(m, k, generator=g, dtype=torch.float64)
    if rank is not None:
        W = torch.randn(m, rank, generator=g, dtype=torch.float64) @ torch.randn(rank, k, generator=g, dtype=torch.float64)
    return W


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    m=st.integers(1, 30),
    k=st.integers(1, 30),
    rank=st.sampled_from([None, 1, 2]),
    exponent=st.integers(-100, 100),
)
def test_sharp_from_the_safe_side(seed: int, m: int, k: int, rank: int | None, exponent: int) -> None:
    W = random_matrix(seed, m, k, rank) * 10.0**exponent
    norm = float(torch.linalg.matrix_norm(W, ord=2))
    assert norm_is_below(W, norm * (1 + 1e-10))
    assert not norm_is_below(W, norm * (1 - 1e-13))
    assert norm_is_below(W.t(), norm * (1 + 1e-10))


@settings(deadline=None, max_examples=60)
@given(
    numerators=st.lists(st.integers(-(2**20), 2**20), min_size=2, max_size=12),
    ulps=st.integers(0, 6),
    left=st.integers(0, 1000),
)
def test_never_true_within_a_few_ulps_below_a_norm_known_exactly(numerators: list[int], ulps: int, left: int) -> None:
    # rank one, c w^T with c a signed unit vector: the norm squared is a sum of squares of integers, exact in Python
    w = torch.tensor(numerators, dtype=torch.float64)
    square = sum(n * n for n in numerators)
    bound = math.nextafter(math.sqrt(square), math.inf)
    W = torch.zeros(3, len(numerators), dtype=torch.float64)
    W[left % 3] = w
    for _ in range(ulps):
        bound = math.nextafter(bound, 0.0)
    if Fraction(bound) ** 2 < square:
        assert not norm_is_below(W, bound)


def test_orthogonal_matrices_have_norm_one() -> None:
    # a Hadamard matrix times a power of two: every entry is exact, and so is the norm
    H = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(6):
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)], 0)
    assert not norm_is_below(H, 8.0 * (1 - 2.0**-53)) and not norm_is_below(H / 8, 1.0 - 2.0**-53)
    assert norm_is_below(H / 8, 1.0 + 1e-10)


def test_agrees_with_the_bound_by_singular_values() -> None:
    W = random_matrix(0, 200, 200)
    upper = spectral_norm_upper(W)
    assert norm_is_below(W, upper * (1 + 1e-10)) and not norm_is_below(W, upper * (1 - 1e-9))


def test_edges() -> None:
    W = random_matrix(1, 4, 3)
    assert norm_is_below(W[:0], 1.0) and norm_is_below(W[:, :0], 1.0)
    assert not norm_is_below(W, 0.0) and not norm_is_below(W, -100.0)  # the square of -100 is large
    assert not norm_is_below(W, math.nan)
    assert norm_is_below(torch.zeros(3, 3, dtype=torch.float64), 1e-3)
    for bad in (math.nan, math.inf):
        V = W.clone()
        V[1, 1] = bad
        assert not norm_is_below(V, 10.0)
        V = torch.eye(3, dtype=torch.float64) * 0.1
        V[2, 2] = bad
        assert not norm_is_below(V, 10.0)


def test_underflow_hides_nothing() -> None:
    # 10^4 entries whose squares vanish: the norm is 1e-160, and 1e-161 is not above it
    W = torch.full((10_000, 1), 1e-162, dtype=torch.float64)
    assert not norm_is_below(W, 1e-161)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_low_precision_is_converted_exactly(dtype: torch.dtype) -> None:
    W = random_matrix(2, 40, 40).to(dtype)
    norm = float(torch.linalg.matrix_norm(W.double(), ord=2))
    assert norm_is_below(W, norm * (1 + 1e-10)) and not norm_is_below(W, norm * (1 - 1e-12))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    m=st.integers(1, 30),
    k=st.integers(1, 30),
    rank=st.sampled_from([None, 1, 2]),
    exponent=st.integers(-100, 100),
)
def test_the_bound_by_test_is_above_the_norm_and_near(seed: int, m: int, k: int, rank: int | None, exponent: int) -> None:
    W = random_matrix(seed, m, k, rank) * 2.0**exponent
    norm = float(torch.linalg.svdvals(W)[0])
    bound = norm_upper_by_test(W)
    assert norm * (1 - 1e-14) <= bound <= norm * (1 + 1e-7)


def test_the_bound_by_test_of_nothing_is_nothing() -> None:
    assert norm_upper_by_test(torch.zeros(3, 4, dtype=torch.float64)) == 0.0
