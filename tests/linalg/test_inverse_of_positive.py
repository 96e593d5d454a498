"""Inverses by blocks of matrices with positive definite symmetric part."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.linalg import direct
from wellposed.nn.maps.operator import DenseOperator, MonotoneOperator


def positive(n: int, margin: float, skew: float, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    A, B = (torch.randn(n, n, generator=generator, dtype=dtype) / n**0.5 for _ in range(2))
    return margin * torch.eye(n, dtype=dtype) + A.t() @ A + skew * (B - B.t())


@settings(deadline=None, max_examples=25)
@given(n=st.integers(1, 60), margin=st.floats(0.05, 2.0), skew=st.floats(0.0, 20.0), seed=st.integers(0, 99))
def test_blocks_give_the_inverse(n: int, margin: float, skew: float, seed: int) -> None:
    M = positive(n, margin, skew, seed)
    leaf, direct._LARGEST_LAPACK = direct._LARGEST_LAPACK, 4  # many levels
    try:
        inverse = direct.inverse_of_positive(M)
    finally:
        direct._LARGEST_LAPACK = leaf
    identity = torch.eye(n, dtype=M.dtype)
    condition = float(torch.linalg.cond(M))
    assert float((M @ inverse - identity).norm()) <= 1e-14 * n * condition
    assert float((inverse @ M - identity).norm()) <= 1e-14 * n * condition


def test_blocks_are_as_exact_as_lapack_in_single_precision() -> None:
    M = positive(600, 0.5, 1.0, 3, torch.float32)
    exact = torch.linalg.inv(M.double())
    error = float((direct.inverse_of_positive(M) - exact).norm())
    assert error <= 4 * float((torch.linalg.inv(M) - exact).norm())


@pytest.mark.parametrize("transpose", [False, True])
def test_the_resolvent_of_a_monotone_matrix_is_that_of_the_matrix(transpose: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(30, 30, generator=generator, dtype=torch.float64) for _ in range(2))
    v = torch.randn(5, 30, generator=generator, dtype=torch.float64)
    monotone = MonotoneOperator(A, B, 0.2)
    z = monotone.resolvent(v, 0.7, transpose=transpose)
    by_factors = DenseOperator(monotone.dense(30)).resolvent(v, 0.7, transpose=transpose)
    torch.testing.assert_close(z, by_factors)
    back = monotone.transposed(z) if transpose else monotone.product(z)
    torch.testing.assert_close(z + 0.7 * (z - back), v)
