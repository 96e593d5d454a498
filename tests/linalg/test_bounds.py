"""The bounds against exact integer arithmetic and against matrices whose spectrum is known."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis.strategies as st
import mpmath
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg.bounds import least_eigenvalue_lower, least_singular_value_lower, spectral_norm_upper

BOUNDS = [spectral_norm_upper, least_singular_value_lower, least_eigenvalue_lower]


# --- the second road: exact arithmetic ----------------------------------------------------------------------


def exact(A: Tensor) -> list[list[Fraction]]:
    return [[Fraction(entry) for entry in row] for row in A.double().tolist()]


def gram(A: list[list[Fraction]]) -> list[list[Fraction]]:
    """The smaller of A A^T and A^T A: its eigenvalues are the squares of all min(m, k) singular values."""
    rows = A if len(A) <= len(A[0]) else [list(column) for column in zip(*A, strict=True)]
    return [[sum((x * y for x, y in zip(u, v, strict=True)), Fraction(0)) for v in rows] for u in rows]


def is_positive_definite(A: list[list[Fraction]]) -> bool:
    """Sylvester's criterion by fraction-free elimination (Bareiss): the pivots are the leading minors."""
    scale = math.lcm(*(entry.denominator for row in A for entry in row))
    M = [[int(entry * scale) for entry in row] for row in A]
    previous = 1
    for k in range(len(M)):
        if M[k][k] <= 0:
            return False
        for i in range(k + 1, len(M)):
            for j in range(k + 1, len(M)):
                M[i][j] = (M[i][j] * M[k][k] - M[i][k] * M[k][j]) // previous
        previous = M[k][k]
    return True


def shifted(A: list[list[Fraction]], sign: int, shift: Fraction) -> list[list[Fraction]]:
    """sign * A + shift * I."""
    return [[sign * entry + (shift if i == j else 0) for j, entry in enumerate(row)] for i, row in enumerate(A)]


def exceeds_norm(bound: float | Fraction, A: Tensor) -> bool:
    return is_positive_definite(shifted(gram(exact(A)), -1, Fraction(bound) ** 2))


def below_singular_values(bound: float | Fraction, A: Tensor) -> bool:
    return bound <= 0 or is_positive_definite(shifted(gram(exact(A)), 1, -(Fraction(bound) ** 2)))


def below_eigenvalues(bound: float | Fraction, A: Tensor) -> bool:
    return is_positive_definite(shifted(exact(A), 1, -Fraction(bound)))


def test_the_exact_road_tells_right_from_wrong() -> None:
    A = torch.tensor([[3.0, 4.0], [-4.0, 3.0]])  # both singular values are 5
    assert exceeds_norm(Fraction(5) + Fraction(1, 10**30), A) and not exceeds_norm(Fraction(5), A)
    assert below_singular_values(Fraction(5) - Fraction(1, 10**30), A) and not below_singular_values(Fraction(5), A)
    S = torch.tensor([[2.0, 1.0], [1.0, 2.0]])  # 1 and 3
    assert below_eigenvalues(1 - Fraction(1, 10**30), S) and not below_eigenvalues(1 + Fraction(1, 10**30), S)


@st.composite
def matrices(draw: st.DrawFn, *, square: bool = False) -> Tensor:
    """Up to 5 x 5, with rows and columns of very different magnitude, or of low rank, in any dtype."""
    m = draw(st.integers(1, 5))
    k = m if square else draw(st.integers(1, 5))
    entries = st.floats(-1.0, 1.0, width=32)
    A = torch.tensor(draw(st.lists(entries, min_size=m * k, max_size=m * k)), dtype=torch.float64).reshape(m, k)
    if draw(st.booleans()):
        spread = draw(st.sampled_from([1, 8, 20]))
        A = A * torch.logspace(0, -spread, m, dtype=torch.float64)[:, None]
        A = A * torch.logspace(-spread, 0, k, dtype=torch.float64)
    if draw(st.booleans()) and m > 1:
        A[-1] = A[0] * draw(st.sampled_from([1.0, -2.0, 1.0 + 2.0**-50]))
    A = A * 2.0 ** draw(st.sampled_from([0, 0, 30, -30, 500, -500]))
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]))
    A = A.to(dtype)
    return torch.where(torch.isfinite(A), A, torch.ones((), dtype=dtype))


