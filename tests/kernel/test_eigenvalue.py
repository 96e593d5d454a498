"""The least eigenvalue: three methods against each other and against exact arithmetic; the bound from the right side."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import wellposed as wp
from wellposed.errors import InvalidArgument
from wellposed.kernel import eigenvalue
from wellposed.kernel._closed_form import ClosedFormMethod
from wellposed.kernel._generic import GenericMethod
from wellposed.kernel.eigenvalue import structural_lower
from wellposed.linalg.verified_cholesky import least_eigenvalue_lower_by_cholesky, unexplained
from wellposed.nn.tangent import TangentFeatures

METHODS = ["dense", "cholesky", "lanczos"]
NETWORKS = [wp.GaussianDEQ, wp.SkipDEQ, wp.ImplicitOnlyDEQ, wp.MonotoneDEQ]


def network(kind: type, d: int = 4, width: int = 30, dtype: torch.dtype = torch.float64) -> nn.Module:
    return kind(d, width, generator=torch.Generator().manual_seed(1), dtype=dtype)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact_kernel(features: TangentFeatures) -> list[list[Fraction]]:
    """The kernel of stored features in rational arithmetic."""
    F = {name: [[Fraction(x) for x in row] for row in tensor.double().tolist()] for name, tensor in features.features.items()}
    n = len(next(iter(F.values())))
    K = [[Fraction(0)] * n for _ in range(n)]
    for terms in features.terms.values():
        for term in terms:
            for i in range(n):
                for j in range(n):
                    entry = Fraction(term.coefficient)
                    for left, right in term.factors:
                        entry *= sum((a * b for a, b in zip(F[left][i], F[right][j], strict=True)), Fraction(0))
                    K[i][j] += entry
    return K


def exact_least(K: list[list[Fraction]]) -> mpmath.mpf:
    """lambda_min in 60 digits."""
    with mpmath.workdps(60):
        A = mpmath.matrix([[mpmath.mpf(x.numerator) / x.denominator for x in row] for row in K])
        return min(mpmath.eigsy(A, eigvals_only=True))


def of_matrix(K: Tensor) -> mpmath.mpf:
    return exact_least([[Fraction(x) for x in row] for row in K.tolist()])


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_value_error_and_bound(kind: type, method: str) -> None:
    model, X = network(kind), draw(12, 4)
    K = wp.tangent_kernel(model, X)
    true, norm = float(torch.linalg.eigvalsh(K)[0]), float(torch.linalg.matrix_norm(K, 2))
    found = wp.least_eigenvalue(model, X, method=method)
    assert found.method == method
    assert abs(found.value - true) < 1e-9 * norm
    assert found.error < 1e-8 * norm
    assert 0.0 <= found.lower <= true
    if method != "lanczos":
        assert true - found.lower < 1e-11 * norm


@settings(deadline=None, max_examples=16)
@given(st.sampled_from(NETWORKS), st.sampled_from(["duplicate", "parallel", "near", "plain"]), st.integers(0, 10**6))
def test_never_above_the_exact_kernel_of_the_features(kind: type, case: str, seed: int) -> None:
    """Ill-conditioned batches; truth by rational arithmetic on the features as computed."""
    generator = torch.Generator().manual_seed(seed)
    model = kind(3, 6, generator=generator, dtype=torch.float64)
    X = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    X[3] = {"duplicate": X[0], "parallel": 3 * X[0], "near": X[0] * (1 + 1e-7), "plain": X[3]}[case]
    true = exact_least(exact_kernel(model.tangent_features(X)))
    for method in METHODS:
        found = wp.least_eigenvalue(model, X, method=method)
        assert 0.0 <= found.lower
        # The rational kernel of a duplicate is singular; its eigenvalue in 60 digits is 0 up to them.
        assert mpmath.mpf(found.lower) <= true + mpmath.mpf(10) ** -50


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.integers(-12, 12), st.integers(-900, 900), st.booleans(), st.integers(0, 10**6))
def test_never_above_for_a_matrix(n: int, conditioning: int, exponent: int, indefinite: bool, seed: int) -> None:
    """Any symmetric matrix as stored: definite, nearly singular, indefinite; huge and tiny."""
    generator = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    values = torch.logspace(0, conditioning, n, dtype=torch.float64)
    if indefinite:
        values[0] *= -1.0
    A = (Q * values) @ Q.T
    A = (A + A.T) / 2 * 2.0**exponent
    true, norm = of_matrix(A), float(torch.linalg.matrix_norm(A * 2.0**-exponent, 2))
    for method in METHODS:
        found = wp.least_eigenvalue(A, method=method)
        assert mpmath.mpf(found.lower) <= true
        assert float((true - mpmath.mpf(found.lower)) * mpmath.mpf(2) ** -exponent) < 1e-12 * norm


def test_a_wrong_guess_only_loosens_the_bound() -> None:
    A = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64))
    for guess in (-5.0, 0.0, 0.9, 1.0, 1.0 + 1e-12, 3.0):
        assert least_eigenvalue_lower_by_cholesky(A, guess) <= 1.0
    assert least_eigenvalue_lower_by_cholesky(A, 1.0) > 1.0 - 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_the_zero_matrix(method: str) -> None:
    found = wp.least_eigenvalue(torch.zeros(3, 3), method=method)
    assert (found.value, found.lower, found.error) == (0.0, 0.0, 0.0)


def test_large_blocks_of_the_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    F = draw(60, 90)
    K = F @ F.T
    whole = wp.least_eigenvalue(K, method="cholesky").lower
    monkeypatch.setattr("wellposed.linalg.verified_cholesky._TILE", 16)
    monkeypatch.setattr("wellposed.linalg.verified_cholesky._DEPTH", 8)
    tiled = wp.least_eigenvalue(K, method="cholesky").lower
    true = float(torch.linalg.eigvalsh(K)[0])
    assert true - 1e-10 < tiled <= true and true - 1e-10 < whole <= true


def test_the_factor_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that factorizes wrongly costs sharpness, never truth."""
    original = torch.linalg.cholesky_ex

    def wrong(A: Tensor) -> tuple[Tensor, Tensor]:
        L, info = original(A)
        return L * 1.001, info

    monkeypatch.setattr(torch.linalg, "cholesky_ex", wrong)
    A = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64))
    lower = least_eigenvalue_lower_by_cholesky(A, 1.0)
    assert 0.9 < lower < 0.999


