"""Sums and products without rounding, against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.prove.error_free import norm_up, outer_sum, rows_up, split, two_product, two_sum


def rational(A: torch.Tensor) -> np.ndarray:
    return np.vectorize(Fraction, otypes=[object])(A.numpy())


def draw(seed: int, *shape: int) -> torch.Tensor:
    """Entries of very different sizes, and some zeros."""
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(*shape, generator=g, dtype=torch.float64) * 10.0 ** torch.randint(-9, 9, shape, generator=g)
    return A * (torch.rand(*shape, generator=g) > 0.1)


SEEDS = st.integers(0, 10**6)


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_sums_and_products_lose_nothing(seed: int) -> None:
    a, b = draw(seed, 40), draw(seed + 1, 40)
    s, t = two_sum(a, b)
    assert (rational(s) + rational(t) == rational(a) + rational(b)).all()
    p, q = two_product(a, b)
    assert (rational(p) + rational(q) == rational(a) * rational(b)).all()
    p, q = two_product(a, 0.1)
    assert (rational(p) + rational(q) == rational(a) * Fraction(0.1)).all()


@given(SEEDS, st.booleans())
@settings(max_examples=30, deadline=None)
def test_the_leading_product_is_exact(seed: int, common: bool) -> None:
    A, B = draw(seed, 4, 37), draw(seed + 1, 5, 37)
    A1, A2 = split(A, 37)
    B1, B2 = split(B, 37, common=common)
    assert (rational(A1) + rational(A2) == rational(A)).all() and (rational(B1) + rational(B2) == rational(B)).all()
    assert (rational(A1 @ B1.T) == rational(A1) @ rational(B1).T).all()
    assert A2.abs().max() <= 2.0**-20 * A.abs().max()


def test_a_common_unit_makes_products_with_columns_exact() -> None:
    R1, _ = split(draw(3, 37, 37), 37, common=True)
    P1, _ = split(draw(4, 3, 37), 37)
    assert (rational(P1 @ R1) == rational(P1) @ rational(R1)).all()


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_sums_of_outer_products_are_within_their_bound(seed: int) -> None:
    A, B = draw(seed, 6, 5), draw(seed + 1, 6, 4)
    A_low, B_low = draw(seed + 2, 6, 5) * 2.0**-60, draw(seed + 3, 6, 4) * 2.0**-60
    G, rest, error = outer_sum(A, A_low, B, B_low)
    exact = (rational(A) + rational(A_low)).T @ (rational(B) + rational(B_low))
    wrong = exact - rational(G) - rational(rest)
    assert sum((wrong**2).flatten()) <= Fraction(error) ** 2
    assert error <= 1e-20 * norm_up(A) * norm_up(B)


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_norms_are_upper_bounds(seed: int) -> None:
    A = draw(seed, 7, 30)
    squares = rational(A) ** 2
    assert Fraction(norm_up(A)) ** 2 >= sum(squares.flatten())
    assert all(Fraction(bound) ** 2 >= square for bound, square in zip(rows_up(A).tolist(), squares.sum(axis=1), strict=True))
    assert norm_up(A) <= float(A.norm()) * (1 + 1e-9)


@pytest.mark.parametrize("terms", [1, 2, 1000])
def test_few_and_many_terms(terms: int) -> None:
    A = draw(7, 2, terms)
    A1, A2 = split(A, terms)
    assert (rational(A1) + rational(A2) == rational(A)).all()