@settings(max_examples=75, deadline=None)
@given(matrices())
def test_norm_is_bounded_from_above_and_tightly(W: Tensor) -> None:
    upper = spectral_norm_upper(W)
    if not W.any():
        assert upper == 0.0
        return
    assert exceeds_norm(upper, W)
    assert not exceeds_norm(Fraction(upper) * (1 - Fraction(1, 10**13)), W)


@settings(max_examples=75, deadline=None)
@given(matrices())
def test_singular_values_are_bounded_from_below_and_tightly(Z: Tensor) -> None:
    lower = least_singular_value_lower(Z)
    assert lower >= 0.0
    assert below_singular_values(lower, Z)
    # Absolute accuracy: 1e-13 of the norm above the bound there must be a singular value.
    assert not below_singular_values(Fraction(lower) + Fraction(spectral_norm_upper(Z)) / 10**13 + Fraction(1, 2**1070), Z)


@settings(max_examples=75, deadline=None)
@given(matrices(square=True), st.sampled_from(["gram", "sum", "shifted"]))
def test_eigenvalues_are_bounded_from_below_and_tightly(A: Tensor, kind: str) -> None:
    A = A.double()
    A = A / A.abs().max().clamp(min=2.0**-600)
    S = {"gram": A @ A.T, "sum": A + A.T, "shifted": A @ A.T + torch.eye(len(A))}[kind]
    S = (S + S.T) / 2
    lower = least_eigenvalue_lower(S)
    if not S.any():
        assert lower == 0.0
        return
    assert below_eigenvalues(lower, S)
    assert not below_eigenvalues(Fraction(lower) + Fraction(spectral_norm_upper(S)) / 10**13, S)


@pytest.mark.parametrize("condition", [1e2, 1e8, 1e14, 1e20])
def test_ill_conditioned_matrices_of_size_24(condition: float) -> None:
    generator = torch.Generator().manual_seed(0)
    n = 24
    U, V = (torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    W = U @ torch.diag(torch.logspace(0, -math.log10(condition), n, dtype=torch.float64)) @ V
    S = W @ W.T
    S = (S + S.T) / 2
    assert exceeds_norm(spectral_norm_upper(W), W)
    assert below_singular_values(least_singular_value_lower(W), W)
    assert below_eigenvalues(least_eigenvalue_lower(S), S)
    assert least_singular_value_lower(W) == pytest.approx(max(1 / condition, 0), abs=2e-13)
    if condition < 1e12:
        assert least_singular_value_lower(W) > 0.0


# --- spectra known in closed form ---------------------------------------------------------------------------


def hadamard(n: int) -> Tensor:
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < n:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H


@pytest.mark.parametrize(
    ("n", "dtype"),
    [(1, torch.float16), (4, torch.bfloat16), (16, torch.float32), (64, torch.float64), (256, torch.float32)],
)
def test_hadamard(n: int, dtype: torch.dtype) -> None:
    # H H^T = n I: every singular value is sqrt(n), an integer here.
    H, root = hadamard(n).to(dtype), math.isqrt(n)
    excess = 2e-14 * (n + 5)
    assert root <= spectral_norm_upper(H) <= root * (1 + excess)
    assert root * (1 - excess) <= least_singular_value_lower(H) <= root
    # H is symmetric with eigenvalues +-sqrt(n).
    if n > 1:
        assert -root * (1 + excess) <= least_eigenvalue_lower(H) <= -root


@pytest.mark.parametrize(("rows", "columns"), [(40, 7), (7, 40), (1, 30), (30, 1), (1, 1)])
def test_rectangular_with_known_singular_values(rows: int, columns: int) -> None:
    # Distinct rows and columns carry the integers 3, 4, ...: the singular values, exactly.
    count = min(rows, columns)
    W = torch.zeros(rows, columns)
    for i in range(count):
        W[rows - 1 - i, (3 * i) % columns if columns % 3 else i] = 3.0 + i
    assert 2.0 + count <= spectral_norm_upper(W) <= (2.0 + count) * (1 + 1e-12)
    assert 3.0 * (1 - 1e-12) <= least_singular_value_lower(W) <= 3.0


@pytest.mark.parametrize("n", [2, 10, 150])
def test_rank_one_update_of_the_identity(n: int) -> None:
    # a I + b 1 1^T has the eigenvalues a (n - 1 times) and a + n b.
    ones = torch.ones(n, n, dtype=torch.float64)
    identity = torch.eye(n, dtype=torch.float64)
    assert 0.25 - 1e-11 * n <= least_eigenvalue_lower(0.25 * identity + ones) <= 0.25
    assert 0.25 - n - 1e-11 * n <= least_eigenvalue_lower(0.25 * identity - ones) <= 0.25 - n
    assert n + 0.25 <= spectral_norm_upper(0.25 * identity + ones) <= (n + 0.25) * (1 + 3e-12)


def test_second_difference_against_mpmath() -> None:
    n = 50
    L = 2 * torch.eye(n) - torch.diag(torch.ones(n - 1), 1) - torch.diag(torch.ones(n - 1), -1)
    with mpmath.workdps(40):
        least, largest = (2 - 2 * mpmath.cos(j * mpmath.pi / (n + 1)) for j in (1, n))
        assert least - mpmath.mpf("1e-12") <= least_eigenvalue_lower(L) <= least
        assert least - mpmath.mpf("1e-12") <= least_singular_value_lower(L) <= least
        assert largest <= spectral_norm_upper(L) <= largest * (1 + mpmath.mpf("1e-12"))


@pytest.mark.parametrize("scale", [2.0**-1060, 2.0**-1000, 2.0**-540, 2.0**540, 2.0**1000, 2.0**1020])
def test_every_magnitude(scale: float) -> None:
    W = torch.tensor([[3.0, 4.0], [-4.0, 3.0]], dtype=torch.float64) * scale
    slack = 1e-13 * 5 * scale + 2.0**-1073
    assert 5 * scale <= spectral_norm_upper(W) <= 5 * scale + slack
    assert 5 * scale - slack <= least_singular_value_lower(W) <= 5 * scale
    S = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64) * scale
    assert scale - slack <= least_eigenvalue_lower(S) <= scale


