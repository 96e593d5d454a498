"""Whether |W| < c: never a false yes, and a yes as soon as there is room for rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wellposed as wp
from wellposed.linalg.bounds import spectral_norm_upper
from wellposed.linalg.verified_cholesky import norm_is_below
from wellposed.nn.families import _contraction
from wellposed.nn.families._contraction import NormBound

F64 = torch.float64


def with_exact_norm(m: int, k: int, seed: int) -> torch.Tensor:
    """A matrix of norm exactly 1 and no rounding: a permutation of a diagonal with entries 1, 1/2, ... (powers of 2)."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.zeros(m, k, dtype=F64)
    places = torch.randperm(min(m, k), generator=generator)
    W[torch.arange(min(m, k)), places] = 2.0 ** -torch.randint(0, 4, (min(m, k),), generator=generator).double()
    W[0] = 0
    W[0, places[0]] = 1.0
    return W


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 30), k=st.integers(1, 30), seed=st.integers(0, 1000), exponent=st.integers(-30, 30))
def test_never_a_false_yes(m: int, k: int, seed: int, exponent: int) -> None:
    W = with_exact_norm(m, k, seed) * 2.0**exponent
    c = 2.0**exponent
    assert not norm_is_below(W, c) and not norm_is_below(W, c * (1 - 1e-15))
    assert norm_is_below(W, c * (1 + 1e-11 * max(m, k)))


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=["float32", "float64"])
def test_agrees_with_the_decomposition(dtype: torch.dtype) -> None:
    for seed in range(5):
        W = torch.randn(60, 40, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        norm = spectral_norm_upper(W)  # at most 1e-11 above
        assert norm_is_below(W, norm * (1 + 1e-9)) and not norm_is_below(W, norm * (1 - 1e-10))
        assert norm_is_below(W.T, norm * (1 + 1e-9)) and not norm_is_below(W.T, norm * (1 - 1e-10))


def test_what_overflows_proves_nothing() -> None:
    assert not norm_is_below(torch.full((3, 3), 1e200, dtype=F64), 1e300)


def test_a_wide_network_is_tested_and_not_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_contraction, "WIDE", 20)
    tests: list[float] = []
    monkeypatch.setattr(_contraction, "norm_is_below", lambda W, c: tests.append(c) or norm_is_below(W, c))
    model = wp.GaussianDEQ(3, 40, generator=torch.Generator().manual_seed(0), dtype=F64)
    known = NormBound()
    W = model.W.detach()
    bound = known(W, below=1.0)
    exact = float(torch.linalg.matrix_norm(W, 2))
    assert exact < bound < 1.0 and 1 <= len(tests) <= _contraction.TESTS
    assert known(W, below=1.0) == bound and len(tests) <= _contraction.TESTS  # nothing new to find out
    sharp = known(W, below=0.0)  # certificates ask for the sharp bound
    assert exact <= sharp <= exact * (1 + 1e-10)
    tests.clear()
    moved = W * (0.97 / exact)  # drift makes another one necessary
    assert 0.97 <= known(moved, below=1.0) < 1.0 and 1 <= len(tests) <= _contraction.TESTS
    tests.clear()
    assert known(W * (1.01 / exact), below=1.0) >= 1.01 * (1 - 1e-12) and not tests  # no test can succeed