@pytest.mark.parametrize("n", [1, 3])
def test_the_unexplained_part_is_bounded_from_above(n: int) -> None:
    """||A - c I - L L^T||_F in rational arithmetic; often the computed residual is 0 and the exact one is not."""
    for k in range(1, 40):
        A = k * torch.eye(n, dtype=torch.float64) + 0.1
        c = 0.0 if k % 2 else 0.3
        L = torch.linalg.cholesky(A - c * torch.eye(n, dtype=torch.float64))
        rows = [[Fraction(x) for x in row] for row in L.tolist()]
        squares = Fraction(0)
        for i in range(n):
            for j in range(n):
                explained = sum((a * b for a, b in zip(rows[i], rows[j], strict=True)), Fraction(0))
                squares += (Fraction(float(A[i, j])) - (Fraction(c) if i == j else 0) - explained) ** 2
        bound = unexplained(A, L, c)
        assert squares <= Fraction(bound) ** 2
        assert bound < 1e-12 * k


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_rounding_of_the_kernel_is_bounded_from_above(kind: type) -> None:
    """The kernel in float32, where rounding shows, against rational arithmetic on the same features."""
    model, X = network(kind, width=6, dtype=torch.float32), draw(4, 4).float()
    K = wp.tangent_kernel(model, X)
    exact = exact_kernel(model.tangent_features(X))
    squares = sum((Fraction(float(K[i, j])) - exact[i][j]) ** 2 for i in range(4) for j in range(4))
    bound = ClosedFormMethod(model, X).rounding_upper(float(K.trace()))
    assert 0 < squares <= Fraction(bound) ** 2
    assert bound < 1e-4 * float(K.trace())


def test_the_rounding_of_gradients_is_bounded_from_above() -> None:
    model, X = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1)), draw(4, 4).float()
    method = GenericMethod(model, X)
    J = [[Fraction(x) for x in row] for row in method.jacobian(X)[:, 0].tolist()]
    K = wp.tangent_kernel(model, X)
    exact = [[sum((a * b for a, b in zip(p, q, strict=True)), Fraction(0)) for q in J] for p in J]
    squares = sum((Fraction(float(K[i, j])) - exact[i][j]) ** 2 for i in range(4) for j in range(4))
    assert 0 < squares <= Fraction(method.rounding_upper(float(K.trace()))) ** 2


def test_the_rounding_is_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, X = network(wp.GaussianDEQ), draw(6, 4)
    before = wp.least_eigenvalue(model, X).lower
    monkeypatch.setattr(ClosedFormMethod, "rounding_upper", lambda self, trace: before / 2)
    assert abs(wp.least_eigenvalue(model, X).lower - before / 2) < 1e-9 * before
    monkeypatch.setattr(ClosedFormMethod, "rounding_upper", lambda self, trace: 2 * before)
    assert wp.least_eigenvalue(model, X).lower == 0.0


def test_structural_bound_follows_schur() -> None:
    model, X = network(wp.GaussianDEQ, d=10), draw(6, 10)
    method = ClosedFormMethod(model, X)
    F = method.sides[0]
    Z, P, G = F["Z"], F["P"], F["X"]
    least = {name: float(torch.linalg.eigvalsh(A @ A.T)[0]) for name, A in F.items()}
    square = {name: float((A**2).sum(1).min()) for name, A in F.items()}
    expected = least["Z"] + sum(max(least["P"] * square[b], square["P"] * least[b]) for b in ("Z", "X"))
    assert abs(structural_lower(method) - expected) < 1e-9 * expected
    H = Z @ Z.T + (P @ P.T) * (Z @ Z.T + G @ G.T)
    assert 0 < structural_lower(method) <= float(torch.linalg.eigvalsh(H)[0])


