"""The estimate against spectra known by construction."""

from __future__ import annotations

import inspect
import math
import pickle

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType, NotConverged
from wellposed.linalg.spectral_radius import spectral_radius_estimate


def rotation(angle: float, radius: float = 1.0) -> Tensor:
    c, s = radius * math.cos(angle), radius * math.sin(angle)
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)


def with_radius(n: int, radius: float, *, normal: bool = True) -> Tensor:
    """(n, n) with the pair radius * exp(+-i) on top and the rest within 0.9 of it, in a random basis."""
    generator = torch.Generator().manual_seed(n)
    blocks = [rotation(1.0, radius)]
    blocks += [rotation(0.3 * j, 0.9 * radius * j / n) for j in range(1, n // 2)]
    A = torch.block_diag(*blocks)
    if not normal:
        A = A + 0.05 * torch.triu(torch.randn(n, n, generator=generator, dtype=torch.float64), 2)
    Q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    return Q @ A @ Q.T


def as_function(A: Tensor):
    return lambda v: A @ v


@pytest.mark.parametrize("angle", [0.0, 0.1, 1.0, math.pi / 2, math.pi])
def test_scaled_rotation(angle: float) -> None:
    A = rotation(angle, 0.9)
    assert spectral_radius_estimate(A) == pytest.approx(0.9, abs=1e-14)
    assert spectral_radius_estimate(as_function(A), size=2) == pytest.approx(0.9, abs=1e-14)


@pytest.mark.parametrize("value", [0.0, 2.0, -3.0])
def test_one_by_one(value: float) -> None:
    A = torch.tensor([[value]])
    assert spectral_radius_estimate(A) == abs(value)
    assert spectral_radius_estimate(as_function(A), size=1, dtype=torch.float32) == abs(value)


def test_two_by_two_by_hand() -> None:
    # trace 3, determinant -10: eigenvalues 5 and -2.  Not normal: its norm is larger.
    assert spectral_radius_estimate(torch.tensor([[4.0, 3.0], [2.0, -1.0]])) == pytest.approx(5.0, abs=1e-12)
    assert spectral_radius_estimate(torch.tensor([[0.0, 100.0], [0.0, 0.0]])) == 0.0


@pytest.mark.parametrize("n", [3, 600, 2100])
def test_zero(n: int) -> None:
    if n <= 600:
        assert spectral_radius_estimate(torch.zeros(n, n)) == 0.0
    assert spectral_radius_estimate(torch.zeros_like, size=n) == 0.0


@pytest.mark.parametrize("normal", [True, False])
@pytest.mark.parametrize("n", [20, 200])
def test_complex_pair_on_top(n: int, normal: bool) -> None:
    A = with_radius(n, 0.9, normal=normal)
    assert spectral_radius_estimate(A) == pytest.approx(0.9, abs=1e-9)
    assert spectral_radius_estimate(as_function(A), size=n) == pytest.approx(0.9, abs=1e-9)
    single = spectral_radius_estimate(as_function(A.float()), size=n, dtype=torch.float32)
    assert single == pytest.approx(0.9, abs=1e-5)


def test_large_matrix_by_arnoldi(monkeypatch: pytest.MonkeyPatch) -> None:
    A = with_radius(600, 1.7)
    monkeypatch.setattr(np.linalg, "eigvals", None)  # so this is really Arnoldi
    assert spectral_radius_estimate(A) == pytest.approx(1.7, abs=1e-9)


def test_products_are_few() -> None:
    A, count = with_radius(400, 0.9), 0

    def product(v: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return A @ v

    spectral_radius_estimate(product, size=400)
    assert count <= 100


def test_all_eigenvalues_of_one_modulus_fall_back_to_the_dense_matrix() -> None:
    # A cyclic shift: Arnoldi cannot tell its eigenvalues apart by modulus.
    estimate = spectral_radius_estimate(lambda v: 0.9 * v.roll(1), size=200, max_restarts=2)
    assert estimate == pytest.approx(0.9, abs=1e-12)


def test_failure_is_an_error() -> None:
    with pytest.raises(NotConverged, match="max_restarts=2 for size 3000"):
        spectral_radius_estimate(lambda v: 0.9 * v.roll(1), size=3000, max_restarts=2)


def test_deterministic_and_without_global_randomness() -> None:
    A = with_radius(200, 0.9, normal=False)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = spectral_radius_estimate(as_function(A), size=200)
    assert spectral_radius_estimate(as_function(A), size=200) == first
    # On the identity every vector spans an invariant subspace, so ARPACK must draw new ones.
    drawn: list[list[Tensor]] = [[], []]
    for vectors in drawn:

        def product(v: Tensor, vectors: list[Tensor] = vectors) -> Tensor:
            vectors.append(v.clone())
            return 0.7 * v

        assert spectral_radius_estimate(product, size=200) == pytest.approx(0.7, abs=1e-12)
    if "rng" in inspect.signature(scipy.sparse.linalg.eigs).parameters:  # SciPy >= 1.17
        assert all(torch.equal(u, v) for u, v in zip(*drawn, strict=True))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()


def shift(n: int, seed: int | None = None) -> Tensor:
    """(n, n) nilpotent: ones below the diagonal, in a random basis if there is a seed."""
    S = torch.diag(torch.ones(n - 1, dtype=torch.float64), -1)
    if seed is None:
        return S
    Q, _ = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return Q @ S @ Q.T


@pytest.mark.parametrize("S", [shift(5, 0), shift(100), shift(100, 1), shift(130)], ids=["5", "100", "100-rotated", "130"])
def test_what_rounding_has_made_is_not_reliable(S: Tensor) -> None:
    """The radius of a nilpotent shift is 0, and 0.6 to 0.8 is found: the value says so, with or without the transpose."""
    n = len(S)
    with_transpose = spectral_radius_estimate(as_function(S), size=n, transposed=as_function(S.T))
    for estimate in (spectral_radius_estimate(S), spectral_radius_estimate(as_function(S), size=n), with_transpose):
        assert estimate.reliable is False
        assert estimate.uncertainty >= estimate or not estimate.judged
        assert "reliable=False" in repr(estimate)


@pytest.mark.parametrize("n", [20, 200])
def test_what_is_well_conditioned_is_reliable(n: int) -> None:
    for A in (
        with_radius(n, 0.9),
        with_radius(n, 0.9, normal=False),
        torch.diag(torch.linspace(-1, 1, n, dtype=torch.float64)),
    ):
        exact = float(torch.linalg.eigvals(A).abs().max())
        for estimate in (
            spectral_radius_estimate(A),
            spectral_radius_estimate(as_function(A), size=n, transposed=as_function(A.T)),
        ):
            assert estimate.reliable is True and estimate.condition >= 1 - 1e-12
            assert abs(estimate - exact) <= max(estimate.uncertainty, 1e-9)
    unknown = spectral_radius_estimate(as_function(A), size=n)
    assert unknown.reliable is (True if n <= 128 else None)  # a small function is made into its matrix


def test_the_estimate_is_a_float() -> None:
    estimate = spectral_radius_estimate(rotation(1.0, 0.5))
    copy = pickle.loads(pickle.dumps(estimate))
    assert isinstance(copy, float) and copy == estimate and copy.uncertainty == estimate.uncertainty
    assert f"{estimate:.2f}" == "0.50" and torch.tensor([estimate]).item() == pytest.approx(0.5)
    zero = spectral_radius_estimate(torch.zeros(3, 3))
    assert zero == 0.0 and zero.reliable is True


def test_generator_is_used() -> None:
    A, starts = with_radius(200, 0.9), []

    def product(v: Tensor) -> Tensor:
        starts.append(v.clone())
        return A @ v

    def first_vector(seed: int) -> Tensor:
        starts.clear()
        spectral_radius_estimate(product, size=200, generator=torch.Generator().manual_seed(seed))
        return starts[1] / starts[1].norm()  # the first of ARPACK's own: the direction it starts from

    assert torch.equal(first_vector(1), first_vector(1))
    assert not torch.equal(first_vector(1), first_vector(2))
    expected = torch.randn(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.allclose(first_vector(1), expected / expected.norm())


def test_function_gets_the_dtype_it_asked_for() -> None:
    def product(v: Tensor) -> Tensor:
        assert v.dtype == torch.float32 and v.shape == (3,)
        return 2 * v

    assert spectral_radius_estimate(product, size=3, dtype=torch.float32) == 2.0


@pytest.mark.parametrize(
    ("bad", "options", "message"),
    [
        (torch.ones(2, 3), {}, r"square matrix.*\(2, 3\)"),
        (torch.ones(0, 0), {}, r"at least one row.*\(0, 0\)"),
        (torch.ones(2, 2, dtype=torch.int32), {}, "torch.int32"),
        (torch.ones(2, 2, dtype=torch.complex64), {}, "torch.complex64"),
        (torch.tensor([[math.nan]]), {}, "finite, got 1 entries"),
        (torch.ones(2, 2), {"size": 2}, "Omit it"),
        (lambda v: v, {}, "size=None"),
        (lambda v: v, {"size": 0}, "size=0"),
        (lambda v: v[:1], {"size": 2}, r"flat with size=2.*\(1,\)"),
        (lambda v: v * math.inf, {"size": 200}, "NaN or infinite"),
    ],
)
def test_bad_input(bad, options: dict, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        spectral_radius_estimate(bad, **options)


def test_wrong_kind() -> None:
    with pytest.raises(InvalidType, match="got list"):
        spectral_radius_estimate([[1.0]])  # type: ignore[arg-type]