def test_overflow_is_an_infinite_bound() -> None:
    largest = torch.finfo(torch.float64).max
    W = torch.full((2, 2), largest, dtype=torch.float64)
    assert spectral_norm_upper(W) == math.inf
    assert least_eigenvalue_lower(-W) == -math.inf
    assert least_singular_value_lower(W) == 0.0


def test_zero() -> None:
    Z = torch.zeros(3, 2)
    assert spectral_norm_upper(Z) == 0.0
    assert least_singular_value_lower(Z) == 0.0
    assert least_eigenvalue_lower(torch.zeros(3, 3)) == 0.0


# --- a wrong factorization may loosen a bound, never falsify it ---------------------------------------------


def test_bounds_do_not_trust_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    W = torch.tensor([[3.0, 4.0], [-4.0, 3.0]], dtype=torch.float64)
    svd = torch.linalg.svd
    perturbations = [
        lambda U, s, Vh: (U, s * 0.9, Vh),  # values too small
        lambda U, s, Vh: (U, s * 1.1, Vh),  # values too large
        lambda U, s, Vh: (U * 1.05, s, Vh),  # not orthogonal
        lambda U, s, Vh: (U * 1.05, s / 1.05, Vh),  # not orthogonal, though the product is right
        lambda U, s, Vh: (U, s / 0.95, Vh * 0.95),
        lambda U, s, Vh: (U, s, Vh + 0.01),
        lambda U, s, Vh: (U, -s, Vh),
        lambda U, s, Vh: (torch.zeros_like(U), s * 0, Vh),
        lambda U, s, Vh: (U, s * math.nan, Vh),
        lambda U, s, Vh: (U * math.nan, s, Vh),
    ]
    for perturb in perturbations:
        monkeypatch.setattr(torch.linalg, "svd", lambda A, full_matrices, p=perturb: p(*svd(A, full_matrices=False)))
        assert 5.0 <= spectral_norm_upper(W) < math.inf
        assert 0.0 <= least_singular_value_lower(W) <= 5.0