def test_structural_bound_is_zero_where_it_knows_nothing() -> None:
    more_samples_than_units = network(wp.GaussianDEQ, width=5)
    assert structural_lower(ClosedFormMethod(more_samples_than_units, draw(9, 4))) == 0.0
    mixed = network(wp.MonotoneDEQ)  # A and B have products of unequal features: only U and u count
    model_lower = structural_lower(ClosedFormMethod(mixed, draw(6, 4)))
    F = ClosedFormMethod(mixed, draw(6, 4)).sides[0]
    assert 0.0 < model_lower <= float(torch.linalg.eigvalsh(wp.tangent_kernel(mixed, draw(6, 4)))[0])
    assert set(F) > {"Z", "P"}


def test_any_model() -> None:
    model, X = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)).double(), draw(10, 4)
    true = float(torch.linalg.eigvalsh(wp.tangent_kernel(model, X))[0])
    for method in METHODS:
        found = wp.least_eigenvalue(model, X, method=method)
        assert abs(found.value - true) < 1e-8 and found.lower <= true
        assert found.lower == 0.0 if method == "lanczos" else found.lower > true - 1e-10


def test_float32_models_are_multiplied_in_float64() -> None:
    model, X = network(wp.GaussianDEQ, dtype=torch.float32), draw(5, 4).float()
    X = torch.cat([X, X[:1] * 1.001])
    true = exact_least(exact_kernel(model.tangent_features(X)))
    for method in ("dense", "cholesky"):
        found = wp.least_eigenvalue(model, X, method=method)
        assert mpmath.mpf(found.lower) <= true and float(true - found.lower) < 1e-10


def test_lanczos_that_did_not_finish_says_so() -> None:
    K = torch.diag(torch.linspace(0.0, 1.0, 400, dtype=torch.float64))
    few, many = (wp.least_eigenvalue(K, method="lanczos", max_steps=steps) for steps in (5, 300))
    assert few.error > 1e-3 > 1e-7 > many.error
    assert few.value > many.value > -1e-12 and abs(many.value) < 1e-9
    assert many.lower > -1e-13 * float(K.trace())


def test_auto_chooses_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, X = network(wp.GaussianDEQ), draw(20, 4)
    assert wp.least_eigenvalue(model, X).method == "dense"
    monkeypatch.setattr(eigenvalue, "DENSE_SIZE", 10)
    assert wp.least_eigenvalue(model, X).method == "cholesky"
    assert wp.least_eigenvalue(model, X, memory=1000).method == "lanczos"


def test_a_kernel_that_is_symmetric_up_to_rounding() -> None:
    K = draw(9, 20) @ draw(9, 20).T
    K[0, 1] *= 1 + 1e-14
    symmetric = (K + K.T) / 2
    true = float(torch.linalg.eigvalsh(symmetric)[0])
    for method in METHODS:
        assert wp.least_eigenvalue(K, method=method).lower <= true


@pytest.mark.parametrize("method", METHODS)
def test_a_model_with_nan_is_refused(method: str) -> None:
    model = nn.Linear(4, 1).double()
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    with pytest.raises(InvalidArgument, match="NaN or infinite entries"):
        wp.least_eigenvalue(Squared(model), draw(3, 4), method=method)


class Squared(nn.Module):
    """Its gradients see its parameters."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, X: Tensor) -> Tensor:
        return self.inner(X) ** 2


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((torch.eye(3), draw(3, 2)), {}, "needs no X"),
        ((wp.GaussianDEQ(4, 8),), {}, "X is missing"),
        ((torch.ones(2, 3),), {}, r"square real matrix, got shape \(2, 3\)"),
        ((torch.eye(3) * torch.nan,), {}, "NaN or infinite"),
        ((torch.tensor([[1.0, 0.5], [0.0, 1.0]]),), {}, "symmetric up to rounding"),
        ((torch.eye(3),), {"method": "denes"}, "Did you mean 'dense'"),
    ],
)
def test_errors_say_what_was_wrong(args: tuple, options: dict, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        wp.least_eigenvalue(*args, **options)


@pytest.mark.parametrize("method", ["dense", "cholesky", "lanczos"])
def test_the_bound_of_a_model_accounts_for_underflow(method: str) -> None:
    """Squares of features below 1e-154 lose digits, and all of them below 1e-162."""
    X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for seed in range(8):
        g = torch.Generator().manual_seed(seed)
        model = wp.GaussianDEQ(4, 6, weight_variance=0.05, generator=g, dtype=torch.float64, rtol=1e-13, max_steps=2000)
        whole = wp.least_eigenvalue(model, X, method="dense")
        for exponent in (-545, -540, -536, -532, -520, -490, 500):
            found = wp.least_eigenvalue(model, X * 2.0**exponent, method=method)
            # the kernel is 4^exponent times the other, whose eigenvalue is known to `error`
            assert math.ldexp(found.lower, -exponent) <= math.ldexp(whole.value + whole.error, exponent) * (1 + 1e-9)
            assert found.lower >= 0
            if exponent in (-490, 500):
                assert found.lower > 0 or method == "lanczos"
                assert math.ldexp(found.value, -exponent) == pytest.approx(math.ldexp(whole.value, exponent), rel=1e-3)
