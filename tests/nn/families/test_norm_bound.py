"""NormBound: never below the norm, sharp when asked, and no decomposition that is not needed."""

from __future__ import annotations

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria import F64, normal
from wellposed.linalg import spectral_norm_upper
from wellposed.nn.families import _contraction
from wellposed.nn.families._contraction import NormBound


@pytest.fixture
def count(monkeypatch):
    """How often a matrix was decomposed."""
    calls = []

    def counted(V):
        calls.append(V.clone())
        return spectral_norm_upper(V)

    monkeypatch.setattr(_contraction, "spectral_norm_upper", counted)
    return calls


def norm(V):
    return float(torch.linalg.matrix_norm(V.double(), 2))


@settings(deadline=None, max_examples=25)
@given(
    m=st.integers(1, 8),
    seed=st.integers(0, 10**6),
    step=st.floats(1e-12, 1.0),
    below=st.floats(0.0, 3.0),
    dtype=st.sampled_from([F64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_an_upper_bound_along_a_random_walk(m, seed, step, below, dtype):
    bound, V = NormBound(), normal(m, m, seed=seed, scale=0.3).to(dtype)
    for k in range(8):
        found = bound(V, below)
        assert found >= norm(V) * (1 - 1e-14)
        if found >= below:  # then it must be sharp, or a network would be called ill-posed for nothing
            assert found <= norm(V) * (1 + 1e-9) + 1e-300
        V = (V.double() + normal(m, m, seed=seed + k + 1, scale=step)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64], ids=str)
def test_differences_are_not_rounded_away(dtype):
    """For one entry the triangle inequality is an equality, so any rounding down of the difference shows."""
    values = torch.linspace(0.001, 0.9, 60, dtype=F64).to(dtype)
    for a in values[::7]:
        for b in values:
            if b > a:
                bound = NormBound()
                bound(a.reshape(1, 1), 0.0)
                assert bound(b.reshape(1, 1), 2.0) >= float(b)


def test_a_small_step_needs_no_decomposition(count):
    bound, V = NormBound(), normal(6, 6, scale=0.1)
    first = bound(V, 1.0)
    assert bound(V, 1.0) == first and bound(V, 0.0) == first and len(count) == 1
    near = V + 1e-3
    assert first < bound(near, 1.0) < first + 0.01 and len(count) == 1
    assert bound(near, 0.0) < first + 0.01 and len(count) == 2  # 0 asks for the sharp one
    assert norm(near) <= bound(near, 1.0) <= norm(near) * (1 + 1e-9)


def test_it_decomposes_when_the_cheap_bound_does_not_decide(count):
    bound, V = NormBound(), torch.eye(4, dtype=F64) * 0.5
    bound(V, 1.0)
    V = V + 0.3 * (torch.ones(4, 4, dtype=F64) - 4 * torch.eye(4, dtype=F64)) / 4  # |V - V_0|_F = 0.52: the sum reaches 1
    assert bound(V, 1.0) == pytest.approx(norm(V)) and len(count) == 2


def test_a_change_in_place_is_seen(count):
    bound, V = NormBound(), normal(5, 5, scale=0.1)
    small = bound(V, 1.0)
    V.mul_(100)
    assert bound(V, 1.0) == pytest.approx(100 * small, rel=1e-9)


def test_another_shape_or_dtype_begins_anew(count):
    bound = NormBound()
    for V in (normal(5, 5), normal(4, 4), normal(4, 4).float(), normal(4, 3)):
        assert bound(V, 1.0) >= norm(V) * (1 - 1e-14)
    assert len(count) == 4


def test_a_large_difference_is_bounded_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never below the norm in 50 digits, equal matrices have 0, and blocks of very different sizes do not overflow."""
    monkeypatch.setattr(_contraction, "BLOCK", 12)
    V, W = normal(7, 5, seed=1), normal(7, 5, seed=2)
    V[3] *= 1e-200
    V[6] *= 1e200
    assert _contraction._distance(V, V.clone()) == 0.0
    with mpmath.workdps(50):
        exact = mpmath.sqrt(
            sum((mpmath.mpf(a) - mpmath.mpf(b)) ** 2 for a, b in zip(V.flatten().tolist(), W.flatten().tolist(), strict=True))
        )
        assert exact <= _contraction._distance(V, W) <= exact * (1 + 1e-5)