def test_bounds_do_not_trust_eigh(monkeypatch: pytest.MonkeyPatch) -> None:
    S = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    eigh = torch.linalg.eigh
    for shift in (0.0, 2.0):  # least eigenvalue 1 and -1
        A = S - shift * torch.eye(2, dtype=torch.float64)
        for perturb in (
            lambda e, Q: (e + 0.1, Q),
            lambda e, Q: (e - 0.1, Q),
            lambda e, Q: (e, Q * 1.05),
            lambda e, Q: (e / 1.05**2, Q * 1.05),
            lambda e, Q: (e / 0.95**2, Q * 0.95),
            lambda e, Q: (e, Q + 0.01),
            lambda e, Q: (e * math.nan, Q),
            lambda e, Q: (e, Q * math.nan),
        ):
            monkeypatch.setattr(torch.linalg, "eigh", lambda H, p=perturb: p(*eigh(H)))
            assert -math.inf < least_eigenvalue_lower(A) <= 1.0 - shift


def test_failed_factorization_leaves_the_trivial_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "svd", fail)
    monkeypatch.setattr(torch.linalg, "eigh", fail)
    W = torch.tensor([[3.0, 4.0], [4.0, -3.0]])
    frobenius = math.sqrt(50)
    assert frobenius <= spectral_norm_upper(W) <= frobenius * 1.00001
    assert least_singular_value_lower(W) == 0.0
    assert -frobenius * 1.00001 <= least_eigenvalue_lower(W) <= -frobenius


# --- symmetry and bad input ---------------------------------------------------------------------------------


def test_asymmetry_is_accounted_for() -> None:
    # Symmetric part [[2, 1], [1, 2]]; the upper triangle alone means [[2, 1 + delta], [1 + delta, 2]].
    delta = 2.0**-18
    S = torch.tensor([[2.0, 1.0 + delta], [1.0 - delta, 2.0]], dtype=torch.float32)
    assert 1.0 - 2 * delta <= least_eigenvalue_lower(S) <= 1.0 - delta
    assert least_eigenvalue_lower(S.T) <= 1.0 - delta


def test_gram_matrices_made_in_float32_are_symmetric_enough() -> None:
    Z = torch.randn(30, 2000, generator=torch.Generator().manual_seed(0))
    S = Z @ Z.T
    noise = torch.randn(30, 30, generator=torch.Generator().manual_seed(1)) * 1e-7
    assert least_eigenvalue_lower(S * (1 + noise)) > 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_asymmetric_matrices_are_refused(dtype: torch.dtype) -> None:
    S = torch.tensor([[2.0, 1.1], [1.0, 2.0]], dtype=dtype)
    with pytest.raises(InvalidArgument, match=r"symmetric up to rounding.*S \+ S\.T"):
        least_eigenvalue_lower(S)
    with pytest.raises(InvalidArgument, match=r"square, got shape \(2, 3\)"):
        least_eigenvalue_lower(torch.ones(2, 3, dtype=dtype))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.ones(3), r"2 dimensions.*\(3,\)"),
        (torch.ones(2, 2, 2), r"2 dimensions.*\(2, 2, 2\)"),
        (torch.ones(0, 0), r"at least one row.*\(0, 0\)"),
        (torch.ones(2, 2, dtype=torch.int64), r"floating-point dtype, got torch.int64"),
        (torch.ones(2, 2, dtype=torch.complex64), r"floating-point dtype, got torch.complex64"),
        (torch.tensor([[1.0, math.nan], [1.0, 1.0]]), r"finite, got 1 of 4 entries"),
        (torch.tensor([[1.0, math.inf], [math.inf, 1.0]]), r"finite, got 2 of 4 entries"),
    ],
)
def test_bad_input(bound, bad: Tensor, message: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"{bound.__name__}: .*{message}"):
        bound(bad)


@pytest.mark.parametrize("bound", BOUNDS)
def test_not_a_tensor(bound) -> None:
    with pytest.raises(InvalidType, match="must be a torch.Tensor, got list"):
        bound([[1.0]])


@pytest.mark.parametrize("bound", BOUNDS)
def test_graph_and_argument_are_left_alone(bound) -> None:
    W = torch.eye(3, requires_grad=True)
    before = W.detach().clone()
    assert isinstance(bound(W), float)
    assert torch.equal(W.detach(), before) and W.grad is None
